"""Gradients from those who hold them to those who own blocks, and updates back: one collective each.

What goes where is found once, from the boxes that the ranks hold; a step only copies. A gradient that several ranks
hold (DDP, and replicas of a shard) is sent by one of them, and not at all if the owner has it; the update goes to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from accel_shard.layout import Box
from accel_shard.optim.blocks import Block, Part
from accel_shard.optim.bucket import Ranks

__all__ = ["Exchange", "Job", "Piece", "Spread", "Transfer", "holders_of"]

Holders = dict[Box, list[int]]
"""Which ranks hold which boxes of a parameter."""


@dataclass(frozen=True, slots=True)
class Job:
    """A block, whose it is and of which parameter."""

    parameter: int
    block: Block
    owner: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one block that lie in one box of one holder; where they are is worked out once, for all steps."""

    job: int
    parameter: int
    box: Box
    held: Box
    """What the holder has."""
    _inside: tuple[slice, ...]
    _at: tuple[slice, ...]
    _sizes: tuple[int, ...]
    _within: tuple[slice, ...]

    @classmethod
    def of(cls, job: int, parameter: int, part: Part, box: Box, held: Box) -> Piece:
        """Work out where a box of a part is."""
        return cls(
            job, parameter, box, held, box.slices(inside=held), part.at.slices(), part.box.sizes,
            box.slices(inside=part.box),
        )  # fmt: skip

    def in_held(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements in the holder's tensor; a view."""
        return tensor[self._inside]

    def in_block(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements in a tensor of the block, in the box's shape; a view."""
        return tensor[self._at].view(self._sizes)[self._within]


Take = Callable[[Piece], torch.Tensor | None]
Put = Callable[[Piece, torch.Tensor], object]


def holders_of(held: Sequence[Sequence[Box]]) -> Holders:
    """Turn the boxes that each rank holds of a parameter into the ranks that hold each box, in order."""
    found: Holders = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            found.setdefault(box, []).append(rank)
    return found


class Transfer:
    """Pieces that go from rank to rank in one collective, each to be taken from a tensor and put into another."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.outgoing: list[list[Piece]] = [[] for _ in range(ranks.count)]
        self.incoming: list[list[Piece]] = [[] for _ in range(ranks.count)]
        self.local: list[Piece] = []
        self.silent = True
        """Whether no rank sends anything, so that there is nothing to call."""

    def add(self, make: Callable[[], Piece], source: int, target: int) -> None:
        """Add a piece, on every rank in the same order; it is made where it is needed."""
        self.silent &= source == target
        if source == target == self._ranks.rank:
            self.local.append(make())
        elif source == self._ranks.rank:
            self.outgoing[target].append(make())
        elif target == self._ranks.rank:
            self.incoming[source].append(make())

    @property
    def sent(self) -> int:
        """Elements that this rank sends to others."""
        return sum(piece.box.numel for pieces in self.outgoing for piece in pieces)

    def run(self, take: Take, put: Put, dtype: torch.dtype, device: torch.device) -> None:
        """Send. Every rank must call it.

        Args:
            take: returns a piece's elements where they come from; None for zeros.
            put: is given them where they go to.
            dtype: in which they travel, and into which also what stays is rounded, so that all ranks get the same.
            device: of the buffers.
        """
        finish = self._start(take, dtype, device)
        for piece in self.local:  # while the others travel
            put(piece, _taken(take, piece, dtype, device))
        finish(put)

    def _start(self, take: Take, dtype: torch.dtype, device: torch.device) -> Callable[[Put], None]:
        """Start to send; return what waits and hands out what arrived."""
        if self.silent:
            return lambda put: None
        sizes, expected = _sizes(self.outgoing), _sizes(self.incoming)
        sent = torch.empty(sum(sizes), dtype=dtype, device=device)
        for piece, place in _laid_out(self.outgoing, sent):
            _fill(place, take(piece))
        arrived = torch.empty(sum(expected), dtype=dtype, device=device)
        work = dist.all_to_all_single(arrived, sent, expected, sizes, group=self._ranks.group, async_op=True)

        def finish(put: Put) -> None:
            work.wait()
            for piece, place in _laid_out(self.incoming, arrived):
                put(piece, place)

        return finish


class Spread(Transfer):
    """Pieces that all go to every rank: what each sends is put together once, and not once a receiver."""

    def _start(self, take: Take, dtype: torch.dtype, device: torch.device) -> Callable[[Put], None]:
        rank, broadcasts = self._ranks.rank, self._ranks.gathers_poorly
        everyones = [self.local if source == rank else pieces for source, pieces in enumerate(self.incoming)]
        sizes = _sizes(everyones)
        strides = sizes if broadcasts else [max(sizes)] * len(sizes)
        flat = torch.empty(sum(strides), dtype=dtype, device=device)
        starts = [sum(strides[:source]) for source in range(len(strides))]
        ranges = [flat[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        for piece, place in _laid_out([self.local], ranges[rank]):
            _fill(place, take(piece))
        if broadcasts:
            works = self._ranks.broadcast_each(ranges)
        else:
            own = flat[starts[rank] : starts[rank] + strides[rank]]
            works = [dist.all_gather_into_tensor(flat, own, group=self._ranks.group, async_op=True)]

        def finish(put: Put) -> None:
            for work in works:
                work.wait()
            for source, part in enumerate(ranges):
                for piece, place in _laid_out([everyones[source]] if source != rank else [], part):
                    put(piece, place)

        return finish


def _sizes(pieces: Sequence[Sequence[Piece]]) -> list[int]:
    return [sum(piece.box.numel for piece in theirs) for theirs in pieces]


def _fill(place: torch.Tensor, elements: torch.Tensor | None) -> None:
    if elements is None:
        place.zero_()
    else:
        place.copy_(elements)


def _taken(take: Take, piece: Piece, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    elements = take(piece)
    return torch.zeros(piece.box.sizes, dtype=dtype, device=device) if elements is None else elements.to(dtype)


def _laid_out(pieces: Sequence[Sequence[Piece]], buffer: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    at = 0
    for rank in pieces:
        for piece in rank:
            yield piece, buffer[at : at + piece.box.numel].view(piece.box.sizes)
            at += piece.box.numel


class Exchange:
    """The two transfers of a step, found once. Local: every rank must give it the same jobs and holders.

    Args:
        jobs: the blocks of all ranks.
        holders: who holds which boxes, for each parameter.
        ranks: that take part.
    """

    def __init__(self, jobs: Sequence[Job], holders: Sequence[Holders], ranks: Ranks) -> None:
        everywhere = all(len(theirs) == ranks.count for boxes in holders for theirs in boxes.values())
        self.gradients = Transfer(ranks)
        self.updates = Spread(ranks) if everywhere and ranks.count > 1 else Transfer(ranks)
        for number, job in enumerate(jobs):
            for part in job.block.parts:
                for box, theirs in holders[job.parameter].items():
                    shared = part.box.intersect(box)
                    if shared is None:
                        continue
                    make = partial(Piece.of, number, job.parameter, part, shared, box)
                    self.gradients.add(make, _nearest(theirs, job.owner, ranks.count), job.owner)
                    for rank in theirs:
                        self.updates.add(make, job.owner, rank)


def _nearest(holders: Sequence[int], owner: int, ranks: int) -> int:
    """Return who sends a box to an owner: itself, or whoever is in the same replica, so that all send alike much."""
    return owner if owner in holders else holders[owner * len(holders) // ranks]
