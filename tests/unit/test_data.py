"""Order of samples: the same on any number of ranks and workers, wherever it is interrupted, map-style or streamed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from accel_shard import DataOrderError
from accel_shard.data import Batches
from accel_shard.sample_order import Deal


class Numbers(Dataset[Any]):
    """A sample is its index, and what each of the random streams drew for it."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> list[float]:
        self.read += 1
        return [float(index), random.random(), float(np.random.rand()), float(torch.rand(()))]


def collate(samples: list[list[float]]) -> torch.Tensor:
    """Samples, and a number that the collator drew."""
    return torch.tensor([[*sample, float(torch.rand(()))] for sample in samples], dtype=torch.float64)


class Stream(IterableDataset[Any]):
    """A stream without a state, longer in odd epochs."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.read = size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[float]]:
        for index in range(self.size + self.epoch % 2):
            self.read += 1
            yield [100.0 * self.epoch + index, random.random()]


def global_batches(
    make: Any, ranks: int, size: int, accumulation: int, steps: int, state: Any = None, **options: Any
) -> tuple[list[torch.Tensor], Any]:
    """The samples of each optimizer step in their order, put together from all ranks; and the place after them."""
    columns, places = [], []
    for rank in range(ranks):
        batches = Batches(make(), Deal(rank, ranks, size, accumulation), **options)
        if state is not None:
            batches.load_state_dict(state)
        columns.append([next(batches) for _ in range(steps * accumulation)])
        places.append(batches.state_dict())
        batches.close()
    assert all(place == places[0] for place in places)
    rounds = [torch.cat([column[i] for column in columns]) for i in range(steps * accumulation)]
    whole = [torch.cat(rounds[i * accumulation : (i + 1) * accumulation]) for i in range(steps)]
    return whole, places[0]


def map_loader(workers: int = 0, size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(27), size, shuffle=True, num_workers=workers, collate_fn=collate, **options)


def test_every_sample_once_an_epoch_in_another_order_each_time() -> None:
    steps, _ = global_batches(map_loader, 1, 8, 1, 10)
    flat = torch.cat(steps)[:, 0].tolist()
    epochs = [flat[:27], flat[27:54], flat[54:]]
    assert [sorted(epoch) for epoch in epochs[:2]] == [list(range(27))] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])
    other, _ = global_batches(map_loader, 1, 8, 1, 3, seed=5)
    assert torch.cat(other)[:, 0].tolist() != flat[:24]


def drawn(batch: torch.Tensor) -> torch.Tensor:
    """Sample and what was drawn for it; what the collator draws is a matter of the micro-batch."""
    return batch[:, :4]


@pytest.mark.parametrize(("ranks", "size", "accumulation"), [(2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 1, 8), (8, 1, 1)])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_does_not_depend_on_ranks_accumulation_or_workers(
    ranks: int, size: int, accumulation: int, workers: int
) -> None:
    if workers and ranks > 2:
        workers = 1  # processes are dear, and the worker's part in it is that of any number of ranks
    wanted, _ = global_batches(lambda: map_loader(), 1, 8, 1, 8)
    found, _ = global_batches(lambda: map_loader(workers, size), ranks, size, accumulation, 8)
    assert all(torch.equal(drawn(a), drawn(b)) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_draw_what_the_process_itself_would_and_its_streams_stay(workers: int) -> None:
    wanted, _ = global_batches(map_loader, 1, 4, 1, 10)
    before = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist())
    found, _ = global_batches(lambda: map_loader(workers), 1, 4, 1, 10)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), "the collator's draws too"
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]


@given(stop=st.integers(0, 13), split=st.sampled_from([(1, 8, 1), (2, 4, 1), (4, 1, 2)]), last=st.booleans())
@settings(max_examples=30)
def test_stopped_anywhere_it_goes_on_as_if_it_had_not_been(stop: int, split: tuple[int, int, int], last: bool) -> None:
    def make() -> DataLoader[Any]:
        return map_loader(drop_last=last)

    wanted, _ = global_batches(make, 1, 8, 1, stop + 5)
    first, place = global_batches(make, 2, 2, 2, stop)
    rest, _ = global_batches(make, *split, 5, state=place)
    assert all(torch.equal(drawn(a), drawn(b)) for a, b in zip(wanted, first + rest, strict=True))


def test_a_resume_does_not_read_what_was_skipped() -> None:
    _, place = global_batches(map_loader, 1, 4, 1, 5)
    data = Numbers(27)
    batches = Batches(DataLoader(data, 4, shuffle=True, collate_fn=collate), Deal(0, 1, 4, 1))
    batches.load_state_dict(place)
    next(batches)
    assert data.read == 4


def test_an_incomplete_end_is_left_out_filled_up_or_padded() -> None:
    sequential = DataLoader(Numbers(10), 4, collate_fn=collate)
    (*_, third), place = global_batches(lambda: sequential, 1, 4, 1, 3)
    assert third[:, 0].tolist() == [8, 9, 0, 1], "the next epoch fills it up"
    assert (place["epoch"], place["position"]) == (1, 2)
    dropping = DataLoader(Numbers(10), 4, collate_fn=collate, drop_last=True)
    (*_, third), place = global_batches(lambda: dropping, 1, 4, 1, 3)
    assert third[:, 0].tolist() == [0, 1, 2, 3]
    assert (place["epoch"], place["position"]) == (1, 4)
    (*_, third), place = global_batches(lambda: sequential, 2, 2, 1, 3, padding=-7)
    assert third[:, 0].tolist() == [8, 9, -7, -7]
    assert (place["epoch"], place["position"]) == (1, 0)
    assert Batches(sequential, Deal(0, 2, 2, 1), padding=-7).steps_per_epoch == 3
    with pytest.raises(DataOrderError, match="10 samples do not fill one optimizer step of 12"):
        Batches(dropping, Deal(0, 1, 4, 3))


def test_epochs_end_with_a_whole_step() -> None:
    """Two epochs of 10 samples, or of 10 and 11 for the stream, in micro-batches of 4."""
    indexed = DataLoader(Numbers(10), 4, collate_fn=collate)
    streamed = DataLoader(Stream(10), 4, collate_fn=torch.tensor)
    counts = [len(list(Batches(loader, Deal(0, 1, 4, a), epochs=2))) for loader in (indexed, streamed) for a in (1, 2)]
    assert counts == [5, 6, 6, 6]
    stopped = Batches(DataLoader(Numbers(10), 4, collate_fn=collate), Deal(0, 1, 4, 1), epochs=2)
    for _ in range(3):
        next(stopped)
    again = Batches(DataLoader(Numbers(10), 4, collate_fn=collate), Deal(0, 1, 4, 1), epochs=2)
    again.load_state_dict(stopped.state_dict())
    assert len(list(again)) == 2, "epochs are counted over all launches"


# ---- samplers --------------------------------------------------------------------------------------------------


def loaders() -> dict[str, Any]:
    data = Numbers(20)
    options = {"collate_fn": collate}
    return {
        "weighted": DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 10 + [5.0] * 10, 20), **options),
        "with replacement": DataLoader(data, 4, sampler=RandomSampler(data, replacement=True), **options),
        "with a generator": DataLoader(
            data, 4, sampler=RandomSampler(data, num_samples=12, generator=torch.Generator()), **options
        ),
        "in batches": DataLoader(data, batch_sampler=Pairs(20), **options),
        "a list": DataLoader(data, 4, sampler=[3, 1, 2, 0, 7, 9, 11, 13], **options),
    }


class Pairs(BatchSampler):
    """Batches of samples that belong together, in random order, as samplers by length make them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size // 2

    def __iter__(self) -> Iterator[list[int]]:
        for first in torch.randperm(self.size // 2).tolist():
            yield [2 * first, 2 * first + 1]


@pytest.mark.parametrize("kind", loaders())
def test_any_sampler_is_a_function_of_seed_and_epoch(kind: str) -> None:
    size = 1 if kind == "in batches" else 4
    torch.manual_seed(1)
    wanted, _ = global_batches(lambda: loaders()[kind], 2, size, 1, 6)
    torch.manual_seed(2)
    first, place = global_batches(lambda: loaders()[kind], 2, size, 1, 4)
    rest, _ = global_batches(lambda: loaders()[kind], 1, size, 2, 2, state=place)
    assert all(torch.equal(drawn(a), drawn(b)) for a, b in zip(wanted, first + rest, strict=True))
    flat = torch.cat(wanted)[:, 0].tolist()
    assert len(set(flat)) > 5
    if kind == "in batches":
        assert all(b == a + 1 for a, b in zip(flat[::2], flat[1::2], strict=True)), "batches stay together"


def test_what_has_no_common_order_is_refused() -> None:
    data = Numbers(8)
    deal = Deal(0, 2, 2, 1)
    with pytest.raises(DataOrderError, match="DistributedSampler"):
        Batches(DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0)), deal)
    with pytest.raises(DataOrderError, match="in_order=False"):
        Batches(DataLoader(data, 2, num_workers=1, in_order=False), deal)
    with pytest.raises(DataOrderError, match="a stream has none"):
        Batches(DataLoader(Stream(3), 2), deal, padding=-1)
    with pytest.raises(DataOrderError, match="shuffle_window is for streams"):
        Batches(DataLoader(data, 2), deal, window=8)
    with pytest.raises(DataOrderError, match="does not say how long"):
        _ = Batches(DataLoader(Stream(3), 2), deal).steps_per_epoch
    with pytest.raises(DataOrderError, match="no samples in epoch 0"):
        next(Batches(DataLoader(Stream(0), 2), deal))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"deal": Deal(0, 1, 2, 1)}, "samples in an optimizer step.*has 4, this run 2"),
        ({"seed": 3}, "the seed of the order: the snapshot has 0, this run 3"),
        ({"loader": DataLoader(Numbers(9), 4)}, "samples in the dataset: the snapshot has 8, this run 9"),
    ],
)
def test_another_order_than_the_snapshots_is_refused(other: dict[str, Any], words: str) -> None:
    place = Batches(DataLoader(Numbers(8), 4), Deal(0, 1, 4, 1)).state_dict()
    with pytest.raises(DataOrderError, match=words):
        Batches(**({"loader": DataLoader(Numbers(8), 4), "deal": Deal(0, 1, 4, 1)} | other)).load_state_dict(place)


