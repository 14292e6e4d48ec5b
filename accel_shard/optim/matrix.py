"""``MatrixOptimizer``: an optimizer of whole matrices, the same under DDP, FSDP and ZeRO, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, overload

import torch

from accel_shard.errors import unknown_name
from accel_shard.layout import FlatTensor, Layout
from accel_shard.optim.block_states import describe, install, materialize, pack
from accel_shard.optim.blocks import phases_of
from accel_shard.optim.bucket import Ranks
from accel_shard.optim.core import Core
from accel_shard.optim.holding import Member, agree, held_by_all, members_of
from accel_shard.optim.stacks import Counts
from accel_shard.optim.unit import GRID, Unit, check_settings, cut, is_matrix, work_of

__all__ = ["SETTINGS", "MatrixOptimizer"]

SETTINGS: Final[Mapping[str, Any]] = {
    "lr": 1e-3, "weight_decay": 0.0, "decoupled_weight_decay": True, "max_preconditioner_dim": None, "row_dims": 1,
    "heads": 1, "heads_axis": 0, "core": "matrix", "adamw_betas": (0.9, 0.999), "adamw_eps": 1e-8,
    "adamw_lr_factor": 1.0,
}  # fmt: skip
"""What the layer itself takes, with defaults; a core's own win.

* ``lr``, ``weight_decay``: as everywhere; ``decoupled_weight_decay=False`` adds the decay to the gradient (L2).
* ``max_preconditioner_dim``: longest side of a block; None for none. ``row_dims``: leading dimensions that are the rows
  of a parameter's matrix; 0 for the squarest. ``heads``: bands into which a matrix is cut before, as the heads of an
  attention matrix; ``heads_axis``: 0 if they are rows, 1 if they are columns.
* ``core``: ``matrix``, or ``adamw`` for the built-in one. ``adamw_betas``, ``adamw_eps``; ``adamw_lr_factor``: its
  learning rate as a multiple of ``lr``.
