"""Batches in an order that is a function of seed, epoch and position, on any number of ranks and workers.

Global batch k is the same samples in the same order however many ranks, micro-batches and worker processes share it,
and however often the run was stopped. What is random in a sample or a collator is drawn from a stream that belongs to
the sample's place in that order, not from the process's own, which is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accel_shard.errors import DataOrderError
from accel_shard.random_streams import seed_host
from accel_shard.sample_order import Cursor, Deal, Keys, derived_seed, random_state_left_alone
from accel_shard.stream import StreamReader

if TYPE_CHECKING:
    from accel_shard.accelerator import PolicyAccelerator

__all__ = ["Batches", "batches_of"]

_FROM_LOADER: Final = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")


class _Fetcher(Dataset[Any]):
    """A map-style dataset with its collator, drawing from the stream of each sample's place."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int, *, batched: bool, nested: bool) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed
        self.batched, self.nested = batched, nested
        self.epoch: int | None = None

    def __getitems__(self, keys: list[tuple[int, int, Any]]) -> Any:
        epoch, position, first = keys[0]
        if epoch != self.epoch and callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)
        self.epoch = epoch
        indices = list(first) if self.nested else [index for _, _, index in keys]
        with random_state_left_alone():
            if self.batched and callable(getattr(self.dataset, "__getitems__", None)):
                seed_host(derived_seed(self.seed, epoch, position, 0))
                samples = self.dataset.__getitems__(indices)
            else:
                samples = []
                for number, index in enumerate(indices):
                    where = (epoch, position, number) if self.nested else keys[number][:2]
                    seed_host(derived_seed(self.seed, *where, 0))
                    samples.append(self.dataset[index])
            seed_host(derived_seed(self.seed, epoch, position, 1))
            return self.collate(samples if self.batched else samples[0])


def _as_it_is(batch: Any) -> Any:
    return batch


class Batches(Iterator[Any]):
    """This rank's micro-batches on its device, epoch after epoch, from where the run is.

    :meth:`accel_shard.Checkpointer.batches` makes one. Its place is that of the micro-batches handed out so far, so
    take as many as the step that is about to be made needs, not more.
    """

    def __init__(
        self,
        loader: Any,
        deal: Deal,
        *,
        seed: int = 0,
        epochs: int | None = None,
        padding: int | None = None,
        window: int = 0,
        to_device: Callable[[Any], Any] = _as_it_is,
    ) -> None:
        self.loader, self.deal, self.seed, self.epochs, self.padding = loader, deal, seed, epochs, padding
        self.window, self._to_device = window, to_device
        self._cursor, self._handed_out = Cursor(0, 0), 0
        self._source: Iterator[Any] | None = None
        self._streamed = isinstance(loader.dataset, IterableDataset)
        _refuse(loader, streamed=self._streamed, padding=padding, window=window)
        if not self._streamed:
            self._nested = type(loader.batch_sampler) is not BatchSampler and loader.batch_sampler is not None
            self._sampler: Any = loader.batch_sampler if self._nested else loader.sampler
            self._length = self._epoch_length(len(self._sampler))

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        return self._cursor.epoch

    @property
    def position(self) -> int:
        """How many samples of that epoch were handed out, to all ranks together."""
        return self._cursor.position

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps until the epoch's samples are used up.

        Raises:
            DataOrderError: for a stream, whose length nobody knows.
        """
        if self._streamed:
            raise DataOrderError("a stream does not say how long an epoch is; count steps.")
        return -(-self._length // self.deal.whole)

    def _epoch_length(self, number: int) -> int:
        whole = self.deal.whole
        if self.padding is not None:
            return -(-number // whole) * whole
        if self.loader.drop_last and not self._nested:
            if number < whole:
                raise DataOrderError(
                    f"{number} samples do not fill one optimizer step of {whole}, and drop_last is on."
                )
            return number // whole * whole
        if number == 0:
            raise DataOrderError("the dataset is empty.")
        return number

    def __next__(self) -> Any:
        if self._is_over(self.epoch):
            self.close()
            raise StopIteration
        if self._source is None:
            self._source = self._open()
        if self._streamed:
            batch, cursor = next(self._source)
            if self._is_over(cursor.epoch) and cursor.position >= self.deal.round:  # it is the next epoch's alone
                self.close()
                raise StopIteration
            self._cursor = cursor
        else:
            batch = next(self._source)
            self._cursor = self._cursor.advance(self.deal.round, self._length)
        self._handed_out += 1
        return self._to_device(batch)

    def _is_over(self, epoch: int) -> bool:
        """Whether the epochs are used up and no optimizer step is left half fed."""
        return self.epochs is not None and epoch >= self.epochs and self._handed_out % self.deal.accumulation == 0

    def close(self) -> None:
        """End the worker processes; the next batch starts new ones."""
        self._source = None

    def _open(self) -> Iterator[Any]:
        settings = {name: getattr(self.loader, name) for name in _FROM_LOADER}
        if settings["num_workers"]:
            settings["prefetch_factor"] = self.loader.prefetch_factor
        # A generator of its own: an iterator draws a number from the process's stream if it has none.
        settings["generator"] = torch.Generator().manual_seed(self.seed)
        batched = self.loader.batch_size is not None or self.loader.batch_sampler is not None
        collate = self.loader.collate_fn
        if self._streamed:
            # In one order by one worker: several would each read all of it.
            settings |= {"num_workers": min(1, settings["num_workers"])}
            reader = StreamReader(
                self.loader.dataset, collate, self.deal, self.seed, self._cursor,
                window=self.window, drop_last=self.loader.drop_last, batched=batched,
            )  # fmt: skip
            return iter(DataLoader(reader, batch_size=None, collate_fn=_as_it_is, **settings))
        keys: Any = Keys(self._sampler, self.seed, self.deal, self._cursor, self._length, self.padding)
        fetcher = _Fetcher(self.loader.dataset, collate, self.seed, batched=batched, nested=self._nested)
        return iter(DataLoader(fetcher, batch_sampler=keys, collate_fn=_as_it_is, **settings))

    # ---- stopping and going on -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the order as plain data, the same on every rank. Local."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "stream": self._cursor.state,
            "since": self._cursor.since,
            "seed": self.seed,
            "window": self.window,
            "samples_in_step": self.deal.whole,
            "samples": None if self._streamed else len(self._sampler),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a place. Local; every rank must do it.

        Raises:
            DataOrderError: if the samples of the steps to come would not be those of the run that was stopped.
        """
        own = self.state_dict()
        meanings = {
            "seed": "the seed of the order",
            "window": "shuffle_window",
            "samples_in_step": "samples in an optimizer step (micro-batch x ranks x accumulation)",
            "samples": "samples in the dataset",
        }
        for name, meaning in meanings.items():
            if own[name] != state[name]:
                raise DataOrderError(
                    f"{meaning}: the snapshot has {state[name]}, this run {own[name]}. Keep it, or start a fresh run "
                    "from the snapshot's weights."
                )
        self.close()
        self._cursor = Cursor(state["epoch"], state["position"], state["stream"], state["since"])
        self._handed_out = 0


