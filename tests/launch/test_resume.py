"""The recipe, stopped and killed, goes on under another policy and number of ranks as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, finish, start, torchrun
from safetensors.torch import load_file

STEPS = 14
SHARED = [
    "--block-size",
    "48",
    "--max-steps",
    str(STEPS),
    "--eval-steps",
    "7",
    "--max-new-tokens",
    "0",
    "--warmup-steps",
    "2",
]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of so few blocks that the run crosses epochs, and stops in the middle of one."""
    from pydoc_data.topics import topics

    file = tmp_path_factory.mktemp("text") / "prose.txt"
    file.write_text("\n\n".join(topics[name] for name in sorted(topics))[:2450])
    return file


def command(text: Path, folder: Path, policy: str, ranks: int, *more: str) -> list[str]:
    """A launch whose global batch is 8 blocks on any number of ranks."""
    script = [str(ROOT / "recipes" / "finetune.py"), "--dataset", str(text), "--output-dir", str(folder), *SHARED]
    return torchrun(*script, "--per-device-train-batch-size", str(8 // ranks), "--policy", policy, *more, ranks=ranks)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


@pytest.fixture(scope="session")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finish(start(command(text, folder / "out", "fsdp2", 2), folder / "log"), folder / "log")
    return folder / "out"


def same(rows: list[dict[str, Any]], wanted: list[dict[str, Any]], tolerance: float) -> None:
    assert [(row["step"], "loss" in row) for row in rows] == [(row["step"], "loss" in row) for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        assert row == pytest.approx(other, rel=tolerance), row["step"]


def test_a_run_in_parts_is_the_run_bit_for_bit(text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    parts = ("--resume-from-checkpoint", "auto", "--stop-after", "5")
    for _ in range(3):
        finish(start(command(text, tmp_path / "out", "fsdp2", 2, *parts), tmp_path / "log"), tmp_path / "log")
    assert metrics(tmp_path / "out") == metrics(uninterrupted)
    first, second = (load_file(f / "model" / "model.safetensors") for f in (tmp_path / "out", uninterrupted))
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir()) == ["step-000000005", "step-000000010"]


def test_parts_under_other_policies_and_numbers_of_ranks(text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    for policy, ranks in (("zero3", 2), ("hsdp", 4), ("ddp", 1)):
        line = command(text, tmp_path / "out", policy, ranks, "--resume-from-checkpoint", "auto", "--stop-after", "5")
        finish(start(line, tmp_path / "log"), tmp_path / "log")
    same(metrics(tmp_path / "out"), metrics(uninterrupted), 1e-4)


def test_another_global_batch_is_refused(text: Path, tmp_path: Path) -> None:
    finish(start(command(text, tmp_path / "out", "ddp", 1, "--stop-after", "2"), tmp_path / "log"), tmp_path / "log")
    line = command(text, tmp_path / "out", "ddp", 1, "--resume-from-checkpoint", "auto")
    line[line.index("--per-device-train-batch-size") + 1] = "4"
    output = finish(start(line, tmp_path / "log2"), tmp_path / "log2", code=1)
    assert "the snapshot has 8, this run 4" in output


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "SIGTERM"])
def test_killed_and_started_again(how: signal.Signals, text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """kill -9 of a rank loses the steps since the last snapshot; SIGTERM loses none. Neither changes the run."""
    folder = tmp_path / "out"
    line = command(text, folder, "fsdp2", 2, "--save-steps", "3", "--resume-from-checkpoint", "auto")
    process = start(line, tmp_path / "log")
    deadline = time.monotonic() + 120
    while len(lines(folder / "metrics.jsonl")) < 6:
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"ended by itself with {process.wait(timeout=0.1)}\n{(tmp_path / 'log').read_text()}")
    os.kill(rank_of(process.pid), how)
    finish(process, tmp_path / "log", code=1)
    reached = max(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*"))
    assert 3 <= reached < STEPS
    finish(start(line, tmp_path / "log2"), tmp_path / "log2")
    assert metrics(folder) == metrics(uninterrupted)


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def rank_of(launcher: int) -> int:
    """Return one of a launcher's children, a rank."""
    return int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[-1])