"""

_OF_OTHERS: Final = ("params", "param_names", "name", "initial_lr")


class MatrixOptimizer(torch.optim.Optimizer):
    """Runs a core on whole blocks of the parameters, each block on one rank, whatever the ranks hold of them.

    A step brings the gradient of each block to the rank that owns it, updates all blocks of a shape in one call of the
    core, and brings the updates to whoever holds the weights: ``weight -= lr * (direction + weight_decay * weight)``.
    The state of a block lives on its owner only. Costly refreshes are spread over the steps of a period.

    Parameters of one dimension, and groups with ``core="adamw"``, are updated by AdamW, each element where it is.

    Construct it before or after ``prepare``, or before the model is moved: parameters are looked up at the first step.
    Under FSDP1 and DeepSpeed that needs ``ShardingPolicy(...).accelerator()``, whose ``prepare`` tells it what their
    flat tensors are made of. A parameter that has no gradient in a step, on any rank, is passed over, as torch does;
    one that has a gradient on some of the ranks that share it counts as zero on the others. FSDP1 has zeros for a
    parameter without a gradient, so there a gradient of zeros counts as none.

    Args:
        params: parameters, or groups of them, as for any optimizer.
        core: the mathematics.
        nonfinite: ``raise`` refuses a gradient that is not finite, on every rank, before it touches anything; ``skip``
            passes over the step.
        communication_dtype: dtype in which updates travel, if lower than that of the computation. Gradients never lose
            precision.
        process_group: the ranks that hold the parameters together; the default group if None; none is needed.
        **settings: the core's, and those of the layer (:data:`SETTINGS`). Each can be said a group, with
            ``core="adamw"`` beside them.

    Raises:
        ValueError: for a setting that is unknown, or has a value that is not allowed.
    """

    def __init__(
        self, params: Any, core: Core, *, nonfinite: str = "raise", communication_dtype: torch.dtype | None = None,
        process_group: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        if nonfinite not in ("raise", "skip"):
            raise ValueError(unknown_name("nonfinite", str(nonfinite), ("raise", "skip")))
        # DeepSpeed shows one group at a time.
        self._groups: list[dict[str, Any]] = []
        self._given: list[list[tuple[int, ...]]] = []
        self.core: Final = core
        self.nonfinite: Final = nonfinite
        defaults = dict(SETTINGS) | dict(core.defaults)
        self._refuse_unknown(settings, defaults)
        super().__init__(params, defaults | settings)
        self._sent, self._process_group = communication_dtype, process_group
        self._tensors: Callable[[], Sequence[FlatTensor] | None] = lambda: None
        self._units: list[Unit] = []
        self._phases: list[list[int]] = []
        self._planned: tuple[Any, ...] = ()
        self._bound: set[int] = set()
        self._ranks, self._loads = Ranks(None, 0, 1), [0.0]
        self._counts, self._skipped = Counts(), 0
        self._waiting: Mapping[Any, Mapping[str, Any]] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as to any optimizer; every rank must add the same."""
        self._refuse_unknown(param_group, {**self.defaults, **dict.fromkeys(_OF_OTHERS)})
        super().add_param_group(param_group)
        for check in (check_settings, self.core.check):
            check(self.param_groups[-1])
        self._groups.append(self.param_groups[-1])
        self._given.append([tuple(p.shape) for p in self.param_groups[-1]["params"]])

    def _refuse_unknown(self, settings: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        for name in settings:
            if name not in known:
                raise ValueError(unknown_name(f"setting of {type(self.core).__name__}", name, tuple(known)))

    def bind_to(self, tensors: Callable[[], Sequence[FlatTensor] | None]) -> None:
        """Take a function that describes the tensors of the groups (:class:`~accel_shard.layout.NeedsLayout`)."""
        self._tensors = tensors

    # ---- binding -------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Look up parameters that are new, or train now, and share out their blocks.

        The first step does it; every rank must call it, with the same parameters. It gathers the boxes that ranks hold.

        Raises:
            ValueError: for parameters that are not what the optimizer was given, and nobody says what they are.
        """
        known = {id(member.parameter) for unit in self._units for member in unit.members}
        seen = (p for group in self.param_groups for p in group["params"] if p.requires_grad)
        if self._units and all(id(p) in self._bound for p in seen):
            return  # DeepSpeed shows no tensors but while it steps
        if not self._units:
            self._ranks = Ranks.of(self._process_group)
            self._loads = [0.0] * self._ranks.count
        found = members_of(self._groups, self._given, self._tensors())
        fresh = [member for member in found if id(member.parameter) not in known]
        if not fresh:
            return
        self._bound |= {id(member.tensor) for member in found}
        self._plan(fresh)
        apart: dict[Any, list[Member]] = {}
        for member in fresh:
            key = (id(member.tensor) if member.alone else 0, member.tensor.dtype, member.device)
            apart.setdefault(key, []).append(member)
        for members in apart.values():
            phases = [phase for m in members for phase in self._phases_of.get(m.place, ())]
            holders = held_by_all(members, self._ranks)
            self._units.append(Unit(members, holders, self._ranks, self.core, phases, self._loads, self._sent))
        self._arrange()
        if self._waiting is not None:
            stored, self._waiting = self._waiting, None
            install(self._units, self._numbers(), stored)

    def _members(self) -> Iterable[Member]:
        return (member for unit in self._units for member in unit.members)

    def _plan(self, fresh: Sequence[Member] = ()) -> None:
        """Say when each block is refreshed: by what trains now, and not by the order in which it came."""
        training = [m for m in (*self._members(), *fresh) if m.alone or m.tensor.requires_grad]
        matrices = sorted((m for m in training if is_matrix(m)), key=lambda m: m.place)
        blocks = [(member, block) for member in matrices for block in cut(member)]
        phases = phases_of([work_of(self.core, block, member.group) for member, block in blocks])
        self._phases_of: dict[tuple[int, int], list[int]] = {}
        for (member, _), phase in zip(blocks, phases, strict=True):
            self._phases_of.setdefault(member.place, []).append(phase)

    def _arrange(self) -> None:
        """Line the phases up with the jobs of each unit."""
        self._planned = self._state_of_plan()
        self._phases = []
        for unit in self._units:
            queues = {i: iter(self._phases_of.get(m.place, ())) for i, m in enumerate(unit.members)}
            self._phases.append([next(queues[job.parameter], 0) for job in unit.jobs])

    def _state_of_plan(self) -> tuple[Any, ...]:
        return tuple((m.place, m.tensor.requires_grad, self.core.period(m.group)) for m in self._members())

    # ---- stepping ------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all weights. Every rank must call it; it sends gradients to owners and updates to holders.

        Args:
            closure: evaluated once, before the update.

        Returns:
            What the closure returned.

        Raises:
            ValueError: on every rank, for a gradient that is not finite; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        present = {id(p) for group in self.param_groups for p in group["params"]}
        self._refuse_replaced(present)
        self.bind()
        self._follow_settings()
        now = [i for i, unit in enumerate(self._units) if any(id(m.tensor) in present for m in unit.members)]
        members = [member for i in now for member in self._units[i].members]
        if not members:
            return loss
        gradients = [member.gradient() for member in members]
        active, infinite = agree(members, gradients, self._ranks)
        for member in members:
            member.done()
        if infinite:
            self._refuse([members[i] for i in infinite])
            return loss
        at = 0
        for i in now:
            end = at + len(self._units[i].members)
            self._units[i].step(active[at:end], gradients[at:end], self._phases[i], self.core, self._counts)
            at = end
        return loss

    def _refuse_replaced(self, present: set[int]) -> None:
        for unit in self._units:
            for member in unit.members:
                stays = member.alone or id(member.tensor) in present
                if not stays or (member.tensor.dtype, member.device) != (unit.dtype, unit.device):
                    raise ValueError(
                        f"parameter {member.place[1]} of group {member.place[0]}, of shape {member.shape}, was "
                        f"replaced, cast or moved after the first step; its state is of {unit.dtype} on {unit.device}. "
                        "Prepare, cast and move before the first step, or make a new optimizer and load its state dict."
                    )

    def _follow_settings(self) -> None:
        """Take notice of what was changed in the groups.

        Raises:
            ValueError: for what cannot be changed any more.
        """
        for member in self._members():
            for name in (*GRID, "core"):
                if member.group[name] != member.cut_by[name]:
                    raise ValueError(
                        f"{name} of group {member.place[0]} is {member.group[name]!r} and was {member.cut_by[name]!r} "
                        "at the first step, by which the parameters were cut. Set it before, or make a new optimizer."
                    )
        if self._state_of_plan() != self._planned:
            self._plan()
            self._arrange()

    def _refuse(self, members: Sequence[Member]) -> None:
        self._skipped += 1
        if self.nonfinite == "skip":
            return
        where = ", ".join(f"{m.place[1]} of group {m.place[0]} {m.shape}" for m in members[:3])
        where += ", ..." if len(members) > 3 else ""
        raise ValueError(
            f"the gradient of {len(members)} parameters is not finite (number {where}); "
            "the step was refused and nothing changed. Allowed: finite gradients. Clip, lower lr, or use "
            "nonfinite='skip' to pass over such steps."
        )

    # ---- states --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's blocks and the groups, of plain types. Local: communicates nothing.

        A state's key is its name and where its block starts. One process has all of them; of several ranks each has its
        own, and another rank count needs a snapshot (``Checkpointer``).
        """
        packed = super().state_dict()
        packed["state"] = pack(self._units, self._numbers()) if self._waiting is None else dict(self._waiting)
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the states from a ``state_dict`` of one process, or of this rank among as many. Local.

        Raises:
            ValueError: if the groups are others, or it lacks a block of this rank's.
        """
        groups = self.param_groups
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()  # the same objects: what was bound has them
            group.update(loaded)
        self.param_groups = groups
        if self._units:
            install(self._units, self._numbers(), state_dict["state"])
        else:
            self._waiting = dict(state_dict["state"]) or None

    def _numbers(self) -> dict[int, int]:
        starts = [sum(map(len, self._given[:index])) for index in range(len(self._given))]
        return {id(m.parameter): starts[m.place[0]] + m.place[1] for m in self._members()}

    # ---- what checkpoints and backends ask (accel_shard.layout.ShardsState) --------------------------------------

    def describe_state(self, layout: Layout, names: Mapping[int, str]) -> None:
        """Add the states of this rank's blocks to a layout. Every rank must call it, as :meth:`bind`.

        Args:
            layout: of the model.
            names: fully qualified names by the ``id`` of the parameter.
        """
        self.bind()
        describe(self._units, layout, names)

    def materialize_state(
        self, names: Mapping[int, str], shapes: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
        scalars: Mapping[str, Mapping[str, Any]],
    ) -> None:  # fmt: skip
        """Prepare the states to be filled from a snapshot. Every rank must call it, as :meth:`bind`.

        Raises:
            SnapshotError: on every rank, if the snapshot has other states.
        """
        self.bind()
        self._waiting = None
        materialize(self._units, self.core, names, shapes, scalars)

    def after_fill(self) -> None:
        """Do nothing: the weights are what is updated. Local."""

    def updated_elements(self) -> int:
        """Return how many elements this rank updates, and has the state of. Every rank must call it."""
        self.bind()
        return sum(block.numel for unit in self._units for _, _, _, block in unit.owned())

    def master_dtypes(self) -> frozenset[torch.dtype]:
        """Return the dtypes of what is updated. Local."""
        return frozenset(p.dtype for group in self.param_groups for p in group["params"] if p.requires_grad)

    # ---- what can be seen of it ----------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Return what happened so far on this rank. Local; it waits for the device.

        ``refreshes`` of blocks; of those ``kept``, where nothing better could be computed than what the block had;
        steps ``skipped`` because of gradients that were not finite; elements ``sent`` in a step, by this rank:
        ``gradients_sent`` and ``updates_sent``.
        """
        return {
            "refreshes": self._counts.refreshes,
            "kept": int(self._counts.kept),
            "skipped": self._skipped,
            "gradients_sent": sum(unit.exchange.gradients.sent for unit in self._units),
            "updates_sent": sum(unit.exchange.updates.sent for unit in self._units),
        }

    def state_bytes(self) -> int:
        """Return the bytes of this rank's state. Local."""
        return sum(
            value.numel() * value.element_size()
            for unit in self._units
            for stack, position, _, _ in unit.owned()
            for _, _, value in stack.states(position)
        )
