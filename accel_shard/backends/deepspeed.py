"""DeepSpeed ZeRO: flat partitions of optimizer state (stage 1), gradients (2) and parameters (3).

Everything that Accelerate and DeepSpeed would fill in by themselves is said here, because what they fill in is not
what was asked for: an unset clipping becomes 1.0, a client optimizer under offload becomes DeepSpeedCPUAdam, and an
untested optimizer is refused.

Private upstream names (deepspeed 0.19.8), used only to read what was prepared; :func:`probe` says which has gone:
``single_partition_of_fp32_groups``, ``groups_padding`` (stages 1 and 2), ``ds_tensor``, ``ds_numel``,
``ds_process_group`` (stage 3).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from accel_shard.backends.base import Backend, Prepared

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from accel_shard.backends.parameter_layout import StateShape
    from accel_shard.layout import FlatTensor, Layout

__all__ = ["DeepSpeedBackend"]

# Smaller parameters stay gathered on every rank in stage 3. DeepSpeed's 1e5 would leave a small model unsharded.
_PERSISTENCE_THRESHOLD: Final = 10_000
# Elements of the buffer in which gradients are put together for a reduction, allocated whole: DeepSpeed's 5e8 is 2 GB
# in fp32. A fiftieth of a small model keeps the buffer out of the memory that the policy promises.
_REDUCE_BUCKET: Final = 50_000_000
_BUCKETS: Final = 50
_COUNTERS: Final = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class DeepSpeedBackend(Backend):
    """Carries out any ``shard`` on DeepSpeed, as ZeRO stage 0 to 3."""

    distributed_types = ("DEEPSPEED",)
    _bucket_given = False
    _reached: set[int] | None = None

    @property
    def kind(self) -> str:  # type: ignore[override]
        """What :class:`Prepared` must say."""
        return f"ZeRO stage {self.policy.zero_stage}"

    def launch_config(self) -> dict[str, Any]:
        """Return the keys of an accelerate config file that say this policy."""
        keys: dict[str, Any] = {"zero_stage": self.policy.zero_stage}
        keys["offload_optimizer_device"] = "none" if self.policy.offload == "none" else "cpu"
        if self.policy.shard == "parameters":
            keys["offload_param_device"] = "cpu" if self.policy.offload == "parameters" else "none"
            keys["zero3_init_flag"] = True
            keys["zero3_save_16bit_model"] = True
        if self.policy.gradient_clipping is not None:
            keys["gradient_clipping"] = self.policy.gradient_clipping
        if self.policy.gradient_accumulation_steps > 1:
            keys["gradient_accumulation_steps"] = self.policy.gradient_accumulation_steps
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": keys}

    def config(self, *, rehearsing: bool, batch_size: int | None) -> dict[str, Any]:
        """Return the whole DeepSpeed JSON; ``batch_size`` None leaves the two batch sizes to :meth:`before_prepare`."""
        from accel_shard.environment import deepspeed_file

        policy, dtypes = self.policy, self.policy.dtypes
        settled = {
            "gradient_accumulation_steps": policy.gradient_accumulation_steps,
            "gradient_clipping": policy.gradient_clipping or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "communication_data_type": dtypes.reduce,
            "bf16": self._bf16(),
            "fp16": {"enabled": dtypes.compute == "fp16"},
            "zero_optimization": self._zero(rehearsing),
        }
        # What the policy says was read from this file; the file may say more, as bucket sizes.
        given = deepspeed_file(os.environ)
        self._bucket_given = given.get("zero_optimization", {}).get("reduce_bucket_size", "auto") != "auto"
        config = _merged(settled, given)
        return config | _batch_sizes(batch_size, policy.gradient_accumulation_steps)

    def _bf16(self) -> dict[str, bool]:
        section = {"enabled": self.policy.dtypes.compute == "bf16"}
        if self.policy.dtypes.master == "bf16":
            section |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        return section

    def _zero(self, rehearsing: bool) -> dict[str, Any]:
        policy = self.policy
        section: dict[str, Any] = {"stage": policy.zero_stage, "round_robin_gradients": False}
        section["reduce_bucket_size"] = _REDUCE_BUCKET
        device: dict[str, Any] = {"device": "nvme" if policy.offload_path else "cpu", "pin_memory": not rehearsing}
        if policy.offload_path:
            device["nvme_path"] = policy.offload_path
        if policy.offload != "none":
            section["offload_optimizer"] = dict(device)
        if policy.offload == "parameters":
            section["offload_param"] = dict(device)
        if policy.shard == "parameters":
            section["stage3_param_persistence_threshold"] = _PERSISTENCE_THRESHOLD
            section["stage3_gather_16bit_weights_on_model_save"] = True
        return section

    def accelerator_arguments(self, *, rehearsing: bool) -> dict[str, Any]:
        """Return the arguments of ``accelerate.Accelerator``."""
        from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

        from accel_shard.environment import launcher_fields_set_aside
        from accel_shard.rehearsal import deepspeed_group_arguments

        with launcher_fields_set_aside():
            plugin = DeepSpeedPlugin(
                hf_ds_config=self.config(rehearsing=rehearsing, batch_size=None),
                zero3_init_flag=self.policy.shard == "parameters"
                and os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true").lower() == "true",
            )
        handlers = [InitProcessGroupKwargs(**deepspeed_group_arguments())] if rehearsing else []
        return {"deepspeed_plugin": plugin, "kwargs_handlers": handlers}

    def training_arguments(self, *, rehearsing: bool, batch_size: int) -> dict[str, Any]:
        """Return the fields of ``TrainingArguments`` that say this policy."""
        fields: dict[str, Any] = {"deepspeed": self.config(rehearsing=rehearsing, batch_size=batch_size)}
        if rehearsing:
            fields["accelerator_config"] = {"use_configured_state": True}
        return fields

    def before_prepare(self, accelerator: Accelerator, model: torch.nn.Module, batch_size: int | None) -> None:
        """Settle the batch sizes: DeepSpeed computes throughput from them and checks their product, nothing else."""
        config = accelerator.deepspeed_plugin.deepspeed_config
        config.update(_batch_sizes(batch_size or 1, self.policy.gradient_accumulation_steps))
        zero = config["zero_optimization"]
        if not self._bucket_given:
            elements = sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters() if p.requires_grad)
            zero["reduce_bucket_size"] = max(1, min(_REDUCE_BUCKET, elements // _BUCKETS))

    def after_prepare(self, accelerator: Accelerator, model: torch.nn.Module) -> None:
        """Cast floating inputs to the compute dtype and outputs to fp32, as DDP's autocast and FSDP do."""
        from accel_shard.precision import cast_at_the_border

        if self.policy.dtypes.compute != "fp32":
            inner: Any = model
            cast_at_the_border(inner.module, self.policy.dtypes.compute)
        from accel_shard.backends.zero_layout import watch
        from accel_shard.layout import NeedsLayout

        engine: Any = model
        if self.policy.zero_stage and isinstance(engine.basic_optimizer, NeedsLayout):
            self._reached = watch(engine)

    def inspect(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Prepared:
        """Read from prepared objects what this rank holds."""
        from accel_shard.precision import dtype_name

        engine: Any = model
        if not hasattr(engine, "zero_optimization_stage"):
            return Prepared(
                kind=type(model).__name__, weights=0, updated=0, compute=frozenset(), master=frozenset(),
                reduce=frozenset(), units={},
            )  # fmt: skip
        stage = engine.zero_optimization_stage()
        parameters = list(engine.module.parameters())
        trainable = [p for p in parameters if p.requires_grad]
        inner = engine.optimizer
        held = _partition if stage == 3 else _numel
        masters = _masters(engine, stage) or trainable
        updated = sum(held(p) for p in trainable)
        if stage in (1, 2) and inner is not None:
            updated = sum(t.numel() for t in inner.single_partition_of_fp32_groups) - _padding(engine)
        return Prepared(
            kind=f"ZeRO stage {stage}",
            weights=sum(held(p) for p in parameters),
            updated=updated,
            compute=frozenset(dtype_name(p.dtype) for p in trainable),
            master=frozenset(dtype_name(t.dtype) for t in masters),
            reduce=frozenset({dtype_name(engine.communication_data_type)}),
            units={},
        )

    def weight_copies(self, world_size: int) -> int:
        """Return how often each weight element exists over all ranks."""
        return 1 if self.policy.shard == "parameters" else world_size

    def state_copies(self, world_size: int) -> int:
        """Return how often each element's optimizer state exists over all ranks."""
        return world_size if self.policy.shard == "none" else 1

    def whole_weights(self, accelerator: Accelerator, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight; in stage 3, and where masters are kept apart, gathered one at a time."""
        import deepspeed
        import torch
        from deepspeed.utils import safe_get_full_fp32_param

        engine: Any = model
        from accel_shard.names import canonical

        if self.policy.shard == "parameters":
            # A fetch that was begun for the next step would meet the gathers below.
            engine.empty_partition_cache()
        apart = self.policy.dtypes.master != self.policy.dtypes.compute
        for name, parameter in engine.module.named_parameters():
            if apart and parameter.requires_grad:
                yield canonical(name), safe_get_full_fp32_param(parameter).detach()
            elif self.policy.shard == "parameters":
                # DeepSpeed fills views that want gradients off; the yield must not turn them off for the caller.
                with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter]):
                    whole = parameter.detach().clone()
                yield canonical(name), whole
            else:
                yield canonical(name), parameter.detach()

    def layout(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Layout:
        """Describe what this rank holds: ranges of flattened masters; in stage 0, all of it."""
        from accel_shard.backends.parameter_layout import describe
        from accel_shard.backends.zero_layout import describe_zero
        from accel_shard.layout import Shard

        if self.policy.zero_stage:
            return describe_zero(model)
        named, client = self.named_module(accelerator, model), self.torch_optimizer(model, optimizer)
        return describe(named, client, lambda _, tensor: Shard.whole(tensor), replicated=True)

    def flat_tensors(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> list[FlatTensor] | None:
        """Describe the tensors that the client optimizer is stepped with: flat partitions, but for stage 0."""
        from accel_shard.backends.zero_layout import flat_tensors

        return flat_tensors(model, self._reached) if self.policy.zero_stage else None

    def named_module(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model inside the engine."""
        engine: Any = model
        inner: torch.nn.Module = engine.module
        return inner

    def materialize(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: Any,
        shapes: Mapping[str, Mapping[str, StateShape]],
        scalars: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Give the client optimizer state for its flat partitions, or for the parameters in stage 0."""
        from accel_shard.backends.zero_layout import materialize_zero

        if self.policy.zero_stage:
            materialize_zero(model, shapes, scalars)
        else:
            super().materialize(accelerator, model, optimizer, shapes, scalars)

    def after_load(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> None:
        """Copy filled masters into the weights that forward uses, by an all-gather."""
        from accel_shard.backends.zero_layout import refresh_zero

        if self.policy.zero_stage:
            refresh_zero(model)

    def counters(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the engine's counts of steps and samples."""
        return {name: int(getattr(model, name)) for name in _COUNTERS}

    def set_counters(self, model: torch.nn.Module, counters: Mapping[str, Any]) -> None:
        """Set the engine's counts; a snapshot of another backend has none, and they decide nothing."""
        for name in _COUNTERS:
            if name in counters:
                setattr(model, name, counters[name])

    def torch_optimizer(self, model: torch.nn.Module, optimizer: Any) -> Any:
        """Return the client optimizer inside the engine."""
        engine: Any = model
        return None if optimizer is None else engine.basic_optimizer

    def clip(self, accelerator: Accelerator, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Never called: the engine clips inside ``backward``, by the value in its config."""
        raise AssertionError("DeepSpeed clips in its own step")


def _batch_sizes(batch_size: int | None, accumulation: int) -> dict[str, Any]:
    if batch_size is None:
        return {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return {"train_batch_size": batch_size * accumulation * world, "train_micro_batch_size_per_gpu": batch_size}


def _merged(settled: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Complete a settled config with a user's own; an ``auto`` of his is what we settled, if we did."""
    merged = dict(settled)
    for key, value in given.items():
        own = settled.get(key)
        if isinstance(own, dict) and isinstance(value, dict):
            merged[key] = _merged(own, value)
        elif value != "auto" or own is None:
            merged[key] = value
    return merged


def _numel(parameter: Any) -> int:
    return int(parameter.numel())


def _partition(parameter: Any) -> int:
    """Count this rank's elements of a stage 3 parameter: equal partitions, the last one padded."""
    import torch.distributed as dist

    size = parameter.ds_tensor.ds_numel
    start = size * dist.get_rank(parameter.ds_process_group)
    return int(max(0, min(size, parameter.ds_numel - start)))


def _masters(engine: Any, stage: int) -> list[torch.Tensor]:
    if engine.optimizer is None or stage == 0:
        return []
    name = "single_partition_of_fp32_groups" if stage < 3 else "fp32_partitioned_groups_flat"
    return list(getattr(engine.optimizer, name))


def _padding(engine: Any) -> int:
    """Count the elements that fill up the last rank's partition in stages 1 and 2."""
    import torch.distributed as dist

    groups = engine.optimizer.real_dp_process_group
    padding = engine.optimizer.groups_padding
    last = [dist.get_rank(g) == dist.get_world_size(g) - 1 for g in groups]
    return int(sum(p for p, is_last in zip(padding, last, strict=True) if is_last))
