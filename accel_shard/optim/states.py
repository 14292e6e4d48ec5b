"""States of single parameters, cut out of an optimizer's pieces and put into them: for state dicts and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accel_shard.errors import UnsupportedPolicyError
from accel_shard.layout import Layout, Shard
from accel_shard.optim.bucket import Bucket, Part, is_shared_out

__all__ = ["cut_stored", "describe", "in_one_piece", "made_of_shapes"]


def in_one_piece(bucket: Bucket, state: Mapping[Any, Mapping[str, Any]]) -> Iterator[tuple[Part, dict[str, Any]]]:
    """Yield what each part of this rank has of state: views of live memory in one dimension, and numbers."""
    for piece in bucket.pieces:
        values = state.get(piece.tensor, {})
        for part, offset in zip(piece.parts, piece.offsets(), strict=True):
            count = part.stop - part.start
            yield (
                part,
                {
                    key: value[offset : offset + count]
                    if len(piece.parts) > 1 and is_shared_out(value, piece)
                    else value
                    for key, value in values.items()
                },
            )


def cut_stored(
    stored: Mapping[str, Any], part: Part, bucket: Bucket, group: Mapping[str, Any], index: int, *, whole: bool
) -> dict[str, Any]:
    """Return this rank's part of a parameter's stored state, as torch would load it, in memory of its own.

    Args:
        stored: of the whole parameter, or this part of it.
        part: what this rank updates.
        bucket: that it is in.
        group: its hyperparameters.
        index: of the parameter, for messages.
        whole: whether ``stored`` is of the whole parameter.

    Raises:
        ValueError: for a state of another shape, which cannot be cut.
    """
    shape, found = tuple(part.slot.parameter.shape), {}
    like = bucket.flat if bucket.master is None else bucket.master
    for key, value in stored.items():
        if not isinstance(value, torch.Tensor):
            found[key] = value
            continue
        if key == "step":  # torch keeps it apart too: fp32, and on the device only where a kernel reads it
            moved = value.to(device=like.device) if _on_device(group) else value
        else:
            moved = value.to(device=like.device, dtype=like.dtype if _casts(value, like) else value.dtype)
        if whole and bucket.elementwise and value.dim() > 0:
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"the state {key!r} of parameter {index} has shape {tuple(value.shape)}, the parameter {shape}: "
                    "it is of other parameters, or of an optimizer that is not element-wise."
                )
            moved = part.of(moved)
        found[key] = moved.detach().clone()
    return found


def _casts(value: torch.Tensor, like: torch.Tensor) -> bool:
    floats = value.is_floating_point() or value.is_complex()
    return floats and value.is_complex() == like.is_complex()


def _on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def made_of_shapes(
    name: str, part: Part, bucket: Bucket, group: Mapping[str, Any],
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], scalars: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return empty state for a part, to be filled from a snapshot, and the numbers.

    Raises:
        UnsupportedPolicyError: for a state that is not laid out as its parameter, if only a range of it is updated.
    """
    shape, device = tuple(part.slot.parameter.shape), bucket.flat.device
    found: dict[str, Any] = {}
    for key, value in scalars.items():
        if isinstance(value, torch.Tensor):
            found[key] = value.to(device) if _on_device(group) or value.dim() else value.clone()
        else:
            found[key] = value
    for key, (stored, dtype) in shapes.items():
        if bucket.elementwise and tuple(stored) != shape:
            raise UnsupportedPolicyError(
                f"the checkpoint's optimizer state {key!r} of {name!r} has shape {tuple(stored)}, not the parameter's "
                f"{shape}; an element-wise optimizer has no such state. Prepare the optimizer that was saved."
            )
        found[key] = torch.zeros(part.stop - part.start if bucket.elementwise else stored, dtype=dtype, device=device)
    return found


def describe(
    bucket: Bucket, state: Mapping[Any, Mapping[str, Any]], layout: Layout, names: Mapping[int, str], optimizer: str
) -> None:
    """Add a bucket's states to a layout under torch's own names, and its masters in place of the weights.

    Raises:
        UnsupportedPolicyError: for a state that is not laid out as the elements that it belongs to.
    """
    if bucket.master is not None:
        for slot in bucket.slots:  # a rank that has nothing of a master has nothing of the weight
            name = names[id(slot.parameter)]
            layout.weights[name] = Shard(tuple(slot.parameter.shape), bucket.master.dtype, ())
    for part, values in in_one_piece(bucket, state):
        name, shape = names[id(part.slot.parameter)], tuple(part.slot.parameter.shape)
        if (kept := bucket.master_of(part)) is not None:
            layout.weights[name] = Shard.flat_range(shape, part.start, kept)
        for key, value in values.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                layout.scalars.setdefault(name, {})[key] = value
            elif not bucket.elementwise:
                layout.states.setdefault(name, {})[key] = Shard.whole(value)
            elif tuple(value.shape) == (part.stop - part.start,):
                layout.states.setdefault(name, {})[key] = Shard.flat_range(shape, part.start, value)
            else:
                raise UnsupportedPolicyError(
                    f"{optimizer} keeps the state {key!r} in shape {tuple(value.shape)} for {part.stop - part.start} "
                    f"elements of {name!r}: it is not element-wise. Make it with elementwise=False."
                )
