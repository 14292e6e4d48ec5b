"""Arguments of a recipe: a dataclass, read from the command line and from a YAML file that the command line beats."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import transformers
import yaml

from accel_shard.errors import unknown_name

__all__ = ["RunArguments", "option", "parse_arguments"]

T = TypeVar("T")


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with a help text."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArguments:
    """What every training recipe takes. Flat names, as Hugging Face spells them; hyphens do as well as underscores."""

    config: str | None = option(None, "YAML file of these arguments; the command line wins over it")
    policy: str | None = option(None, "preset, YAML file or field=value,...; default: the launch config's, or ddp")
    gradient_accumulation_steps: int | None = option(None, "forwards in an optimizer step; default: the policy's")
    # Optimizer
    optimizer: str = option("adamw", "adamw, shampoo, soap, muon or galore; the last four leave embeddings to AdamW")
    optim_args: str | None = option(None, "further settings of the optimizer: name=value,name=value")
    learning_rate: float = option(3e-3, "peak of the schedule")
    lr_scheduler_type: str = option("cosine", "a name of transformers.get_scheduler: linear, constant_with_warmup, ...")
    warmup_steps: int = option(10, "optimizer steps of linear warm-up")
    weight_decay: float = option(0.1, "of matrices; vectors (norms, biases) have none")
    # Reports
    report_to: str = option("none", "tensorboard, wandb, trackio, ... (several: with commas), all, or none")
    # Stopping and going on: snapshots are in OUTPUT_DIR/checkpoints, and any policy and number of ranks loads them
    resume_from_checkpoint: str = option("none", "auto = the newest that can be trusted, or none, or a path")
    save_steps: int | None = option(None, "optimizer steps between snapshots; default: none are saved by steps")
    save_total_limit: int | None = option(None, "how many of the newest snapshots are kept; default: all")
    stop_after: int | None = option(None, "save and stop after so many optimizer steps of this launch")

    def check_counts(self, *names: str) -> None:
        """Check that these are counts.

        Raises:
            ValueError: for one below 1.
        """
        for name in names:
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} is {value}. Allowed: whole numbers from 1 on.")


def parse_arguments(kind: type[T], line: list[str], description: str = "") -> T:
    """Read a dataclass from a command line; a ``--config`` file is put before it, so it is checked alike and loses.

    Raises:
        ValueError: for an unknown argument, with the nearest valid name, or a file that is not there.
    """
    parser = transformers.HfArgumentParser(kind, description=description.partition("\n")[0], allow_abbrev=False)
    names = [field.name for field in dataclasses.fields(kind)]
    if (file := parser.parse_known_args(line)[0].config) is not None:
        if not Path(file).is_file():
            raise ValueError(f"--config {file!r}: there is no such file here ({Path.cwd()}).")
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
        for name in values:
            if name not in names:
                raise ValueError(f"{file}: " + unknown_name("argument", str(name), names))
        line = [f"--{name}={value}" for name, value in values.items() if value is not None] + line
    args, rest = parser.parse_args_into_dataclasses(line, return_remaining_strings=True, look_for_args_file=False)
    if rest:
        raise ValueError(unknown_name("argument", rest[0].lstrip("-").partition("=")[0].replace("-", "_"), names))
    return args
