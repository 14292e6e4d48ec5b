"""Parameters that are stepped in one call: their blocks, the stacks of this rank's, and the exchange between ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from accel_shard.errors import require
from accel_shard.layout import Box, Shard
from accel_shard.optim.blocks import Block, Grid, Work, owners_of
from accel_shard.optim.bucket import Ranks
from accel_shard.optim.core import Core
from accel_shard.optim.exchange import Exchange, Holders, Job, Piece
from accel_shard.optim.holding import Member
from accel_shard.optim.stacks import Counts, Entry, MatrixStack, Stack, VectorStack

__all__ = ["GRID", "Unit", "check_settings", "compute_dtype", "cut", "is_matrix", "work_of"]


Parts = dict[Box, torch.Tensor]
"""What this rank holds of a parameter, or of its gradient."""

_MOVE: Final = 64.0
"""An element that is sent there and back takes as long as so many multiplications, roughly, on any machine."""

GRID: Final = ("max_preconditioner_dim", "row_dims", "heads", "heads_axis")
"""Settings that say how a parameter is cut."""


def is_matrix(member: Member) -> bool:
    """Tell whether a parameter is updated by the core, in whole blocks; else AdamW updates it element by element."""
    return member.cut_by["core"] == "matrix" and len(member.shape) > 1


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of the layer that make no sense.

    Raises:
        ValueError: saying which, what it is and what is allowed.
    """
    Grid(**{name: settings[name] for name in GRID})
    for name in ("lr", "weight_decay", "adamw_lr_factor"):
        require(0.0 <= float(settings[name]) < math.inf, name, settings[name], "a number of at least 0")
    betas, decoupled = settings["adamw_betas"], settings["decoupled_weight_decay"]
    require(settings["core"] in ("matrix", "adamw"), "core", settings["core"], "'matrix', 'adamw'")
    require(isinstance(decoupled, bool), "decoupled_weight_decay", decoupled, "True, False")
    two = len(betas) == 2 and all(0.0 <= b < 1.0 for b in betas)
    require(two, "adamw_betas", betas, "two of at least 0 and less than 1")
    require(0.0 < settings["adamw_eps"] < math.inf, "adamw_eps", settings["adamw_eps"], "a number above 0")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which weights of a dtype are updated.

    Raises:
        ValueError: for one that cannot be.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"a parameter is {dtype}. Allowed: real floating point. Give it to another optimizer.")
    return torch.float64 if dtype == torch.float64 else torch.float32


def cut(member: Member) -> list[Block]:
    """Cut a parameter that the core updates into blocks, by the settings of its group at the first step."""
    return Grid(**{name: member.cut_by[name] for name in GRID}).blocks(member.shape)


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
        self._share_matrices(core, ranks, phases, holders, loads)
        self._share_vectors(holders)
        self.exchange = Exchange(self.jobs, holders, ranks)
        self.stacks = self._stack(core, ranks.rank)
        self._rates: list[tuple[float, float]] = []
        self._homes = {
            entry.job: (stack, position) for stack in self.stacks for position, entry in enumerate(stack.entries)
        }

    def _share_matrices(
        self, core: Core, ranks: Ranks, phases: Sequence[int], holders: Sequence[Holders], loads: list[float]
    ) -> None:
        found = [(i, b) for i, member in enumerate(self.members) if self.matrices[i] for b in cut(member)]
        works = [work_of(core, block, self.members[index].group) for index, block in found]
        moves = [_moves(block, holders[index], ranks.count) for index, block in found]
        owners = owners_of(works, phases, ranks.count, loads=loads, moves=moves)
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
        weights = [self._parts(member.weight()) for member in self.members]
        held = [None if gradient is None else self._parts(gradient) for gradient in gradients]
        self._rates = [self._rate(index) for index in range(len(self.members))]
        self.exchange.gradients.run(
            lambda piece: self._gradient(piece, held, weights) if active[piece.parameter] else None,
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

    def _rate(self, index: int) -> tuple[float, float]:
        """Return by what an update is multiplied, and what is left of a weight."""
        group = self.members[index].group
        rate = float(group["lr"]) * (1.0 if self.matrices[index] else group["adamw_lr_factor"])
        return rate, 1.0 - rate * group["weight_decay"] if group["decoupled_weight_decay"] else 1.0

    def _gradient(self, piece: Piece, held: Sequence[Parts | None], weights: Sequence[Parts]) -> torch.Tensor | None:
        mine, group = held[piece.parameter], self.members[piece.parameter].group
        gradient = None if mine is None else piece.in_held(mine[piece.held])
        if group["decoupled_weight_decay"] or not group["weight_decay"]:
            return gradient
        decay: torch.Tensor = piece.in_held(weights[piece.parameter][piece.held]) * group["weight_decay"]
        return decay if gradient is None else gradient + decay

    def _place(self, piece: Piece) -> torch.Tensor:
        stack, position = self._homes[piece.job]
        return piece.in_block(stack.place(position))

    def _update(self, piece: Piece) -> torch.Tensor:
        stack, position = self._homes[piece.job]
        return piece.in_block(stack.update(position))

    def _apply(self, piece: Piece, update: torch.Tensor, weights: Sequence[Parts]) -> None:
        weight, (rate, kept) = piece.in_held(weights[piece.parameter][piece.held]), self._rates[piece.parameter]
        if weight.dtype != self._computed:  # rounded once
            weight.copy_(weight.to(self._computed).mul_(kept).add_(update.to(self._computed), alpha=-rate))
            return
        if kept != 1.0:
            weight.mul_(kept)
        weight.add_(update, alpha=-rate)

    @staticmethod
    def _parts(shard: Shard) -> Parts:
        return dict(shard.parts)

    # ---- states --------------------------------------------------------------------------------------------------

    def owned(self) -> Iterator[tuple[Stack, int, Member, Block]]:
        """Yield this rank's blocks: where each is stacked, and of which parameter it is."""
        for stack in self.stacks:
            for position, entry in enumerate(stack.entries):
                yield stack, position, self.members[entry.parameter], entry.block


def _moves(block: Block, holders: Holders, ranks: int) -> list[float]:
    """Return what sending a block's gradient and update costs if a rank owns it, in multiplications."""
    away = [float(block.numel)] * ranks
    for box, theirs in holders.items():
        shared = [part.box.intersect(box) for part in block.parts]
        count = sum(both.numel for both in shared if both is not None)
        for rank in theirs if count else ():
            away[rank] -= count
    return [_MOVE * elements for elements in away]
