"""The states of blocks, for layouts and state dicts: under their names and the blocks' offsets, with no rank in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from accel_shard.errors import SnapshotError
from accel_shard.layout import Box, Layout, Shard, overlaps
from accel_shard.optim.core import Core
from accel_shard.optim.holding import Member
from accel_shard.optim.stacks import Stack
from accel_shard.optim.unit import Unit, compute_dtype, cut, is_matrix

__all__ = ["block_key", "describe", "install", "materialize", "pack"]

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def block_key(state: str, offsets: Sequence[int]) -> str:
    """Return the name of a block's state: ``STATE@ROW,COLUMN``."""
    return f"{state}@{','.join(map(str, offsets))}"


def _split(key: str) -> tuple[str, tuple[int, ...]]:
    state, _, offsets = key.rpartition("@")
    return state, tuple(int(o) for o in offsets.split(",") if o)


# ---- snapshots -------------------------------------------------------------------------------------------------------


def describe(units: Iterable[Unit], layout: Layout, names: Mapping[int, str]) -> None:
    """Add the states of this rank's blocks to a layout. Local."""
    for unit in units:
        for member in unit.members:
            if member.steps:
                scalars = layout.scalars.setdefault(names[id(member.parameter)], {})
                scalars["step"] = torch.tensor(float(member.steps))
        for stack, position, member, block in unit.owned():
            if not member.steps:
                continue
            states = layout.states.setdefault(names[id(member.parameter)], {})
            for state, box, tensor in stack.states(position):
                if box is None:
                    states[block_key(state, block.offsets)] = Shard.whole(tensor)
                else:
                    before = states[state].parts if state in states else ()
                    states[state] = Shard(member.shape, tensor.dtype, (*before, (box, tensor.detach())))


def materialize(
    units: Iterable[Unit], core: Core, names: Mapping[int, str], shapes: Mapping[str, Shapes],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:  # fmt: skip
    """Prepare the states to be filled from a snapshot. Local.

    Raises:
        SnapshotError: on every rank, if the snapshot has other states: of another optimizer, or of another grid.
    """
    for unit in units:
        for stack in unit.stacks:
            stack.reset()
        for member in unit.members:
            name = names[id(member.parameter)]
            member.steps = int(scalars.get(name, {}).get("step", 0))
            wanted = dict(_expected(core, member)) if member.steps else {}
            stored = {key: (tuple(shape), dtype) for key, (shape, dtype) in shapes.get(name, {}).items()}
            if wanted != stored:
                raise SnapshotError(_other_states(name, wanted, stored))


def _expected(core: Core, member: Member) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    if is_matrix(member):
        for block in cut(member):
            for state, (shape, dtype) in core.state(block.sizes, member.cut_by).items():
                yield block_key(state, block.offsets), (tuple(shape), dtype)
    else:
        dtype = compute_dtype(member.tensor.dtype)
        yield from ((state, (member.shape, dtype)) for state in ("exp_avg", "exp_avg_sq"))


def _other_states(name: str, wanted: Shapes, stored: Shapes) -> str:
    differ = sorted(key for key in wanted.keys() | stored.keys() if wanted.get(key) != stored.get(key))
    first = differ[0]
    return (
        f"the snapshot's optimizer states of {name!r} are not this run's: {len(differ)} differ, the first is "
        f"{first!r}, {stored.get(first, 'nothing')} there and {wanted.get(first, 'nothing')} here. "
        "Resume with the optimizer, max_preconditioner_dim, row_dims and heads that it was saved with."
    )


# ---- state dicts -----------------------------------------------------------------------------------------------------


def pack(units: Iterable[Unit], numbers: Mapping[int, int]) -> dict[int, dict[str, Any]]:
    """Return the states of this rank's blocks as plain data, by number of the parameter. Local."""
    packed: dict[int, dict[str, Any]] = {}
    for unit in units:
        for member in unit.members:
            if member.steps:
                packed.setdefault(numbers[id(member.parameter)], {})["step"] = member.steps
        for stack, position, member, block in unit.owned():
            if member.steps:
                mine = packed[numbers[id(member.parameter)]]
                for state, _, tensor in stack.states(position):
                    mine[block_key(state, block.offsets)] = tensor.detach()
    return packed


def install(units: Iterable[Unit], numbers: Mapping[int, int], packed: Mapping[Any, Mapping[str, Any]]) -> None:
    """Take the states of this rank's blocks from what :func:`pack` returned, on these ranks or on one. Local.

    Raises:
        ValueError: if it lacks a block of this rank's.
    """
    for unit in units:
        for stack in unit.stacks:
            stack.reset()
        for member in unit.members:
            member.steps = int(packed.get(numbers[id(member.parameter)], {}).get("step", 0))
        for stack, position, member, _ in unit.owned():
            if member.steps:
                number = numbers[id(member.parameter)]
                _fill(stack, position, number, packed[number])


def _fill(stack: Stack, position: int, number: int, stored: Mapping[str, Any]) -> None:
    block = stack.entries[position].block
    for state, box, tensor in stack.states(position):
        if box is None:
            found = stored.get(block_key(state, block.offsets))
            if found is None or tuple(found.shape) != tuple(tensor.shape):
                raise ValueError(_lacks(state, number, Box(block.offsets, block.sizes)))
            tensor.copy_(found)
            continue
        pieces = {}
        for key, value in stored.items():
            kind, offsets = _split(key) if key != "step" else ("", ())
            if kind == state:
                pieces[Box(offsets, tuple(value.shape))] = value
        shared, missing = overlaps(box, list(pieces))
        if missing:
            raise ValueError(_lacks(state, number, missing[0]))
        for index, both in shared:
            at, value = list(pieces.items())[index]
            tensor[both.slices(inside=box)] = value[both.slices(inside=at)]


def _lacks(state: str, number: int, box: Box) -> str:
    return (
        f"the state dict has no {state!r} of the block at {box.offsets} of sizes {box.sizes} of parameter {number}: it "
        "is of another optimizer or grid, or the share of a rank that owned other blocks. Allowed: the state dict of "
        "one process, or of this rank among as many. Resume on other ranks with accel_shard.Checkpointer."
    )
