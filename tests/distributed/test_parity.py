"""Every policy, on its real backend, trains as one process in plain torch does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from training import STEPS, Run, oracle, tiny_llama, under_policy

ON_TWO = [
    "ddp",
    "ddp_sharded",
    "fsdp1",
    "fsdp2",
    "fsdp2_keep_params",
    "fsdp2_offload",
    "zero1",
    "zero2",
    "zero3",
    "zero3_offload",
]
CASES = [(name, 2) for name in ON_TWO] + [("hsdp", 4), ("zero3", 4), ("fsdp1", 4), ("ddp_sharded", 4)]


@cache
def plain_torch(**options: Any) -> Run:
    """The oracle, once per kind of model."""
    return oracle(**options)


def assert_same(run: Run, wanted: Run, tolerance: float = 1e-4) -> None:
    """Losses, gradient norms, learning rates and final weights agree; and the run did train."""
    assert run.rates == pytest.approx(wanted.rates, rel=1e-9)
    assert run.losses == pytest.approx(wanted.losses, rel=tolerance)
    if run.norms:
        assert run.norms == pytest.approx(wanted.norms, rel=10 * tolerance)
    assert run.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=tolerance, atol=tolerance, msg=name)
    start = dict(tiny_llama(tied="lm_head.weight" not in run.weights).named_parameters())
    moved = max((weight - start[name].detach()).abs().max().item() for name, weight in run.weights.items())
    assert moved > 100 * tolerance, "nothing trained"
    assert wanted.losses[-1] < wanted.losses[0] - 0.1


@pytest.mark.parametrize(("name", "ranks"), CASES, indirect=["ranks"])
def test_policy_trains_as_plain_torch(name: str, ranks: RankPool) -> None:
    runs = ranks.run(under_policy, f"{name},gradient_accumulation_steps=2")
    wanted = plain_torch()
    assert len(wanted.losses) == STEPS
    assert max(wanted.norms) > 0.5, "clipping must bite"
    assert_same(runs[0], wanted)
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert run.norms == runs[0].norms


@pytest.mark.parametrize("name", ["ddp", "ddp_sharded", "fsdp1", "fsdp2", "zero2", "zero3"])
def test_tied_weights(name: str, two_ranks: RankPool) -> None:
    runs = two_ranks.run(under_policy, name, tied=True)
    wanted = plain_torch(tied=True)
    assert "lm_head.weight" not in wanted.weights
    assert_same(runs[0], wanted)
