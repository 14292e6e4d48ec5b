"""What the fields of a policy may say, and how it is read."""

from __future__ import annotations

from typing import Final

from accel_shard.errors import PolicyError, unknown_name

__all__ = [
    "BACKEND", "COMPRESSION", "DTYPES", "OFFLOAD", "REDUCE", "SHARD",
    "choose", "parse_clipping", "parse_wrap", "positive",
]  # fmt: skip

SHARD: Final = ("none", "optimizer", "gradients", "parameters")
BACKEND: Final = ("auto", "ddp", "fsdp", "fsdp1", "deepspeed")
DTYPES: Final = ("fp32", "bf16", "fp16")
OFFLOAD: Final = ("none", "optimizer", "parameters")
REDUCE: Final = ("all", "owner")
COMPRESSION: Final = ("none", "fp16", "bf16", "powersgd")


def choose(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of the words.

    Raises:
        PolicyError: naming the words.
    """
    if not isinstance(value, str) or value not in allowed:
        raise PolicyError(unknown_name(name, str(value), allowed))
    return value


def positive(name: str, value: object) -> None:
    """Check a number of things.

    Raises:
        PolicyError: if it is no whole number from 1 on.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PolicyError(f"{name} is {value!r}. Allowed: whole numbers from 1 on.")


def parse_wrap(value: object) -> str | tuple[str, ...] | int:
    """Read what the units of FSDP are.

    Raises:
        PolicyError: for anything else.
    """
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) and v.isidentifier() for v in value):
        return tuple(value)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise PolicyError(f"wrap is {value!r}. Allowed: 'auto', class names, or a number of parameters above 0.")


def parse_clipping(value: object) -> float | None:
    """Read the largest norm of gradients; None is off.

    Raises:
        PolicyError: for anything else.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise PolicyError(f"gradient_clipping is {value!r}. Allowed: a number above 0, or null for off.")
    return float(value)
