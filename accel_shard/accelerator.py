"""``PolicyAccelerator``: an ``accelerate.Accelerator`` that does what a policy says, and checks that it did."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
)

from accel_shard import rehearsal
from accel_shard.backends import backend_for
from accel_shard.backends.base import Backend, Prepared
from accel_shard.environment import refuse_other_launch
from accel_shard.errors import PolicyError
from accel_shard.layout import ShardsState
from accel_shard.optim.under_policy import (
    adopt,
    attach,
    clip_shares,
    is_asked_for,
    let_ask,
    refuse_sharded,
    sends_to_owners,
)
from accel_shard.policy import ShardingPolicy
from accel_shard.precision import cast_masters
from accel_shard.recompute import checkpoint_blocks
from accel_shard.same_start import start_from_rank_zero
from accel_shard.verify import expect, verify_connection, verify_prepared

__all__ = ["PolicyAccelerator"]

logger = get_logger(__name__)

_SAID_BY_THE_POLICY: Final = {
    "mixed_precision": "precision",
    "fsdp_plugin": "backend",
    "deepspeed_plugin": "backend",
    "deepspeed_plugins": "backend",
    "megatron_lm_plugin": "backend",
    "torch_tp_plugin": "tensor_parallel",
    "parallelism_config": "replicas",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_accumulation_plugin": "gradient_accumulation_steps",
    "dynamo_backend": "compile",
    "dynamo_plugin": "compile",
    "cpu": "backend",
}


class PolicyAccelerator(Accelerator):  # type: ignore[misc]  # accelerate ships no types
    """An ``Accelerator`` built from a :class:`~accel_shard.ShardingPolicy`. Get one with ``policy.accelerator()``.

    Every rank must build it, before its model. Beyond ``Accelerator`` it

    * gives every trainable weight the policy's master dtype, and under FSDP rank 0's values, before ``prepare``;
    * counts schedulers in optimizer steps on any number of ranks (``Accelerator`` steps them once per rank);
    * clips to the policy's norm at each step, whether or not the loop calls :meth:`clip_grad_norm_`;
    * compares what came out of ``prepare`` with the policy (:attr:`prepared`).

    Args:
        policy: what to do.
        sync_with_dataloader: close an accumulation window when the loader ends, as ``Accelerator`` does. Say False if
            the loop fetches the micro-batches of a step ahead, and so meets the end of the loader too early.
        **arguments: what ``Accelerator`` takes and a policy does not say: ``log_with``, ``project_dir``,
            ``dataloader_config``, ``kwargs_handlers`` and so on.

    Raises:
        PolicyError: if an argument or the launcher says otherwise what the policy says, or there is no launcher.
        UnsupportedPolicyError: if this machine cannot carry the policy out.
        PolicyNotAppliedError: if Accelerate did something else.
    """

    policy: ShardingPolicy
    prepared: Prepared | None
    """What this rank holds, after a model was prepared."""
    config_changes: dict[str, Any]
    """Entries of the model's config that training needed otherwise, with the values that an exported model gets."""
    before_end: list[Callable[[], None]]
    """Called by :meth:`end_training` first: a save in flight waits for its end, since it needs all ranks."""

    def __init__(self, policy: ShardingPolicy, *, sync_with_dataloader: bool = True, **arguments: Any) -> None:
        for name in arguments.keys() & _SAID_BY_THE_POLICY.keys():
            field = _SAID_BY_THE_POLICY[name]
            raise PolicyError(f"{name}={arguments[name]!r} is said by the policy's field {field!r}. Say it there.")
        if policy.backend != "ddp" and "LOCAL_RANK" not in os.environ:
            raise PolicyError(
                f"backend {policy.backend!r} shards over ranks, and this process was started alone. Start it with "
                "`accelerate launch --num_processes N ...` or `torchrun --nproc-per-node N ...`."
            )
        refuse_other_launch(policy)
        self.policy, self.prepared, self.config_changes = policy, None, {}
        self.backend: Backend = backend_for(policy)
        self._trained: list[torch.nn.Module] = []
        self._clipped = self._loader_seen = False
        self.before_end: list[Callable[[], None]] = []
        self._loaders_given: list[tuple[Any, Any]] = []
        rehearsing = rehearsal.is_needed()
        given = list(arguments.pop("kwargs_handlers", None) or [])
        if rehearsing:
            rehearsal.enter(policy, _timeout(given))
        settled = self.backend.accelerator_arguments(rehearsing=rehearsing)
        handlers = _merge_handlers(settled.pop("kwargs_handlers", []), given)
        dtypes = policy.dtypes
        super().__init__(
            mixed_precision="no" if dtypes.compute in ("fp32", dtypes.master) else dtypes.compute,
            # As an argument of its own, the number would lose against the launcher's variable.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=policy.gradient_accumulation_steps,
                sync_with_dataloader=sync_with_dataloader,
                # FSDP without a reduce-scatter per micro-batch would accumulate whole gradients: not what was asked.
                sync_each_batch=policy.backend in ("fsdp", "fsdp1"),
            ),
            dynamo_backend="inductor" if policy.compile else "no",
            kwargs_handlers=handlers,
            **settled,
            **arguments,
        )
        if "fsdp_plugin" in settled:
            # Accelerate's state is one for the process: a second accelerator would get the first one's plugin.
            self.state.fsdp_plugin = settled["fsdp_plugin"]
        verify_connection(self, policy)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers together, as ``Accelerator.prepare``, and verify.

        Every rank must call it with the same objects. The first loader ever prepared is taken for the training loader.

        Raises:
            PolicyError: for a wrap class the model does not have, or a loader against ``global_batch_size``.
            PolicyNotAppliedError: if the result is not what the policy says.
        """
        for thing in args:  # here too: DeepSpeed's are not prepared one by one
            refuse_sharded(thing, self.policy)
        models = [
            a for a in args if isinstance(a, torch.nn.Module) and not getattr(a, "_is_accelerate_prepared", False)
        ]
        batch_size = self._batch_size(args)
        expected = [expect(model, self.policy) for model in models]
        for model in models:
            self._before(model, batch_size)
        result = super().prepare(*args, device_placement=device_placement)
        outcome = result if len(args) > 1 else (result,)
        for scheduler in self._schedulers:
            if isinstance(scheduler, AcceleratedScheduler):
                self._follow_sharded(scheduler)
                # Its name for "one step is one optimizer step"; false steps once for each rank.
                scheduler.split_batches = True
        optimizers = [o for o in outcome if isinstance(o, torch.optim.Optimizer)]
        prepared = [new for old, new in zip(args, outcome, strict=True) if any(old is model for model in models)]
        for model, counts in zip(prepared, expected, strict=True):
            optimizer = optimizers[0] if len(optimizers) == len(prepared) == 1 else None
            self.prepared = verify_prepared(self, self.policy, model, optimizer, counts, backend=self.backend)
            self._trained.append(model)
            self.backend.after_prepare(self, model)
            logger.info("prepared [%s]: %s", self.policy.to_line(), self.prepared, main_process_only=True)
        for optimizer in optimizers:
            trained = self._trained[-1] if self._trained else None
            if trained is not None:
                asked = partial(self.backend.flat_tensors, self, trained, optimizer)
                let_ask(self.backend.torch_optimizer(trained, optimizer), asked)
            attach(getattr(optimizer, "optimizer", None), trained, self.policy)
            self._clip_at_step(optimizer)
        return result

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer, as ``Accelerator.prepare_optimizer``; with ``shard: optimizer`` on DDP, shard it.

        Raises:
            PolicyError: for a ``ShardedOptimizer`` under a policy that shards otherwise.
            ValueError: for an optimizer that cannot be sharded.
        """
        refuse_sharded(optimizer, self.policy)
        done = isinstance(optimizer, ShardsState) or getattr(optimizer, "_is_accelerate_prepared", False)
        if done or not is_asked_for(self.policy):
            return super().prepare_optimizer(optimizer, device_placement)
        return super().prepare_optimizer(adopt(optimizer, self.policy), device_placement)

    def _follow_sharded(self, scheduler: AcceleratedScheduler) -> None:
        """Let a scheduler know the optimizer that took its optimizer's place: it waits for that one's steps."""
        for prepared in self._optimizers:
            given = getattr(prepared.optimizer, "stands_for", None)
            if given is not None and getattr(scheduler.scheduler, "optimizer", None) is given:
                scheduler.optimizers = [prepared]

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Save as ``Accelerator.save_state``; refused where it would save a part only.

        Raises:
            PolicyError: with ``shard: optimizer`` on DDP, where it keeps rank 0's share of the optimizer state.
        """
        if is_asked_for(self.policy):
            raise PolicyError(
                "Accelerate's save_state keeps rank 0's share of an optimizer state that is shared out. Use "
                "accel_shard.Checkpointer."
            )
        saved: str = super().save_state(*args, **kwargs)
        return saved

    def _before(self, model: torch.nn.Module, batch_size: int | None) -> None:
        """Change a model in place into one that the backend can prepare."""
        cast_masters(model, self.policy)
        if self.policy.backend != "ddp":
            start_from_rank_zero(self, model)
        self.backend.before_prepare(self, model, batch_size)
        if self.policy.activation_checkpointing and self.policy.backend != "fsdp1":
            checkpoint_blocks(model, self.policy)
        config: Any = getattr(model, "config", None)
        if self.policy.activation_checkpointing and getattr(config, "use_cache", False):
            # A cache filled twice changes the shapes of the recomputation. An exported model gets it back.
            config.use_cache = False
            self.config_changes["use_cache"] = True

    def _batch_size(self, args: tuple[Any, ...]) -> int | None:
        """Return samples per rank and micro-batch: by the first loader, else by the policy, else unknown."""
        policy, ranks = self.policy, self.num_processes
        whole = ranks * policy.gradient_accumulation_steps
        loader = next((a for a in args if isinstance(a, torch.utils.data.DataLoader)), None)
        first, self._loader_seen = not self._loader_seen, self._loader_seen or loader is not None
        size = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", None
        )
        if loader is not None and size is not None and self.split_batches:
            size //= ranks
        total = policy.global_batch_size
        if total is not None and size is not None and size * whole != total and first:
            fits = f"{total // whole}" if total % whole == 0 else "none, as it does not divide"
            raise PolicyError(
                f"global_batch_size is {total}, but {size} samples a micro-batch x {ranks} ranks x "
                f"{policy.gradient_accumulation_steps} accumulation steps = {size * whole}. What fits: {fits}."
            )
        return size if size is not None or total is None else max(1, total // whole)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader, as ``Accelerator.prepare_data_loader``."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if prepared is not data_loader:
            self._loaders_given.append((prepared, data_loader))
        return prepared

    def loader_given(self, loader: Any) -> Any:
        """Return the loader that a prepared one was made from: some of them hold this rank's part of the data only."""
        return next((given for prepared, given in self._loaders_given if prepared is loader), loader)

    @property
    def trained(self) -> tuple[torch.nn.Module, Any]:
        """The prepared model and its prepared optimizer, if there is one.

        Raises:
            PolicyError: unless exactly one model, and at most one optimizer, were prepared.
        """
        if len(self._trained) != 1 or len(self._optimizers) > 1:
            raise PolicyError(
                f"{len(self._trained)} models and {len(self._optimizers)} optimizers were prepared; one each is needed."
            )
        return self._trained[0], self._optimizers[0] if self._optimizers else None

    def whole_weights(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(fully qualified name, whole master weight)``, one parameter at a time, tied weights once.

        Every rank must iterate to the end; sharded weights are gathered one by one and freed as the loop goes on.
        """
        return self.backend.whole_weights(self, model)

    # ---- clipping --------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Any, max_norm: float | None = None, norm_type: float = 2.0) -> torch.Tensor:
        """Clip to the policy's norm, and return the global norm as a plain tensor on every backend.

        Every rank must call it, when ``sync_gradients`` is true. It sums one number over the ranks that share
        gradients. Under DeepSpeed ``backward`` has clipped and stepped already; the norm is the engine's, which in ZeRO
        stage 0 keeps none (nan).

        Args:
            parameters: the model's parameters.
            max_norm: None for the policy's ``gradient_clipping`` (and no clipping if that is off).
            norm_type: as in torch; DeepSpeed has 2 only.

        Raises:
            PolicyError: if ``max_norm`` contradicts the policy, or DeepSpeed could not honour it.
        """
        settled = self.policy.gradient_clipping
        on_engine = self.policy.backend == "deepspeed"
        if max_norm is not None and max_norm != settled and (settled is not None or on_engine):
            raise PolicyError(
                f"max_norm is {max_norm!r} here and gradient_clipping is {settled!r} in the policy"
                + (", which is all that DeepSpeed reads" if on_engine else "")
                + ". Say it in one place: the policy."
            )
        if on_engine and norm_type != 2.0:
            raise PolicyError(f"norm_type is {norm_type!r}; DeepSpeed clips by the 2-norm only.")
        if on_engine:
            engines = super().clip_grad_norm_(parameters, settled)
            return torch.tensor(math.nan if engines is None else float(engines))
        limit = max_norm if max_norm is not None else settled
        limit = math.inf if limit is None else limit
        owner = next((o.optimizer for o in self._optimizers if sends_to_owners(o.optimizer)), None)
        if owner is not None:
            norm: Any = clip_shares(owner, parameters, limit, norm_type)
        elif self.policy.backend == "fsdp1" and self._trained:
            norm = self._clip_flattened(list(parameters), limit, norm_type)
        else:
            norm = super().clip_grad_norm_(parameters, limit, norm_type)
        self._clipped = True
        whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def _clip_flattened(self, parameters: list[Any], limit: float, norm_type: float) -> torch.Tensor:
        """Clip under FSDP1, where a rank's parameters are ranges, and only the whole model knows the global norm."""
        given = {id(p) for p in parameters}
        model, _ = self.trained
        missing = sum(p.requires_grad and id(p) not in given for p in model.parameters())
        if missing or norm_type != 2.0:
            raise PolicyError(
                f"under FSDP1 only the 2-norm of all trainable parameters can be clipped; {missing} of them are "
                f"left out here and norm_type is {norm_type!r}. Use backend 'fsdp'."
            )
        self.unscale_gradients()
        return self.backend.clip(self, model, limit)

    def _clip_at_step(self, optimizer: Any) -> None:
        """Clip before each step that the loop did not clip for, so that the policy's field always holds."""
        limit = self.policy.gradient_clipping
        if limit is None or self.policy.backend == "deepspeed":
            return

        def before_step(inner: torch.optim.Optimizer, *_: Any) -> None:
            mine = {id(p) for group in inner.param_groups for p in group["params"]}
            for model in self._trained:
                if not self._clipped and any(id(p) in mine for p in model.parameters()):
                    if sends_to_owners(inner):
                        clip_shares(inner, model.parameters(), limit, 2.0)
                    else:
                        self.backend.clip(self, model, limit)
            self._clipped = False

        optimizer.optimizer.register_step_pre_hook(before_step)

    def end_training(self) -> None:
        """End trackers and leave the process group, as ``Accelerator.end_training``."""
        for finish in self.before_end:
            finish()
        super().end_training()

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load what ``save_state`` saved, as ``Accelerator.load_state``; refused where Accelerate loses state.

        Raises:
            PolicyError: under FSDP1, where a fresh process silently gets no optimizer state.
        """
        if self.policy.backend == "fsdp1":
            raise PolicyError(
                "Accelerate's load_state restores no optimizer state under FSDP1, without a word. Use "
                "accel_shard.Checkpointer, or backend 'fsdp'."
            )
        super().load_state(*args, **kwargs)


def _timeout(handlers: list[KwargsHandler]) -> Any:
    found = [h for h in handlers if isinstance(h, InitProcessGroupKwargs)]
    return found[0].timeout if found else None


def _merge_handlers(settled: list[KwargsHandler], given: list[KwargsHandler]) -> list[KwargsHandler]:
    """Join the backend's handlers with the caller's; of one class, the backend's settings complete the caller's."""
    merged = {type(handler): handler for handler in settled}
    for handler in given:
        own = merged.get(type(handler))
        if isinstance(own, DistributedDataParallelKwargs) and isinstance(handler, DistributedDataParallelKwargs):
            if handler.comm_hook != DDPCommunicationHookType.NO:
                raise PolicyError("a DDP comm_hook is said by the policy's field 'gradient_compression'. Say it there.")
            handler = dataclasses.replace(handler, comm_hook=own.comm_hook)
        if isinstance(own, InitProcessGroupKwargs) and isinstance(handler, InitProcessGroupKwargs):
            handler = dataclasses.replace(handler, backend=own.backend)
        merged[type(handler)] = handler
    return list(merged.values())
