"""Gradients that go to their owners only: a DDP communication hook, and the global norm of what it leaves.

A step then moves the parameters twice (gradients to their owners, weights back) where all-reduce moves them thrice. Of
each bucket that DDP fills in backward, every rank sends each owner its part, and adds up what it gets: an all-to-all
with a local sum, which gloo does faster than its reduce-scatter, and which takes parts of any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    Of a gradient, the elements that another rank owns become NaN: a norm or a sum that took them for gradients would be
    wrong by a little, and this way it is wrong for all to see.

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
        self._plans: dict[tuple[int, ...], list[list[Span]]] = {}
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._homes:
                raise ValueError(
                    f"reduce='owner' and no optimizer has the parameter {name!r}, so that its gradient has no owner. "
                    "Freeze it (requires_grad_(False)) before prepare, give it to the optimizer, or use reduce='all'."
                )
            if parameter.requires_grad and not parameter.is_contiguous():
                raise ValueError(f"reduce='owner' and the parameter {name!r} is not contiguous. Use reduce='all'.")
        model.register_comm_hook(self, _reduce)

    def plan(self, bucket: GradBucket) -> list[list[Span]]:
        """Return, for each rank, which spans of a DDP bucket it owns; DDP forms its buckets anew after a first step."""
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
            self._plans[key] = [_merged(sorted(theirs)) for theirs in spans]
        return self._plans[key]

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Send each owner its part of a bucket, divided by the number of ranks, and add up this rank's."""
        buffer, plan, ranks = bucket.buffer(), self.plan(bucket), self._ranks
        buffer.div_(ranks.count)
        in_order = _merged([span for spans in plan for span in spans])
        # Often all of a bucket has one owner, or lies in the order of its owners, and need not be copied.
        sent = buffer if len(in_order) == 1 else torch.cat([buffer[a:b] for spans in plan for a, b in spans])
        sizes = [sum(b - a for a, b in spans) for spans in plan]
        mine = sizes[ranks.rank]
        arrived = torch.empty(ranks.count * mine, dtype=buffer.dtype, device=buffer.device)
        work = dist.all_to_all_single(arrived, sent, [mine] * ranks.count, sizes, group=ranks.group, async_op=True)

        def add_up(_: Any) -> torch.Tensor:
            everyones, at = arrived.view(ranks.count, mine), 0
            for rank, spans in enumerate(plan):
                for a, b in spans:
                    if rank != ranks.rank:
                        buffer[a:b].fill_(torch.nan)
                        continue
                    torch.sum(everyones[:, at : at + b - a], 0, out=buffer[a:b])
                    at += b - a
            return buffer

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(add_up)
        return future


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
