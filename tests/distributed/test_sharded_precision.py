"""16 bits with a sharded optimizer: what a policy keeps in which dtype, in bytes, and what fp16's scaler does."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankError, RankPool
from torch.nn.parallel import DistributedDataParallel
from training import put_together

from accel_shard import Checkpointer, ShardedOptimizer, ShardingPolicy, export_model
from accel_shard.explain import explain_policy

APART = "ddp_sharded,precision=bf16,precision.reduce=bf16"


def tower(width: int = 24, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers: list[torch.nn.Module] = [torch.nn.Embedding(50, width)]
    for _ in range(3):
        layers += [torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 50)).to(dtype)


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 50, (32,), generator=torch.Generator().manual_seed(step))
    mine = drawn[dist.get_rank() :: dist.get_world_size()]
    return mine, (mine * 7 + 3) % 50


class Run:
    def __init__(self, line: str, width: int = 24, dtype: torch.dtype = torch.float32) -> None:
        self.accelerator = ShardingPolicy.load(line).accelerator()
        model: Any = tower(width, dtype)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))

    def train(self, steps: range, *, clear: bool = True) -> list[float]:
        losses = []
        for step in steps:
            given, wanted = tokens(step)
            loss = torch.nn.functional.cross_entropy(self.model(given).float(), wanted)
            self.accelerator.backward(loss)
            self.optimizer.step()
            if clear:
                self.optimizer.zero_grad()
            losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))
        return losses

    def held(self) -> dict[str, torch.Tensor]:
        return put_together(self.accelerator.backend.layout(self.accelerator, self.model, self.optimizer))


def live() -> int:
    """Bytes of all tensors of this process, each piece of memory once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def bytes_a_parameter(line: str) -> tuple[float, set[str]]:
    """After a step, before gradients are freed; and the dtypes of weights and gradients."""
    before = live()
    run = Run(line, width=512, dtype=torch.bfloat16)
    run.train(range(2))
    run.train(range(2, 3), clear=False)
    gradients = [p.grad for p in run.model.parameters()]
    kinds = {str(t.dtype) for t in (*gradients, *run.model.parameters()) if t is not None}
    held = live() - before
    return held / sum(p.numel() for p in run.model.parameters()), kinds


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_masters_apart_are_2_and_2_and_12_over_n_bytes(ranks: RankPool) -> None:
    for held, kinds in ranks.run(bytes_a_parameter, APART):
        assert kinds == {"torch.bfloat16"}
        assert held == pytest.approx(2 + 2 + 12 / ranks.world, rel=0.02)


def test_without_them_weights_are_the_masters(two_ranks: RankPool) -> None:
    for held, kinds in two_ranks.run(bytes_a_parameter, "ddp_sharded,precision=bf16"):
        assert kinds == {"torch.float32"}, "a model that was loaded in bf16 gets its masters"
        assert held == pytest.approx(4 + 4 + 8 / 2, rel=0.02)


