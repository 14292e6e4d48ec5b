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

__all__ = ["AdamWCore"]


class AdamWCore(Core):
    """AdamW as ``torch.optim.AdamW(foreach=False)`` computes it, with torch's names.

    The order of operations is torch's; but the layer multiplies with the learning rate last, so that weights differ
    from torch's by rounding.
    """

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
            seen = block.to(mean.dtype)
            mean.lerp_(seen, 1 - beta1)
            square.mul_(beta2).addcmul_(seen, seen, value=1 - beta2)
            below = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(settings["eps"])
            block.copy_(torch.div(mean, below, out=below).div_(1 - beta1**step))
        return gradient
