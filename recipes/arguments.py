"""Arguments of a recipe: a dataclass, read from the command line and from a YAML file that the command line beats."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import transformers
import yaml

from accel_shard.errors import unknown_name

__all__ = ["option", "parse_arguments"]

T = TypeVar("T")


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with a help text."""
    return dataclasses.field(default=default, metadata={"help": text})


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
