"""Buckets for parameters: ranges of groups for element-wise optimizers, whole parameters for the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from accel_shard.optim.bucket import Bucket, Ranks, Slot
from accel_shard.optim.partition import assign_longest_first, chunks, equal_ranges, sections

__all__ = ["check_memory", "outline", "ranged_buckets", "whole_buckets"]


def ranged_buckets(fresh: Sequence[tuple[int, torch.Tensor]], ranks: Ranks, master: torch.dtype | None) -> list[Bucket]:
    """Put parameters into buckets a group, dtype and device, of each of which every rank updates a contiguous range.

    The buckets are those that DDP will most often form, so that gradients lie in them as the weights do here. What
    forward needs first comes first.

    Args:
        fresh: index of the parameter group, and parameter.
        ranks: who shares them.
        master: as for :class:`~accel_shard.optim.bucket.Bucket`.
    """
    alike: dict[tuple[int, torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    for number, (index, p) in enumerate(fresh):
        alike.setdefault((index, p.dtype, p.device), []).append((number, p))
    made: list[tuple[int, Bucket]] = []
    for (index, *_), numbered in alike.items():
        for run in chunks([p.numel() for _, p in reversed(numbered)], numbered[0][1].element_size(), ranks.count):
            members = numbered[len(numbered) - run.stop : len(numbered) - run.start]
            slots: list[Slot] = []
            for _, p in reversed(members):
                slots.append(Slot(p, index, slots[-1].stop if slots else 0))
            if slots[-1].stop:
                bounds = equal_ranges(slots[-1].stop, ranks.count)
                bucket = Bucket(slots, bounds, ranks, elementwise=True, master=master)
                made.append((members[0][0], bucket))
    return [bucket for _, bucket in sorted(made, key=lambda pair: pair[0])]


def whole_buckets(
    fresh: Sequence[tuple[int, torch.Tensor]], ranks: Ranks, master: torch.dtype | None, loads: list[int]
) -> list[Bucket]:
    """Put parameters into one bucket a dtype and device, each owned by one rank, the largest given out first.

    Args:
        fresh: index of the parameter group, and parameter.
        ranks: who shares them.
        master: as for :class:`~accel_shard.optim.bucket.Bucket`.
        loads: elements that each rank owns already; counted on.
    """
    owners = assign_longest_first([p.numel() for _, p in fresh], loads)
    alike: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor, int]]] = {}
    for (index, p), owner in zip(fresh, owners, strict=True):
        loads[owner] += p.numel()
        alike.setdefault((p.dtype, p.device), []).append((index, p, owner))
    made = []
    for items in alike.values():
        order, bounds = sections([p.numel() for _, p, _ in items], [owner for *_, owner in items], ranks.count)
        slots: list[Slot] = []
        for index, p, _ in (items[i] for i in order):
            slots.append(Slot(p, index, slots[-1].stop if slots else 0))
        if slots[-1].stop:
            made.append(Bucket(slots, bounds, ranks, elementwise=False, master=master))
    return made


def check_memory(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse parameters that cannot be moved into flat buffers.

    Raises:
        ValueError: if another backend has sharded them, or they share memory.
    """
    spans: dict[Any, list[tuple[int, int, tuple[int, ...]]]] = {}
    for p in parameters:
        if hasattr(p, "placements") or hasattr(p, "ds_id"):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is sharded already, by "
                f"{'FSDP2 or tensor parallelism' if hasattr(p, 'placements') else 'DeepSpeed'}, with its optimizer "
                "state. Use the plain optimizer there; ShardedOptimizer is for whole parameters, as under DDP."
            )
        if p.is_contiguous() and p.numel():
            start = p.data_ptr()
            spans.setdefault(p.device, []).append((start, start + p.numel() * p.element_size(), tuple(p.shape)))
    for found in spans.values():
        found.sort()
        for (_, stop, shape), (start, _, other) in itertools.pairwise(found):
            if start < stop:
                raise ValueError(
                    f"two parameters, of shapes {shape} and {other}, share memory, which flat buffers would end. Tie "
                    "weights by using one Parameter twice."
                )


def outline(parameter: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter of the same shape without memory: some optimizers make their state when they are made."""
    floats = parameter.is_floating_point() or parameter.is_complex()
    return torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=floats)