# ---- streams ---------------------------------------------------------------------------------------------------


def hub_stream(**options: Any) -> DataLoader[Any]:
    from datasets import Dataset as Rows

    rows = Rows.from_dict({"x": list(range(230))}).to_iterable_dataset(num_shards=4)
    rows = rows.map(lambda row: {"x": row["x"], "noise": random.random()}).filter(lambda row: row["x"] % 10 != 3)
    return DataLoader(rows, 4, collate_fn=as_rows, **options)


def buffered_stream() -> DataLoader[Any]:
    from datasets import Dataset as Rows

    rows = Rows.from_dict({"x": list(range(230))}).to_iterable_dataset(num_shards=2)
    return DataLoader(rows.shuffle(seed=3, buffer_size=16), 4, collate_fn=as_rows)


def plain_stream(**options: Any) -> DataLoader[Any]:
    return DataLoader(Stream(200), 4, collate_fn=lambda rows: torch.tensor(rows, dtype=torch.float64), **options)


def as_rows(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([[row["x"], row.get("noise", 0.0)] for row in rows], dtype=torch.float64)


STREAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "datasets": (hub_stream, {}),
    "datasets in windows": (hub_stream, {"window": 50}),
    "datasets with a buffer": (buffered_stream, {}),
    "no state": (plain_stream, {}),
    "no state in windows": (plain_stream, {"window": 32}),
    "drop_last": (lambda: hub_stream(drop_last=True), {}),
    "a worker": (lambda: hub_stream(num_workers=2), {"window": 50}),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("stop", [3, 24, 26, 33])
def test_a_stream_in_one_order_wherever_it_is_stopped(kind: str, stop: int) -> None:
    """Stops in the first epoch, near its end, where it ends, and in the second."""
    make, options = STREAMS[kind]
    wanted, _ = global_batches(make, 1, 8, 1, stop + 4, **options)
    first, place = global_batches(make, 2, 4, 1, stop, **options)
    rest, _ = global_batches(make, 4, 1, 2, 4, state=place, **options)
    assert all(torch.equal(a, b) for a, b in zip(wanted, first + rest, strict=True))


@pytest.mark.parametrize("kind", STREAMS)
def test_every_sample_of_a_stream_once_an_epoch(kind: str) -> None:
    make, options = STREAMS[kind]
    steps, place = global_batches(make, 2, 4, 1, 40, **options)
    size = 200 if "no state" in kind else 230 if "buffer" in kind else 207
    flat = torch.cat(steps)[:, 0].tolist()
    length = size // 8 * 8 if kind == "drop_last" else size
    assert len(set(flat[:length])) == length
    if kind != "drop_last":
        assert sorted(flat[:length]) == sorted(v for v in range(230) if size != 207 or v % 10 != 3)[:length]
    assert place["epoch"] == 1
    assert flat[:length] == sorted(flat[:length]) if not options and "buffer" not in kind else flat != sorted(flat)


def test_a_stream_reads_at_most_a_window_again() -> None:
    from datasets import Dataset as Rows

    read = []

    def make() -> DataLoader[Any]:
        rows = Rows.from_dict({"x": list(range(900))}).to_iterable_dataset()
        return DataLoader(rows.map(lambda row: read.append(row["x"]) or row), 4, collate_fn=as_rows)

    for options, most in (({}, 64), ({"window": 100}, 100)):
        _, place = global_batches(make, 1, 4, 1, 150, **options)
        read.clear()
        global_batches(make, 1, 4, 1, 1, state=place, **options)
        assert len(read) <= most + 4 + (100 if options else 0), "what is skipped, and what is yielded"
        assert min(read) >= 600 - most


def test_a_stream_dealt_out_already_is_refused() -> None:
    from datasets import Dataset as Rows
    from datasets.distributed import split_dataset_by_node

    rows = split_dataset_by_node(Rows.from_dict({"x": [1, 2]}).to_iterable_dataset(), rank=0, world_size=2)
    with pytest.raises(DataOrderError, match="split_dataset_by_node"):
        Batches(DataLoader(rows, 1), Deal(0, 2, 1, 1))
