"""``Shard``: what one rank holds of one tensor, whatever the backend calls it; and arithmetic on boxes.

DDP holds a whole tensor, FSDP2 rows of it, FSDP1 and DeepSpeed a contiguous range of it flattened. A contiguous range
of a row-major tensor is at most ``2 * ndim - 1`` axis-aligned boxes (head of a row, whole rows, tail of a row, and so
on inwards), so one description covers them all. Checkpoints, matrix optimizers and plans rest on it.

Nothing here communicates. This module imports torch only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch

__all__ = [
    "Box",
    "FlatTensor",
    "Held",
    "Layout",
    "NeedsLayout",
    "Shard",
    "ShardsState",
    "boxes_of_range",
    "overlaps",
    "split_state_key",
    "state_key",
    "subtract",
    "uncovered",
]


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """An axis-aligned piece of a tensor: where it starts and how large it is, one number a dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is the whole tensor; of a zero-dimensional tensor it has no dimensions."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in the box; 1 for a box without dimensions."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index, one number a dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return what two boxes of one tensor share, or None if they share no element."""
        low = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        high = tuple(min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def slices(self, inside: Box | None = None) -> tuple[slice, ...]:
        """Return the index of this box in the whole tensor, or in the tensor of another box that contains it."""
        base = inside.offsets if inside is not None else (0,) * len(self.offsets)
        return tuple(slice(o - b, o - b + s) for o, b, s in zip(self.offsets, base, self.sizes, strict=True))

    def split(self, parts: int) -> list[Box]:
        """Cut the box along one dimension into at most ``parts`` boxes of nearly equal size.

        Along the first that is long enough, since pieces of consecutive rows are copied and written fastest.
        """
        if not self.sizes or parts <= 1:
            return [self]
        longest = max(self.sizes)
        axis = next(i for i, size in enumerate(self.sizes) if size >= min(longest, 16 * parts))
        length, pieces = self.sizes[axis], []
        for index in range(parts):
            start, stop = length * index // parts, length * (index + 1) // parts
            if stop > start:
                offsets, sizes = list(self.offsets), list(self.sizes)
                offsets[axis], sizes[axis] = offsets[axis] + start, stop - start
                pieces.append(Box(tuple(offsets), tuple(sizes)))
        return pieces


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes that elements ``start`` to ``stop`` (exclusive) of a flattened tensor form, in that order.

    Args:
        shape: of the whole tensor.
        start: first element, counted row-major.
        stop: one past the last.

    Returns:
        At most ``2 * len(shape) - 1`` boxes, disjoint, that together hold exactly those elements; none if the range
        is empty.
    """
    assert 0 <= start <= stop <= math.prod(shape), (shape, start, stop)
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return _at_row(first, boxes_of_range(shape[1:], start - first * row, stop - first * row))
    boxes: list[Box] = []
    if start % row:
        boxes += _at_row(first, boxes_of_range(shape[1:], start - first * row, row))
        first += 1
    complete = stop // row
    if complete > first:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (complete - first, *shape[1:])))
    if stop % row:
        boxes += _at_row(complete, boxes_of_range(shape[1:], 0, stop - complete * row))
    return boxes


