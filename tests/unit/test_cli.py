"""The command: what it prints and how it exits."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from accel_shard import ShardingPolicy
from accel_shard.cli import main
from accel_shard.launch_config import SHIPPED, policy_from_config, shipped_configs


def test_config_writes_what_launches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "zero3,precision=bf16", "-o", str(tmp_path / "my.yaml")]) == 0
    assert policy_from_config(yaml.safe_load((tmp_path / "my.yaml").read_text())) == ShardingPolicy.load(
        "zero3,precision=bf16"
    )
    assert main(["config", "hsdp"]) == 0
    assert "dp_replicate_size" in capsys.readouterr().out


def test_config_all_writes_the_shipped_ones(tmp_path: Path) -> None:
    assert main(["config", "--all", "-o", str(tmp_path / "new")]) == 0
    assert {f.stem: f.read_text() for f in (tmp_path / "new").iterdir()} == shipped_configs()
    assert len(SHIPPED) == 11


@pytest.mark.parametrize(
    ("line", "words"),
    [(["config", "fsdp3"], "Did you mean 'fsdp2'"), (["config"], "config needs a policy"), (["config", "--all"], "needs --output"),
     (["explain"], "explain needs"), (["explain", "nowhere.yaml"], "does not exist"), (["check", "nowhere.yaml"], "nowhere.yaml"),
     (["config", "fsdp2", "-o", "no/such/folder/x.yaml"], "no/such/folder"), (["explain", "fsdp1,replicas=2"], "backend='fsdp'")],
)  # fmt: skip
def test_wrong_use_exits_2_with_one_line(line: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    error = capsys.readouterr().err
    assert error.startswith("accel-shard: ")
    assert words in error
    assert "Traceback" not in error


def test_explain_says_what_plain_accelerate_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "zero2,offload=optimizer", "-o", str(tmp_path / "z.yaml")])
    assert main(["explain", str(tmp_path / "z.yaml")]) == 0
    text = capsys.readouterr().out
    assert "DeepSpeed ZeRO stage 2" in text
    assert "clipped at 1.0" in text
    assert "replaced by DeepSpeedCPUAdam" in text
    main(["explain", "zero2,gradient_clipping=0.5"])
    text = capsys.readouterr().out
    assert "plain Accelerate" not in text
    assert "torch 2" in text


def test_explain_reads_policy_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text("preset: fsdp2\ngradient_clipping: 0.7\n")
    assert main(["explain", str(tmp_path / "p.yaml")]) == 0
    assert "gradient_clipping            0.7" in capsys.readouterr().out


def test_check_exits_1_on_errors_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(shipped_configs()["fsdp2"])
    bad.write_text(shipped_configs()["fsdp2"].replace("fsdp_reshard_after_forward", "fsdp_reshard_after_foward"))
    warned = tmp_path / "warned.yaml"
    warned.write_text(shipped_configs()["zero2"])
    assert main(["check", str(good)]) == 0
    assert main(["check", str(warned)]) == 0
    assert main(["check", "--strict", str(warned)]) == 1
    assert main(["check", str(good), str(bad)]) == 1
    assert "fsdp_reshard_after_forward" in capsys.readouterr().out
