"""Gradients that go to their owners only: a DDP communication hook, and the global norm of what it leaves.

A step then moves the parameters twice (gradients to their owners, weights back) where all-reduce moves them thrice. Of
each bucket that DDP fills in backward, every rank sends each owner its part, and adds up what it gets: an all-to-all
with a local sum, which gloo does faster than its reduce-scatter, and which takes parts of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from accel_shard.optim.bucket import Bucket, Ranks, Slot

__all__ = ["OwnerReduce", "norm_of_shares"]

Span = tuple[int, int]


class OwnerReduce:
    """The hook. DDP calls it for each bucket, on every rank in the same order.

    Of a gradient, an element that another rank owns becomes NaN, if there is one: a norm or a sum that took the others'
    part for gradients would be wrong by a little, and this way it is wrong for all to see.

    Args:
        model: trained with it; it must have no other hook.
        buckets: of the optimizer, bound.
        ranks: who shares them.

    Raises:
        ValueError: for a parameter that nobody owns, or that is not contiguous.
    """

    def __init__(self, model: DistributedDataParallel, buckets: Sequence[Bucket], ranks: Ranks) -> None:
        self._ranks = ranks
        self._homes: dict[int, tuple[Bucket, Slot]] = {id(s.parameter): (b, s) for b in buckets for s in b.slots}
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._spare = Spare()
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._homes:
                raise ValueError(
                    f"reduce='owner' and no optimizer has the parameter {name!r}, so that its gradient has no owner. "
                    "Freeze it (requires_grad_(False)) before prepare, give it to the optimizer, or use reduce='all'."
                )
            if parameter.requires_grad and not parameter.is_contiguous():
                raise ValueError(f"reduce='owner' and the parameter {name!r} is not contiguous. Use reduce='all'.")
        model.register_comm_hook(self, _reduce)

    def plan(self, bucket: GradBucket) -> Plan:
        """Return who owns what of a DDP bucket; DDP forms its buckets anew after a first step."""
        parameters = bucket.parameters()
        key = tuple(id(p) for p in parameters)
        if key not in self._plans:
            base = bucket.buffer().storage_offset()
            starts = [int(gradient.storage_offset() - base) for gradient in bucket.gradients()]
            spans: list[list[Span]] = [[] for _ in range(self._ranks.count)]
            for parameter, start in zip(parameters, starts, strict=True):
                home, slot = self._homes[id(parameter)]
                for rank, (low, high) in enumerate(home.bounds):
                    first, last = max(low, slot.start) - slot.start, min(high, slot.stop) - slot.start
                    if first < last:
                        spans[rank].append((start + first, start + last))
            self._plans[key] = Plan.of(spans, self._ranks.rank, bucket.buffer().device)
        return self._plans[key]

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Send each owner its part of a bucket, add up this rank's, and divide it by the number of ranks."""
        buffer, (work, finish) = bucket.buffer(), self.start(bucket)

        def add_up(_: Any) -> torch.Tensor:
            finish()
            return buffer

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(add_up)
        return future

    def start(self, bucket: GradBucket) -> tuple[Any, Callable[[], None]]:
        """Start to reduce a bucket; return what to wait for, and what to call then."""
        buffer, plan, ranks = bucket.buffer(), self.plan(bucket), self._ranks
        early = buffer.dtype == torch.float16  # whose sums could overflow
        if early:
            buffer.div_(ranks.count)
        given = buffer if plan.in_order else _joined(buffer, plan.sent)
        count = sum(plan.arriving)
        arrived = self._spare.take(count, buffer)
        work = dist.all_to_all_single(
            arrived, given, list(plan.arriving), list(plan.leaving), group=ranks.group, async_op=True
        )

        def finish() -> None:
            at = 0
            for size, kept in zip(plan.arriving, plan.added, strict=True):
                for a, b in plan.own if kept else ():
                    buffer[a:b].add_(arrived[at : at + b - a])
                    at += b - a
                at += 0 if kept else size
            for a, b in plan.own if not early else ():
                buffer[a:b].div_(ranks.count)
            buffer.index_fill_(0, plan.foreign, torch.nan)
            self._spare.give(arrived)

        return work, finish


