"""The block grid on a whole parameter, and which rank has which block: plain arithmetic, the same on every rank.

The grid is laid on the parameter seen as a matrix, never on a shard, so that the mathematics depends neither on the
backend nor on the number of ranks. When a block is refreshed depends on the grid alone, too; only its owner does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from accel_shard.errors import require
from accel_shard.layout import Box, boxes_of_range
from accel_shard.optim.partition import assign_longest_first

__all__ = ["Block", "Grid", "Part", "Work", "owners_of", "phases_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the parameter in its own shape, and where in a block its elements lie."""

    box: Box
    at: Box

    def view(self, block: torch.Tensor, box: Box) -> torch.Tensor:
        """Return the elements of a box inside :attr:`box`, in that box's shape; a view of the block's tensor."""
        return block[self.at.slices()].view(self.box.sizes)[box.slices(inside=self.box)]


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a parameter that an optimizer's core sees as a tensor of its own.

    Attributes:
        offsets: where it starts in the parameter seen as a matrix; with the parameter's name, its name.
        sizes: its shape.
        parts: what it is made of in the parameter's own shape.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Elements in the block."""
        return math.prod(self.sizes)

    @classmethod
    def of_box(cls, box: Box) -> Block:
        """Return a block that is a box of the parameter in its own shape."""
        return cls(box.offsets, box.sizes, (Part(box, Box.whole(box.sizes)),))


@dataclass(frozen=True, slots=True)
class Grid:
    """How a parameter is cut into blocks.

    Attributes:
        max_preconditioner_dim: longest side of a block; None for no cut. The last block of a row or column is what is
            left.
        row_dims: how many leading dimensions are merged into the rows of the matrix; the others are its columns. 0
            chooses the squarest matrix.
        heads: into how many equal bands the matrix is cut before, as the heads of an attention matrix.
        heads_axis: 0 if a head is a band of rows, 1 if it is one of columns.
    """

    max_preconditioner_dim: int | None = None
    row_dims: int = 1
    heads: int = 1
    heads_axis: int = 0

    def __post_init__(self) -> None:
        longest = self.max_preconditioner_dim
        require(longest is None or longest >= 1, "max_preconditioner_dim", longest, "None, or at least 1")
        require(self.row_dims >= 0, "row_dims", self.row_dims, "at least 0")
        require(self.heads >= 1, "heads", self.heads, "at least 1")
        require(self.heads_axis in (0, 1), "heads_axis", self.heads_axis, "0, 1")

    def split_at(self, shape: Sequence[int]) -> int:
        """Return how many dimensions of a parameter are the rows of its matrix.

        Raises:
            ValueError: if it has no dimension left for the columns.
        """
        if self.row_dims:
            if self.row_dims >= len(shape):
                raise ValueError(
                    f"row_dims is {self.row_dims} for a parameter of shape {tuple(shape)}. Allowed: 0 to "
                    f"{len(shape) - 1}; put parameters of other shapes into another group."
                )
            return self.row_dims
        return min(range(1, len(shape)), key=lambda k: max(math.prod(shape[:k]), math.prod(shape[k:])))

    def blocks(self, shape: Sequence[int]) -> list[Block]:
        """Cut a parameter of at least two dimensions; one without elements has no blocks.

        Raises:
            ValueError: if the heads do not divide its matrix.
        """
        if not math.prod(shape):
            return []
        at = self.split_at(shape)
        sides = (tuple(shape[:at]), tuple(shape[at:]))
        lengths = [math.prod(side) for side in sides]
        if lengths[self.heads_axis] % self.heads:
            raise ValueError(
                f"heads is {self.heads} for a parameter of shape {tuple(shape)}, a matrix of {lengths[0]} x "
                f"{lengths[1]}. Allowed: what divides its {('rows', 'columns')[self.heads_axis]}."
            )
        bands = [self.heads if axis == self.heads_axis else 1 for axis in (0, 1)]
        rows, columns = (self._spans(length, count) for length, count in zip(lengths, bands, strict=True))
        return [_block(sides, row, column) for row in rows for column in columns]

    def _spans(self, length: int, bands: int) -> list[tuple[int, int]]:
        band = length // bands
        step = min(band, self.max_preconditioner_dim or band)
        return [
            (start + low, min(start + low + step, start + band))
            for start in range(0, length, band)
            for low in range(0, band, step)
        ]


def _block(sides: tuple[tuple[int, ...], tuple[int, ...]], row: tuple[int, int], column: tuple[int, int]) -> Block:
    parts = [
        Part(Box(r.offsets + c.offsets, r.sizes + c.sizes), Box((r_at, c_at), (r.numel, c.numel)))
        for r_at, r in _boxes(sides[0], row)
        for c_at, c in _boxes(sides[1], column)
    ]
    return Block((row[0], column[0]), (row[1] - row[0], column[1] - column[0]), tuple(parts))


def _boxes(shape: tuple[int, ...], span: tuple[int, int]) -> list[tuple[int, Box]]:
    """Return the boxes of a span of a flattened shape, each with where it starts in the span."""
    found, at = [], 0
    for box in boxes_of_range(shape, *span):
        found.append((at, box))
        at += box.numel
    return found


# ---- when, and where -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """What a block costs.

    Attributes:
        step: at every step.
        refresh: at a refresh.
        period: every how many steps it is refreshed; 0 for never.
    """

    step: float
    refresh: float = 0.0
    period: int = 0

    @property
    def mean(self) -> float:
        """Cost of a step on average."""
        return self.step + (self.refresh / self.period if self.period else 0.0)


def phases_of(works: Sequence[Work]) -> list[int]:
    """Say in which step of its period each block is refreshed, so that the steps cost the same.

    The costliest first, each to the step with least so far. It knows nothing of ranks.
    """
    phases = [0] * len(works)
    for period in {work.period for work in works if work.period > 1}:
        alike = [index for index, work in enumerate(works) if work.period == period]
        steps = assign_longest_first([works[index].refresh for index in alike], [0.0] * period)
        for index, step in zip(alike, steps, strict=True):
            phases[index] = step
    return phases


def owners_of(
    works: Sequence[Work], phases: Sequence[int], ranks: int, *, loads: Sequence[float] | None = None,
    moves: Sequence[Sequence[float]] | None = None,
) -> list[int]:  # fmt: skip
    """Give each block an owner, so that the ranks have the same to do in every step.

    The costliest first, each to whom would be done first with it: with what a rank has in a step on average, what it
    refreshes in the same step already, and what must be sent if it is the one.

    Args:
        works: what the blocks cost.
        phases: when they are refreshed, as :func:`phases_of` says.
        ranks: how many there are.
        loads: what each rank has in a step on average already.
        moves: for each block, what sending costs if a rank owns it; nothing by default.
    """
    mean = list(loads) if loads is not None else [0.0] * ranks
    owners, nothing = [0] * len(works), [0.0] * ranks
    together: dict[tuple[int, int], list[float]] = {}
    for index in sorted(range(len(works)), key=lambda i: (-works[i].mean, i)):
        work, sent = works[index], moves[index] if moves is not None else nothing
        same = together.setdefault((work.period, phases[index]), [0.0] * ranks)
        done = [(mean[rank] + same[rank] + sent[rank], mean[rank]) for rank in range(ranks)]
        owner = done.index(min(done))
        owners[index] = owner
        mean[owner] += work.mean + sent[owner]
        same[owner] += work.refresh if work.period else 0.0
    return owners
