"""Gradients from those who hold them to those who own blocks, and updates back: one all-to-all each.

What goes where is found once, from the boxes that the ranks hold; a step only copies. A gradient that several ranks
hold (DDP, and replicas of a shard) is sent by one of them, and not at all if the owner has it; the update goes to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from accel_shard.layout import Box
from accel_shard.optim.blocks import Block, Part
from accel_shard.optim.bucket import Ranks

__all__ = ["Exchange", "Job", "Piece", "Transfer", "holders_of"]

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
    """Elements of one block that lie in one box of one holder."""

    job: int
    parameter: int
    part: Part
    box: Box


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

    def add(self, piece: Piece, source: int, target: int) -> None:
        """Add a piece, on every rank in the same order."""
        self.silent &= source == target
        if source == target == self._ranks.rank:
            self.local.append(piece)
        elif source == self._ranks.rank:
            self.outgoing[target].append(piece)
        elif target == self._ranks.rank:
            self.incoming[source].append(piece)

    @property
    def sent(self) -> int:
        """Elements that this rank sends to others."""
        return sum(piece.box.numel for pieces in self.outgoing for piece in pieces)

    def run(
        self, take: Callable[[Piece], torch.Tensor | None], put: Callable[[Piece, torch.Tensor], object],
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """Send. Every rank must call it.

        Args:
            take: returns a piece's elements where they come from; None for zeros.
            put: is given them where they go to.
            dtype: in which they travel, and into which also what stays is rounded, so that all ranks get the same.
            device: of the buffers.
        """
        work, arrived = None, None
        if not self.silent:
            sizes = [sum(p.box.numel for p in pieces) for pieces in self.outgoing]
            sent = torch.empty(sum(sizes), dtype=dtype, device=device)
            for piece, place in _laid_out(self.outgoing, sent):
                elements = take(piece)
                if elements is None:
                    place.zero_()
                else:
                    place.copy_(elements)
            expected = [sum(p.box.numel for p in pieces) for pieces in self.incoming]
            arrived = torch.empty(sum(expected), dtype=dtype, device=device)
            work = dist.all_to_all_single(arrived, sent, expected, sizes, group=self._ranks.group, async_op=True)
        for piece in self.local:  # while the others travel
            elements = take(piece)
            put(
                piece,
                elements.to(dtype) if elements is not None else torch.zeros(piece.box.sizes, dtype=dtype).to(device),
            )
        if work is not None and arrived is not None:
            work.wait()
            for piece, place in _laid_out(self.incoming, arrived):
                put(piece, place)


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
        self.gradients, self.updates = Transfer(ranks), Transfer(ranks)
        for number, job in enumerate(jobs):
            for part in job.block.parts:
                for box, theirs in holders[job.parameter].items():
                    shared = part.box.intersect(box)
                    if shared is None:
                        continue
                    piece = Piece(number, job.parameter, part, shared)
                    self.gradients.add(piece, _nearest(theirs, job.owner, ranks.count), job.owner)
                    for rank in theirs:
                        self.updates.add(piece, job.owner, rank)


def _nearest(holders: Sequence[int], owner: int, ranks: int) -> int:
    """Return who sends a box to an owner: itself, or whoever is in the same replica, so that all send alike much."""
    return owner if owner in holders else holders[owner * len(holders) // ranks]
