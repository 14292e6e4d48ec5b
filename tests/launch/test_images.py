"""The image recipe for real: stopped, and gone on with under another policy, it has the losses of one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import ROOT, finish, start, torchrun

STEPS = 12


def recipe(folder: Path, *, batch: int) -> list[str]:
    return [
        str(ROOT / "recipes" / "classify_images.py"), "--output_dir", str(folder), "--max_steps", str(STEPS),
        "--per_device_train_batch_size", str(batch), "--eval_steps", str(STEPS), "--max_grad_norm", "1.0",
    ]  # fmt: skip


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    return [row.get("loss", row.get("eval_loss")) for row in rows]


def test_stopped_and_gone_on_with_under_another_policy(tmp_path: Path) -> None:
    from transformers import ViTForImageClassification

    alone, parts = tmp_path / "alone", tmp_path / "parts"
    finish(start([sys.executable, *recipe(alone, batch=32)], tmp_path / "alone.log"), tmp_path / "alone.log")
    for policy, more in (("fsdp2", ["--stop_after", "5"]), ("zero2", ["--resume_from_checkpoint", "auto"])):
        log = tmp_path / f"{policy}.log"
        command = torchrun(*recipe(parts, batch=16), "--policy", policy, *more, ranks=2)
        finish(start(command, log), log)
    assert losses(parts) == pytest.approx(losses(alone), rel=1e-4)
    assert losses(alone)[-1] < losses(alone)[0]
    assert ViTForImageClassification.from_pretrained(parts / "model").num_labels == 10
