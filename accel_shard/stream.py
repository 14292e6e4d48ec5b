"""A stream read in one order: this rank's part of it, and the place to go on from after each part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset

from accel_shard.errors import DataOrderError
from accel_shard.random_streams import seed_host
from accel_shard.sample_order import Cursor, Deal, derived_seed, random_state_left_alone

__all__ = ["StreamReader", "has_exact_state"]

# A state costs a copy of some dictionaries. After a resume, so many samples at most are read again without a window.
_STATE_EVERY: Final = 64


class StreamReader(IterableDataset[Any]):
    """Yields ``(this rank's micro-batch, the place after its round)`` for ever. Every rank reads the whole stream.

    Args:
        dataset: the stream. Its ``set_epoch`` is called at each epoch, and its ``state_dict`` and ``load_state_dict``
            (the state at the latest sample it yielded, as in ``datasets``) make a resume start where it stopped;
            without them, or if they lose samples, the epoch's samples up to the place are read again and dropped.
        collate: of the loader.
        deal: how samples are dealt out.
        seed: of the run.
        start: where to begin.
        window: shuffle within windows of so many samples, by the seed; 0 leaves the stream's order.
        drop_last: leave out the end of an epoch that does not fill an optimizer step, rather than fill it up from the
            next epoch. A whole step's samples are then read before the first of them is handed out.
        batched: collate samples into micro-batches; else the stream's items are micro-batches.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        deal: Deal,
        seed: int,
        start: Cursor,
        *,
        window: int,
        drop_last: bool,
        batched: bool,
    ) -> None:
        self.dataset, self.collate, self.deal, self.seed, self.start = dataset, collate, deal, seed, start
        self.window, self.drop_last, self.batched = window, drop_last, batched
        self.resumable = has_exact_state(dataset)

    def __iter__(self) -> Iterator[tuple[Any, Cursor]]:
        deal = self.deal
        held: list[tuple[Any, Cursor]] = []
        group = deal.whole if self.drop_last else deal.round
        for sample, cursor in self._samples():
            if sample is None:  # the end of an epoch
                held = [] if self.drop_last else held
                continue
            held.append((sample[0], cursor))
            if len(held) == group:
                for first in range(0, group, deal.round):
                    mine = held[first + deal.rank * deal.size : first + (deal.rank + 1) * deal.size]
                    yield self._collated(mine), held[first + deal.round - 1][1]
                held = []

    def _collated(self, mine: list[tuple[Any, Cursor]]) -> Any:
        samples, after = [sample for sample, _ in mine], mine[0][1]
        with random_state_left_alone():
            seed_host(derived_seed(self.seed, after.epoch, after.position, 1))
            return self.collate(samples if self.batched else samples[0])

    def _samples(self) -> Iterator[tuple[tuple[Any] | None, Cursor]]:
        """Yield every sample with the place after it, and None at the end of each epoch."""
        cursor = self.start
        while True:
            if callable(getattr(self.dataset, "set_epoch", None)):
                self.dataset.set_epoch(cursor.epoch)
            epoch, position = cursor.epoch, cursor.position
            for sample, state, since in self._epoch(cursor):
                position += 1
                yield (sample,), Cursor(epoch, position, state, since)
            if position == 0:
                raise DataOrderError(f"the stream has no samples in epoch {epoch}.")
            cursor = Cursor(epoch + 1, 0)
            yield None, cursor

    def _epoch(self, cursor: Cursor) -> Iterator[tuple[Any, Any, int]]:
        """Yield the rest of an epoch: sample, a state of the stream, and how many samples came after that state."""
        skip, state, since = cursor.position, None, 0
        if self.resumable and cursor.state is not None:
            self.dataset.load_state_dict(cursor.state)
            skip, state = cursor.since, cursor.state
        source = self._drawn(iter(self.dataset), cursor.epoch, cursor.position - skip)
        if self.window:
            source = self._shuffled(source, cursor.epoch, (cursor.position - skip) // self.window)
        every = self.window or _STATE_EVERY
        for sample in source:
            since += 1
            if self.resumable and since == every:
                state, since = self.dataset.state_dict(), 0
            if skip:
                skip -= 1
            else:
                yield sample, state, since

    def _shuffled(self, source: Iterator[Any], epoch: int, number: int) -> Iterator[Any]:
        while read := list(itertools.islice(source, self.window)):
            generator = torch.Generator().manual_seed(derived_seed(self.seed, epoch, number, 2))
            for index in torch.randperm(len(read), generator=generator).tolist():
                yield read[index]
            number += 1

    def _drawn(self, source: Iterator[Any], epoch: int, number: int) -> Iterator[Any]:
        """Iterate with the random stream of each sample's place."""
        while True:
            with random_state_left_alone():
                seed_host(derived_seed(self.seed, epoch, number, 0))
                try:
                    sample = next(source)
                except StopIteration:
                    return
            number += 1
            yield sample


def has_exact_state(dataset: Any) -> bool:
    """Whether a stream can be put back to a place without losing samples.

    ``datasets`` says that its shuffle buffers, and batched maps over Arrow tables, lose some. Private upstream names
    (datasets 5.2): ``_ex_iterable``, ``_formatting``, ``BufferShuffledExamplesIterable``; without them it is no.
    """
    if not (callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))):
        return False
    if not type(dataset).__module__.startswith("datasets."):
        return True
    if not hasattr(dataset, "_ex_iterable") or getattr(getattr(dataset, "_formatting", None), "is_table", False):
        return False
    waiting, seen = [dataset._ex_iterable], 0
    while waiting:
        source = waiting.pop()
        seen += 1
        if "Buffer" in type(source).__name__:
            return False
        waiting += [source.ex_iterable] if hasattr(source, "ex_iterable") else []
        waiting += list(getattr(source, "ex_iterables", ()))
    return seen > 0
