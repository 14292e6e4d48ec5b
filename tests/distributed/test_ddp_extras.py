"""What DDP can do beside: compressed gradients, whose memory is in snapshots, and weights averaged now and then."""

from __future__ import annotations

import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from listening import listening
from rank_pool import RankError, RankPool

from accel_shard import Checkpointer, ShardingPolicy, UnsupportedPolicyError
from accel_shard.backends.ddp import DDPBackend
from accel_shard.backends.ddp_powersgd import PowerSGDMemory
from accel_shard.checkpoint.snapshot import Snapshot

STEPS, STOP, START = 12, 7, 3


def tower() -> torch.nn.Sequential:
    """Matrices that are worth compressing, two of them alike, and vectors that are not."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 24), torch.nn.LayerNorm(24),
        torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 6),
    )  # fmt: skip


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a global batch of 16."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(16, 12, generator=generator)
    y = torch.sin(x[:, :6] * 2) + x[:, 6:]
    return x[dist.get_rank() :: dist.get_world_size()], y[dist.get_rank() :: dist.get_world_size()]


class Compressed:
    """The tower under PowerSGD, in buckets so small that DDP has several."""

    def __init__(self, line: str = "ddp,gradient_compression=powersgd", **options: Any) -> None:
        state = {"start_powerSGD_iter": START, "matrix_approximation_rank": 2} | options
        handlers = [DistributedDataParallelKwargs(bucket_cap_mb=0.002, comm_state_option=state)]  # type: ignore[arg-type]
        self.accelerator = ShardingPolicy.load(line).accelerator(kwargs_handlers=handlers)
        model: Any = tower()
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            x, y = rows(step)
            loss = torch.nn.functional.mse_loss(self.model(x), y)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.accelerator.unwrap_model(self.model).named_parameters()}

    def state(self) -> Any:
        return self.model._comm_hooks[0][1]

    def errors(self) -> dict[str, torch.Tensor]:
        """This rank's, by parameter."""
        found = PowerSGDMemory(self.model).shards(dist.get_rank(), dist.get_world_size())
        return {key: shard.parts[0][1][0].clone() for key, shard in found.items() if "error" in key}


