"""AdamW, element by element: for parameters that are not matrices, and to compare the others with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from accel_shard.errors import require
from accel_shard.optim.core import Core, Cost
from accel_shard.optim.cores.batch import ELEMENTWISE, pieces
from accel_shard.optim.cores.checks import check_common, dtype_of

__all__ = ["AdamWCore", "adam_step"]


class AdamWCore(Core):
    """AdamW as ``torch.optim.AdamW`` computes it, up to rounding, with torch's names."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "state_dtype": "float32",
    }  # fmt: skip

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse hyperparameters that make no sense."""
        check_common(settings)
        require(0.0 <= settings["eps"] < math.inf, "eps", settings["eps"], "a number of at least 0")

    def state(
        self, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return torch's two states."""
        dtype = dtype_of(settings, "state_dtype")
        return {"exp_avg": (shape, dtype), "exp_avg_sq": (shape, dtype)}

    def cost(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Cost:
        """Return what passing over the elements costs."""
        return Cost(ELEMENTWISE * math.prod(shape))

    def direction(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> torch.Tensor:
        """Return the mean over the root of the mean square, with the bias of both corrected."""
        beta1, beta2 = settings["betas"]
        for at in pieces(gradient):
            block, mean, square = gradient[at], state["exp_avg"][at], state["exp_avg_sq"][at]
            block.copy_(adam_step(block.to(mean.dtype), mean, square, (beta1, beta2), settings["eps"], step))
        return gradient


def adam_step(
    seen: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, betas: tuple[float, float], eps: float, step: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Take a gradient into Adam's moments, and return the mean over the root of the mean square, both without bias.

    Args:
        seen: the gradient.
        mean: updated in place.
        square: updated in place.
        betas: their decays.
        eps: added to the root.
        step: from 1.
        out: where to put it, which may be the gradient's place.
    """
    beta1, beta2 = betas
    mean.lerp_(seen, 1 - beta1)
    square.mul_(beta2).addcmul_(seen, seen, value=1 - beta2)
    # The corrections of both biases, as factors of root and eps: a pass less over the elements.
    below = square.sqrt().mul_((1 - beta1**step) / (1 - beta2**step) ** 0.5).add_(eps * (1 - beta1**step))
    return torch.div(mean, below, out=below if out is None else out)
