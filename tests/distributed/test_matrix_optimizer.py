"""``MatrixOptimizer`` under every policy against plain loops over blocks in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from matrix_training import (
    CORES,
    STEPS,
    Net,
    Run,
    batch,
    client_of,
    loss_of,
    optimizer_for,
    oracle,
    policy_accelerator,
    train,
    under_policy,
    weights_of,
)
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


@pytest.mark.parametrize("core", [pytest.param("orthogonal", marks=pytest.mark.wide), "whitening"])
@pytest.mark.parametrize(("name", "ranks"), CASES, indirect=["ranks"])
def test_policy_trains_as_one_process(name: str, ranks: RankPool, core: str) -> None:
    trains_as_one_process(name, ranks, core)


@pytest.mark.parametrize("core", ["shampoo", "soap", "muon", "galore"])
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("ddp", 2), ("fsdp1", 2), ("fsdp2", 4), ("hsdp", 4), ("zero1", 2), ("zero2", 4), ("zero3", 2)],
    indirect=["ranks"],
)
def test_the_field_s_optimizers(name: str, ranks: RankPool, core: str) -> None:
    trains_as_one_process(name, ranks, core)


def trains_as_one_process(name: str, ranks: RankPool, core: str) -> None:
    runs = ranks.run(under_policy, name, core)
    assert_same(runs[0], plain(core))
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        for weight, first in zip(run.weights.values(), runs[0].weights.values(), strict=True):
            assert torch.equal(weight, first)


@pytest.mark.parametrize("line", ["fsdp2_offload", "zero3_offload", "zero2,offload=optimizer", "fsdp1,shard=gradients"])
def test_offload_and_other_shards(line: str, two_ranks: RankPool) -> None:
    assert_same(two_ranks.run(under_policy, line, "whitening")[0], plain("whitening"))


def in_sub_groups(size: int) -> tuple[Run, int]:
    """ZeRO-3 steps the optimizer once for each of them."""
    accelerator = policy_accelerator("zero3")
    accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]["sub_group_size"] = size
    net, run = Net(), Run()
    run.start = weights_of(net)
    optimizer: Any = optimizer_for(net, "whitening")
    model, optimizer = accelerator.prepare(net, optimizer)
    train(accelerator, model, optimizer, range(STEPS), run)
    run.weights = {name: w.detach().clone() for name, w in accelerator.whole_weights(model)}
    return run, len(client_of(accelerator, optimizer)._units)


def test_many_sub_groups_are_refreshed_as_one(two_ranks: RankPool) -> None:
    run, units = two_ranks.run(in_sub_groups, 150)[0]
    assert units > 3
    assert_same(run, plain("whitening"))


def test_clipped_gradients_are_clipped_alike(two_ranks: RankPool) -> None:
    """Not in stage 3: its norm counts the old gradient of the part that is not used (deepspeed 0.19.8)."""
    wanted = two_ranks.run(under_policy, "ddp,gradient_clipping=0.05", "whitening")[0]
    assert wanted.losses != pytest.approx(plain("whitening").losses, rel=1e-3), "clipping must bite"
    for name in ("fsdp1", "fsdp2", "zero1"):
        assert_same(two_ranks.run(under_policy, f"{name},gradient_clipping=0.05", "whitening")[0], wanted)


@pytest.mark.parametrize("name", ["ddp", "fsdp1", "fsdp2", "zero2", "zero3"])
def test_in_bf16_ranks_agree(name: str, two_ranks: RankPool) -> None:
    one, other = two_ranks.run(under_policy, f"{name},precision=bf16", "orthogonal")
    assert one.losses == pytest.approx(plain("orthogonal").losses, rel=1e-2)
    for weight, same in zip(one.weights.values(), other.weights.values(), strict=True):
        assert weight.dtype == torch.float32
        assert torch.equal(weight, same)


def test_three_ranks() -> None:
    pool = RankPool(3)
    try:
        for name in POLICIES:
            for run in pool.run(under_policy, name, "whitening"):
                assert_same(run, plain("whitening"))
    finally:
        pool.stop()
