"""What this rank holds of each parameter that an optimizer updates, whatever tensor it lies in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accel_shard.layout import Box, FlatTensor, Held, Shard, uncovered
from accel_shard.optim.bucket import Ranks
from accel_shard.optim.exchange import Holders, holders_of

__all__ = ["Member", "agree", "held_by_all", "members_of"]


@dataclass(slots=True)
class Member:
    """One parameter of a group, and where this rank's elements of it are."""

    tensor: torch.Tensor
    """In the optimizer's groups: the parameter, a DTensor, or a tensor that has a range of the parameter in it."""
    group: dict[str, Any]
    """Its parameter group, live."""
    place: tuple[int, int]
    """Index of the group, and of the parameter in it: the same under every policy."""
    held: Held | None = None
    alone: bool = False
    """Whether its tensor is stepped alone."""
    reached: set[int] | None = None
    """Parameters that backward has reached; None if nobody looks."""
    steps: int = 0
    """How many steps it has done."""

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter of the model."""
        return self.tensor if self.held is None else self.held.parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self.tensor.shape) if self.held is None else self.held.shape

    @property
    def device(self) -> torch.device:
        """Where this rank's elements are."""
        return self.tensor.device

    def weight(self) -> Shard:
        """Return this rank's elements, as views of the weight."""
        return self._shard(self.tensor)

    def gradient(self) -> Shard | None:
        """Return the gradient of this rank's elements, or None.

        Raises:
            ValueError: if it is sparse.
        """
        gradient = self.tensor.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise ValueError(
                f"the gradient of parameter {self.place[1]} of group {self.place[0]}, of shape {self.shape}, is "
                f"{gradient.layout}. Allowed: dense gradients. Make its embedding with sparse=False."
            )
        return self._shard(gradient)

    def has_gradient(self) -> bool | None:
        """Tell whether a gradient that is there is of this step; None if only its values say so."""
        if self.held is None:
            return True
        return None if self.reached is None else id(self.parameter) in self.reached

    def done(self) -> None:
        """Forget, after a step, that backward has reached it."""
        if self.reached is not None:
            self.reached.discard(id(self.parameter))

    def _shard(self, tensor: torch.Tensor) -> Shard:
        if self.held is not None:
            flat = tensor.detach().reshape(-1)[self.held.offset : self.held.offset + self.held.count]
            return Shard.flat_range(self.held.shape, self.held.start, flat)
        return Shard.of_dtensor(tensor) if hasattr(tensor, "placements") else Shard.whole(tensor)


def members_of(
    groups: Sequence[dict[str, Any]], given: Sequence[Sequence[tuple[int, ...]]], flat: Sequence[FlatTensor] | None
) -> list[Member]:
    """List the parameters that train, in the order of the groups. Local.

    Args:
        groups: the optimizer's.
        given: shapes of what it was given for each group.
        flat: what its tensors are made of, where they are no parameters.

    Raises:
        ValueError: for tensors that are no parameters, and nobody says what they are made of.
    """
    if flat is None:
        _refuse_flattened(groups, given)
        return [
            Member(tensor, group, (index, number))
            for index, group in enumerate(groups)
            for number, tensor in enumerate(group["params"])
            if tensor.requires_grad
        ]
    counts = [0] * len(groups)
    members = []
    for thing in flat:
        for held in thing.held if thing.tensor.requires_grad else ():
            members.append(
                Member(
                    thing.tensor,
                    groups[thing.group],
                    (thing.group, counts[thing.group]),
                    held,
                    thing.alone,
                    thing.reached,
                )
            )
            counts[thing.group] += 1
    return members


def _refuse_flattened(groups: Sequence[dict[str, Any]], given: Sequence[Sequence[tuple[int, ...]]]) -> None:
    for index, (group, shapes) in enumerate(zip(groups, given, strict=True)):
        found = [tuple(tensor.shape) for tensor in group["params"]]
        flattened = any(getattr(tensor, "_fsdp_flattened", False) for tensor in group["params"])
        if found != list(shapes) or flattened:
            raise ValueError(
                f"group {index} of the optimizer has tensors of shapes {_short(found)} and was given {_short(shapes)}: "
                "FSDP1 or DeepSpeed has flattened the parameters, and a matrix optimizer needs to know how. Use "
                "ShardingPolicy(...).accelerator(), whose prepare says so; or FSDP2 or DDP, where it can be seen."
            )


