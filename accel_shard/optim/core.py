"""What a matrix optimizer is to the layer that distributes it: arithmetic on a batch of whole blocks of one shape.

A core knows nothing of ranks, of parameters or of where a block was cut. The layer (:mod:`accel_shard.optim.matrix`)
cuts parameters into blocks, brings each block's gradient to its owner, calls the core there on all blocks of a shape at
once, and applies what it returns: ``weight -= lr * (direction + weight_decay * weight)``.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

__all__ = ["Core", "Cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Multiplications for one block: at every step, and at a refresh."""

    step: float
    refresh: float = 0.0


class Core(abc.ABC):
    """The mathematics of one optimizer. All tensors have a leading dimension: the blocks of the batch."""

    #: The hyperparameters and their defaults, of plain types; a parameter group has these and no others of this core's.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: Whether :meth:`refresh` finds the step's gradient in the state it gets, under the name ``gradient``.
    needs_gradient: ClassVar[bool] = False

    def check(self, settings: Mapping[str, Any]) -> None:  # noqa: B027
        """Refuse hyperparameters that make no sense. Called for each parameter group when it is added.

        Raises:
            ValueError: that says which option, what it got and what is allowed.
        """

    @abc.abstractmethod
    def state(
        self, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each state tensor of one block (without the batch dimension), by name.

        Args:
            shape: of the block.
            settings: the parameter group's hyperparameters.
        """

    def start(self, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:  # noqa: B027
        """Fill states that do not begin as zeros, in place. Called once, before the first step of the blocks."""

    @abc.abstractmethod
    def cost(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Cost:
        """Return what a block of this shape costs; owners and refreshes are shared out by it."""

    def observe(  # noqa: B027
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> None:
        """Take the gradient into the statistics, in place: the first part of a step.

        Args:
            gradient: ``[blocks, *shape]``, float32 (or float64), finite; not to be changed.
            state: by name, ``[blocks, ...]``.
            settings: the parameter group's hyperparameters.
            step: how many steps these blocks have done, with this one: 1 at the first.
        """

    def period(self, settings: Mapping[str, Any]) -> int:
        """Return every how many steps a block is refreshed; 0 if this core has nothing to refresh.

        The layer spreads the blocks over the steps of a period, by cost; all are refreshed at their first step too.
        """
        return 0

    def refresh(
        self, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Compute what is costly (roots, bases, projectors) from the statistics: the second part of a step, when due.

        It changes nothing, so that it can run beside training on a copy of the statistics.

        Returns:
            The states to replace, by name, ``[blocks, ...]``; and ``[blocks]``, bool: which blocks keep what they had,
            because nothing better could be computed.
        """
        raise NotImplementedError(f"{type(self).__name__} has a period and no refresh")

    @abc.abstractmethod
    def direction(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any], step: int
    ) -> torch.Tensor:
        """Return what the weights move against, before the learning rate: the last part of a step.

        Args:
            gradient: as in :meth:`observe`; it may be overwritten.
            state: by name, ``[blocks, ...]``; momenta are updated in place.
            settings: the parameter group's hyperparameters.
            step: as in :meth:`observe`.

        Returns:
            ``[blocks, *shape]``, in the gradient's dtype.
        """
