"""``Shampoo``, ``SOAP``, ``Muon`` and ``GaLore``: cores and their distribution, to be used as any optimizer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from accel_shard.optim.core import Core
from accel_shard.optim.cores.galore import GaLoreCore
from accel_shard.optim.cores.muon import MuonCore
from accel_shard.optim.cores.shampoo import ShampooCore
from accel_shard.optim.cores.soap import SOAPCore
from accel_shard.optim.matrix import MatrixOptimizer

__all__ = ["GaLore", "Muon", "SOAP", "Shampoo"]


class _Named(MatrixOptimizer):
    """A matrix optimizer with the core, and the defaults, of its name."""

    _core: ClassVar[type[Core]]

    def __init__(self, params: Any, lr: float | torch.Tensor | None = None, **settings: Any) -> None:
        given = settings if lr is None else {"lr": lr} | settings
        super().__init__(params, self._core(), **(dict(self._core.defaults) | given))


class Shampoo(_Named):
    """Shampoo: ``Shampoo(parameter_groups(model), lr=1e-3)``.

    Gupta, Koren, Singer, 2018; blocks, grafting and start step as in Shi et al., 2023, arXiv 2309.06497.

    Args:
        params: parameters, or groups of them; :func:`~accel_shard.parameter_groups` makes sensible ones.
        lr: learning rate. With grafting (the default is Adam's) that of the grafted optimizer.
        **settings: :class:`~accel_shard.optim.cores.shampoo.ShampooCore` lists those of the method,
            :class:`~accel_shard.optim.matrix.MatrixOptimizer` the others. All can be said a group.
    """

    _core = ShampooCore


class SOAP(_Named):
    """SOAP: Adam in the eigenbasis of Shampoo's factors; eigenvalue-corrected Shampoo.

    Vyas et al., 2024, arXiv 2409.11321.

    Args:
        params: as for :class:`Shampoo`.
        lr: learning rate; AdamW's is a good first guess.
        **settings: :class:`~accel_shard.optim.cores.soap.SOAPCore` lists those of the method.
    """

    _core = SOAPCore


class Muon(_Named):
    """Muon: momentum, orthogonalised. Jordan et al., 2024; under the names of ``torch.optim.Muon``.

    Args:
        params: as for :class:`Shampoo`; a group with ``heads`` orthogonalises each attention head by itself.
        lr: learning rate.
        **settings: :class:`~accel_shard.optim.cores.muon.MuonCore` lists those of the method.
    """

    _core = MuonCore


class GaLore(_Named):
    """GaLore: Adam on a low-rank projection of the gradient. Zhao et al., 2024, arXiv 2403.03507.

    Args:
        params: as for :class:`Shampoo`.
        lr: learning rate.
        **settings: :class:`~accel_shard.optim.cores.galore.GaLoreCore` lists those of the method.
    """

    _core = GaLoreCore
