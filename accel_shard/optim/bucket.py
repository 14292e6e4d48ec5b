"""A flat buffer of parameters: who updates which range of it, in which pieces, and how all ranks get the result.

The model's parameters are views of the buffer, so that one collective, in place, brings the updated weights to every
rank. The inner optimizer sees *pieces* of this rank's range. An element-wise optimizer sees as few as can be: one that
spans all parameters, cut only where neighbours must be treated apart, because one had no gradient in some step, or has
another step count. Any other optimizer sees each parameter that the rank owns in its own shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accel_shard.optim.partition import runs

__all__ = ["Bucket", "Part", "Piece", "Ranks", "Slot", "gather_all", "is_shared_out", "wait_for"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that share the state; one rank if there is no process group."""

    group: Any
    rank: int
    count: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Look up the ranks of a process group, or of the default one; local."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(None, 0, 1)
        group = group if group is not None else dist.group.WORLD
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def gathers_poorly(self) -> bool:
        """Whether an all-gather sends more than it must, as gloo's does."""
        return dist.get_backend(self.group) == "gloo"

    def broadcast_each(self, parts: Sequence[torch.Tensor]) -> list[Any]:
        """Start to send each rank's part to all. Every rank must call it.

        Args:
            parts: one a rank, of any lengths; what is empty is not sent.

        Returns:
            What to wait for.
        """
        return [
            dist.broadcast(part, src=dist.get_global_rank(self.group, rank), group=self.group, async_op=True)
            for rank, part in enumerate(parts)
            if part.numel()
        ]


@dataclass(slots=True)
class Slot:
    """One parameter's place in a buffer."""

    parameter: torch.Tensor
    group: int
    """Index of its parameter group."""
    start: int
    """Its first element in the buffer."""
    version: int = 0
    """Of the parameter when its master was made: another one says that somebody wrote to the weight."""

    @property
    def stop(self) -> int:
        """One past its last element in the buffer."""
        return self.start + self.parameter.numel()


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank updates of one parameter: elements ``start`` to ``stop`` of it, flattened."""

    slot: Slot
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor of the parameter's shape, in one dimension; a view where that can be."""
        return tensor.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor that the inner optimizer updates, and the parts of parameters that it is made of."""

    tensor: torch.nn.Parameter
    group: int
    parts: tuple[Part, ...]

    def offsets(self) -> list[int]:
        """Where each part begins in the piece."""
        starts, at = [], 0
        for part in self.parts:
            starts.append(at)
            at += part.stop - part.start
        return starts


def is_shared_out(value: Any, piece: Piece) -> bool:
    """Tell whether a state has an element for each element of its piece, and is no number."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == piece.tensor.shape


