"""Muon: the momentum of a matrix, orthogonalised by Newton-Schulz iterations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from accel_shard.errors import require
from accel_shard.optim.core import Core, Cost
from accel_shard.optim.cores.batch import ELEMENTWISE, gram, norms, pieces
from accel_shard.optim.cores.checks import check_common, check_whole, dtype_of

__all__ = ["MuonCore", "newton_schulz"]

SCALES = ("original", "match_rms_adamw")


class MuonCore(Core):
    """Muon, under the names of ``torch.optim.Muon``; tensors of higher order are matrices of their first dimension.

    Hyperparameters, beside ``lr`` and ``weight_decay``, which are the layer's:

    * ``momentum``, ``nesterov``: the mean gradient, and whether to look ahead by it.
    * ``ns_steps``, ``ns_coefficients``: iterations ``X <- a X + b (X X') X + c (X X')^2 X``. The usual coefficients
      bring singular values between 0.7 and 1.2 rather than to 1, in few iterations. ``eps``: least norm to divide by.
    * ``adjust_lr_fn``: ``original``: times ``sqrt(max(1, rows / columns))``; ``match_rms_adamw``: times
      ``0.2 sqrt(max(rows, columns))``, with which AdamW's learning rates and decay fit. Rows and columns of the block.
    * ``ns_dtype``: float32, float64, or bfloat16, which is faster where the hardware has it, and good to two digits.
    * ``max_preconditioner_dim``: larger matrices are cut into blocks, each orthogonalised alone.
    * ``state_dtype``: float32 or float64, of the momentum.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5,
        "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "adjust_lr_fn": "original", "ns_dtype": "float32",
        "max_preconditioner_dim": 16384, "state_dtype": "float32",
    }  # fmt: skip

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse hyperparameters that make no sense."""
        check_common(settings)
        check_whole(settings, "ns_steps", "max_preconditioner_dim")
        require(0.0 <= settings["momentum"] < 1.0, "momentum", settings["momentum"], "at least 0 and less than 1")
        idle = settings["nesterov"] and settings["momentum"] == 0.0
        require(not idle, "nesterov", settings["nesterov"], "False with momentum=0, where it would do nothing")
        require(0.0 < settings["eps"] < math.inf, "eps", settings["eps"], "a number above 0")
        coefficients = settings["ns_coefficients"]
        require(
            isinstance(coefficients, (tuple, list)) and len(coefficients) == 3, "ns_coefficients", coefficients, "three"
        )
        require(settings["adjust_lr_fn"] in SCALES, "adjust_lr_fn", settings["adjust_lr_fn"], ", ".join(SCALES))
        dtypes = ("float32", "float64", "bfloat16")
        require(settings["ns_dtype"] in dtypes, "ns_dtype", settings["ns_dtype"], ", ".join(dtypes))

    def state(
        self, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the momentum.

        Raises:
            ValueError: for a block of one dimension, which has nothing to orthogonalise.
        """
        require(len(shape) >= 2, "the shape of a block", shape, "two dimensions or more; give vectors to AdamW")
        return {"momentum_buffer": (shape, dtype_of(settings, "state_dtype"))} if settings["momentum"] else {}

    def cost(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Cost:
        """Return multiplications: two symmetric products and a full one in each iteration."""
        rows, columns = shape[0], math.prod(shape[1:])
        small, large = min(rows, columns), max(rows, columns)
        each = 1.625 * small * small * large + 0.625 * small**3
        return Cost(settings["ns_steps"] * each + ELEMENTWISE * rows * columns)

    def direction(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> torch.Tensor:
        """Return the orthogonalised momentum, scaled by the shape of the block."""
        rows, columns = gradient.shape[1], math.prod(gradient.shape[2:])
        scale = math.sqrt(max(1.0, rows / columns))
        if settings["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        momentum, dtype = settings["momentum"], getattr(torch, settings["ns_dtype"])
        for at in pieces(gradient):
            block = gradient[at]
            if momentum:
                mean = state["momentum_buffer"][at]
                seen = block.to(mean.dtype)
                mean.lerp_(seen, 1 - momentum)
                seen = seen.lerp(mean, momentum) if settings["nesterov"] else mean
            else:
                seen = block
            found = newton_schulz(
                seen.flatten(2).to(dtype), settings["ns_steps"], settings["ns_coefficients"], settings["eps"]
            )
            block.copy_(found.reshape(block.shape)).mul_(scale)
        return gradient


def newton_schulz(
    matrices: torch.Tensor, steps: int, coefficients: tuple[float, float, float], eps: float = 1e-7
) -> torch.Tensor:
    """Return matrices with the singular vectors of these and singular values near 1; zeros stay zeros.

    Args:
        matrices: ``[blocks, rows, columns]``; computed with in their dtype.
        steps: how many iterations.
        coefficients: of the odd polynomial that each applies to the singular values.
        eps: least norm to divide by. A norm too large for its dtype gives zeros.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    found = (matrices.mT if tall else matrices) / norms(matrices).clamp(min=eps).view(-1, 1, 1)
    for _ in range(steps):
        square = gram(found)
        found = torch.baddbmm(found, gram(square).mul_(c).add_(square, alpha=b), found, beta=a)
    return found.mT if tall else found
