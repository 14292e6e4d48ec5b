"""The blocks that this rank owns, stacked by shape, so that a core updates all of a shape in one call."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from accel_shard.layout import Box
from accel_shard.optim.blocks import Block
from accel_shard.optim.core import Core
from accel_shard.optim.cores.adamw import adam_step

__all__ = ["Counts", "Entry", "MatrixStack", "Stack", "VectorStack"]


_IN_CACHE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Entry:
    """A block of this rank's: its number among all blocks, and its parameter's."""

    job: int
    parameter: int
    block: Block


@dataclass(slots=True)
class Counts:
    """What happened so far on this rank; ``kept`` stays on the device until it is asked for."""

    refreshes: int = 0
    kept: torch.Tensor | int = 0


class Stack(abc.ABC):
    """Blocks of one parameter group that are updated together.

    Attributes:
        entries: the blocks.
        gradient: what they are given, to be filled before :meth:`run`.
    """

    def __init__(self, entries: Sequence[Entry], group: dict[str, Any]) -> None:
        self.entries, self.group = list(entries), group
        self.gradient: torch.Tensor
        self._update: torch.Tensor | None = None

    @abc.abstractmethod
    def run(self, steps: Sequence[int], due: Callable[[int, int], bool], counts: Counts) -> None:
        """Do one step: local.

        Args:
            steps: how many steps each block has done with this one; 0 for one that has no gradient in it.
            due: tells by a block's position and step whether it is refreshed now.
            counts: to be added to.
        """

    @abc.abstractmethod
    def tensor(self, position: int, stacked: torch.Tensor) -> torch.Tensor:
        """Return a block's part of a tensor of gradients, updates or states, in the block's shape; a view."""

    @abc.abstractmethod
    def states(self, position: int) -> Iterator[tuple[str, Box | None, torch.Tensor]]:
        """Yield a block's states: name, the box of the parameter if it is laid out as that, and a view."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Put all states to what they are before the first step."""

    def place(self, position: int) -> torch.Tensor:
        """Return where a block's gradient goes."""
        return self.tensor(position, self.gradient)

    def update(self, position: int) -> torch.Tensor:
        """Return what a block's weights move against in this step, before the learning rate."""
        assert self._update is not None, "the stack was not run"
        return self.tensor(position, self._update)

    def forget(self) -> None:
        """Let go of the updates, once they are sent."""
        self._update = None


def _by_step(steps: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    found: dict[int, list[int]] = {}
    for position, step in enumerate(steps):
        if step:
            found.setdefault(step, []).append(position)
    yield from found.items()


class MatrixStack(Stack):
    """Whole blocks of one shape, for a core. Local.

    Args:
        entries: the blocks.
        group: their parameter group.
        core: that updates them.
        dtype: in which it computes.
        device: where.
    """

    def __init__(
        self, entries: Sequence[Entry], group: dict[str, Any], core: Core, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(entries, group)
        self._core, count, shape = core, len(self.entries), self.entries[0].block.sizes
        self.gradient = torch.zeros(count, *shape, dtype=dtype, device=device)
        self.state = {
            name: torch.zeros(count, *sizes, dtype=kind, device=device)
            for name, (sizes, kind) in core.state(shape, group).items()
        }
        core.start(self.state, group)

    def run(self, steps: Sequence[int], due: Callable[[int, int], bool], counts: Counts) -> None:
        """Observe, refresh what is due, and find the updates, for all blocks of one step count at once."""
        for step, rows in _by_step(steps):
            refreshed = [number for number, row in enumerate(rows) if due(row, step)]
            if len(rows) == len(self.entries):
                self._update = self._advance(self.gradient, self.state, step, refreshed, counts)
                continue
            index = torch.tensor(rows, device=self.gradient.device)
            state = {name: value[index] for name, value in self.state.items()}
            update = self._advance(self.gradient[index], state, step, refreshed, counts)
            for name, value in state.items():
                self.state[name][index] = value
            if self._update is None:
                self._update = torch.zeros_like(self.gradient)
            self._update[index] = update

    def _advance(
        self, gradient: torch.Tensor, state: dict[str, torch.Tensor], step: int, refreshed: list[int], counts: Counts
    ) -> torch.Tensor:
        self._core.observe(gradient, state, self.group, step)
        if refreshed:
            some = len(refreshed) < len(gradient)
            index = torch.tensor(refreshed, device=gradient.device) if some else slice(None)
            old = {name: value[index] for name, value in state.items()}
            seen = {"gradient": gradient[index]} if self._core.needs_gradient else {}
            new, keep = self._core.refresh(old | seen, self.group, step)
            for name, value in new.items():
                wide = keep.view(-1, *(1,) * (value.dim() - 1))
                state[name][index] = torch.where(wide, old[name], value.to(old[name].dtype))
            counts.refreshes += len(refreshed)
            counts.kept = counts.kept + keep.sum()
        return self._core.direction(gradient, state, self.group, step)

    def tensor(self, position: int, stacked: torch.Tensor) -> torch.Tensor:
        """Return a block's part of a stacked tensor."""
        return stacked[position]

    def states(self, position: int) -> Iterator[tuple[str, Box | None, torch.Tensor]]:
        """Yield a block's states; they have shapes of their own."""
        for name, value in self.state.items():
            yield name, None, value[position]

    def reset(self) -> None:
        """Put all states to what the core starts with."""
        for value in self.state.values():
            value.zero_()
        self._core.start(self.state, self.group)


class VectorStack(Stack):
    """Boxes of any shapes that AdamW updates element by element, in one flat tensor; states as torch's. Local."""

    def __init__(
        self, entries: Sequence[Entry], group: dict[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(entries, group)
        self._starts = [0]
        for entry in self.entries:
            self._starts.append(self._starts[-1] + entry.block.numel)
        self.gradient = torch.zeros(self._starts[-1], dtype=dtype, device=device)
        self.state = {name: torch.zeros_like(self.gradient) for name in ("exp_avg", "exp_avg_sq")}

    def run(self, steps: Sequence[int], due: Callable[[int, int], bool], counts: Counts) -> None:
        """Turn the gradients into updates, of neighbours with one step count at once."""
        self._update = self.gradient
        # On a CPU a piece stays in the cache from one operation to the next; elsewhere every call costs.
        most = _IN_CACHE if self.gradient.device.type == "cpu" else self._starts[-1]
        for step, positions in _by_step(steps):
            whole = len(positions) == len(self.entries)
            spans = [(0, self._starts[-1])] if whole else [(self._starts[i], self._starts[i + 1]) for i in positions]
            for start, stop in spans:
                for at in range(start, stop, most):
                    self._adamw(slice(at, min(at + most, stop)), step)

    def _adamw(self, where: slice, step: int) -> None:
        gradient, mean, square = self.gradient[where], self.state["exp_avg"][where], self.state["exp_avg_sq"][where]
        adam_step(gradient, mean, square, self.group["adamw_betas"], self.group["adamw_eps"], step, out=gradient)

    def tensor(self, position: int, stacked: torch.Tensor) -> torch.Tensor:
        """Return a box's part of a flat tensor."""
        start, stop = self._starts[position], self._starts[position + 1]
        return stacked[start:stop].view(self.entries[position].block.sizes)

    def states(self, position: int) -> Iterator[tuple[str, Box | None, torch.Tensor]]:
        """Yield a box's states, laid out as the parameter."""
        for name, value in self.state.items():
            yield name, self.entries[position].block.parts[0].box, self.tensor(position, value)

    def reset(self) -> None:
        """Put the moments to zero."""
        for value in self.state.values():
            value.zero_()
