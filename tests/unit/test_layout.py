"""Arithmetic on boxes, against plain indexing of plain tensors."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_shard.layout import Box, Shard, boxes_of_range, subtract, uncovered

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    low = [draw(st.integers(0, n - 1)) for n in shape]
    return Box(tuple(low), tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, low, strict=True)))


@st.composite
def box_sets(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    return shape, draw(st.lists(boxes(shape), min_size=1, max_size=5))


def painted(shape: tuple[int, ...], parts: list[Box]) -> torch.Tensor:
    """How often each element is in one of the boxes."""
    count = torch.zeros(shape, dtype=torch.int64)
    for box in parts:
        count[box.slices()] += 1
    return count


@given(ranges())
def test_a_flat_range_is_few_boxes_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    whole = torch.arange(math.prod(shape)).view(shape)
    parts = boxes_of_range(shape, start, stop)
    found = torch.cat([whole[box.slices()].reshape(-1) for box in parts]) if parts else torch.empty(0)
    assert found.tolist() == list(range(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@given(ranges())
def test_a_shard_of_a_range_is_views_of_it(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    local = whole.reshape(-1)[start:stop].clone()
    shard = Shard.flat_range(shape, start, local)
    assert shard.numel == stop - start
    for box, tensor in shard.parts:
        assert torch.equal(tensor, whole[box.slices()])
        tensor.add_(1000)
    assert torch.equal(local, whole.reshape(-1)[start:stop] + 1000), "writing a part writes the local memory"


@given(box_sets())
def test_intersection_and_difference(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, parts = case
    first, second = parts[0], parts[-1]
    shared = first.intersect(second)
    wanted = (painted(shape, [first]) > 0) & (painted(shape, [second]) > 0)
    assert torch.equal(painted(shape, [shared] if shared else []) > 0, wanted)
    rest = painted(shape, subtract(first, second))
    assert rest.max() <= 1, "disjoint"
    assert torch.equal(rest > 0, (painted(shape, [first]) > 0) & ~wanted)


@given(box_sets())
def test_what_is_not_covered(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, parts = case
    missing = painted(shape, uncovered(Box.whole(shape), parts))
    assert missing.max() <= 1
    assert torch.equal(missing > 0, painted(shape, parts) == 0)


@given(box_sets(), st.integers(1, 7))
def test_a_split_box_is_the_box(case: tuple[tuple[int, ...], list[Box]], parts: int) -> None:
    shape, (box, *_) = case
    pieces = box.split(parts)
    assert torch.equal(painted(shape, pieces), painted(shape, [box]))
    assert len(pieces) <= parts
    axis = next((i for i, size in enumerate(box.sizes) if size != pieces[0].sizes[i]), 0)
    assert max(p.numel for p in pieces) - min(p.numel for p in pieces) <= box.numel // box.sizes[axis]


def test_a_matrix_is_cut_into_rows_unless_they_are_few() -> None:
    assert {piece.sizes for piece in Box.whole((64, 1000)).split(2)} == {(32, 1000)}
    assert {piece.sizes for piece in Box.whole((3, 1000)).split(2)} == {(3, 500)}


def test_zero_dimensional_and_empty_tensors() -> None:
    assert boxes_of_range((), 0, 1) == [Box((), ())]
    assert boxes_of_range((3, 0), 0, 0) == []
    assert Shard.whole(torch.tensor(4.0)).numel == 1
    assert Box((), ()).split(3) == [Box((), ())]
    assert uncovered(Box.whole((0, 4)), []) == []
