"""Which rank writes which box: every element once, replicas shared out among those that hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from accel_shard.errors import SnapshotError
from accel_shard.layout import Box, Layout, uncovered

__all__ = ["Part", "Planner", "StoredTensor", "WritePlan", "gather", "own_rank", "rank_count"]

# A replicated tensor of fewer bytes is written by one rank whole; cutting it would only make more entries.
_WORTH_SPLITTING: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """One box of a stored tensor, and where it is."""

    file: str
    entry: str
    box: Box


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor as a snapshot holds it."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What this rank writes, and the index of what all ranks write."""

    mine: list[tuple[str, torch.Tensor]]
    index: dict[str, StoredTensor]


def own_rank() -> int:
    """Return this process's rank; 0 if it has none."""
    return dist.get_rank() if dist.is_initialized() else 0


def rank_count() -> int:
    """Return how many ranks there are; 1 if there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in the order of ranks. Every rank must call it, on the same group of all ranks."""
    if rank_count() == 1:
        return [value]
    found: list[Any] = [None] * rank_count()
    dist.all_gather_object(found, value, group=group)
    return found


class Planner:
    """Shares the boxes of a layout out among the ranks that hold them, and finds entries for them.

    A plan is kept while no rank's boxes change: making it takes longer than the copy of what is saved.
    """

    def __init__(self) -> None:
        self._held: dict[str, Any] | None = None
        self._cuts: list[tuple[str, str, int, Box]] = []
        self._index: dict[str, StoredTensor] = {}

    def unchanged(self, layout: Layout) -> bool:
        """Tell whether this rank holds the boxes that it held at the last plan. Local: communicates nothing."""
        return _held(layout) == self._held

    def plan(self, layout: Layout, *, keep: bool) -> WritePlan:
        """Return what this rank writes, and the index of what all ranks write, which is the same on every rank.

        Every rank must call it; if a new plan is made it gathers the boxes (not the data) of all ranks.

        Args:
            layout: of this rank.
            keep: whether :meth:`unchanged` was true on every rank.

        Raises:
            SnapshotError: if the ranks together do not hold some tensor whole, or hold pieces that overlap.
        """
        mine = dict(layout.tensors())
        if not keep:
            self._held = None
            held = _held(layout)
            self._make(gather(held))
            self._held = held
        return WritePlan([(entry, _cut(mine[key].parts[i], box)) for entry, key, i, box in self._cuts], self._index)

    def _make(self, held: list[dict[str, Any]]) -> None:
        rank = own_rank()
        loads, index, cuts = [0] * len(held), {}, []
        taken: set[str] = set()
        # The order of rank 0, then of what only others have, is the same everywhere.
        for key in dict.fromkeys(key for boxes in held for key in boxes):
            shape, dtype = next((d[key][0], d[key][1]) for d in held if key in d)
            parts = _share_out(key, shape, dtype, [d[key][2] if key in d else [] for d in held], loads)
            stored = []
            for owner, box in parts:
                whole = box == Box.whole(shape)
                entry = key if whole else f"{key}@{'.'.join(map(str, box.offsets))}"
                while entry in taken:  # a parameter may be called what a piece of another one is
                    entry += "~"
                taken.add(entry)
                stored.append(Part(f"rank-{owner:05d}.safetensors", entry, box))
                if owner == rank:
                    cuts.append((entry, key, _holding(held[rank][key][2], box), box))
            index[key] = StoredTensor(shape, str(dtype).removeprefix("torch."), tuple(stored))
        self._index, self._cuts = index, cuts


def _held(layout: Layout) -> dict[str, Any]:
    return {key: (s.shape, s.dtype, [box for box, _ in s.parts]) for key, s in layout.tensors()}


def _share_out(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, held: Sequence[list[Box]], loads: list[int]
) -> list[tuple[int, Box]]:
    holders: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    missing = uncovered(Box.whole(shape), holders)
    total = sum(box.numel for box in holders)
    if missing or total != math.prod(shape):
        raise SnapshotError(
            f"all ranks together hold {total:,} of the {math.prod(shape):,} elements of {key!r}"
            + (f"; {missing[0]} is nowhere" if missing else "; some overlap")
            + ". Every rank must call save, with the model that it prepared."
        )
    shares = []
    for box, ranks in holders.items():
        size = box.numel * dtype.itemsize
        if len(ranks) == 1 or size < _WORTH_SPLITTING:
            pieces = [(min(ranks, key=lambda r: (loads[r], r)), box)]
        else:
            pieces = list(zip(ranks, box.split(len(ranks)), strict=False))
        for owner, piece in pieces:
            loads[owner] += piece.numel * dtype.itemsize
            shares.append((owner, piece))
    return shares


def _holding(boxes: Sequence[Box], wanted: Box) -> int:
    for number, box in enumerate(boxes):
        if box == wanted or box.intersect(wanted) == wanted:
            return number
    raise AssertionError((wanted, boxes))


def _cut(part: tuple[Box, torch.Tensor], wanted: Box) -> torch.Tensor:
    box, tensor = part
    return tensor if box == wanted else tensor[wanted.slices(inside=box)]
