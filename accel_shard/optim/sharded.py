"""``ShardedOptimizer``: any optimizer, its state held once over all ranks, the model whole on each (ZeRO-1 on DDP)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, overload

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_shard.errors import unknown_name
from accel_shard.layout import Layout, NeedsLayout
from accel_shard.optim.backward import InBackward
from accel_shard.optim.bucket import Bucket, Part, Ranks, gather_all
from accel_shard.optim.flatten import check_memory, outline, ranged_buckets, whole_buckets
from accel_shard.optim.owner import OwnerReduce, norm_of_shares
from accel_shard.optim.states import cut_stored, describe, in_one_piece, made_of_shapes
from accel_shard.optim.stepping import ELEMENTWISE, seat, settings_of, update

__all__ = ["ELEMENTWISE", "ShardedOptimizer"]

_COUPLED: Final[dict[type[Any], str]] = {
    NeedsLayout: "works on whole parameters, and shares out its state itself",
    torch.optim.LBFGS: "takes inner products over all parameters, which no rank has",
    torch.optim.SparseAdam: "takes sparse gradients, which cannot be cut into ranges",
}


class ShardedOptimizer(torch.optim.Optimizer):
    """Runs an optimizer on this rank's share of the parameters, and brings the updated weights to all ranks.

    Use it as the optimizer that it runs: ``ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)``.
    ``param_groups`` holds all parameters, so schedulers, ``zero_grad``, clipping and ``GradScaler`` act on it.

    * An element-wise optimizer (:data:`ELEMENTWISE`, or marked) updates contiguous ranges of each parameter group, one
      flat tensor a group and dtype: each rank holds ``1 / ranks`` of the state, to within one element a group.
    * Any other updates whole parameters, the largest assigned first. One that couples parameters with each other (a
      norm over all of them) would see this rank's only: do not run it here.

    Gradients must be the same on every rank, as DDP makes them (but see ``reduce``). The parameters become
    views of flat buffers at the first step, so they may be moved, cast and wrapped before it.

    Args:
        params: parameters, or groups of them, as for any optimizer.
        optimizer: a class, or a factory such as ``lambda params: Mine(params, beta=0.9)``. It is called with a list of
            groups, first on the meta device to learn its defaults, later with what this rank updates; it must hand
            the groups on as they are.
        elementwise: whether it treats each element by itself; None asks :data:`ELEMENTWISE`.
        master: dtype of the copy that is updated, with its state, for 16-bit weights; held by the owner only. None
            updates the weights in their own dtype.
        reduce: ``all``: DDP's all-reduce gives every rank all gradients. ``owner``: they go to their owners only
            (:meth:`attach`, which ``PolicyAccelerator.prepare`` calls), a third less traffic; clip with
            ``accelerator.clip_grad_norm_`` or :meth:`clip_grad_norm_`, and without a ``GradScaler``.
        in_backward: update each bucket as soon as its gradient is reduced, and free the gradient, so that gradients of
            a few buckets exist at a time; needs ``reduce="owner"``. :meth:`step` then only checks. Refused with
            clipping, accumulation and ``GradScaler``, which need all gradients before the first update.
        process_group: the ranks that share the state; the default group if None; none is needed.
        **settings: what ``optimizer`` takes beside the parameters.

    Raises:
        ValueError: for an optimizer that cannot be sharded.
    """

    def __init__(
        self, params: Any, optimizer: Callable[..., torch.optim.Optimizer], *, elementwise: bool | None = None,
        master: torch.dtype | None = torch.float32, reduce: str = "all", in_backward: bool = False,
        process_group: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        if reduce not in ("all", "owner"):
            raise ValueError(unknown_name("reduce", str(reduce), ("all", "owner")))
        if in_backward and reduce != "owner":
            raise ValueError(
                f"in_backward is set and reduce is {reduce!r}: DDP's all-reduce keeps all gradients until backward "
                "ends. Allowed: reduce 'owner'."
            )
        super().__init__(params, {})
        self.reduce: Final = reduce
        self.in_backward: Final = in_backward
        self._make: Callable[..., torch.optim.Optimizer] = lambda groups: optimizer(groups, **settings)
        self._master, self._process_group = master, process_group
        model = self._make([settings_of(g) | {"params": [outline(p) for p in g["params"]]} for g in self.param_groups])
        for kind, reason in _COUPLED.items():
            if isinstance(model, kind):
                raise ValueError(
                    f"optimizer is {type(model).__name__}, which {reason}. Allowed: any that updates each parameter "
                    "by itself, from a dense gradient. Use it unsharded."
                )
        self._check_groups(model, [len(group["params"]) for group in self.param_groups])
        self.inner_name: Final = type(model).__name__
        self.elementwise: Final = type(model) in ELEMENTWISE if elementwise is None else elementwise
        self.defaults = dict(model.defaults)
        for group, made in zip(self.param_groups, model.param_groups, strict=True):
            for key, value in settings_of(made).items():
                group.setdefault(key, value)
        self._inner: torch.optim.Optimizer | None = None
        self._buckets: list[Bucket] = []
        self._bound: set[int] = set()
        self._loads: list[int] = []
        self._ranks = Ranks(None, 0, 1)
        self._waiting: Mapping[str, Any] | None = None
        self.stands_for: torch.optim.Optimizer | None = None
        self._hook: OwnerReduce | None = None

    # ---- binding -------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Move parameters that are new, or train now, into flat buffers, and share them out. Local.

        The first step does it; until then parameters may be moved. Every rank must have the same ones.

        Raises:
            ValueError: for parameters that another backend shards, or that share memory.
        """
        fresh = [
            (index, p)
            for index, group in enumerate(self.param_groups)
            for p in group["params"]
            if p.requires_grad and id(p) not in self._bound
        ]
        if fresh:
            check_memory([p for _, p in fresh])
            self._bound |= {id(p) for _, p in fresh}
            if self._inner is None:
                self._ranks = Ranks.of(self._process_group)
                self._loads = [0] * self._ranks.count
            if self.elementwise:
                made = ranged_buckets(fresh, self._ranks, self._master)
            else:
                made = whole_buckets(fresh, self._ranks, self._master, self._loads)
            self._buckets += made
            self._join(made)
        if self._waiting is not None and self._inner is not None:
            stored, self._waiting = self._waiting, None
            self._install(stored)

    def _join(self, made: list[Bucket]) -> None:
        """Give the pieces of new buckets to the inner optimizer."""
        groups: list[dict[str, Any]] = [settings_of(group) | {"params": []} for group in self.param_groups]
        for bucket in made:
            for piece in bucket.pieces:
                groups[piece.group]["params"].append(piece.tensor)
        added = self._make(groups)
        self._check_groups(added, [len(group["params"]) for group in groups])
        if self._inner is None:
            self._inner = added
        else:
            # An optimizer may give its parameters state when it is made (Adagrad does).
            self._inner.state.update(added.state)
            self._inner.param_groups += added.param_groups[len(self._inner.param_groups) :]
        seat(self._inner, self._buckets)

    def _check_groups(self, made: torch.optim.Optimizer, counts: list[int]) -> None:
        found = [len(group["params"]) for group in made.param_groups]
        if found != counts:
            raise ValueError(
                f"the factory was given groups of {counts} parameters and made a {type(made).__name__} with groups of "
                f"{found}. It must hand its argument on as it is; form the groups in params."
            )

    # ---- stepping ------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all weights. Every rank must call it; each sends its share of the updated weights to all others.

        Args:
            closure: evaluated once, before the update.

        Returns:
            What the closure returned.

        Raises:
            ValueError: for a sparse gradient, on every rank; for one that backward did not use, if it should have.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.stands_for is not None:
            self.stands_for._opt_called = True  # type: ignore[attr-defined]  # or its scheduler warns
        self.bind()
        self._refuse_sparse()
        if self.reduce == "owner" and self._hook is None and (self._ranks.count > 1 or self.in_backward):
            raise ValueError(
                "reduce is 'owner' and the optimizer is not attached to the DDP model, which so all-reduces. Call "
                "optimizer.attach(model) after wrapping it, or use policy.accelerator().prepare."
            )
        if isinstance(self._hook, InBackward):
            self._hook.check(self._buckets)
        elif self._inner is not None:  # something trains
            update(self._inner, self._buckets, self.param_groups)
        return loss

    def _refuse_sparse(self) -> None:
        for index, group in enumerate(self.param_groups):
            for number, p in enumerate(group["params"]):
                if p.grad is not None and p.grad.layout != torch.strided:
                    name = group.get("param_names", {number: f"number {number}"})[number]
                    raise ValueError(
                        f"the gradient of parameter {name} of group {index}, of shape {tuple(p.shape)}, is "
                        f"{p.grad.layout}. Allowed: dense gradients. Make its embedding with sparse=False."
                    )

    def attach(self, model: DistributedDataParallel) -> None:
        """Let a DDP model send gradients to their owners only, if ``reduce`` is ``owner``. Every rank must call it.

        Raises:
            ValueError: if some parameter has no owner.
        """
        if self.reduce == "owner" and self._hook is None:
            self.bind()
            if self.in_backward and self._inner is not None:
                self._hook = InBackward(model, self._buckets, self._ranks, self._inner, self.param_groups)
            else:
                self._hook = OwnerReduce(model, self._buckets, self._ranks)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all parameters to their global norm, and return it. Every rank must call it.

        With ``reduce="owner"`` it sums one number over the ranks.

        Raises:
            ValueError: if the weights are updated in backward, before there is a norm.
        """
        if self.in_backward:
            raise ValueError(
                "gradients are clipped to their norm and in_backward is set: the first weights are updated before the "
                "last gradients exist. Allowed: no clipping (in HF Trainer, max_grad_norm=0), or in_backward=False."
            )
        everything = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self._hook is None:
            return torch.nn.utils.clip_grad_norm_(everything, max_norm, norm_type)
        mine = [p for b in self._buckets for p in b.parts if p.slot.parameter.grad is not None]
        shares = [part.of(part.slot.parameter.grad) for part in mine if part.slot.parameter.grad is not None]
        norm = norm_of_shares(shares, norm_type, self._ranks, self._buckets[0].flat.device)
        torch.nn.utils.clip_grads_with_norm_(everything, max_norm, norm)
        return norm

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler asks for it before a step; a rank sees what overflowed in its own share only.
        if self.reduce == "owner":
            raise ValueError(
                "a GradScaler (fp16) with reduce 'owner': ranks would not agree on what overflowed. Allowed: reduce "
                "'all', or bf16."
            )
        return False

    # ---- states --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's share of the state. Local: communicates nothing.

        It has what a torch optimizer's has, each state cut to what this rank updates of its parameter, and
        ``sharded``, which says what that is. Another rank count needs a snapshot (``Checkpointer``).
        """
        packed = super().state_dict()
        if self._inner is None:
            waiting = self._waiting or {}
            packed["state"] = dict(waiting.get("state", {}))
            return packed | {"sharded": waiting["sharded"]} if "sharded" in waiting else packed
        numbers = self._numbers()
        state, ranges, masters = {}, {}, {}
        for bucket in self._buckets:
            for part, own in in_one_piece(bucket, self._inner.state):
                number = numbers[id(part.slot.parameter)]
                ranges[number] = (part.start, part.stop)
                if own:
                    state[number] = own
                if (kept := bucket.master_of(part)) is not None:
                    masters[number] = kept
        about = {"rank": self._ranks.rank, "ranks": self._ranks.count, "ranges": ranges, "masters": masters}
        return packed | {"state": state, "sharded": about}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state from a ``state_dict`` of this rank, or of the unsharded optimizer. Local.

        Raises:
            ValueError: if the groups are others, or it is a share for another rank or number of ranks.
        """
        about, ranks = state_dict.get("sharded"), Ranks.of(self._process_group)
        own = (ranks.rank, ranks.count)
        if about is not None and (about["rank"], about["ranks"]) != own:
            raise ValueError(
                f"the state dict is the share of rank {about['rank']} of {about['ranks']}; this is rank {own[0]} of "
                f"{own[1]}. A share fits its own rank only. Resume with accel_shard.Checkpointer, or load the state "
                "dict of an unsharded optimizer."
            )
        groups = self.param_groups
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, loaded in zip(groups, self.param_groups, strict=True):
            # The same objects: a scheduler of an optimizer that was adopted has them.
            group.clear()
            group.update(loaded)
        self.param_groups = groups
        if self._inner is None:
            self._waiting = state_dict
        else:
            self._install(state_dict)

    def _install(self, stored: Mapping[str, Any]) -> None:
        assert self._inner is not None
        about, numbers = stored.get("sharded"), self._numbers()
        for bucket in self._buckets:
            found = {}
            for number, part in enumerate(bucket.parts):
                index = numbers[id(part.slot.parameter)]
                if about is not None and tuple(about["ranges"].get(index, ())) != (part.start, part.stop):
                    raise ValueError(
                        f"the state dict has elements {about['ranges'].get(index)} of parameter {index} and this rank "
                        f"updates {(part.start, part.stop)}: it is of other parameters or groups."
                    )
                if index in stored["state"]:
                    state = stored["state"][index]
                    whole = about is None
                    found[number] = cut_stored(state, part, bucket, self._group_of(part), index, whole=whole)
                if about is not None and (kept := bucket.master_of(part)) is not None:
                    kept.copy_(about["masters"][index])
            bucket.replace_states(found, self._inner.state)
        seat(self._inner, self._buckets)

    def _group_of(self, part: Part) -> Mapping[str, Any]:
        return self.param_groups[part.slot.group]

    def _numbers(self) -> dict[int, int]:
        everything = [p for group in self.param_groups for p in group["params"]]
        return {id(p): number for number, p in enumerate(everything)}

    # ---- what checkpoints and backends ask (accel_shard.layout.ShardsState) --------------------------------------

    def describe_state(self, layout: Layout, names: Mapping[int, str]) -> None:
        """Add this rank's states to a layout, and masters in place of weights. Local.

        Args:
            layout: of the model.
            names: fully qualified names by the ``id`` of the parameter.
        """
        self.bind()
        for bucket in self._buckets:
            assert self._inner is not None
            describe(bucket, self._inner.state, layout, names, self.inner_name)

    def materialize_state(
        self, names: Mapping[int, str], shapes: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
        scalars: Mapping[str, Mapping[str, Any]],
    ) -> None:  # fmt: skip
        """Make state of these shapes, of which this rank gets its share, to be filled. Local."""
        self.bind()
        for bucket in self._buckets:
            assert self._inner is not None
            states = {}
            for number, part in enumerate(bucket.parts):
                name = names[id(part.slot.parameter)]
                if name in shapes or name in scalars:
                    states[number] = made_of_shapes(
                        name, part, bucket, self._group_of(part), shapes.get(name, {}), scalars.get(name, {})
                    )
            bucket.replace_states(states, self._inner.state)
        if self._inner is not None:
            seat(self._inner, self._buckets)

    @torch.no_grad()
    def after_fill(self) -> None:
        """Bring the weights up to date with masters that were filled. Every rank must call it."""
        gather_all([bucket for bucket in self._buckets if bucket.master is not None])

    def updated_elements(self) -> int:
        """Return how many elements this rank updates, and has the state of. Local."""
        self.bind()
        return sum(part.stop - part.start for bucket in self._buckets for part in bucket.parts)

    def master_dtypes(self) -> frozenset[torch.dtype]:
        """Return the dtypes of what this rank updates. Local."""
        self.bind()
        return frozenset(
            bucket.flat.dtype if bucket.master is None else bucket.master.dtype for bucket in self._buckets
        )

    def state_bytes(self) -> int:
        """Return the bytes of this rank's state, masters included. Local."""
        held = [bucket.master for bucket in self._buckets if bucket.master is not None]
        if self._inner is not None:
            held += [v for s in self._inner.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)