def _short(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes[:3])) + (f" and {len(shapes) - 3} more" if len(shapes) > 3 else "")


def held_by_all(members: Sequence[Member], ranks: Ranks) -> list[Holders]:
    """Return for each parameter which ranks hold which boxes. Every rank must call it; it gathers the boxes.

    Raises:
        ValueError: on every rank, if the ranks have other parameters, or nobody holds some elements.
    """
    own = [(m.shape, [box for box, _ in m.weight().parts]) for m in members]
    everyones: list[Any] = [own]
    if ranks.count > 1:
        everyones = [None] * ranks.count
        dist.all_gather_object(everyones, own, group=ranks.group)
    for rank, theirs in enumerate(everyones):
        if [shape for shape, _ in theirs] != [shape for shape, _ in everyones[0]]:
            raise ValueError(
                f"the optimizer has {len(everyones[0])} parameters on rank 0 and other ones, {len(theirs)}, on rank "
                f"{rank}. Give it the same parameters in the same order on every rank."
            )
    found = []
    for index, (shape, _) in enumerate(own):
        holders = holders_of([theirs[index][1] for theirs in everyones])
        if sum(box.numel for box in holders) != Box.whole(shape).numel or uncovered(Box.whole(shape), holders):
            raise ValueError(
                f"the ranks of the optimizer's process group do not hold all of a parameter of shape {shape}, or some "
                "of it in boxes that overlap. Give process_group the ranks that hold it together."
            )
        found.append(holders)
    return found


@torch.no_grad()
def agree(members: Sequence[Member], gradients: Sequence[Shard | None], ranks: Ranks) -> tuple[list[bool], list[int]]:
    """Agree on which parameters have a gradient, and on those whose gradient is not finite.

    Every rank must call it; it sums up a few bytes a parameter, and is the only thing of a step that a host waits for.

    Args:
        members: the parameters.
        gradients: what this rank holds of their gradients.
        ranks: to agree with.

    Returns:
        Which parameters have a gradient on some rank; the positions of those with one that is not finite.

    Raises:
        ValueError: on every rank, if a parameter that is whole on every rank has a gradient on some of them only.
    """
    table = _table(members, gradients)
    if ranks.count > 1:
        dist.all_reduce(table, dist.ReduceOp.MAX, group=ranks.group)
    rows = table.tolist()
    for member, (has, lacks, _) in zip(members, rows, strict=True):
        if has and lacks and member.held is None and not hasattr(member.tensor, "placements"):
            raise ValueError(
                f"parameter {member.place[1]} of group {member.place[0]}, of shape {member.shape}, has a gradient on "
                "some ranks only, though every rank holds all of it. Gradients must be the same on every rank, as DDP "
                "makes them; wrap the model with find_unused_parameters=True if ranks use other parts of it."
            )
    return [bool(has) for has, _, _ in rows], [i for i, (_, _, infinite) in enumerate(rows) if infinite]


def _table(members: Sequence[Member], gradients: Sequence[Shard | None]) -> torch.Tensor:
    """Return three bytes a parameter: it has a gradient here, it lacks one that it should have, it is not finite."""
    device = members[0].device
    table = torch.zeros(len(members), 3, dtype=torch.uint8)
    tensors, places = [], []
    for index, (member, gradient) in enumerate(zip(members, gradients, strict=True)):
        if gradient is None:
            table[index, 1] = member.weight().numel > 0
            continue
        table[index, 0] = bool(member.has_gradient())
        tensors += [part for _, part in gradient.parts]
        places += [index] * len(gradient.parts)
    table = table.to(device)
    if tensors:
        wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        norms = torch.stack([n.to(device, wide) for n in torch._foreach_norm(tensors, ord=float("inf"))])
        where = torch.tensor(places, device=device)
        by_value = torch.tensor([members[index].has_gradient() is None for index in places], device=device)
        for column, found in ((2, ~norms.isfinite()), (0, (norms != 0) & by_value)):
            marks = torch.zeros(len(members), dtype=torch.int32, device=device).index_add_(0, where, found.int())
            table[:, column] |= (marks > 0).to(torch.uint8)
    return table
