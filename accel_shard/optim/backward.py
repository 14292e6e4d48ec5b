"""The optimizer in backward: a bucket is updated as soon as its gradient is reduced, and the gradient goes at once.

DDP keeps a buffer for every bucket of gradients, as much as all weights. Here its memory goes when the bucket has been
updated, and comes back when the next backward reaches it, so that gradients of a few buckets are alive at a time. DDP
forms its buckets in the first step and again in the second, so that it holds from the third step on.

While bucket ``k`` is on its way, bucket ``k - 1`` is added up, updated and sent: on the thread that runs backward, so
that every rank starts its collectives in one order. Weights that are written before backward is done with them are
found by autograd, which refuses to use them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from accel_shard.optim.bucket import Bucket, Ranks, wait_for
from accel_shard.optim.owner import OwnerReduce
from accel_shard.optim.stepping import ELEMENTWISE, seat, update_bucket

__all__ = ["InBackward"]


_Sent = tuple[Any, Callable[[], None], list[tuple[torch.Tensor, torch.Tensor]], torch.UntypedStorage]


class InBackward(OwnerReduce):
    """The hook. When ``backward`` returns, all weights are updated on every rank, and every gradient is NaN.

    Args:
        model: as for :class:`~accel_shard.optim.owner.OwnerReduce`.
        buckets: as there.
        ranks: as there.
        inner: the optimizer of the buckets' pieces.
        groups: what the user sees as parameter groups, whose settings apply when backward runs.

    Raises:
        ValueError: for a model or an optimizer that cannot be updated in backward.
    """

    def __init__(
        self, model: DistributedDataParallel, buckets: Sequence[Bucket], ranks: Ranks, inner: torch.optim.Optimizer,
        groups: Sequence[dict[str, Any]],
    ) -> None:  # fmt: skip
        _refuse_unfit(model, buckets, inner)
        super().__init__(model, buckets, ranks)
        # DDP's reducer holds the hook where no garbage collector looks, so the hook must not hold DDP.
        self._model, self._inner, self._groups = weakref.proxy(model), inner, groups
        self._buckets = tuple(buckets)
        self._number = {id(slot.parameter): n for n, bucket in enumerate(buckets) for slot in bucket.slots}
        self._memory: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._last: _Sent | None = None
        self._works: list[Any] = []
        self._used: dict[int, torch.Tensor] = {}
        for bucket in buckets:
            for slot in bucket.slots:
                slot.parameter.register_hook(self._before(slot.parameter))  # type: ignore[no-untyped-call]

    def check(self, buckets: Sequence[Bucket]) -> None:
        """Refuse a step for gradients that backward has not used. Local.

        Raises:
            ValueError: if there are some, or parameters that the hook does not know.
        """
        if len(buckets) != len(self._buckets):
            raise ValueError(
                "in_backward is set and parameters were added, or train now, that DDP does not reduce. Wrap the model "
                "and attach a new optimizer after changing what trains."
            )
        for bucket in self._buckets:
            for slot in bucket.slots:
                gradient = slot.parameter.grad
                if gradient is not None and gradient is not self._used.get(id(slot.parameter)):
                    raise ValueError(
                        f"in_backward is set and a parameter of shape {tuple(slot.parameter.shape)} has a gradient "
                        "that DDP did not reduce: backward ran past the wrapped model, or forward in no_sync(). Call "
                        "the wrapped model, without accumulation, or use in_backward=False."
                    )

    def _before(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def arrive(_: torch.Tensor) -> None:
            if not self._model.require_backward_grad_sync:
                raise ValueError(
                    "in_backward is set and gradients are accumulated (no_sync): each backward updates the weights and "
                    "frees its gradients, so there is nothing to add to. Allowed: gradient_accumulation_steps 1, or "
                    "in_backward=False."
                )
            if parameter.grad is not None:
                raise ValueError(
                    "in_backward is set and a gradient is left from the last backward, which has used it already. "
                    "Call optimizer.zero_grad() after each step, or use in_backward=False to accumulate."
                )
            memory, size = self._memory.get(id(parameter), (None, 0))
            if memory is not None and not memory.nbytes():
                memory.resize_(size)

        return arrive

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to reduce a bucket, and update what the one before it completes."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        memory = buffer.untyped_storage()
        self._memory |= {id(p): (memory, memory.nbytes()) for p in parameters}
        started = self.start(bucket)
        self._finish()
        self._last = (*started, list(zip(parameters, bucket.gradients(), strict=True)), memory)
        if bucket.is_last():
            # DDP queues its own end after this call; what is queued by the first is run after that.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._end))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(_Views.of(buffer, bucket.gradients()))
        return done

    def _finish(self) -> None:
        """Add up the bucket that was sent last, and update what is complete now."""
        if self._last is None:
            return
        (work, add_up, pairs, memory), self._last = self._last, None
        work.wait()
        add_up()
        self._gradients |= {id(parameter): gradient for parameter, gradient in pairs}
        numbers = {self._number[id(parameter)] for parameter, _ in pairs}
        for number in sorted(numbers):
            if all(id(slot.parameter) in self._gradients for slot in self._buckets[number].slots):
                self._update(self._buckets[number])
        for parameter, gradient in pairs:
            parameter.grad = None
            if id(parameter) in self._gradients:  # its bucket here goes on in DDP's next
                self._gradients[id(parameter)] = gradient.clone()
        memory.resize_(0)

    def _update(self, bucket: Bucket) -> None:
        parameters = [slot.parameter for slot in bucket.slots]
        torch.autograd.graph.increment_version(parameters)
        for parameter in parameters:
            parameter.grad = self._gradients.pop(id(parameter))
        self._works += update_bucket(self._inner, bucket, self._groups)
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()
    def _end(self) -> None:
        self._finish()
        works, self._works = self._works, []
        wait_for(self._buckets, works)
        seat(self._inner, self._buckets)
        for bucket in self._buckets:
            for slot in bucket.slots:
                # What was there is freed. Who clips or logs gradients now would else do it to nothing, unnoticed.
                used = torch.full((), torch.nan, dtype=slot.parameter.dtype, device=slot.parameter.device)
                slot.parameter.grad = self._used[id(slot.parameter)] = used.expand(slot.parameter.shape)


class _Views(torch.Tensor):
    """What DDP is given as the reduced bucket: it cuts out each gradient, and memory that is gone cannot be cut."""

    _views: dict[int, torch.Tensor]

    @classmethod
    def of(cls, buffer: torch.Tensor, gradients: Sequence[torch.Tensor]) -> _Views:
        made: _Views = torch.Tensor._make_wrapper_subclass(cls, buffer.shape, dtype=buffer.dtype, device=buffer.device)
        made._views = {int(view.storage_offset() - buffer.storage_offset()): view for view in gradients}
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.as_strided.default:
            bucket, _, _, offset = args
            return torch.ops.aten.alias.default(bucket._views[offset])
        raise NotImplementedError(f"in_backward: DDP asks {func} of a bucket that was freed; it only cut views so far")


def _refuse_unfit(model: DistributedDataParallel, buckets: Sequence[Bucket], inner: torch.optim.Optimizer) -> None:
    if type(inner) not in ELEMENTWISE:
        raise ValueError(
            f"in_backward is set and the optimizer is {type(inner).__name__}, which may count its steps for all "
            f"parameters together. Allowed: {', '.join(kind.__name__ for kind in ELEMENTWISE)}; or in_backward=False."
        )
    for option, wanted, reason in (
        ("gradient_as_bucket_view", True, "a second copy of every gradient would be kept"),
        ("find_unused_parameters", False, "which gradients there are is known only when backward is over"),
        ("static_graph", False, "the first backward reduces at its end"),
    ):
        if bool(getattr(model, option)) != wanted:
            raise ValueError(
                f"in_backward is set and DDP has {option}={not wanted}: {reason}. Wrap the model with "
                f"{option}={wanted}, or use in_backward=False."
            )
    reduced = {id(p) for p in model.module.parameters() if p.requires_grad}
    if any(id(slot.parameter) not in reduced for bucket in buckets for slot in bucket.slots):
        raise ValueError(
            "in_backward is set and the optimizer has parameters that are not in the DDP model, which so are never "
            "updated. Give each model its own optimizer, or use in_backward=False."
        )
