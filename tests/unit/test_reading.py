"""Boxes out of tensor files: what is read is what was stored, by as few bytes as can be, and a wrong header is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_shard import SnapshotError
from accel_shard.checkpoint.plan import Part, StoredTensor
from accel_shard.checkpoint.reading import Reading, TensorFile, byte_runs
from accel_shard.checkpoint.storage import DTYPE_NAMES, write_tensors
from accel_shard.layout import Box


@st.composite
def boxes(draw: Any) -> tuple[Box, Box]:
    """A box somewhere, and one in it."""
    outer, inner = [], []
    for _ in range(draw(st.integers(0, 4))):
        size, start = draw(st.integers(1, 6)), draw(st.integers(0, 3))
        first = draw(st.integers(0, size - 1))
        outer.append((start, size))
        inner.append((start + first, draw(st.integers(1, size - first))))
    return tuple(Box(tuple(o for o, _ in axes), tuple(s for _, s in axes)) for axes in (outer, inner))  # type: ignore[return-value]


@given(boxes(), st.sampled_from([1, 2, 8]), st.sampled_from([0, 8, 40, 10**6]))
def test_runs_hold_the_box_that_they_say_and_gaps_are_larger_than_the_limit(
    pair: tuple[Box, Box], itemsize: int, gap: int
) -> None:
    part, wanted = pair
    read, starts, length = byte_runs(part, wanted, itemsize, gap)
    assert wanted.intersect(read) == wanted or not wanted.sizes
    content = torch.arange(part.numel * itemsize).reshape(*part.sizes, itemsize)
    taken = torch.cat([content.reshape(-1)[start : start + length] for start in starts])
    expected = content[read.slices(inside=part)] if part.sizes else content
    assert torch.equal(taken, expected.reshape(-1))
    assert all(later - (start + length) > gap for start, later in itertools.pairwise(starts))
    if gap == 0:
        assert read == wanted


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_dtype_comes_back_as_it_was(dtype: torch.dtype, tmp_path: Path) -> None:
    """Whole, cut, converted, and into memory with holes."""
    whole = torch.arange(24).remainder(2 if dtype is torch.bool else 24).reshape(4, 6).to(dtype)
    scalar = torch.tensor(1).to(dtype)
    write_tensors(tmp_path / "f", [("w", whole), ("s", scalar), ("none", whole[:0])])
    name = str(dtype).removeprefix("torch.")
    stored = StoredTensor((4, 6), name, (Part("f", "w", Box((0, 0), (4, 6))),))
    straight, row, column = (torch.zeros(*sizes, dtype=dtype) for sizes in ((4, 6), (2, 6), (4, 2)))
    holes, wide, one = (
        torch.zeros(4, 12, dtype=dtype),
        torch.zeros(4, 6, dtype=torch.float64),
        torch.zeros((), dtype=dtype),
    )
    with Reading(tmp_path) as reading:
        reading.fill("w", stored, Box((0, 0), (4, 6)), straight)
        reading.fill("w", stored, Box((1, 0), (2, 6)), row)
        reading.fill("w", stored, Box((0, 3), (4, 2)), column)
        reading.fill("w", stored, Box((0, 0), (4, 6)), holes[:, ::2])
        reading.fill("w", stored, Box((0, 0), (4, 6)), wide)
        reading.fill("s", StoredTensor((), name, (Part("f", "s", Box((), ())),)), Box((), ()), one)
    pairs = [(straight, whole), (row, whole[1:3]), (column, whole[:, 3:5]), (holes[:, ::2], whole), (one, scalar)]
    for got, expected in pairs:
        assert torch.equal(got.double(), expected.double())
    assert torch.equal(wide, whole.double())
    assert not holes[:, 1::2].double().any()


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_shard.checkpoint import stores

    write_tensors(tmp_path / "f", [("w", torch.arange(1 << 18).reshape(512, 512))])
    asked, original = [], stores._DiskSource.read_into

    def watched(self: Any, at: int, target: memoryview) -> None:
        asked.append(len(target))
        original(self, at, target)

    stored = StoredTensor((512, 512), "int64", (Part("f", "w", Box((0, 0), (512, 512))),))
    rows = torch.zeros(8, 512, dtype=torch.int64)
    monkeypatch.setattr(stores._DiskSource, "read_into", watched)
    with Reading(tmp_path) as reading:
        reading.fill("w", stored, Box((100, 0), (8, 512)), rows)
    assert torch.equal(rows, torch.arange(100 * 512, 108 * 512).reshape(8, 512))
    assert sum(asked) == (1 << 16) + 8 * 512 * 8, "the header's guess, and the rows"


LIES: dict[str, Any] = {
    "another shape": {"dtype": "I64", "shape": [3, 8], "data_offsets": [0, 192]},
    "another dtype": {"dtype": "F64", "shape": [4, 6], "data_offsets": [0, 192]},
    "out of the file": {"dtype": "I64", "shape": [4, 6], "data_offsets": [8, 200]},
    "before the data": {"dtype": "I64", "shape": [4, 6], "data_offsets": [-8, 184]},
    "too few bytes": {"dtype": "I64", "shape": [4, 6], "data_offsets": [0, 184]},
    "no offsets": {"dtype": "I64", "shape": [4, 6]},
    "not there": None,
    "no numbers": {"dtype": "I64", "shape": [4, 6], "data_offsets": ["a", "b"]},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    text = json.dumps({"w": LIES[lie]} if LIES[lie] else {}).encode()
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + bytes(192))
    file = TensorFile(tmp_path / "f")
    with pytest.raises(SnapshotError, match=r"'w' should be int64 of \(4, 6\), 192 bytes; its header says"):
        file.locate(Part("f", "w", Box((0, 0), (4, 6))), "int64")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x05\x00", "a header of 5 bytes in a file of 2"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "a header of 1099511627776 bytes in a file of 10"),
        ((4).to_bytes(8, "little") + b"{abc", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "no dictionary"),
    ],
)
def test_what_is_no_tensor_file_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(SnapshotError, match=words):
        TensorFile(tmp_path / "f")


def test_a_header_longer_than_the_first_guess_is_read_whole(tmp_path: Path) -> None:
    entries = [(f"{'long' * 50}{i}", torch.full((2,), i)) for i in range(400)]
    write_tensors(tmp_path / "f", entries)
    name, box = entries[399][0], Box((0,), (2,))
    got = torch.zeros(2, dtype=torch.int64)
    with Reading(tmp_path) as reading:
        reading.fill("w", StoredTensor((2,), "int64", (Part("f", name, box),)), box, got)
    assert got.tolist() == [399, 399]
