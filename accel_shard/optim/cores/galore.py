"""GaLore: Adam on the gradient's projection to a subspace of low rank, and its step projected back.

The subspace is spanned by the leading singular vectors of the gradient on the block's shorter side, and is found anew
every so many steps. The moments stay in the coordinates of the subspace, and singular vectors are free in their sign,
and nearly free among themselves where singular values are close; a new basis can therefore be turned so that it is the
nearest to the one before it. This is what the moments mean most after the change, and it leaves them untouched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from accel_shard.errors import require
from accel_shard.optim.core import Core, Cost
from accel_shard.optim.cores.adamw import adam_step
from accel_shard.optim.cores.batch import ELEMENTWISE, all_finite, gram, norms, pieces, replaced
from accel_shard.optim.cores.checks import check_common, check_whole, dtype_of
from accel_shard.optim.cores.roots import eigh

__all__ = ["GaLoreCore"]


class GaLoreCore(Core):
    """GaLore, under the names of its authors; tensors of higher order are matrices of their first dimension.

    Hyperparameters, beside ``lr`` and ``weight_decay``, which are the layer's:

    * ``rank``: of the subspace, or the shorter side where that is less. ``update_proj_gap``: every how many steps it is
      found anew. ``scale``: of the step that is projected back.
    * ``align``: turn a new basis to the one before it; False: as the decomposition gives it, as in the first GaLore.
    * ``betas``, ``eps``: Adam's, in the subspace.
    * ``max_preconditioner_dim``: larger matrices are cut into blocks, each with a subspace of its own.
    * ``state_dtype``: float32 or float64.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "rank": 128, "update_proj_gap": 200,
        "scale": 0.25, "align": True, "max_preconditioner_dim": 16384, "state_dtype": "float32",
    }  # fmt: skip
    needs_gradient: ClassVar[bool] = True

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse hyperparameters that make no sense."""
        check_common(settings)
        check_whole(settings, "rank", "update_proj_gap", "max_preconditioner_dim")
        require(0.0 <= settings["eps"] < math.inf, "eps", settings["eps"], "a number of at least 0")
        require(0.0 < settings["scale"] < math.inf, "scale", settings["scale"], "a number above 0")

    def state(
        self, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the projector and Adam's moments in the subspace.

        Raises:
            ValueError: for a block of one dimension, which has no rank.
        """
        require(len(shape) >= 2, "the shape of a block", shape, "two dimensions or more; give vectors to AdamW")
        dtype, (short, long) = dtype_of(settings, "state_dtype"), _sides(shape)
        rank = min(settings["rank"], short)
        return {
            "projector": ((short, rank), dtype),
            "exp_avg": ((rank, long), dtype),
            "exp_avg_sq": ((rank, long), dtype),
        }

    def start(self, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
        """Begin with the first coordinates: what remains if nothing better can be computed."""
        state["projector"].diagonal(dim1=-2, dim2=-1).fill_(1.0)

    def cost(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Cost:
        """Return multiplications: a product with the projector and one back; a square and its decomposition."""
        short, long = _sides(shape)
        rank = min(settings["rank"], short)
        return Cost(
            2.0 * rank * short * long + ELEMENTWISE * rank * long, 0.625 * short * short * long + 13.0 * short**3
        )

    def period(self, settings: Mapping[str, Any]) -> int:
        """Return ``update_proj_gap``."""
        gap: int = settings["update_proj_gap"]
        return gap

    def refresh(
        self, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Compute the projectors from this step's gradient."""
        old, gradient = state["projector"], state["gradient"]
        found, kept = torch.empty_like(old), torch.zeros(len(old), dtype=torch.bool, device=old.device)
        for at in pieces(gradient):
            rows = _short_rows(gradient[at]).to(old.dtype)
            # Of order one, so that no square over- or underflows.
            rows = rows / rows.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
            _, vectors, failed = eigh(gram(rows))
            # Nothing is known of a gradient of zeros.
            failed = failed | (norms(rows) == 0)
            new = vectors[..., -old.shape[-1] :].flip(-1)
            if settings["align"]:
                new = _turned(new, old[at])
            found[at] = replaced(new, failed, old[at])
            kept[at] = failed
        return {"projector": found}, kept

    def direction(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> torch.Tensor:
        """Return Adam's step in the subspace, projected back and scaled."""
        for at in pieces(gradient):
            rows, projector = _short_rows(gradient[at]), state["projector"][at]
            mean, square = state["exp_avg"][at], state["exp_avg_sq"][at]
            seen = projector.mT @ rows.to(projector.dtype)
            moved = adam_step(seen, mean, square, settings["betas"], settings["eps"], step)
            rows.copy_(projector @ moved.mul_(settings["scale"]))
        return gradient


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shorter and the longer side of a block as a matrix."""
    rows, columns = shape[0], math.prod(shape[1:])
    return min(rows, columns), max(rows, columns)


def _short_rows(blocks: torch.Tensor) -> torch.Tensor:
    """Return a view of blocks as matrices whose rows run over the shorter side."""
    matrices = blocks.view(*blocks.shape[:2], -1)
    return matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT


def _turned(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the basis of the same subspace that is nearest to an earlier one, by the polar factor of their product."""
    try:
        left, _, right = torch.linalg.svd(new.mT @ old)
    except RuntimeError:  # it did not converge: the same subspace, in its own coordinates
        return new
    turned = new @ (left @ right)
    return replaced(turned, ~all_finite(turned), new)