def by_hand() -> tuple[list[float], dict[str, torch.Tensor]]:
    """bf16 weights that follow masters which torch's own AdamW updates, with gradients summed over ranks in bf16."""
    model: Any = tower(dtype=torch.bfloat16)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=3e-3)
    wrapped, losses = DistributedDataParallel(model), []
    for step in range(12):
        given, wanted = tokens(step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = wrapped(given)
        loss = torch.nn.functional.cross_entropy(logits.float(), wanted)
        loss.backward()
        for p, m in zip(model.parameters(), masters, strict=True):
            m.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, m in zip(model.parameters(), masters, strict=True):
                p.copy_(m)
                p.grad = None
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses, {name: m.detach() for (name, _), m in zip(model.named_parameters(), masters, strict=True)}


def by_policy(line: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    run = Run(line)
    losses = run.train(range(12))
    weights = {n: w.clone() for n, w in run.accelerator.whole_weights(run.model)}
    return losses, weights, run.accelerator.unwrap_model(run.model).state_dict(), str(run.accelerator.prepared)


def test_masters_apart_train_as_written_by_hand(two_ranks: RankPool) -> None:
    losses, masters = two_ranks.run(by_hand)[0]
    for found, weights, held, prepared in two_ranks.run(by_policy, APART):
        assert found == losses
        for name, master in masters.items():
            assert torch.equal(weights[name], master)
            assert torch.equal(held[name], master.bfloat16())
        assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values()), "finer than the weights"
        for words in ("master=frozenset({'fp32'})", "compute=frozenset({'bf16'})", "reduce=frozenset({'bf16'})"):
            assert words in prepared
    assert losses[-1] < 0.9 * losses[0]
    near = two_ranks.run(by_policy, "ddp_sharded,precision=bf16")[0][0]
    assert losses == pytest.approx(near, rel=0.03)
    assert two_ranks.run(by_policy, f"{APART},gradient_reduce=owner")[0][0] == pytest.approx(losses, rel=0.01)


def leg(line: str, folder: str, steps: range) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    run = Run(line)
    with Checkpointer(run.accelerator, folder) as checkpointer:
        assert checkpointer.resume() == (steps.start > 0)
        found = run.held() if steps.start else {}
        losses = run.train(steps)
        checkpointer.steps = steps.stop
        checkpointer.save()
    return found, run.held(), losses


def test_masters_go_through_snapshots(two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path) -> None:
    left: dict[str, torch.Tensor] = {}
    straight = two_ranks.run(leg, APART, str(tmp_path / "straight"), range(6))[0]
    for number, (line, pool) in enumerate(
        ((APART, two_ranks), (APART, two_ranks), (APART, four_ranks), ("ddp", two_ranks))
    ):
        found, reached, losses = pool.run(leg, line, str(tmp_path), range(3 * number, 3 * number + 3))[0]
        assert found.keys() == left.keys()
        for key, tensor in left.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(found[key], tensor), key
        if number == 1:
            assert losses == straight[2][3:], "bit for bit"
        left = reached


def exported(folder: str) -> dict[str, torch.Tensor]:
    run = Run(APART)
    run.train(range(3))
    export_model(run.accelerator, run.model, folder)
    return {n: w.clone() for n, w in run.accelerator.whole_weights(run.model)}


def test_masters_are_what_is_exported(two_ranks: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    wanted = two_ranks.run(exported, str(tmp_path / "model"))[0]
    found = load_file(next((tmp_path / "model").glob("*.safetensors")))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ddp,precision=bf16,precision.reduce=bf16", "or with masters apart: shard 'optimizer'"),
        ("ddp_sharded,precision.reduce=bf16", "The nearest policy that works has precision.compute='bf16'"),
        ("ddp_sharded,precision=fp16,precision.reduce=fp16", "torch unscales no fp16 gradients"),
    ],
)
def test_what_masters_apart_cannot_be(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ShardingPolicy.load(line)


def test_explain_says_where_masters_are() -> None:
    assert "the weights are in precision.reduce" in explain_policy(ShardingPolicy.load(APART))
    assert "the weights are in precision.reduce" not in explain_policy(
        ShardingPolicy.load("ddp_sharded,precision=bf16")
    )


# ---- fp16's scaler ---------------------------------------------------------------------------------------------


def scaled(sharded: bool) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Six steps, in the third of which one rank alone overflows; steps that were skipped, weights, scales."""
    net = tower()
    kind = torch.optim.AdamW
    optimizer: Any = ShardedOptimizer(net.parameters(), kind, lr=1e-2) if sharded else kind(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    wrapped = DistributedDataParallel(net)
    moved, scales = [], []
    for step in range(6):
        given, wanted = tokens(step)
        loss = torch.nn.functional.cross_entropy(wrapped(given), wanted)
        if step == 2 and dist.get_rank() == 1:
            loss = loss * torch.inf
        before = copy.deepcopy(net.state_dict())
        state = copy.deepcopy(optimizer.state_dict()["state"])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(max(float((t - before[n]).abs().max()) for n, t in net.state_dict().items()))
        scales.append(scaler.get_scale())
        if not moved[-1]:
            after = optimizer.state_dict()["state"]
            assert all(torch.equal(v, after[i][k]) for i, s in state.items() for k, v in s.items())
    return moved, net.state_dict(), scales


def test_an_overflow_on_one_rank_is_every_ranks(two_ranks: RankPool) -> None:
    wanted = two_ranks.run(scaled, False)
    for (moved, weights, scales), (_, plain, before) in zip(two_ranks.run(scaled, True), wanted, strict=True):
        assert [m == 0.0 for m in moved] == [False, False, True, False, False, False]
        assert scales == before == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]
        assert all(torch.equal(weights[name], plain[name]) for name in plain)


def with_fp16() -> None:
    ShardingPolicy.load("ddp_sharded,precision=fp16").accelerator()


def test_fp16_is_not_rehearsed(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="needs an accelerator device"):
        two_ranks.run(with_fp16)
