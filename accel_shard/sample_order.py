"""The order of samples: a function of seed, epoch and position alone, and the random streams that belong to a place.

Micro-batch ``i`` of ``b`` samples goes to rank ``i`` modulo the number of ranks, as Accelerate deals them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler, get_worker_info

from accel_shard.errors import DataOrderError
from accel_shard.random_streams import capture_host, restore_host, seed_host, seed_of

__all__ = ["Deal", "Keys", "Cursor", "derived_seed", "epoch_order", "random_state_left_alone"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run is in the order of samples, the same on every rank.

    Attributes:
        epoch: of the next sample.
        position: samples of that epoch that were handed out, to all ranks together.
        state: of a stream, some way before that place; None for its start.
        since: samples that the stream yielded after ``state``.
    """

    epoch: int
    position: int
    state: Any = None
    since: int = 0

    def advance(self, samples: int, length: int) -> Cursor:
        """Return the place so many samples on, in epochs of one length."""
        passed, position = divmod(self.position + samples, length)
        return Cursor(self.epoch + passed, position)


@dataclass(frozen=True, slots=True)
class Deal:
    """How samples are dealt out.

    Attributes:
        rank: of this process.
        ranks: how many there are.
        size: samples in a micro-batch of one rank (whole batches, if the loader has a batch sampler of its own: 1).
        accumulation: micro-batches of one rank in an optimizer step.
    """

    rank: int
    ranks: int
    size: int
    accumulation: int

    @property
    def round(self) -> int:
        """Samples that all ranks together take at a time."""
        return self.size * self.ranks

    @property
    def whole(self) -> int:
        """Samples in an optimizer step."""
        return self.round * self.accumulation


def derived_seed(*path: int) -> int:
    """Return a seed of 63 bits for a place in the run."""
    return seed_of("/".join(map(str, path)).encode())


@contextlib.contextmanager
def random_state_left_alone() -> Iterator[None]:
    """Put this process's host streams back afterwards. In a worker process there is nothing to protect."""
    if get_worker_info() is not None:
        yield
        return
    state = capture_host()
    try:
        yield
    finally:
        restore_host(state)


def epoch_order(sampler: Any, seed: int, epoch: int) -> Sequence[Any]:
    """Return what a sampler yields in an epoch, as a function of seed and epoch alone. Local.

    The sampler's own generator and the process's random streams are seeded for it and put back.

    Args:
        sampler: of samples or of batches. One with ``set_epoch`` is told the epoch first.
        seed: of the run.
        epoch: from 0.
    """
    number = derived_seed(seed, epoch)
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        # What the sampler itself yields with this generator, in 8 bytes an index instead of a list's 36.
        permutation = torch.randperm(len(sampler), generator=torch.Generator().manual_seed(number))
        return _Indices(permutation)
    if callable(getattr(sampler, "set_epoch", None)):
        sampler.set_epoch(epoch)
    holders = [s for s in (sampler, getattr(sampler, "sampler", None)) if isinstance(_generator(s), torch.Generator)]
    with random_state_left_alone():
        seed_host(number)
        former = [_generator(holder).get_state() for holder in holders]
        for holder in holders:
            _generator(holder).manual_seed(number)
        try:
            return list(sampler)
        finally:
            for holder, state in zip(holders, former, strict=True):
                _generator(holder).set_state(state)


def _generator(sampler: Any) -> Any:
    return getattr(sampler, "generator", None)


class _Indices(Sequence[int]):
    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        return self._values[at].tolist()


class Keys:
    """What this rank fetches, micro-batch by micro-batch, for ever: ``(epoch, position, sampler's item)``."""

    def __init__(self, sampler: Any, seed: int, deal: Deal, start: Cursor, length: int, padding: int | None) -> None:
        self.sampler, self.seed, self.deal, self.start = sampler, seed, deal, start
        self.length, self.padding = length, padding

    def __iter__(self) -> Iterator[list[tuple[int, int, Any]]]:
        at, epoch = self.start, -1
        order: Sequence[Any] = ()
        while True:
            mine, position = [], at.position + self.deal.rank * self.deal.size
            for offset in range(self.deal.size):
                passed, inside = divmod(position + offset, self.length)
                if at.epoch + passed != epoch:
                    epoch, order = at.epoch + passed, self._order(at.epoch + passed)
                mine.append((epoch, inside, order[inside] if inside < len(order) else self.padding))
            yield mine
            at = at.advance(self.deal.round, self.length)

    def _order(self, epoch: int) -> Any:
        order = epoch_order(self.sampler, self.seed, epoch)
        if self.padding is None and len(order) < self.length:
            raise DataOrderError(
                f"the sampler yields {len(order)} in epoch {epoch}, and its length was {self.length}: a place in the "
                "order needs epochs of one length."
            )
        return order
