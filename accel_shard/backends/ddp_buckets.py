"""The order in which gradients fill DDP's buckets, so that a resumed run sums them as the run that was stopped did.

DDP forms its buckets by size at first, and anew, in the order in which gradients came, after the first backward. Ranks
that a ring adds up in another order differ in the last bit from three ranks on. A resumed process would sum its first
step in the first buckets; so the order is kept in the snapshot, and one backward of zeros is run in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_shard.names import canonical

__all__ = ["GradientOrder"]


class GradientOrder:
    """Notes in which order the first backward of a DDP model reaches its parameters, and can play it back."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model, self.names = model, list[str]()
        self._waiting = {
            canonical(name): parameter.register_post_accumulate_grad_hook(self._note(canonical(name)))
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad
        }

    def _note(self, name: str) -> Any:
        def note(_: torch.Tensor) -> None:
            self.names.append(name)
            self._waiting.pop(name).remove()

        return note

    def play(self, names: Sequence[str], *, times: int = 1) -> bool:
        """Form the buckets as a backward in this order would. Every rank must call it; it sums zeros over the ranks.

        Args:
            names: of all parameters that train.
            times: backwards; DDP forms the buckets when the second begins.

        Returns:
            Whether it is done; False for another model, or a part of it, whose order this is not.
        """
        if not self._waiting:
            return True  # a backward came before
        parameters = {canonical(n): p for n, p in self._model.module.named_parameters() if p.requires_grad}
        if set(names) != parameters.keys():
            return False
        module = self._model.module
        self._model.module = _Zeros([parameters[name] for name in names])
        try:
            for _ in range(times):
                self._model().backward()
        finally:
            self._model.module = module
        for parameter in parameters.values():
            parameter.grad = None
        return True


class _Zeros(torch.nn.Module):
    """Its output depends on the parameters by nothing; their gradients come in the order given."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self._parameters_in_order = tuple(parameters)
        self.register_buffer("_none", parameters[0].new_zeros(1))  # DDP sends buffers around, and not none of them

    def forward(self) -> torch.Tensor:
        # Autograd goes back through what was made last first.
        terms = [(p * 0).sum().float() for p in reversed(self._parameters_in_order)]
        return torch.stack(terms).sum()
