"""Shampoo: each dimension of a block is multiplied with an inverse root of the second moment of the gradient along it.

For a matrix, ``L`` and ``R`` are the sum or the mean over the steps of ``G G'`` and ``G' G``, and the direction is
``L^(-1/4) M R^(-1/4)``, with ``M`` the mean gradient. Its length can be taken from another optimizer (grafting).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from accel_shard.errors import require
from accel_shard.optim.core import Core, Cost
from accel_shard.optim.cores import momenta
from accel_shard.optim.cores.batch import (
    ELEMENTWISE,
    add_gram_,
    mirrored,
    multiply,
    norms,
    part,
    pieces,
    replaced,
    scale_,
)
from accel_shard.optim.cores.checks import check_common, check_whole, dtype_of
from accel_shard.optim.cores.roots import Ridge, inverse_root, root_by_basis
from accel_shard.optim.cores.schedule import check_start, is_too_early, set_to_identity, start_step

__all__ = ["ShampooCore"]

METHODS = ("eigh", "newton", "qr", "cholesky_qr")
# Multiplications of a refresh in units of d^3, from times beside a product of that size.
_REFRESH = {"eigh": 13.0, "newton": 48.0, "qr": 12.0, "cholesky_qr": 9.0}


class ShampooCore(Core):
    """Shampoo for blocks of any order.

    Hyperparameters, beside ``lr`` and ``weight_decay``, which are the layer's:

    * ``betas``: decay of the mean gradient (0: none), and of the factors. A second beta of 1: a sum, as AdaGrad's.
      ``beta3``: if given, what the mean gradient decays by in the step that uses it. ``use_bias_correction``: of both.
    * ``epsilon``, ``relative_epsilon``: the floor of each factor's eigenvalues, in parts of its trace; or, if it is not
      relative, added to each factor's diagonal, as the reference does.
      ``pseudo_inverse``: leave the directions without gradient out instead; ``epsilon`` must be 0 then.
    * ``precondition_frequency``: every how many steps a root is computed; ``statistics_every``: and the factors are
      updated. ``start_preconditioning_step``: before it, the grafted optimizer steps (without grafting: the mean
      gradient); -1: ``precondition_frequency + 1``, when every block has been refreshed since its first steps, in which
      a factor may lack rank and a root then magnifies what the next gradients bring.
    * ``inverse_exponent_override``: of all dimensions, or ``{order: exponent}``, or ``{order: {dimension: exponent}}``;
      0 leaves a dimension alone. Else ``1 / (2 * order)``.
    * ``trace_scaling_exponent``: each factor is divided by its trace to this power before the root; 0: not.
    * ``root_method``: ``eigh``; ``newton`` (coupled Newton: products only, for GPUs); ``qr`` and ``cholesky_qr`` (one
      step of simultaneous iteration from the last eigenbasis: approximate, and another matrix of state a dimension).
    * ``grafting``: none, sgd, adagrad, rmsprop, adam; ``grafting_beta2`` (None: as ``betas[1]``), ``grafting_epsilon``.
    * ``momentum``, ``dampening``, ``use_nesterov``: of the direction. Decoupled decay stays outside of it.
    * ``kl_shampoo``: from the start step, the factors see the gradient multiplied with the roots of the other factors,
      over their sizes. The exponents are 1/2 then, unless overridden.
    * ``state_dtype``, ``factor_dtype``: float32 or float64, of momenta and of factors and roots.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3, "betas": (0.9, 0.999), "beta3": None, "epsilon": 1e-6, "relative_epsilon": True,
        "pseudo_inverse": False, "weight_decay": 0.0, "use_bias_correction": True, "max_preconditioner_dim": 1024,
        "precondition_frequency": 10, "start_preconditioning_step": -1, "statistics_every": 1,
        "inverse_exponent_override": None, "trace_scaling_exponent": 0.0, "root_method": "eigh", "grafting": "adam",
        "grafting_beta2": None, "grafting_epsilon": 1e-8, "momentum": 0.0, "dampening": 0.0, "use_nesterov": False,
        "kl_shampoo": False, "state_dtype": "float32", "factor_dtype": "float32",
    }  # fmt: skip

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse hyperparameters that make no sense."""
        check_common(settings, sums=True)
        momenta.check_betas(settings)
        momenta.check_momentum(settings)
        momenta.check_grafting(settings)
        check_whole(settings, "max_preconditioner_dim", "precondition_frequency", "statistics_every")
        check_start(settings)
        epsilon, pseudo = settings["epsilon"], settings["pseudo_inverse"]
        right = epsilon == 0.0 if pseudo else 0.0 < epsilon < math.inf
        require(
            right, "epsilon", epsilon, "0 with pseudo_inverse=True" if pseudo else "above 0 (pseudo_inverse needs none)"
        )
        scaling = settings["trace_scaling_exponent"]
        require(0.0 <= scaling <= 1.0, "trace_scaling_exponent", scaling, "0 to 1")
        method = settings["root_method"]
        require(method in METHODS, "root_method", method, ", ".join(METHODS))
        require(not (pseudo and method != "eigh"), "root_method", method, "'eigh' with pseudo_inverse=True")
        for exponent in _overridden(settings["inverse_exponent_override"]):
            good = isinstance(exponent, (int, float)) and 0.0 <= exponent < math.inf
            require(
                good, "inverse_exponent_override", exponent, "numbers of at least 0, or {order: {dimension: number}}"
            )
            whole = method != "newton" or exponent == 0 or abs(1 / exponent - round(1 / exponent)) < 1e-9
            require(whole, "inverse_exponent_override", exponent, "1/2, 1/3, 1/4 ... with root_method='newton'")

    def state(
        self, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shapes and dtypes: factors, roots and bases by dimension, and the momenta that are in use."""
        factor, other = dtype_of(settings, "factor_dtype"), dtype_of(settings, "state_dtype")
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for dim in _dims(len(shape), settings):
            square, which = (shape[dim], shape[dim]), f"{dim}_of_{len(shape)}"
            found |= {f"factor_{which}": (square, factor), f"root_{which}": (square, factor)}
            if settings["root_method"].endswith("qr"):
                found[f"basis_{which}"] = (square, factor)
        if settings["grafting"] in ("adagrad", "rmsprop", "adam"):
            found["exp_avg_sq"] = (shape, other)
        return found | momenta.states(shape, settings)

    def start(self, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
        """Begin with the identity as roots and bases."""
        set_to_identity(state, "root_", "basis_")

    def cost(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Cost:
        """Return multiplications: a product for the direction and 5/8 of one for the factor, along each dimension."""
        sizes, elements = [shape[dim] for dim in _dims(len(shape), settings)], math.prod(shape)
        seen = 0.625 + (len(sizes) - 1 if settings["kl_shampoo"] else 0)
        step = elements * sum(sizes) * (1.0 + seen / settings["statistics_every"]) + ELEMENTWISE * elements
        return Cost(step, _REFRESH[settings["root_method"]] * sum(d**3 for d in sizes))

    def observe(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> None:
        """Take the gradient into the factors, and into the squares of the grafted optimizer."""
        shape, beta2 = gradient.shape[1:], settings["betas"][1]
        order, mean = len(shape), 1.0 if beta2 == 1.0 else 1.0 - beta2
        due = (step - 1) % settings["statistics_every"] == 0
        for at in pieces(gradient):
            block = gradient[at]
            for dim in _dims(order, settings) if due else ():
                seen, weight = block, mean
                if settings["kl_shampoo"] and step >= start_step(settings):
                    roots = _stored_roots(state, order, at)
                    roots[dim] = None
                    seen, weight = multiply(block, roots), mean * shape[dim] / math.prod(shape)
                add_gram_(state[f"factor_{dim}_of_{order}"][at], seen, dim, beta2, weight)
            momenta.observe_graft(block, part(state, "exp_avg_sq", at), settings)

    def period(self, settings: Mapping[str, Any]) -> int:
        """Return ``precondition_frequency``."""
        frequency: int = settings["precondition_frequency"]
        return frequency

    def refresh(
        self, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Compute the roots. A block of which one fails is among those that keep what they had."""
        first = next(iter(state.values()))
        kept = torch.zeros(first.shape[0], dtype=torch.bool, device=first.device)
        found: dict[str, torch.Tensor] = {}
        if is_too_early(settings, step):
            return found, kept
        for factor in [name for name in state if name.startswith("factor_")]:
            which = factor.removeprefix("factor_")
            dim, order = map(int, which.split("_of_"))
            names = [name for name in (f"root_{which}", f"basis_{which}") if name in state]
            found |= {name: torch.empty_like(state[name]) for name in names}
            for at in pieces(state[factor]):
                moment = moment_of(state[factor][at], settings, step)
                exponent = _exponent(settings, order, dim)
                results, failed = _roots_of(moment, part(state, f"basis_{which}", at), exponent, settings)
                for name, result in zip(names, results, strict=True):
                    found[name][at] = replaced(result, failed, state[name][at])
                kept[at] |= failed
        return found, kept

    def direction(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> torch.Tensor:
        """Return the preconditioned mean gradient, with the length of the grafted optimizer's step."""
        order, started = gradient.dim() - 1, step >= start_step(settings)
        grafting = settings["grafting"] != "none"
        for at in pieces(gradient):
            block = gradient[at]
            mean, correction = momenta.filtered(block, part(state, "exp_avg", at), settings, step)
            other, scale = mean, correction
            if grafting:
                other, grafted = momenta.graft_step(mean, part(state, "exp_avg_sq", at), settings, step)
                scale *= grafted
            if not started:
                block.copy_(other).mul_(scale)
            elif grafting:
                wanted = norms(other) * scale
                multiply(mean, _stored_roots(state, order, at), out=block)
                scale_(block, momenta.graft_ratio(block, wanted, correction))
            else:
                multiply(mean, _stored_roots(state, order, at), out=block).mul_(scale)
            momenta.with_momentum(block, part(state, "momentum_buffer", at), settings)
        return gradient


def moment_of(factors: torch.Tensor, settings: Mapping[str, Any], step: int) -> torch.Tensor:
    """Return the second moments that factors stand for: whole matrices, with the bias corrected."""
    moment, beta2 = mirrored(factors), settings["betas"][1]
    if settings["use_bias_correction"] and beta2 < 1.0:
        moment /= 1.0 - beta2 ** (1 + (step - 1) // settings["statistics_every"])
    return moment


def _exponent(settings: Mapping[str, Any], order: int, dim: int) -> float:
    """Return the inverse exponent of a dimension."""
    override = settings["inverse_exponent_override"]
    if isinstance(override, Mapping):
        override = override.get(order)
        if isinstance(override, Mapping):
            override = override.get(dim)
    if override is not None:
        return float(override)
    return 0.5 if settings["kl_shampoo"] else 1.0 / (2 * order)


def _overridden(override: object) -> list[Any]:
    """Return all exponents of an override."""
    if isinstance(override, Mapping):
        return [exponent for value in override.values() for exponent in _overridden(value)]
    return [] if override is None else [override]


def _dims(order: int, settings: Mapping[str, Any]) -> list[int]:
    """Return the dimensions that are preconditioned."""
    return [dim for dim in range(order) if _exponent(settings, order, dim) != 0.0]


def _stored_roots(state: Mapping[str, torch.Tensor], order: int, at: slice) -> list[torch.Tensor | None]:
    return [part(state, f"root_{dim}_of_{order}", at) for dim in range(order)]


def _roots_of(
    moments: torch.Tensor, basis: torch.Tensor | None, exponent: float, settings: Mapping[str, Any]
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return roots, and bases where there were some, and which failed."""
    ridge = Ridge(settings["epsilon"], settings["relative_epsilon"], settings["pseudo_inverse"])
    if settings["trace_scaling_exponent"]:
        trace = moments.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=settings["epsilon"])
        scale_(moments, trace ** -settings["trace_scaling_exponent"])
    if basis is None:
        root, failed = inverse_root(moments, exponent, ridge, settings["root_method"])
        return (root,), failed
    root, found, failed = root_by_basis(moments, basis, exponent, ridge, settings["root_method"])
    return (root, found), failed