def batches_of(
    accelerator: PolicyAccelerator, loader: Any, seed: int, epochs: int | None, padding: int | None, window: int
) -> Batches:
    """Deal a loader's samples out to an accelerator's ranks, as :meth:`accel_shard.Checkpointer.batches`."""
    from accelerate.utils import send_to_device

    given, ranks = accelerator.loader_given(loader), accelerator.num_processes
    if given is not loader and getattr(getattr(loader, "base_dataloader", None), "_iterator", None) is not None:
        # Accelerate starts a stateful loader's workers to ask for its state. Nobody will use them, and the workers that
        # are forked here would inherit them.
        loader.base_dataloader._iterator = None
    size = given.batch_size or 1
    if accelerator.split_batches:
        if size % ranks:
            raise DataOrderError(f"split_batches is on, and {ranks} ranks do not divide a batch of {size}.")
        size //= ranks
    device, overlap = accelerator.device, accelerator.non_blocking
    return Batches(
        given, Deal(accelerator.process_index, ranks, size, accelerator.gradient_accumulation_steps),
        seed=seed, epochs=epochs, padding=padding, window=window,
        to_device=lambda batch: send_to_device(batch, device, non_blocking=overlap),
    )  # fmt: skip


def _refuse(loader: Any, *, streamed: bool, padding: int | None, window: int) -> None:
    """Refuse what has no order, or an order of its own on each rank."""
    if isinstance(loader.sampler, DistributedSampler) or getattr(loader.dataset, "_distributed", None) is not None:
        raise DataOrderError(
            "the loader deals samples out to ranks itself (DistributedSampler, split_dataset_by_node). Give a loader "
            "of the whole dataset: which rank gets what is decided here."
        )
    if not getattr(loader, "in_order", True):
        raise DataOrderError("in_order=False lets the faster worker go first, so there is no order to resume.")
    if streamed and padding is not None:
        raise DataOrderError("padding is an index, and a stream has none. Leave it out: the next epoch fills up.")
    if window and not streamed:
        raise DataOrderError("shuffle_window is for streams. Give the DataLoader shuffle=True.")
