"""When Shampoo and SOAP begin to use what they refresh, and what that is before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_shard.errors import require

__all__ = ["check_start", "is_too_early", "set_to_identity", "start_step"]


def check_start(settings: Mapping[str, Any]) -> None:
    """Check ``start_preconditioning_step``.

    Raises:
        ValueError: if it makes no sense.
    """
    start = settings["start_preconditioning_step"]
    good = isinstance(start, int) and (start == -1 or start >= 1)
    require(good, "start_preconditioning_step", start, "-1, or 1 up")


def start_step(settings: Mapping[str, Any]) -> int:
    """Return the first step that is preconditioned."""
    start: int = settings["start_preconditioning_step"]
    return settings["precondition_frequency"] + 1 if start == -1 else start


def is_too_early(settings: Mapping[str, Any], step: int) -> bool:
    """Tell whether nobody looks at what is refreshed now: by the start step these blocks are refreshed again."""
    refreshed_again: int = step + settings["precondition_frequency"]
    return refreshed_again <= start_step(settings)


def set_to_identity(state: Mapping[str, torch.Tensor], *kinds: str) -> None:
    """Make identities of zeros, in the states whose names begin with one of the kinds."""
    for name, tensor in state.items():
        if name.startswith(kinds):
            tensor.diagonal(dim1=-2, dim2=-1).fill_(1.0)
