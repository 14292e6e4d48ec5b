"""The errors that a caller may want to catch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["PolicyError", "PolicyNotAppliedError", "SnapshotError", "UnsupportedPolicyError", "require", "unknown_name"]


class PolicyError(ValueError):
    """A policy, preset, file or option that makes no sense, on any backend."""


class UnsupportedPolicyError(PolicyError):
    """A policy that is well formed, but that this backend or this machine cannot honour."""


class SnapshotError(RuntimeError):
    """A snapshot that cannot be written, found, trusted or loaded."""


class DataOrderError(ValueError):
    """A loader whose order of samples cannot be fixed, or is not that of the run to go on with."""


class PolicyNotAppliedError(RuntimeError):
    """What Accelerate really prepared differs from what the policy asked for."""


def require(ok: bool, option: str, got: object, allowed: str) -> None:
    """Refuse the value of an option.

    Raises:
        ValueError: unless ``ok``.
    """
    if not ok:
        raise ValueError(f"{option} is {got!r}. Allowed: {allowed}.")


def unknown_name(kind: str, got: str, allowed: Iterable[str], remedy: str = "") -> str:
    """Build the message for a misspelt name: what it was, the nearest valid one, all valid ones."""
    names = list(allowed)
    lowered = {name.lower(): name for name in names}
    near = difflib.get_close_matches(got.lower(), lowered, n=1, cutoff=0.5)
    hint = f" Did you mean {lowered[near[0]]!r}?" if near else ""
    tail = f" {remedy}" if remedy else ""
    return f"unknown {kind} {got!r}.{hint} Allowed: {', '.join(names)}.{tail}"
