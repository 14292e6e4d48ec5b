"""What several cores do to gradients and directions: means over steps, and the lengths of other optimizers' steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from accel_shard.errors import require
from accel_shard.optim.cores.batch import norms
from accel_shard.optim.cores.checks import dtype_of

__all__ = [
    "GRAFTINGS",
    "check_betas",
    "check_grafting",
    "check_momentum",
    "filtered",
    "graft_ratio",
    "graft_step",
    "observe_graft",
    "states",
    "with_momentum",
]

GRAFTINGS = ("none", "sgd", "adagrad", "rmsprop", "adam")


def check_betas(settings: Mapping[str, Any]) -> None:
    """Check ``beta3``.

    Raises:
        ValueError: if it makes no sense.
    """
    beta3 = settings["beta3"]
    require(beta3 is None or 0.0 <= beta3 < 1.0, "beta3", beta3, "None (as betas[0]), or at least 0 and less than 1")


def check_momentum(settings: Mapping[str, Any]) -> None:
    """Check ``momentum``, ``dampening`` and ``use_nesterov``.

    Raises:
        ValueError: if one makes no sense.
    """
    momentum, dampening = settings["momentum"], settings["dampening"]
    require(0.0 <= momentum < 1.0, "momentum", momentum, "at least 0 (none) and less than 1")
    require(0.0 <= dampening < 1.0, "dampening", dampening, "at least 0 and less than 1")
    idle = momentum == 0.0 and (dampening != 0.0 or settings["use_nesterov"])
    require(not idle, "momentum", momentum, "above 0, since dampening or use_nesterov is given and would do nothing")


def states(shape: tuple[int, ...], settings: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the states of :func:`filtered` and :func:`with_momentum` that are in use, for a block of a shape."""
    kept = {"exp_avg": settings["betas"][0] > 0.0, "momentum_buffer": settings["momentum"] > 0.0}
    return {name: (shape, dtype_of(settings, "state_dtype")) for name, used in kept.items() if used}


def filtered(
    gradient: torch.Tensor, mean: torch.Tensor | None, settings: Mapping[str, Any], step: int
) -> tuple[torch.Tensor, float]:
    """Take a gradient into its mean, and return what is to be preconditioned, and what that is to be multiplied with.

    With ``beta3`` the mean that is returned decays by that, in this step only (as Lion's does). The number corrects the
    bias. It is left to the caller, since it can wait until a pass over the elements is due anyway.

    Args:
        gradient: of the step.
        mean: updated in place; None without one.
        settings: ``betas``, ``beta3``, ``use_bias_correction``.
        step: from 1.
    """
    if mean is None:
        return gradient, 1.0
    beta1 = settings["betas"][0]
    beta3 = beta1 if settings["beta3"] is None else settings["beta3"]
    gradient = gradient.to(mean.dtype)
    ahead = mean.lerp(gradient, 1 - beta3) if beta3 != beta1 else None
    mean.lerp_(gradient, 1 - beta1)
    correction = 1.0 - beta3 * beta1 ** (step - 1) if settings["use_bias_correction"] else 1.0
    return mean if ahead is None else ahead, 1.0 / correction


def with_momentum(direction: torch.Tensor, buffer: torch.Tensor | None, settings: Mapping[str, Any]) -> torch.Tensor:
    """Take a direction into its momentum, and return what to move against: the momentum, or Nesterov's look ahead."""
    if buffer is None:
        return direction
    momentum, rest = settings["momentum"], 1 - settings["dampening"]
    buffer.mul_(momentum).add_(direction, alpha=rest)
    if settings["use_nesterov"]:
        return direction.mul_(rest).add_(buffer, alpha=momentum)
    return direction.copy_(buffer)


def check_grafting(settings: Mapping[str, Any]) -> None:
    """Check ``grafting``, ``grafting_beta2`` and ``grafting_epsilon``.

    Raises:
        ValueError: if one makes no sense.
    """
    kind, beta2, epsilon = settings["grafting"], settings["grafting_beta2"], settings["grafting_epsilon"]
    require(kind in GRAFTINGS, "grafting", kind, ", ".join(GRAFTINGS))
    require(
        beta2 is None or 0.0 <= beta2 < 1.0, "grafting_beta2", beta2, "None (as betas[1]), or at least 0 and below 1"
    )
    require(0.0 <= epsilon < math.inf, "grafting_epsilon", epsilon, "a number of at least 0")
    if kind in ("rmsprop", "adam"):
        sums = beta2 is None and settings["betas"][1] == 1.0
        require(not sums, "grafting_beta2", beta2, f"below 1 for grafting={kind!r}, and betas[1] is 1; or 'adagrad'")


def observe_graft(gradient: torch.Tensor, squares: torch.Tensor | None, settings: Mapping[str, Any]) -> None:
    """Take a gradient into the squares of the optimizer whose lengths are grafted, in place."""
    if squares is None:
        return
    gradient = gradient.to(squares.dtype)
    if settings["grafting"] == "adagrad":
        squares.addcmul_(gradient, gradient)
        return
    beta2 = _beta2(settings)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


def graft_step(
    gradient: torch.Tensor, squares: torch.Tensor | None, settings: Mapping[str, Any], step: int
) -> tuple[torch.Tensor, float]:
    """Return the step of the optimizer whose lengths are grafted, and a number to multiply it with."""
    if squares is None:
        return gradient, 1.0
    corrected = 1.0
    if settings["grafting"] == "adam":
        corrected = math.sqrt(1.0 - _beta2(settings) ** step)
    # x / (sqrt(v) / c + e) = c * x / (sqrt(v) + c * e): one pass less over the elements.
    scaled = squares.sqrt().add_(settings["grafting_epsilon"] * corrected)
    return torch.div(gradient.to(scaled.dtype), scaled, out=scaled), corrected


def graft_ratio(direction: torch.Tensor, wanted: torch.Tensor, correction: float) -> torch.Tensor:
    """Return what to multiply each block of a direction with, so that it has the wanted norm.

    Args:
        direction: ``[blocks, ...]``, to be multiplied with ``correction`` yet.
        wanted: ``[blocks]``.
        correction: is in the result.
    """
    has = norms(direction) * correction
    # A norm too large for its dtype moves its block by nothing in this step.
    return torch.nan_to_num(wanted.to(has.dtype) / (has + 1e-16) * correction, nan=0.0, posinf=0.0, neginf=0.0)


def _beta2(settings: Mapping[str, Any]) -> float:
    given: float | None = settings["grafting_beta2"]
    return settings["betas"][1] if given is None else given