class Bucket:
    """One flat buffer on one device, of one dtype.

    Making it moves the parameters into it; nothing is communicated, as DDP has made the weights equal.

    Args:
        slots: the parameters in the order of the buffer.
        bounds: each rank's range of the buffer.
        ranks: who shares it.
        elementwise: whether the optimizer treats each element by itself.
        master: dtype of the copy that the optimizer updates, for 16-bit weights; None updates the weights themselves.
    """

    def __init__(
        self, slots: list[Slot], bounds: list[tuple[int, int]], ranks: Ranks, *, elementwise: bool,
        master: torch.dtype | None,
    ) -> None:  # fmt: skip
        first = slots[0].parameter
        self.slots, self.bounds, self._ranks, self.elementwise = slots, bounds, ranks, elementwise
        # Padded, so that the ranges that an all-gather joins are of one length.
        length = max(stop - start for start, stop in bounds)
        padded = length * ranks.count if elementwise else bounds[-1][1]
        self.flat = torch.zeros(padded, dtype=first.dtype, device=first.device)
        for slot in slots:
            place = self._place(slot)
            place.copy_(slot.parameter.detach())
            if slot.parameter.is_contiguous():
                slot.parameter.data = place
            slot.version = slot.parameter._version
        self._low, self._high = bounds[ranks.rank]
        own = self.flat[self._low : self._high]
        apart = master is not None and first.dtype in (torch.bfloat16, torch.float16) and first.dtype != master
        self.master: torch.Tensor | None = own.to(master) if apart else None
        self._own = own if self.master is None else self.master
        self.parts = [
            Part(slot, max(slot.start, self._low) - slot.start, min(slot.stop, self._high) - slot.start)
            for slot in slots
            if max(slot.start, self._low) < min(slot.stop, self._high)
        ]
        self.pieces = [self._piece(run) for run in runs(self.parts, self._may_join)]

    def _place(self, slot: Slot) -> torch.Tensor:
        return self.flat[slot.start : slot.stop].view(slot.parameter.shape)

    def _may_join(self, one: Part, other: Part) -> bool:
        # What a parameter without dimensions has cannot be told from a step count, so it stays in a piece of its own.
        return self.elementwise and min(one.slot.parameter.dim(), other.slot.parameter.dim()) > 0

    def _piece(self, parts: Sequence[Part]) -> Piece:
        first, last = parts[0], parts[-1]
        local = self._own[first.slot.start + first.start - self._low : last.slot.start + last.stop - self._low]
        if not self.elementwise or first.slot.parameter.dim() == 0:
            local = local.view(first.slot.parameter.shape)
        return Piece(torch.nn.Parameter(local, requires_grad=True), first.slot.group, tuple(parts))

    # ---- before and after the inner optimizer's step -----------------------------------------------------------

    def cut_pieces(self, state: dict[Any, Any]) -> bool:
        """Cut pieces where a gradient is missing now, and take over written weights; return whether pieces were cut.

        Args:
            state: the inner optimizer's, which goes with the pieces.
        """
        cut: list[Piece] = []
        for piece in self.pieces:
            cut += self._split(piece, state)
        changed, self.pieces = len(cut) != len(self.pieces), cut
        self._take_over_written()
        return changed

    def take_gradients(self) -> None:
        """Give each piece its gradient, None where there is none."""
        for piece in self.pieces:
            pairs = [(part, part.slot.parameter.grad) for part in piece.parts]
            found = [part.of(gradient) for part, gradient in pairs if gradient is not None]
            piece.tensor.grad = None
            if found:
                flat = found[0] if len(found) == 1 else _side_by_side(found)
                if flat is None:
                    flat = torch.cat([gradient.to(self.flat.device) for gradient in found])
                piece.tensor.grad = flat.to(piece.tensor).view(piece.tensor.shape)

    def _split(self, piece: Piece, state: dict[Any, Any]) -> list[Piece]:
        """Cut a piece where parameters with and without a gradient meet: torch passes over the latter, states too."""

        def alike(one: Part, other: Part) -> bool:
            return (one.slot.parameter.grad is None) == (other.slot.parameter.grad is None)

        found = list(runs(piece.parts, alike))
        if len(found) == 1:
            return [piece]
        pieces, at, whole = [], 0, state.pop(piece.tensor, None)
        for run in found:
            pieces.append(self._piece(run))
            count = pieces[-1].tensor.numel()
            if whole is not None:
                state[pieces[-1].tensor] = {
                    key: value[at : at + count] if is_shared_out(value, piece) else _copy(value)
                    for key, value in whole.items()
                }
            at += count
        return pieces

    def _take_over_written(self) -> None:
        """Take what others did to the weights since the last step: into the buffer, and into the masters."""
        for slot in self.slots:
            if not self._at_home(slot):
                self._place(slot).copy_(slot.parameter)
        if self.master is None:
            return
        for part in self.parts:
            if part.slot.version != part.slot.parameter._version or not self._at_home(part.slot):
                start = part.slot.start + part.start
                written = self.flat[start : start + part.stop - part.start]
                mine = self._master_of(part, self.master)
                # Not where the weight is the rounded master, as that of one which lives elsewhere is.
                mine.copy_(torch.where(mine.to(written.dtype) == written, mine, written.to(mine.dtype)))
                part.slot.version = part.slot.parameter._version

    def _at_home(self, slot: Slot) -> bool:
        home = self.flat.data_ptr() + slot.start * self.flat.element_size()
        return slot.parameter.data_ptr() == home or not slot.parameter.numel()

    def drop_gradients(self) -> None:
        """Forget the pieces' gradients: they are copies, or would keep the model's alive."""
        for piece in self.pieces:
            piece.tensor.grad = None

    def start_gather(self) -> list[Any]:
        """Start to bring every rank's updated range to all of them. Every rank must call it.

        Returns:
            What to wait for before :meth:`finish_gather`.
        """
        if self.master is not None:
            self.flat[self._low : self._high].copy_(self.master)
        if self._ranks.count == 1:
            return []
        size, flat = self.flat.element_size(), self.flat.view(torch.uint8)  # of any dtype: it is only copied
        if self.elementwise and not self._ranks.gathers_poorly:
            length = flat.numel() // self._ranks.count
            mine = flat[self._ranks.rank * length : (self._ranks.rank + 1) * length]
            return [dist.all_gather_into_tensor(flat, mine, group=self._ranks.group, async_op=True)]
        # Ranges of unlike length need one broadcast each.
        return self._ranks.broadcast_each([flat[start * size : stop * size] for start, stop in self.bounds])

    def finish_gather(self) -> None:
        """Let parameters that somebody moved have their new weights, and autograd know that all were written."""
        for slot in self.slots:
            if not self._at_home(slot):
                slot.parameter.copy_(self._place(slot))
            else:  # so that autograd refuses to use the old weights, as after any optimizer's step
                torch.autograd.graph.increment_version(slot.parameter)
            slot.version = slot.parameter._version

    # ---- states of single parameters -----------------------------------------------------------------------------

    def replace_states(self, states: Mapping[int, dict[str, Any]], inner: dict[Any, Any]) -> None:
        """Give the inner optimizer new states, and cut the pieces as they ask for.

        Args:
            states: by position in :attr:`parts`: states of that part. A part that is left out gets none.
            inner: the inner optimizer's ``state``.
        """
        for piece in self.pieces:
            inner.pop(piece.tensor, None)
        numbered = list(enumerate(self.parts))

        def alike(one: tuple[int, Part], other: tuple[int, Part]) -> bool:
            return self._may_join(one[1], other[1]) and _same_kind(states.get(one[0]), states.get(other[0]))

        self.pieces = []
        for run in runs(numbered, alike):
            piece = self._piece([part for _, part in run])
            self.pieces.append(piece)
            theirs = [states[number] for number, _ in run if number in states]
            if theirs:
                joins = len(theirs) > 1
                inner[piece.tensor] = {
                    key: torch.cat([state[key] for state in theirs]) if joins and _has_elements(value) else value
                    for key, value in theirs[0].items()
                }

    def master_of(self, part: Part) -> torch.Tensor | None:
        """Return the master of a part in one dimension, or None if the optimizer updates the weights themselves."""
        if self.master is None:
            return None
        return self._master_of(part, self.master)

    def _master_of(self, part: Part, master: torch.Tensor) -> torch.Tensor:
        start = part.slot.start + part.start - self._low
        return master[start : start + part.stop - part.start]


def _side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors that follow each other in memory as one view, or None; so do gradients in DDP's buckets."""
    first, at = tensors[0], tensors[0].data_ptr()
    memory = first.untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.data_ptr() != at or tensor.untyped_storage().data_ptr() != memory:
            return None
        at += tensor.nbytes
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


@torch.no_grad()
def gather_all(buckets: Sequence[Bucket]) -> None:
    """Bring every rank's updated ranges to all of them. Every rank must call it."""
    wait_for(buckets, [work for bucket in buckets for work in bucket.start_gather()])


def wait_for(buckets: Sequence[Bucket], works: Iterable[Any]) -> None:
    """Wait for gathers that were started for buckets, and let the parameters have what came."""
    for work in works:
        work.wait()
    for bucket in buckets:
        bucket.finish_gather()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _same_kind(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Tell whether two parts can be updated as one: their numbers are equal and their tensors of like dtypes."""
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.dim() == 0 or other.dim() == 0:
        return one.dim() == other.dim() and one.dtype == other.dtype and bool(torch.equal(one, other))
    return one.dtype == other.dtype
