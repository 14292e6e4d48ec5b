"""The recipe's command line: Hugging Face's names, a file that the command line beats, errors that help."""

from __future__ import annotations

from pathlib import Path

import finetune
import pytest
from arguments import parse_arguments


def parsed(line: list[str]) -> finetune.Arguments:
    return parse_arguments(finetune.Arguments, line)


def test_hyphens_and_underscores_are_one(tmp_path: Path) -> None:
    assert parsed(["--max-steps=3"]) == parsed(["--max_steps", "3"])


def test_a_file_gives_defaults_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("max_steps: 5\nlearning_rate: 1e-4\nmodel_name_or_path: some/model\nreport_to: null\n")
    args = parsed(["--config", str(file), "--max_steps", "7"])
    assert (args.max_steps, args.learning_rate, args.model_name_or_path) == (7, 1e-4, "some/model")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--max-stepz", "3"], "Did you mean 'max_steps'"),
        (["--config", "nowhere.yaml"], "there is no such file"),
        (["--max_steps", "3", "--num_train_epochs", "2"], "give one"),
        (["--eval_steps", "0"], "whole numbers from 1 on"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(line: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parsed(line)


def test_unknown_keys_of_a_file_are_errors(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("learning_rat: 1\n")
    with pytest.raises(ValueError, match="Did you mean 'learning_rate'"):
        parsed(["--config", str(tmp_path / "run.yaml")])


def test_shipped_config_files_parse() -> None:
    files = list((Path(finetune.__file__).parent / "configs").glob("*.yaml"))
    assert files
    for file in files:
        parsed(["--config", str(file)])


def test_clipping_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCEL_SHARD_POLICY"):
        monkeypatch.delenv(name, raising=False)

    def clipping(*line: str) -> float | None:
        return finetune.build_policy(parsed(list(line))).gradient_clipping

    assert clipping() == 1.0
    assert clipping("--max_grad_norm", "0") is None
    assert clipping("--max_grad_norm", "0.3") == 0.3
    assert clipping("--policy", "fsdp2,gradient_clipping=0.7") == 0.7
    with pytest.raises(ValueError, match="said twice"):
        clipping("--policy", "fsdp2,gradient_clipping=0.7", "--max_grad_norm", "0.3")
    with pytest.raises(ValueError, match="say it once"):
        clipping("--policy", "fsdp2,gradient_clipping=0.7", "--max_grad_norm", "0")


def test_who_gets_gradients_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCEL_SHARD_POLICY"):
        monkeypatch.delenv(name, raising=False)
    file = Path(finetune.__file__).parent / "policies" / "ddp_sharded.yaml"
    for policy in ("ddp_sharded", str(file)):
        line = ["--policy", policy, "--gradient_reduce", "owner"]
        assert finetune.build_policy(parsed(line)).gradient_reduce == "owner"
        assert finetune.build_policy(parsed(line[:2])).gradient_reduce == "all"
    with pytest.raises(ValueError, match="every rank updates every weight"):
        finetune.build_policy(parsed(["--gradient_reduce", "owner"]))


def test_a_model_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="no such folder, nor a model"):
        finetune.load_model(parsed(["--model_name_or_path", "./no-such-folder"]))
