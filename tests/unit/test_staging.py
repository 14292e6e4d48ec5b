"""Staging: host memory that is used again, plans that are kept, and hashing that sees every byte."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from accel_shard.checkpoint import plan, storage
from accel_shard.checkpoint.plan import Planner
from accel_shard.checkpoint.staging import HostMemory
from accel_shard.layout import Box, Layout, Shard


def mixed() -> list[tuple[str, torch.Tensor]]:
    """Tensors whose order must change for all to be aligned."""
    return [
        ("flag", torch.tensor(True)), ("half", torch.arange(5).to(torch.bfloat16)), ("empty", torch.zeros(0, 3)),
        ("double", torch.arange(6, dtype=torch.float64).reshape(2, 3)), ("turned", torch.arange(6.0).reshape(2, 3).t()),
    ]  # fmt: skip


def test_host_memory_holds_copies_in_one_block_and_is_used_again() -> None:
    memory, entries = HostMemory(), mixed()
    held = dict(memory.hold(entries))
    for name, tensor in entries:
        assert torch.equal(held[name], tensor)
        assert held[name].dtype == tensor.dtype
        assert held[name].data_ptr() % tensor.element_size() == 0
    expected = {name: tensor.clone() for name, tensor in entries}
    for _, tensor in entries:
        tensor.zero_()
    assert all(torch.equal(held[name], expected[name]) for name in held), "training may go on"
    assert len({tensor.untyped_storage().data_ptr() for tensor in held.values()}) == 1
    block = held["double"].untyped_storage()
    assert block.nbytes() == sum(t.numel() * t.element_size() for _, t in entries)
    again = dict(memory.hold(entries))
    assert again["double"].untyped_storage().data_ptr() == block.data_ptr()
    assert torch.equal(again["double"], torch.zeros(2, 3, dtype=torch.float64))
    assert memory.hold([]) == [], "a rank may have nothing to save"
    other = dict(memory.hold([("new", torch.ones(7))]))
    assert torch.equal(other["new"], torch.ones(7))


def test_one_block_is_written_as_one_piece_and_reads_back(tmp_path: Path) -> None:
    entries = mixed()
    held = HostMemory().hold(entries)
    assert len(list(storage._runs([tensor for _, tensor in held]))) == 1
    assert len(list(storage._runs([tensor for _, tensor in entries]))) == len(entries) - 1, "one is empty"
    records = [storage.write_tensors(tmp_path / name, those) for name, those in (("a", held), ("b", entries))]
    assert records[0] == records[1]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with safe_open(tmp_path / "a", framework="pt") as file:
        for name, tensor in entries:
            assert torch.equal(file.get_tensor(name), tensor)


@pytest.mark.parametrize("size", [0, 1, 4095, storage._READ, 3 * storage._READ + 5, storage._CHUNK + 9])
def test_the_hash_is_that_of_all_bytes_in_order(size: int, tmp_path: Path) -> None:
    import xxhash

    data = torch.arange(size).remainder(251).to(torch.uint8)
    record = storage.write_tensors(tmp_path / "f", [("w", data)])
    content = (tmp_path / "f").read_bytes()
    assert record.size == len(content)
    assert record.hash == xxhash.xxh3_128(content).hexdigest() == storage.hash_file(tmp_path / "f", "xxh3_128")
    blake = hashlib.blake2b(content, digest_size=16).hexdigest()
    assert storage.hash_file(tmp_path / "f", "blake2b_128") == blake


def layout_of(rows: int) -> Layout:
    return Layout(
        weights={"w": Shard.whole(torch.arange(4.0 * rows).reshape(rows, 4)), "v": Shard.whole(torch.ones(3))}
    )


def test_a_plan_is_kept_while_boxes_stay_and_follows_the_live_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[Any] = []
    monkeypatch.setattr(plan, "gather", lambda value, group=None: [gathered.append(value), [value]][1])
    planner, first = Planner(), layout_of(2)
    assert not planner.unchanged(first)
    assert dict(planner.plan(first, keep=False).mine)["model.w"].data_ptr() == first.weights["w"].parts[0][1].data_ptr()
    second = layout_of(2)
    assert planner.unchanged(second)
    kept = planner.plan(second, keep=True)
    assert dict(kept.mine)["model.w"].data_ptr() == second.weights["w"].parts[0][1].data_ptr()
    assert len(gathered) == 1, "a kept plan asks nobody"
    third = layout_of(3)
    assert not planner.unchanged(third)
    assert planner.plan(third, keep=False).index["model.w"].parts[0].box == Box((0, 0), (3, 4))
    assert len(gathered) == 2
    assert planner.plan(third, keep=False).index == planner.plan(third, keep=True).index, "others may have changed"
