"""``MatrixOptimizer`` under every policy against plain loops over blocks in one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from matrix_training import CORES, STEPS, Net, Run, batch, loss_of, optimizer_for, oracle, under_policy, weights_of
from rank_pool import RankPool

POLICIES = ["ddp", "ddp_sharded", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"]
CASES = [(name, ranks) for name in POLICIES for ranks in (2, 4)] + [("hsdp", 4)]


@cache
def plain(core: str) -> Run:
    return oracle(core)


def assert_same(run: Run, wanted: Run, tolerance: float = 1e-5) -> None:
    """Losses and weights agree, and every weight that trains has moved."""
    assert run.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert run.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        scale = max(1.0, float(weight.abs().max()))
        worst = float((run.weights[name] - weight).abs().max())
        assert worst <= tolerance * scale, f"{name} is {worst} off"
        moved = float((run.weights[name] - run.start[name]).abs().max())
        assert (moved == 0.0) if name.startswith("frozen") else (moved > 100 * tolerance), f"{name} moved {moved}"


@pytest.mark.parametrize("core", CORES)
def test_one_process(core: str) -> None:
    model, run = Net(), Run(start=weights_of(Net()))
    optimizer = optimizer_for(model, core)
    for step in range(STEPS):
        loss = loss_of(model, *batch(step), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.weights = weights_of(model)
    assert_same(run, plain(core), 1e-6)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(("name", "ranks"), CASES, indirect=["ranks"])
def test_policy_trains_as_one_process(name: str, ranks: RankPool, core: str) -> None:
    runs = ranks.run(under_policy, name, core)
    assert_same(runs[0], plain(core))
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        for weight, first in zip(run.weights.values(), runs[0].weights.values(), strict=True):
            assert torch.equal(weight, first)


def test_three_ranks() -> None:
    pool = RankPool(3)
    try:
        for name in POLICIES:
            for run in pool.run(under_policy, name, "whitening"):
                assert_same(run, plain("whitening"))
    finally:
        pool.stop()