@dataclass(frozen=True, slots=True)
class Plan:
    """Which spans of a DDP bucket go where."""

    own: tuple[Span, ...]
    """What this rank owns."""
    sent: tuple[Span, ...]
    """What is sent, in the order of the ranks that it goes to."""
    in_order: bool
    """Whether the whole bucket can be sent as it is; then what this rank owns goes to itself, for nothing."""
    leaving: tuple[int, ...]
    arriving: tuple[int, ...]
    """Elements to and from each rank."""
    added: tuple[bool, ...]
    """Of what arrives from which rank: what this rank sends itself is there already."""
    foreign: torch.Tensor
    """One element of each span that another rank owns."""

    @classmethod
    def of(cls, spans: Sequence[list[Span]], rank: int, device: torch.device) -> Plan:
        """Plan from each rank's spans, one a parameter."""
        sizes = [sum(b - a for a, b in theirs) for theirs in spans]
        in_order = len(_merged([span for theirs in spans for span in sorted(theirs)])) == 1
        others = [[] if r == rank and not in_order else _merged(sorted(theirs)) for r, theirs in enumerate(spans)]
        foreign = [a for r, theirs in enumerate(spans) if r != rank for a, _ in theirs]
        return cls(
            own=tuple(_merged(sorted(spans[rank]))),
            sent=tuple(span for theirs in others for span in theirs),
            in_order=in_order,
            leaving=tuple(0 if r == rank and not in_order else size for r, size in enumerate(sizes)),
            arriving=tuple(0 if r == rank and not in_order else sizes[rank] for r in range(len(spans))),
            added=tuple(r != rank for r in range(len(spans))),
            foreign=torch.tensor(foreign, dtype=torch.int64, device=device),
        )


class Spare:
    """Memory that is used again: on a CPU, the pages of new memory cost more than what is done with it."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Return ``count`` elements of the dtype and on the device of a tensor."""
        if like.device.type == "cpu":
            for number, memory in enumerate(self._free):
                if memory.dtype == like.dtype and len(memory) >= count:
                    return self._free.pop(number)[:count]
        return torch.empty(count, dtype=like.dtype, device=like.device)

    def give(self, memory: torch.Tensor) -> None:
        """Take back what is used no more."""
        if memory.device.type == "cpu":
            self._free.append(memory if memory._base is None else memory._base)


def _joined(buffer: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """Return spans as one tensor; a view where they follow each other."""
    joined = _merged(spans)
    if len(joined) == 1:
        return buffer[joined[0][0] : joined[0][1]]
    return torch.cat([buffer[a:b] for a, b in joined]) if joined else buffer[:0]


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Join spans where one begins at the end of the one before it."""
    merged: list[Span] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _reduce(state: OwnerReduce, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)


# DDP compares them with its own types, and here they are text.
_reduce.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}


def norm_of_shares(
    shares: Iterable[torch.Tensor], norm_type: float, ranks: Ranks, device: torch.device
) -> torch.Tensor:
    """Return the norm of all ranks' gradients together. Every rank must call it; it sums one number."""
    norms = torch.stack([torch.linalg.vector_norm(s, norm_type).float().to(device) for s in shares] or [
        torch.zeros((), device=device)
    ])  # fmt: skip
    endless = norm_type == float("inf")
    total = norms.max() if endless else norms.pow(norm_type).sum()
    if ranks.count > 1:
        dist.all_reduce(total, dist.ReduceOp.MAX if endless else dist.ReduceOp.SUM, group=ranks.group)
    norm: torch.Tensor = total if endless else total.pow(1.0 / norm_type)
    return norm
