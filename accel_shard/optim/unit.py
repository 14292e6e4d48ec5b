"""Parameters that are stepped in one call: their blocks, the stacks of this rank's, and the exchange between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from accel_shard.layout import Box, Shard
from accel_shard.optim.blocks import Block, Grid, Work, owners_of
from accel_shard.optim.bucket import Ranks
from accel_shard.optim.core import Core
from accel_shard.optim.exchange import Exchange, Holders, Job, Piece
from accel_shard.optim.holding import Member
from accel_shard.optim.stacks import Counts, Entry, MatrixStack, Stack, VectorStack

__all__ = ["Unit", "compute_dtype", "cut", "is_matrix", "work_of"]


def is_matrix(member: Member) -> bool:
    """Tell whether a parameter is updated by the core, in whole blocks; else AdamW updates it element by element.

    Raises:
        ValueError: for a group that names neither.
    """
    chosen = member.group["core"]
    if chosen not in ("matrix", "adamw"):
        raise ValueError(f"core is {chosen!r} in group {member.place[0]}. Allowed: 'matrix', 'adamw'.")
    return chosen == "matrix" and len(member.shape) > 1


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which weights of a dtype are updated.

    Raises:
        ValueError: for one that cannot be.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"a parameter is {dtype}. Allowed: real floating point. Give it to another optimizer.")
    return torch.float64 if dtype == torch.float64 else torch.float32


def cut(member: Member) -> list[Block]:
    """Cut a parameter that the core updates into blocks, by the settings of its group."""
    group = member.group
    grid = Grid(group["max_preconditioner_dim"], group["row_dims"], group["heads"], group["heads_axis"])
    return grid.blocks(member.shape)


def work_of(core: Core, block: Block, group: Mapping[str, Any]) -> Work:
    """Return what a block costs."""
    cost = core.cost(block.sizes, group)
    return Work(cost.step, cost.refresh, core.period(group))


class Unit:
    """Parameters of one dtype that are stepped together. Local; every rank must make it with the same arguments.

    Args:
        members: the parameters.
        holders: who holds which boxes of them.
        ranks: that share the work.
        core: of the matrices.
        phases: of the blocks of the members that are matrices, in order.
        loads: what each rank has to do in a step already; added to.
        sent: dtype in which updates travel; None for that in which they are computed.
    """

    def __init__(
        self, members: Sequence[Member], holders: Sequence[Holders], ranks: Ranks, core: Core, phases: Sequence[int],
        loads: list[float], sent: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.members = list(members)
        self.device, self.dtype = members[0].device, members[0].tensor.dtype
        self._computed = compute_dtype(self.dtype)
        self._sent = sent or self._computed
        self.jobs: list[Job] = []
        self.matrices = [is_matrix(member) for member in members]
        self._share_matrices(core, ranks, phases, loads)
        self._share_vectors(holders)
        self.exchange = Exchange(self.jobs, holders, ranks)
        self.stacks = self._stack(core, ranks.rank)
        self._homes = {
            entry.job: (stack, position) for stack in self.stacks for position, entry in enumerate(stack.entries)
        }

    def _share_matrices(self, core: Core, ranks: Ranks, phases: Sequence[int], loads: list[float]) -> None:
        found = [(i, b) for i, member in enumerate(self.members) if self.matrices[i] for b in cut(member)]
        works = [work_of(core, block, self.members[index].group) for index, block in found]
        owners = owners_of(works, phases, ranks.count, loads=loads)
        for (index, block), work, owner in zip(found, works, owners, strict=True):
            loads[owner] += work.mean
            self.jobs.append(Job(index, block, owner))

    def _share_vectors(self, holders: Sequence[Holders]) -> None:
        """Let holders update their own elements; what several hold is cut between them."""
        for index, matrix in enumerate(self.matrices):
            for box, ranks in () if matrix else holders[index].items():
                for number, piece in enumerate(box.split(len(ranks))):
                    owner = ranks[(number + index) % len(ranks)]
                    self.jobs.append(Job(index, Block.of_box(piece), owner))

    def _stack(self, core: Core, rank: int) -> list[Stack]:
        alike: dict[tuple[int, tuple[int, ...] | None], list[Entry]] = {}
        for number, job in enumerate(self.jobs):
            if job.owner == rank:
                shape = job.block.sizes if self.matrices[job.parameter] else None
                key = (self.members[job.parameter].place[0], shape)
                alike.setdefault(key, []).append(Entry(number, job.parameter, job.block))
        stacks: list[Stack] = []
        for (_, shape), entries in alike.items():
            group = self.members[entries[0].parameter].group
            if shape is None:
                stacks.append(VectorStack(entries, group, self._computed, self.device))
            else:
                stacks.append(MatrixStack(entries, group, core, self._computed, self.device))
        return stacks

    # ---- stepping ------------------------------------------------------------------------------------------------

    def step(
        self, active: Sequence[bool], gradients: Sequence[Shard | None], phases: Sequence[int], core: Core,
        counts: Counts,
    ) -> None:  # fmt: skip
        """Update the weights that this rank holds. Every rank must call it; it sends gradients and updates.

        Args:
            active: which parameters have a gradient on some rank.
            gradients: what this rank holds of them.
            phases: of the matrices' blocks, in the order of the jobs.
            core: of the matrices.
            counts: to be added to.
        """
        for member, acts in zip(self.members, active, strict=True):
            member.steps += acts
        weights = [member.weight() for member in self.members]
        self.exchange.gradients.run(
            lambda piece: self._gradient(piece, gradients, weights, active),
            lambda piece, values: self._place(piece).copy_(values),
            self.dtype, self.device,
        )  # fmt: skip
        for stack in self.stacks:
            steps = [self.members[e.parameter].steps if active[e.parameter] else 0 for e in stack.entries]
            period = core.period(stack.group) if isinstance(stack, MatrixStack) else 0

            def due(position: int, step: int, stack: Stack = stack, period: int = period) -> bool:
                return period > 0 and (step == 1 or step % period == phases[stack.entries[position].job] % period)

            if any(steps):
                stack.run(steps, due, counts)
        self.exchange.updates.run(
            lambda piece: self._update(piece) if active[piece.parameter] else None,
            lambda piece, values: self._apply(piece, values, weights) if active[piece.parameter] else None,
            self._sent, self.device,
        )  # fmt: skip
        for stack in self.stacks:
            stack.forget()

    def _gradient(
        self, piece: Piece, gradients: Sequence[Shard | None], weights: Sequence[Shard], active: Sequence[bool]
    ) -> torch.Tensor | None:
        if not active[piece.parameter]:
            return None
        whole, group = gradients[piece.parameter], self.members[piece.parameter].group
        gradient = None if whole is None else _inside(whole, piece.box)
        if group["decoupled_weight_decay"] or not group["weight_decay"]:
            return gradient
        decay: torch.Tensor = _inside(weights[piece.parameter], piece.box) * group["weight_decay"]
        return decay if gradient is None else gradient + decay

    def _place(self, piece: Piece) -> torch.Tensor:
        stack, position = self._homes[piece.job]
        return piece.part.view(stack.place(position), piece.box)

    def _update(self, piece: Piece) -> torch.Tensor:
        stack, position = self._homes[piece.job]
        return piece.part.view(stack.update(position), piece.box)

    def _apply(self, piece: Piece, update: torch.Tensor, weights: Sequence[Shard]) -> None:
        weight, group = _inside(weights[piece.parameter], piece.box), self.members[piece.parameter].group
        rate = float(group["lr"]) * (1.0 if self.matrices[piece.parameter] else group["adamw_lr_factor"])
        kept = 1.0 - rate * group["weight_decay"] if group["decoupled_weight_decay"] else 1.0
        if weight.dtype == self._computed:
            weight.mul_(kept).add_(update, alpha=-rate)
        else:  # rounded once
            weight.copy_(weight.to(self._computed).mul_(kept).add_(update.to(self._computed), alpha=-rate))

    # ---- states --------------------------------------------------------------------------------------------------

    def owned(self) -> Iterator[tuple[Stack, int, Member, Block]]:
        """Yield this rank's blocks: where each is stacked, and of which parameter it is."""
        for stack in self.stacks:
            for position, entry in enumerate(stack.entries):
                yield stack, position, self.members[entry.parameter], entry.block


def _inside(shard: Shard, box: Box) -> torch.Tensor:
    """Return a box of what this rank holds; a view."""
    for whole, tensor in shard.parts:
        if whole.intersect(box) == box:
            return tensor[box.slices(inside=whole)]
    raise AssertionError(f"{box} is not held here")
