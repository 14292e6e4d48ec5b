"""The benchmarks run and measure every way. Their times are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import finish, start, torchrun


@pytest.mark.parametrize("policy", [pytest.param("ddp", marks=pytest.mark.wide), "fsdp2"])
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


@pytest.mark.wide
def test_every_optimizer_is_measured(tmp_path: Path) -> None:
    output, log = tmp_path / "figures.json", tmp_path / "log"
    command = torchrun(
        "recipes/benchmarks/optimizer.py", "--millions", "4", "--repetitions", "2", "-o", str(output), ranks=2
    )
    printed = finish(start(command, log), log)
    found = json.loads(output.read_text())
    # Of P bytes, two ranks get half of the gradients' sums and half of the weights each; a ring sends the sums twice.
    wanted = {"ZeroRedundancyOptimizer": 1.5, "all": 1.5, "owner": 1.0, "in backward": 1.0, "unsharded": 1.0}
    assert found.keys() == {"foreach", "fused"}
    for kind, ways in found.items():
        assert ways.keys() == {*wanted, "DeepSpeed ZeRO-1", "FSDP2 keeping weights"}
        for name, row in ways.items():
            assert len(row["seconds"]) == 2
            assert min(row["seconds"]) > 0
            assert f"{name}, {kind}" in printed
            assert row.get("arrive") == (pytest.approx(wanted[name], abs=0.01) if name in wanted else None), name
            assert row.get("update_ms", 1.0) > 0


@pytest.mark.wide
def test_every_matrix_optimizer_is_measured(tmp_path: Path) -> None:
    output, log = tmp_path / "figures.json", tmp_path / "log"
    small = ["--width", "64", "--layers", "1", "--block", "64", "--periods", "1"]
    command = torchrun(
        "recipes/benchmarks/matrix_optimizer.py", *small, "--policy", "fsdp2", "-o", str(output), ranks=2
    )
    printed = finish(start(command, log), log)
    rows = json.loads(output.read_text())["rows"]
    assert {"AdamW foreach", "Shampoo", "Shampoo, every matrix", "SOAP", "Muon", "floor"} <= rows.keys()
    # Factors and roots of both sides, a mean and a mean of squares: six times the weights, half of it on each rank.
    assert rows["Shampoo, every matrix"]["state / weights"] == pytest.approx(3.0, rel=0.05)
    assert rows["Shampoo, every matrix, alone"]["state / weights"] == pytest.approx(6.0, rel=0.05)
    assert all(f"| {name} |" in printed for name in rows)