def compressed_leg(
    folder: str, steps: range, save_at: int | None = None, line: str = "ddp,gradient_compression=powersgd",
    forgetting: bool = False, **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:  # fmt: skip
    """Resume if it does not begin at 0, train, save; return losses, weights, errors found at the start, warnings."""
    run = Compressed(line, **options)
    taken = {"side_effect": lambda *_: set()} if forgetting else {"autospec": True, "side_effect": DDPBackend.take_own}
    with Checkpointer(run.accelerator, folder) as checkpointer, listening() as said:
        if steps.start:
            with unittest.mock.patch.object(DDPBackend, "take_own", **taken):
                assert checkpointer.resume()
        found = run.errors() if steps.start and "powersgd" in line and dist.get_world_size() > 1 else {}
        losses = []
        for step in steps:
            losses += run.train(range(step, step + 1))
            if step + 1 == save_at:
                checkpointer.steps = save_at
                if "powersgd" in line:
                    state = run.state()
                    assert state.iter == save_at, "one a step"
                    assert len(state.error_dict) > 2, "several buckets"
                    assert max(float(e.abs().max()) for e in state.error_dict.values()) > 1e-4, "it compresses"
                    found = run.errors()
                checkpointer.save()
    return losses, run.weights(), found, list(said)


@pytest.mark.parametrize("preset", ["ddp", "ddp_sharded"])
def test_powersgd_goes_on_bit_for_bit(preset: str, two_ranks: RankPool, tmp_path: Path) -> None:
    line = f"{preset},gradient_compression=powersgd"
    straight = two_ranks.run(compressed_leg, str(tmp_path), range(STEPS), STOP, line)
    resumed = two_ranks.run(compressed_leg, str(tmp_path), range(STOP, STEPS), None, line)
    for (losses, weights, left, _), (again, reached, found, said) in zip(straight, resumed, strict=True):
        assert again == losses[STOP:]
        assert all(torch.equal(weights[name], reached[name]) for name in weights)
        assert not said
        assert found.keys() == left.keys()
        assert len(found) == 10  # weights and biases
        assert all(torch.equal(found[key], left[key]) for key in left)
    (_, _, first, _), (_, _, second, _) = straight
    assert any(not torch.equal(first[key], second[key]) for key in first), "each rank has its own"
    plain = two_ranks.run(compressed_leg, str(tmp_path / "plain"), range(STEPS), None, "ddp")
    assert plain[0][0] != straight[0][0], "it was approximated"


def test_without_its_memory_powersgd_would_be_another_run(two_ranks: RankPool, tmp_path: Path) -> None:
    straight = two_ranks.run(compressed_leg, str(tmp_path), range(STEPS), STOP)
    resumed = two_ranks.run(compressed_leg, str(tmp_path), range(STOP, STEPS), forgetting=True)
    for (losses, *_), (again, *_) in zip(straight, resumed, strict=True):
        assert again[0] == losses[STOP], "weights are there"
        assert again[2:] != losses[STOP + 2 :]


def test_a_save_before_powersgd_begins_to_approximate(two_ranks: RankPool, tmp_path: Path) -> None:
    early = {"start_powerSGD_iter": STOP}  # the first step after the save is the first that approximates
    straight = two_ranks.run(compressed_leg, str(tmp_path / "s"), range(STEPS), None, **early)
    two_ranks.run(plain_save, str(tmp_path), early)
    resumed = two_ranks.run(compressed_leg, str(tmp_path), range(STOP, STEPS), None, **early)
    for (losses, weights, *_), (again, reached, *_) in zip(straight, resumed, strict=True):
        assert again == losses[STOP:]
        assert all(torch.equal(weights[name], reached[name]) for name in weights)


def plain_save(folder: str, options: dict[str, Any]) -> None:
    run = Compressed(**options)
    run.train(range(STOP))
    assert not run.state().error_dict
    with Checkpointer(run.accelerator, folder) as checkpointer:
        checkpointer.steps = STOP
        checkpointer.save()


def test_on_more_ranks_each_gets_the_mean_error(two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path) -> None:
    straight = two_ranks.run(compressed_leg, str(tmp_path), range(STEPS), STOP)
    resumed = four_ranks.run(compressed_leg, str(tmp_path), range(STOP, STEPS))
    (losses, weights, first, _), (_, _, second, _) = straight
    assert first
    for again, reached, found, said in resumed:
        assert not said
        for key, error in found.items():
            assert torch.equal(error, (first[key] + second[key]) / 2)
        # Only the mean of gradient and error over the ranks is approximated: the same run, but for rounding.
        assert again == pytest.approx(losses[STOP:], rel=1e-4)
        assert max(float((weights[n] - reached[n]).abs().max()) for n in weights) < 1e-4


def test_what_has_no_place_for_the_memory_says_so(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(compressed_leg, str(tmp_path), range(STOP), STOP)
    (*_, said), (*_, silent) = two_ranks.run(compressed_leg, str(tmp_path), range(STOP, STEPS), None, "ddp")
    assert not silent, "rank 0 says it"
    assert len(said) == 1
    assert "have no place under policy [ddp] and were left (first: powersgd.error.0.bias)" in said[0]
    other = two_ranks.run(compressed_leg, str(tmp_path), range(STOP, STEPS), None, matrix_approximation_rank=1)
    assert any("another matrix_approximation_rank" in line for *_, said in other for line in said)
    manifest = _newest(tmp_path).manifest
    errors = {key: t for key, t in manifest["tensors"].items() if key.startswith("own.powersgd.error.")}
    assert len(errors) == 10
    assert all(t["shape"][0] == 2 for t in errors.values())


def _newest(folder: Path) -> Snapshot:
    return Snapshot.open(next(path for path in sorted(folder.iterdir()) if (path / "manifest.json").exists()))


def frozen_differently(folder: str) -> None:
    with unittest.mock.patch(f"{__name__}.tower", half_frozen):
        run = Compressed()
    with Checkpointer(run.accelerator, folder) as checkpointer:
        checkpointer.resume()


def half_frozen() -> Any:
    model = tower_kept()
    model[0].requires_grad_(False)
    return model


tower_kept = tower


def test_other_parameters_than_the_memory_is_of(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(compressed_leg, str(tmp_path), range(STOP), STOP)
    with pytest.raises(RankError, match="run trained other parameters, so that what PowerSGD kept"):
        two_ranks.run(frozen_differently, str(tmp_path))


# ---- 16 bits on the wire ---------------------------------------------------------------------------------------


def halved() -> tuple[bool, bool]:
    """Gradients under the hook against a cast, a sum in 16 bits and a cast back; and whether the cast shows."""
    run = Compressed("ddp,gradient_compression=fp16")
    twin = tower()
    x, y = rows(0)
    torch.nn.functional.mse_loss(run.model(x), y).backward()
    torch.nn.functional.mse_loss(twin(x), y).backward()
    same, rounded = True, False
    for p, q in zip(run.model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        exact = q.grad / dist.get_world_size()
        sent = q.grad.to(torch.float16) / dist.get_world_size()
        dist.all_reduce(sent)
        dist.all_reduce(exact)
        same &= torch.equal(p.grad, sent.float())
        rounded |= not torch.equal(p.grad, exact)
    return same, rounded


def test_fp16_compression_is_a_sum_in_fp16(two_ranks: RankPool) -> None:
    assert two_ranks.run(halved) == [(True, True)] * 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ddp,gradient_compression=fp16", "gradient_compression 'fp16' has no TrainingArguments field. Use .* 'none'"),
        ("ddp_sharded,gradient_reduce=owner", "gradient_reduce 'owner' has no TrainingArguments field. Use .* 'all'"),
        ("ddp,local_sgd=4", "local_sgd 4 has no TrainingArguments field. Use local_sgd 1, or a loop with"),
    ],
)
def test_what_trainer_cannot_be_told_is_an_error(line: str, words: str) -> None:
    with pytest.raises(UnsupportedPolicyError, match=words):
        DDPBackend(ShardingPolicy.load(line)).training_arguments(rehearsing=True, batch_size=1)
