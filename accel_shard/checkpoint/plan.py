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

__all__ = ["Part", "StoredTensor", "WritePlan", "gather", "plan_writes"]

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


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in the order of ranks. Every rank must call it, on the same group of all ranks."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=group)
    return found


def plan_writes(layout: Layout) -> WritePlan:
    """Share the boxes of a layout out among the ranks that hold them, and find entries for them.

    Every rank must call it; it gathers the boxes (not the data) of all ranks. The plan is the same on every rank.

    Raises:
        SnapshotError: if the ranks together do not hold some tensor whole, or hold pieces that overlap.
    """
    mine = dict(layout.tensors())
    rank = dist.get_rank() if dist.is_initialized() else 0
    held = gather({key: (s.shape, s.dtype, [box for box, _ in s.parts]) for key, s in mine.items()})
    loads, index, write = [0] * len(held), {}, []
    taken: set[str] = set()
    # The order of rank 0, then of what only others have, is the same everywhere.
    keys = dict.fromkeys(key for boxes in held for key in boxes)
    for key in keys:
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
                write.append((entry, _cut(mine[key].parts, box)))
        index[key] = StoredTensor(shape, str(dtype).removeprefix("torch."), tuple(stored))
    return WritePlan(write, index)


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


def _cut(parts: Sequence[tuple[Box, torch.Tensor]], wanted: Box) -> torch.Tensor:
    for box, tensor in parts:
        if box.intersect(wanted) == wanted or box == wanted:
            return tensor[wanted.slices(inside=box)] if wanted.sizes else tensor
    raise AssertionError((wanted, [box for box, _ in parts]))
