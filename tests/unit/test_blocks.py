"""The block grid, and who has which block when: arithmetic that must hold for any shape."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_shard.layout import Box
from accel_shard.optim.blocks import Block, Grid, Work, owners_of, phases_of

shapes = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def filled(block: Block, whole: torch.Tensor) -> torch.Tensor:
    tensor = torch.full(block.sizes, -1)
    for part in block.parts:
        part.view(tensor, part.box).copy_(whole[part.box.slices()])
    return tensor


@given(shapes, st.integers(1, 7), st.integers(0, 3))
def test_blocks_are_the_pieces_of_the_matrix(shape: tuple[int, ...], size: int, row_dims: int) -> None:
    grid = Grid(size, row_dims=min(row_dims, len(shape) - 1))
    whole = numbered(shape)
    at = grid.split_at(shape)
    matrix = whole.view(math.prod(shape[:at]), -1)
    seen = torch.zeros_like(matrix)
    for block in grid.blocks(shape):
        assert max(block.sizes) <= size
        where = Box(block.offsets, block.sizes).slices()
        assert torch.equal(filled(block, whole), matrix[where])
        seen[where] += 1
    assert (seen == 1).all()


@given(shapes, st.integers(1, 7), st.data())
def test_any_box_of_a_part_is_found_in_the_block(shape: tuple[int, ...], size: int, data: st.DataObject) -> None:
    whole = numbered(shape)
    for block in Grid(size).blocks(shape):
        tensor = filled(block, whole)
        for part in block.parts:
            offsets = tuple(
                o + data.draw(st.integers(0, s - 1)) for o, s in zip(part.box.offsets, part.box.sizes, strict=True)
            )
            box = Box(offsets, tuple(e - o for o, e in zip(offsets, part.box.ends, strict=True)))
            assert torch.equal(part.view(tensor, box), whole[box.slices()])


def test_ragged_edges_and_names() -> None:
    blocks = Grid(4).blocks((10, 5))
    assert [(b.offsets, b.sizes) for b in blocks] == [
        ((0, 0), (4, 4)), ((0, 4), (4, 1)), ((4, 0), (4, 4)), ((4, 4), (4, 1)), ((8, 0), (2, 4)), ((8, 4), (2, 1)),
    ]  # fmt: skip


def test_the_rows_of_a_convolution_are_its_outputs() -> None:
    assert [b.sizes for b in Grid().blocks((8, 4, 3, 3))] == [(8, 36)]
    assert [b.sizes for b in Grid(row_dims=2).blocks((8, 4, 3, 3))] == [(32, 9)]


def test_the_squarest_matrix() -> None:
    assert [b.sizes for b in Grid(row_dims=0).blocks((2, 3, 50))] == [(6, 50)]
    assert [b.sizes for b in Grid(row_dims=0).blocks((64, 4, 4))] == [(64, 16)]


def test_heads_are_cut_before_blocks() -> None:
    assert [(b.offsets, b.sizes) for b in Grid(3, heads=2).blocks((10, 3))] == [
        ((0, 0), (3, 3)), ((3, 0), (2, 3)), ((5, 0), (3, 3)), ((8, 0), (2, 3)),
    ]  # fmt: skip
    assert [b.offsets for b in Grid(heads=3, heads_axis=1).blocks((2, 12))] == [(0, 0), (0, 4), (0, 8)]


def test_a_parameter_without_elements_has_no_blocks() -> None:
    assert Grid(4).blocks((0, 3)) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grid(0), "max_preconditioner_dim is 0"),
        (lambda: Grid(heads_axis=2), "heads_axis is 2"),
        (lambda: Grid(heads=3).blocks((10, 4)), "divides its rows"),
        (lambda: Grid(row_dims=2).blocks((10, 4)), "row_dims is 2"),
    ],
)
def test_what_cannot_be_cut_is_refused(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


# ---- when, and where -----------------------------------------------------------------------------------------------

works = st.lists(
    st.builds(Work, st.floats(0, 100), st.floats(0, 100), st.sampled_from([0, 1, 3, 5])), min_size=1, max_size=40
)


@given(works, st.integers(1, 9))
def test_no_rank_and_no_step_gets_more_than_its_share_and_one_block(items: list[Work], ranks: int) -> None:
    phases = phases_of(items)
    for period in {3, 5}:
        load = [0.0] * period
        for work, phase in zip(items, phases, strict=True):
            if work.period == period:
                load[phase] += work.refresh
        largest = max((w.refresh for w in items if w.period == period), default=0.0)
        assert max(load) <= sum(load) / period + largest + 1e-6
    assert all(0 <= phase < max(work.period, 1) for work, phase in zip(items, phases, strict=True))
    assert set(owners_of(items, phases, ranks)) <= set(range(ranks))


def gpt2(size: int) -> list[Work]:
    shapes = [(50257, 768), (1024, 768)] + [(768, 2304), (768, 768), (768, 3072), (3072, 768)] * 12
    sides = [block.sizes for shape in shapes for block in Grid(size).blocks(shape)]
    return [Work(4.0 * r * c * (r + c), 25.0 * (r**3 + c**3), 10) for r, c in sides]


@pytest.mark.parametrize(("size", "ranks", "worst"), [(256, 64, 1.03), (512, 64, 1.2), (1024, 8, 1.03)])
def test_every_rank_has_the_same_to_do_in_every_step(size: int, ranks: int, worst: float) -> None:
    """The bound is for a single rank in a single step, against the mean of all ranks in it."""
    items = gpt2(size)
    phases = phases_of(items)
    owners = owners_of(items, phases, ranks)
    steps = []
    for step in range(10):
        load = [0.0] * ranks
        for work, phase, owner in zip(items, phases, owners, strict=True):
            load[owner] += work.step + (work.refresh if phase == step else 0.0)
        assert max(load) <= worst * sum(load) / ranks
        steps.append(max(load))
    assert max(steps) <= 1.01 * min(steps)


def test_over_a_period_ranks_have_the_same_to_do() -> None:
    """Every step by itself cannot be even: it has fewer blocks to refresh than there are ranks."""
    items = gpt2(1024)
    load = [0.0] * 64
    for work, owner in zip(items, owners_of(items, phases_of(items), 64), strict=True):
        load[owner] += work.mean
    assert max(load) <= 1.25 * sum(load) / 64


def test_blocks_stay_where_they_are_held_unless_that_is_uneven() -> None:
    items, phases = [Work(10.0)] * 8, [0] * 8
    at_home = [[0.0, 2.0] if index % 2 else [2.0, 0.0] for index in range(8)]
    assert owners_of(items, phases, 2, moves=at_home) == [1, 0] * 4
    assert sorted(owners_of(items, phases, 2, moves=[[0.0, 2.0]] * 8)) == [0] * 4 + [1] * 4


def test_later_blocks_go_to_who_has_least() -> None:
    assert owners_of([Work(1.0), Work(1.0)], [0, 0], 3, loads=[2.0, 0.5, 0.0]) == [2, 1]
