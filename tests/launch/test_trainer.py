"""HF Trainer under a policy has the losses of plain Trainer in one process, on the backend that was asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import ROOT, LaunchError, accelerate, finish, start, torchrun

SCRIPT = str(ROOT / "tests" / "launch" / "trainer_script.py")


def result(command: list[str], folder: Path) -> dict:
    output = folder / "result.json"
    log = folder / "log"
    finish(start([*command[:-1], str(output), command[-1]], log), log)
    return json.loads(output.read_text())


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of plain Trainer, one process."""
    found = result([sys.executable, SCRIPT, "plain"], tmp_path_factory.mktemp("plain"))
    assert found["losses"][-1] < found["losses"][0]
    return found["losses"]


KINDS = {
    "ddp": "MULTI_CPU",
    "ddp_sharded": "MULTI_CPU",
    "fsdp1": "FSDP",
    "fsdp2": "FSDP",
    "hsdp": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
}


@pytest.mark.parametrize("name", ["fsdp2", "hsdp", "zero2"])
def test_trainer_under_accelerate_launch(name: str, plain: list[float], tmp_path: Path) -> None:
    config = str(ROOT / "accelerate_configs" / f"{name}.yaml")
    ranks = 4 if name == "hsdp" else 2
    found = result(accelerate("--config_file", config, SCRIPT, "launched", ranks=ranks), tmp_path)
    assert found["kind"] == KINDS[name]
    assert found["losses"] == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("name", ["ddp", "ddp_sharded", "fsdp1", "zero3"])
def test_trainer_under_torchrun(name: str, plain: list[float], tmp_path: Path) -> None:
    found = result(torchrun(SCRIPT, name, ranks=2), tmp_path)
    assert found["kind"] == KINDS[name]
    assert found["losses"] == pytest.approx(plain, rel=1e-4)


def test_trainer_with_bf16_weights_and_masters_apart(plain: list[float], tmp_path: Path) -> None:
    found = result(torchrun(SCRIPT, "ddp_sharded,precision=bf16,precision.reduce=bf16", ranks=2), tmp_path)
    assert found["losses"] == pytest.approx(plain, rel=0.02)
    assert found["losses"] != pytest.approx(plain, rel=1e-5), "it computes in bf16"


@pytest.fixture(scope="session")
def plain_matrix(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses of plain Trainer with a matrix optimizer, one process; and its checkpoint after five of eight steps."""
    folder = tmp_path_factory.mktemp("matrix")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATRIX_OPTIMIZER", "1")
        patch.setenv("SAVE_AT", "5")
        found = result([sys.executable, SCRIPT, "plain"], folder)
    return found["losses"], folder / "result.json.d" / "checkpoint-5"


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.wide) for n in ("ddp", "fsdp1")), "fsdp2", "zero3"]
)
def test_a_matrix_optimizer(
    name: str,
    plain: list[float],
    plain_matrix: tuple[list[float], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MATRIX_OPTIMIZER", "1")
    found = result(torchrun(SCRIPT, name, ranks=2), tmp_path)
    assert found["kind"] == KINDS[name]
    assert found["losses"] == pytest.approx(plain_matrix[0], rel=1e-4)
    assert plain_matrix[0] != pytest.approx(plain, rel=1e-3), "AdamW trained"


def test_plain_trainer_resumes_a_matrix_optimizer(
    plain_matrix: tuple[list[float], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATRIX_OPTIMIZER", "1")
    monkeypatch.setenv("RESUME", str(plain_matrix[1]))
    found = result([sys.executable, SCRIPT, "plain"], tmp_path)
    assert found["losses"] == plain_matrix[0]


def test_trainers_own_optimizer_does_not_pass_for_a_sharded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN_OPTIMIZER", "1")
    with pytest.raises(LaunchError, match=r"optimizer_cls_and_kwargs=\(accel_shard.ShardedOptimizer"):
        result(torchrun(SCRIPT, "ddp_sharded", ranks=2), tmp_path)


def test_a_trainer_that_did_something_else_is_stopped(tmp_path: Path) -> None:
    """One rank started alone must not pass for a sharded run."""
    with pytest.raises(LaunchError, match="this process was started alone"):
        result([sys.executable, SCRIPT, "fsdp2"], tmp_path)
