"""The benchmarks run and measure every way. Their times are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import finish, start, torchrun


@pytest.mark.parametrize("policy", ["ddp", "fsdp2"])
def test_every_way_is_measured(policy: str, tmp_path: Path) -> None:
    output, log = tmp_path / "figures.json", tmp_path / "log"
    arguments = ["--megabytes", "130", "--policy", policy, "--repetitions", "2", "--folder", str(tmp_path)]
    command = torchrun("recipes/benchmarks/checkpoint.py", *arguments, "-o", str(output), ranks=2)
    printed = finish(start(command, log), log)
    found = json.loads(output.read_text())
    assert found["megabytes"] == pytest.approx(130, rel=0.2)
    assert len(found["saves"]) == 11
    assert len(found["loads"]) == 5
    for name, figures in (found["saves"] | found["loads"]).items():
        assert len(figures["total"]) == 2, name
        assert min(figures["total"]) > 0, name
        assert all(a <= b for a, b in zip(figures.get("stall", [0, 0]), figures["total"], strict=True)), name
    assert found["memory"]["growth_mb"] > 0.4 * found["memory"]["share_mb"], "the copy was seen"
    for name, (got, _) in found["ratios"].items():
        assert f"{name}: {got:.2f} (at most" in printed
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [], "it cleans up"


def test_every_optimizer_is_measured(tmp_path: Path) -> None:
    output, log = tmp_path / "figures.json", tmp_path / "log"
    command = torchrun(
        "recipes/benchmarks/optimizer.py", "--millions", "4", "--repetitions", "2", "-o", str(output), ranks=2
    )
    printed = finish(start(command, log), log)
    found = json.loads(output.read_text())
    assert len(found["seconds"]) == 8
    assert all(min(times) > 0 for times in found["seconds"].values())
    # Of P bytes, two ranks get half of the gradients' sums and half of the weights each; a ring sends the sums twice.
    for name, units in found["arrive"].items():
        kind = name.partition(",")[0]
        wanted = {"all": 1.5, "owner": 1.0, "ZeroRedundancyOptimizer": 1.5, "unsharded": 1.0, "backward alone": 0.0}[
            kind
        ]
        assert units == pytest.approx(wanted, abs=0.01), name
        assert f"{name:36}" in printed or kind == "backward alone"
