"""SOAP: Adam in the eigenbasis of Shampoo's factors. Also known as eigenvalue-corrected Shampoo.

The second moment is of the gradient in the basis, element by element, and stays as it is when the basis changes; the
mean gradient is kept outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from accel_shard.errors import require
from accel_shard.optim.core import Core, Cost
from accel_shard.optim.cores import momenta
from accel_shard.optim.cores.batch import ELEMENTWISE, add_gram_, mirrored, multiply, part, pieces, replaced
from accel_shard.optim.cores.checks import check_common, check_whole, dtype_of
from accel_shard.optim.cores.roots import Ridge, eigenbasis
from accel_shard.optim.cores.schedule import check_start, is_too_early, set_to_identity, start_step

__all__ = ["SOAPCore"]

METHODS = ("eigh", "qr", "cholesky_qr")
_REFRESH = {"eigh": 13.0, "qr": 9.0, "cholesky_qr": 7.0}
# Keeps the columns of small eigenvalues out of the rounding; the basis of a matrix is also that of matrix + ridge.
_RIDGE = Ridge(1e-6, relative=True)


class SOAPCore(Core):
    """SOAP for blocks of any order.

    Hyperparameters, beside ``lr`` and ``weight_decay``, which are the layer's:

    * ``betas``: decay of the mean gradient (0: none) and of the second moment; a second beta of 1: a sum. ``beta3``: if
      given, what the mean decays by in the step that uses it. ``shampoo_beta``: decay of the factors; None: as
      ``betas[1]``. ``use_bias_correction``: of both moments.
    * ``epsilon``: added to the root of the second moment. ``inverse_exponent``: of the second moment.
    * ``precondition_frequency``: every how many steps a basis is computed; ``statistics_every``: and the factors are
      updated. ``start_preconditioning_step``: before it, Adam in the coordinates of the weights; -1:
      ``precondition_frequency + 1``. In the basis of the first gradients alone, most coordinates of these are nothing
      but rounding, which Adam would scale up to a step like any other.
    * ``max_precond_dim``: longer dimensions keep their coordinates (one-sided SOAP), as do those in
      ``ignored_basis_change_dims``: ``{order: [dimensions]}``.
    * ``basis_method``: ``eigh``, or ``qr`` and ``cholesky_qr``: one step of simultaneous iteration from the last basis.
    * ``momentum``, ``dampening``, ``use_nesterov``: of the direction. Decoupled decay stays outside of it.
    * ``state_dtype``, ``factor_dtype``: float32 or float64, of momenta and of factors and bases.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 3e-3, "betas": (0.95, 0.95), "beta3": None, "shampoo_beta": None, "epsilon": 1e-8, "weight_decay": 0.01,
        "use_bias_correction": True, "max_preconditioner_dim": 1024, "max_precond_dim": 10000,
        "ignored_basis_change_dims": None, "inverse_exponent": 0.5, "precondition_frequency": 10,
        "start_preconditioning_step": -1, "statistics_every": 1, "basis_method": "eigh", "momentum": 0.0,
        "dampening": 0.0, "use_nesterov": False, "state_dtype": "float32", "factor_dtype": "float32",
    }  # fmt: skip

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse hyperparameters that make no sense."""
        check_common(settings, sums=True)
        momenta.check_betas(settings)
        momenta.check_momentum(settings)
        check_whole(settings, "max_preconditioner_dim", "max_precond_dim", "precondition_frequency", "statistics_every")
        check_start(settings)
        beta, epsilon, exponent = settings["shampoo_beta"], settings["epsilon"], settings["inverse_exponent"]
        require(beta is None or 0.0 <= beta <= 1.0, "shampoo_beta", beta, "None (as betas[1]), or 0 to 1 (1: a sum)")
        require(0.0 < epsilon < math.inf, "epsilon", epsilon, "a number above 0")
        require(0.0 < exponent < math.inf, "inverse_exponent", exponent, "a number above 0")
        require(settings["basis_method"] in METHODS, "basis_method", settings["basis_method"], ", ".join(METHODS))
        ignored = settings["ignored_basis_change_dims"]
        good = ignored is None or (isinstance(ignored, Mapping) and all(isinstance(v, list) for v in ignored.values()))
        require(good, "ignored_basis_change_dims", ignored, "None or {order: [dimensions]}")

    def state(
        self, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shapes and dtypes: factors and bases by dimension, and the moments that are in use."""
        factor, other = dtype_of(settings, "factor_dtype"), dtype_of(settings, "state_dtype")
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"exp_avg_sq": (shape, other)}
        for dim in _dims(shape, settings):
            square = (shape[dim], shape[dim])
            found |= {f"factor_{dim}": (square, factor), f"basis_{dim}": (square, factor)}
        return found | momenta.states(shape, settings)

    def start(self, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
        """Begin with the identity as bases."""
        set_to_identity(state, "basis_")

    def cost(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Cost:
        """Return multiplications: along each dimension two products into the basis, one back, 5/8 for the factor."""
        sizes, elements = [shape[dim] for dim in _dims(shape, settings)], math.prod(shape)
        passes = 3.0 if settings["betas"][0] > 0.0 else 2.0
        step = elements * sum(sizes) * (passes + 0.625 / settings["statistics_every"]) + ELEMENTWISE * elements
        return Cost(step, _REFRESH[settings["basis_method"]] * sum(d**3 for d in sizes))

    def observe(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> None:
        """Take the gradient into the factors."""
        beta = settings["betas"][1] if settings["shampoo_beta"] is None else settings["shampoo_beta"]
        if (step - 1) % settings["statistics_every"]:
            return
        for at in pieces(gradient):
            for dim in _dims(gradient.shape[1:], settings):
                weight = 1.0 if beta == 1.0 else 1.0 - beta
                add_gram_(state[f"factor_{dim}"][at], gradient[at], dim, beta, weight)

    def period(self, settings: Mapping[str, Any]) -> int:
        """Return ``precondition_frequency``."""
        frequency: int = settings["precondition_frequency"]
        return frequency

    def refresh(
        self, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Compute the bases. A block of which one fails is among those that keep what they had."""
        squares = state["exp_avg_sq"]
        kept = torch.zeros(squares.shape[0], dtype=torch.bool, device=squares.device)
        found: dict[str, torch.Tensor] = {}
        if is_too_early(settings, step):
            return found, kept
        for name in [name for name in state if name.startswith("basis_")]:
            factors = state["factor_" + name.removeprefix("basis_")]
            found[name] = torch.empty_like(state[name])
            for at in pieces(factors):
                # The bias is not corrected: it does not turn the basis.
                moment, basis = mirrored(factors[at]), state[name][at]
                result, failed = eigenbasis(moment, basis, _RIDGE.of(moment), settings["basis_method"])
                found[name][at] = replaced(result, failed, basis)
                kept[at] |= failed
        return found, kept

    def direction(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> torch.Tensor:
        """Return Adam's step in the basis, turned back."""
        order, beta2, exponent = gradient.dim() - 1, settings["betas"][1], settings["inverse_exponent"]
        turned = step >= start_step(settings)
        bias = 1.0 - beta2**step if settings["use_bias_correction"] and beta2 < 1.0 else 1.0
        for at in pieces(gradient):
            block, squares = gradient[at], state["exp_avg_sq"][at]
            bases = [part(state, f"basis_{dim}", at) if turned else None for dim in range(order)]
            seen = multiply(block, bases).to(squares.dtype)
            squares.mul_(beta2).addcmul_(seen, seen, value=1.0 if beta2 == 1.0 else 1.0 - beta2)
            mean, correction = momenta.filtered(block, part(state, "exp_avg", at), settings, step)
            if mean is not block:
                seen = multiply(mean, bases).to(squares.dtype)
            below = squares / bias
            below = (below.sqrt_() if exponent == 0.5 else below.pow_(exponent)).add_(settings["epsilon"])
            # Of numbers too large for their dtype, nothing.
            inside = torch.div(seen, below, out=below).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            multiply(inside, bases, transposed=False, out=block).mul_(correction)
            momenta.with_momentum(block, part(state, "momentum_buffer", at), settings)
        return gradient


def _dims(shape: tuple[int, ...], settings: Mapping[str, Any]) -> list[int]:
    """Return the dimensions whose coordinates are changed."""
    ignored = (settings["ignored_basis_change_dims"] or {}).get(len(shape), [])
    return [dim for dim, size in enumerate(shape) if dim not in ignored and size <= settings["max_precond_dim"]]
