"""``MatrixOptimizer`` saved in the middle of a period, and gone on with: anywhere, as if nothing had happened."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_training import (
    STEPS,
    Net,
    Run,
    batch,
    loss_of,
    optimizer_for,
    oracle,
    policy_accelerator,
    train,
    weights_of,
)
from rank_pool import RankError, RankPool
from training import put_together

from accel_shard import Checkpointer

SAVED = 6  # steps done: the period is 4, and the next step but one leaves a part out


@pytest.fixture(scope="module")
def pools(two_ranks: RankPool, four_ranks: RankPool) -> Iterator[dict[int, RankPool]]:
    one, three = RankPool(1), RankPool(3)
    yield {1: one, 2: two_ranks, 3: three, 4: four_ranks}
    one.stop()
    three.stop()


def part_of_run(
    line: str, folder: str, first: int, last: int, *, resumes: bool, goes_on: int = 0, core: str = "whitening",
    **options: Any,
) -> tuple[Run, Run, dict[str, torch.Tensor]]:  # fmt: skip
    """Train from one step to another, and save; then go on. Returns what was at both ends, and what was held."""
    accelerator = policy_accelerator(line)
    net, done, later = Net(), Run(), Run()
    optimizer: Any = optimizer_for(net, core, **options)
    model, optimizer = accelerator.prepare(net, optimizer)
    with Checkpointer(accelerator, folder) as checkpointer:
        assert checkpointer.resume() == resumes
        found = put_together(accelerator.backend.layout(accelerator, model, optimizer))
        train(accelerator, model, optimizer, range(first, last), done)
        checkpointer.steps = last
        if first < last:
            found = put_together(accelerator.backend.layout(accelerator, model, optimizer))
            checkpointer.save()
        train(accelerator, model, optimizer, range(last, goes_on), later)
    done.weights = {name: w.detach().float().clone() for name, w in accelerator.whole_weights(model)}
    return done, later, found


@pytest.mark.parametrize("core", ["whitening", "orthogonal"])
@pytest.mark.parametrize("line", ["ddp", "fsdp1", "fsdp2", "zero1", "zero3"])
def test_the_same_policy_goes_on_bit_equal(line: str, core: str, two_ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = two_ranks.run(part_of_run, line, folder, 0, SAVED, resumes=False, goes_on=STEPS, core=core)
    again = two_ranks.run(part_of_run, line, folder, SAVED, SAVED, resumes=True, goes_on=STEPS, core=core)
    for (whole, losses, held), (resumed, later, loaded) in zip(saved, again, strict=True):
        assert len(later.losses) == STEPS - SAVED
        assert later.losses == losses.losses
        assert held.keys() == loaded.keys()
        assert any("@6,0" in key for key in held), "states of blocks are saved"
        for key, tensor in held.items():
            assert torch.equal(tensor, loaded[key]), key
        for name, weight in whole.weights.items():
            assert torch.equal(weight, resumed.weights[name]), name


@cache
def uninterrupted() -> Run:
    return oracle("whitening")


@pytest.mark.parametrize(
    "chain",
    [
        [("fsdp2", 4), ("zero2", 2), ("ddp", 1), ("ddp_sharded", 3)],
        [("zero1", 2), ("fsdp1", 4), ("zero3", 3), ("hsdp", 4)],
        [("hsdp", 4), ("ddp", 2), ("fsdp1", 3), ("zero1", 4)],
        [("zero3", 4), ("fsdp2", 3), ("zero2", 4), ("ddp", 2)],
    ],
)
def test_other_policies_and_numbers_of_ranks(
    chain: list[tuple[str, int]], pools: dict[int, RankPool], tmp_path: Path
) -> None:
    ends = [0, 2, 5, 7, STEPS]
    losses: list[float] = []
    for index, (line, ranks) in enumerate(chain):
        parts = pools[ranks].run(part_of_run, line, str(tmp_path), ends[index], ends[index + 1], resumes=index > 0)
        losses += parts[0][0].losses
        weights = parts[0][0].weights
    wanted = uninterrupted()
    assert losses == pytest.approx(wanted.losses, rel=1e-6)
    for name, weight in wanted.weights.items():
        assert float((weights[name] - weight).abs().max()) <= 1e-6 * max(1.0, float(weight.abs().max())), name
        assert name.startswith("frozen") or not torch.equal(weight, dict(Net().named_parameters())[name])


def test_another_grid_is_refused_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(part_of_run, "fsdp2", str(tmp_path), 0, 2, resumes=False)
    with pytest.raises(RankError, match="Resume with the optimizer, max_preconditioner_dim") as caught:
        two_ranks.run(part_of_run, "fsdp2", str(tmp_path), 2, 2, resumes=True, max_preconditioner_dim=5)
    assert str(caught.value).count("SnapshotError") >= 2


# ---- plain state dicts ---------------------------------------------------------------------------------------------


def trained(steps: range, start: Any = None) -> tuple[Net, Any]:
    model = Net()
    optimizer = optimizer_for(model, "whitening")
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(start[1])
    for step in steps:
        loss_of(model, *batch(step), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_a_state_dict_goes_through_torch_load_with_weights_only() -> None:
    model, optimizer = trained(range(SAVED))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    resumed, after = trained(range(SAVED, STEPS), stored)
    whole, at_once = trained(range(STEPS))
    for name, weight in weights_of(whole).items():
        assert torch.equal(weight, weights_of(resumed)[name]), name
    one, other = at_once.state_dict(), after.state_dict()
    assert one["state"].keys() == other["state"].keys()
    assert "root@6,0" in one["state"][0]


def test_a_state_dict_that_lacks_blocks_is_refused() -> None:
    model, optimizer = trained(range(2))
    stored = optimizer.state_dict()
    del stored["state"][0]["root@6,0"]
    with pytest.raises(ValueError, match="no 'root' of the block at"):
        optimizer.load_state_dict(stored)
    assert model is not None


def load_of_one(stored: Any, steps: range) -> dict[str, torch.Tensor]:
    accelerator = policy_accelerator("ddp")
    net = Net()
    net.load_state_dict(stored[0])
    optimizer: Any = optimizer_for(net, "whitening")
    optimizer.load_state_dict(stored[1])
    model, optimizer = accelerator.prepare(net, optimizer)
    train(accelerator, model, optimizer, steps, Run())
    return {name: w.detach().clone() for name, w in accelerator.whole_weights(model)}


def test_a_state_dict_of_one_process_loads_on_two_ranks(two_ranks: RankPool) -> None:
    model, optimizer = trained(range(SAVED))
    whole, _ = trained(range(STEPS))
    for weights in two_ranks.run(load_of_one, (model.state_dict(), optimizer.state_dict()), range(SAVED, STEPS)):
        for name, weight in weights_of(whole).items():
            assert float((weights[name] - weight).abs().max()) <= 1e-6, name
