"""Who updates what, as arithmetic."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from accel_shard.optim.partition import assign_longest_first, equal_ranges, runs, sections

SIZES = st.lists(st.integers(0, 1000), max_size=30)


@given(total=st.integers(0, 10**9), ranks=st.integers(1, 64))
def test_ranges_cover_everything_once_and_none_is_longer_than_its_share(total: int, ranks: int) -> None:
    ranges = equal_ranges(total, ranks)
    assert len(ranges) == ranks
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert all(0 <= stop - start < total / ranks + 1 for start, stop in ranges)


def test_ranges_by_hand() -> None:
    assert equal_ranges(10, 4) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert equal_ranges(5, 4) == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert equal_ranges(0, 2) == [(0, 0), (0, 0)]


def test_the_longest_comes_first_by_hand() -> None:
    assert assign_longest_first([3, 8, 5, 4], [0, 0]) == [0, 0, 1, 1]  # 8 | 5, 4 (9) | 3 goes to the 8
    assert assign_longest_first([1], [7, 2, 2]) == [1]
    assert assign_longest_first([], [0, 0]) == []


@given(sizes=SIZES, ranks=st.integers(1, 8))
def test_no_rank_has_more_than_its_share_and_the_largest(sizes: list[int], ranks: int) -> None:
    owners = assign_longest_first(sizes, [0] * ranks)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0)


@given(sizes=SIZES, ranks=st.integers(1, 8))
def test_sections_hold_each_owners_items(sizes: list[int], ranks: int) -> None:
    owners = assign_longest_first(sizes, [0] * ranks)
    order, bounds = sections(sizes, owners, ranks)
    assert sorted(order) == list(range(len(sizes)))
    at = 0
    for index in order:
        start, stop = bounds[owners[index]]
        assert start <= at <= at + sizes[index] <= stop
        at += sizes[index]
    assert bounds[-1][1] == at == sum(sizes)


def test_runs_are_the_longest_stretches() -> None:
    assert list(runs([1, 1, 2, 1, 1], lambda a, b: a == b)) == [[1, 1], [2], [1, 1]]
    assert list(runs([], lambda a, b: True)) == []