def _at_row(row: int, boxes: Iterable[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that hold what is in ``box`` and not in ``hole``."""
    shared = box.intersect(hole)
    if shared is None:
        return [box]
    rest, offsets, sizes = [], list(box.offsets), list(box.sizes)
    for axis in range(len(sizes)):
        before, after = shared.offsets[axis] - offsets[axis], offsets[axis] + sizes[axis] - shared.ends[axis]
        for start, length in ((offsets[axis], before), (shared.ends[axis], after)):
            if length:
                piece_offsets, piece_sizes = list(offsets), list(sizes)
                piece_offsets[axis], piece_sizes[axis] = start, length
                rest.append(Box(tuple(piece_offsets), tuple(piece_sizes)))
        offsets[axis], sizes[axis] = shared.offsets[axis], shared.sizes[axis]
    return rest


def uncovered(wanted: Box, present: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes that hold what is in ``wanted`` and in none of ``present``."""
    missing = [wanted] if wanted.numel else []
    for box in present:
        missing = [piece for part in missing for piece in subtract(part, box)]
        if not missing:
            break
    return missing


def overlaps(wanted: Box, present: Sequence[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Say where to find a box among others.

    Returns:
        Which of ``present`` have a part of ``wanted``, each with that part; and disjoint boxes of what none has.
    """
    shared = [(index, both) for index, box in enumerate(present) if (both := wanted.intersect(box)) is not None]
    return shared, uncovered(wanted, [present[index] for index, _ in shared])


@dataclass(frozen=True, slots=True)
class Shard:
    """What this rank holds of one tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        parts: boxes with the tensors that hold them, each of the box's sizes. The tensors are views of live memory:
            reading them reads the training state, writing them changes it. Empty if this rank holds nothing.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Box, torch.Tensor], ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Shard:
        """Describe a tensor that this rank holds whole."""
        return cls(tuple(tensor.shape), tensor.dtype, ((Box.whole(tensor.shape), tensor.detach()),))

    @classmethod
    def flat_range(cls, shape: Sequence[int], start: int, local: torch.Tensor) -> Shard:
        """Describe a contiguous range of a flattened tensor.

        Args:
            shape: of the whole tensor.
            start: which of its elements (row-major) ``local[0]`` is.
            local: one-dimensional and contiguous, so that every box is a view of it.
        """
        flat, at, parts = local.detach(), 0, []
        for box in boxes_of_range(shape, start, start + flat.numel()):
            parts.append((box, flat[at : at + box.numel].view(box.sizes)))
            at += box.numel
        return cls(tuple(shape), flat.dtype, tuple(parts))

    @classmethod
    def of_dtensor(cls, tensor: Any) -> Shard:
        """Describe this rank's part of a DTensor with any placements but partial sums.

        Private upstream name (torch 2.13): ``compute_local_shape_and_global_offset``, which DCP uses for the same.
        """
        local = tensor.to_local().detach()  # in this order: of a DTensor itself, detach is a dispatch of its own
        box = _box_of_dtensor(tensor.shape, tensor.device_mesh, tensor.placements)
        assert tuple(local.shape) == box.sizes, (local.shape, box)
        return cls(tuple(tensor.shape), tensor.dtype, ((box, local),) if box.numel else ())

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return sum(box.numel for box, _ in self.parts)


@lru_cache(maxsize=4096)
def _box_of_dtensor(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> Box:
    # Kept: a weight and its optimizer states are laid out alike, as are the same weights of all layers.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offsets), tuple(sizes))


@dataclass(slots=True)
class Layout:
    """What one rank holds of a model and its optimizer, by fully qualified names, the same on every rank.

    Attributes:
        weights: parameter name -> its shard; masters where the backend keeps them apart.
        buffers: persistent buffers, whole.
        states: parameter name -> state name -> shard, for state tensors with elements to share out.
        scalars: parameter name -> state name -> zero-dimensional tensor or plain number.
        groups: parameter groups in the optimizer's order: ``params`` (names) and hyperparameters.
        aliases: further names of tied weights -> the name under which the weight is listed.
    """

    weights: dict[str, Shard] = field(default_factory=dict)
    buffers: dict[str, Shard] = field(default_factory=dict)
    states: dict[str, dict[str, Shard]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, Shard]]:
        """Yield every shard under its key in a snapshot: ``model.NAME``, ``buffer.NAME``, ``optim.NAME.STATE``."""
        for name, shard in self.weights.items():
            yield f"model.{name}", shard
        for name, shard in self.buffers.items():
            yield f"buffer.{name}", shard
        for name, states in self.states.items():
            for state, shard in states.items():
                yield state_key(name, state), shard


@runtime_checkable
class ShardsState(Protocol):
    """An optimizer that holds a share of the state of parameters that are whole on every rank."""

    def describe_state(self, layout: Layout, names: Mapping[int, str]) -> None:
        """Add its states, and masters in place of weights, to the layout of the model; names by ``id``. Local."""

    def materialize_state(
        self,
        names: Mapping[int, str],
        shapes: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
        scalars: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Make its share of states of these shapes, to be filled. Local."""

    def after_fill(self) -> None:
        """Bring the weights up to date with filled masters. Every rank must call it."""

    def updated_elements(self) -> int:
        """Return how many elements this rank updates. Local."""
        ...

    def master_dtypes(self) -> frozenset[torch.dtype]:
        """Return the dtypes of what is updated. Local."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """A contiguous range of one flattened parameter, inside a tensor that an optimizer updates.

    Attributes:
        parameter: of the model; names are found by its ``id``.
        shape: of the whole parameter.
        start: first element of the range, counted in the flattened parameter.
        offset: its place in the flattened tensor.
        count: elements of the range; 0 if this rank holds nothing of the parameter.
    """

    parameter: torch.Tensor
    shape: tuple[int, ...]
    start: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A tensor in an optimizer's groups that is no parameter, but made of ranges of them.

    Attributes:
        tensor: in ``param_groups`` when the optimizer is stepped.
        group: index of its parameter group.
        held: of every parameter that has a range in it on some rank; the same parameters in one order on every rank.
        alone: whether the optimizer is stepped for it alone.
        reached: the ``id`` of parameters that backward has reached since the last step; who steps takes them out. None
            if nobody looks: then a gradient of zeros says that it has not.
    """

    tensor: torch.Tensor
    group: int
    held: tuple[Held, ...]
    alone: bool = False
    reached: set[int] | None = None


@runtime_checkable
class NeedsLayout(Protocol):
    """An optimizer that works on whole parameters under every policy, and shares out its state itself."""

    def bind_to(self, tensors: Callable[[], Sequence[FlatTensor] | None]) -> None:
        """Take a function that describes the tensors of its groups: None if they are the parameters or DTensors.

        It is called at the first step, on every rank, and may communicate.
        """


def state_key(name: str, state: str) -> str:
    """Return the key of an optimizer's state: ``optim.NAME.STATE``.

    A parameter's name has dots; in a state's name they are written ``%2E`` (and ``%`` is ``%25``), so that state
    ``b.c`` of parameter ``a`` is not state ``c`` of parameter ``a.b``.

    Raises:
        TypeError: if the state's name is no text: it would come back as another one.
    """
    if not isinstance(state, str):
        raise TypeError(
            f"the optimizer keeps a tensor of {name!r} under {state!r}, a {type(state).__name__}. Allowed: strings."
        )
    return f"optim.{name}.{state.replace('%', '%25').replace('.', '%2E')}"


def split_state_key(key: str) -> tuple[str, str]:
    """Return the parameter's and the state's name that :func:`state_key` was given."""
    name, _, state = key.removeprefix("optim.").rpartition(".")
    return name, state.replace("%2E", ".").replace("%25", "%")
