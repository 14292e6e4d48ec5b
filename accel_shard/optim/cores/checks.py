"""What the hyperparameters of the cores may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from accel_shard.errors import require

__all__ = ["check_common", "check_whole", "dtype_of"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def check_common(settings: Mapping[str, Any], *, sums: bool = False) -> None:
    """Check ``lr``, ``betas``, ``weight_decay`` and ``state_dtype``, of those that are there.

    Args:
        settings: of a parameter group.
        sums: whether the second beta may be 1, which means a sum instead of a mean.

    Raises:
        ValueError: for one that makes no sense.
    """
    for option in ("lr", "weight_decay"):
        if option in settings:
            value = settings[option]
            require(0.0 <= value < math.inf, option, value, "a number of at least 0")
    if "betas" in settings:
        betas = settings["betas"]
        require(isinstance(betas, (tuple, list)) and len(betas) == 2, "betas", betas, "two numbers")
        require(0.0 <= betas[0] < 1.0, "betas[0]", betas[0], "at least 0 and less than 1")
        right = 0.0 <= betas[1] <= 1.0 if sums else 0.0 <= betas[1] < 1.0
        require(right, "betas[1]", betas[1], "0 to 1 (1: a sum)" if sums else "at least 0 and less than 1")
    for option in ("state_dtype", "factor_dtype"):
        if option in settings:
            require(settings[option] in _DTYPES, option, settings[option], ", ".join(_DTYPES))


def check_whole(settings: Mapping[str, Any], *options: str) -> None:
    """Check counts: whole numbers of at least 1.

    Raises:
        ValueError: for one that is not.
    """
    for option in options:
        value = settings[option]
        whole = isinstance(value, int) and not isinstance(value, bool)
        require(whole and value >= 1, option, value, "a whole number of at least 1")


def dtype_of(settings: Mapping[str, Any], option: str) -> torch.dtype:
    """Return the dtype that an option names; the names are plain text, so that state dicts are of plain types."""
    return _DTYPES[settings[option]]
