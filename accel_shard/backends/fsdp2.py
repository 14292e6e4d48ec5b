"""FSDP2 (``torch.distributed.fsdp.fully_shard``): every weight a DTensor, sharded by rows; HSDP on a 2-d mesh.

Private upstream names (torch 2.13), used only to read what was prepared: ``FSDPModule._get_fsdp_state()._mp_policy``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accel_shard.backends.base import Backend, Prepared
from accel_shard.backends.fsdp_plugin import launch_keys, plugin_arguments, set_units, trainer_keys
from accel_shard.errors import PolicyError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from accel_shard.layout import Layout

__all__ = ["FSDP2Backend"]


class FSDP2Backend(Backend):
    """Carries out ``shard: gradients`` and ``parameters`` with FSDP2, with replicas as HSDP."""

    distributed_types = ("FSDP",)
    kind = "FSDP2"
    _silenced: torch.nn.Module | None = None

    def launch_config(self) -> dict[str, Any]:
        """Return the keys of an accelerate config file that say this policy."""
        fsdp = launch_keys(self.policy, version=2)
        fsdp["fsdp_reshard_after_forward"] = self.policy.shard == "parameters"
        config: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": fsdp}
        if self.policy.replicas > 1:
            config["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": self.policy.replicas,
                "parallelism_config_dp_shard_size": 2,
            }
        return config

    def accelerator_arguments(self, *, rehearsing: bool) -> dict[str, Any]:
        """Return the arguments of ``accelerate.Accelerator``."""
        from accelerate.utils import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import CPUOffloadPolicy

        arguments = plugin_arguments(self.policy, version=2)
        if self.policy.offload == "parameters":
            # What the launcher sets; by it Accelerate adds gloo to the process group, for norms of host gradients.
            os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_OFFLOAD_PARAMS="true")
            arguments["cpu_offload"] = CPUOffloadPolicy(pin_memory=not rehearsing)
        else:
            arguments["cpu_offload"] = False
        plugin = FullyShardedDataParallelPlugin(
            **arguments,
            reshard_after_forward=self.policy.shard == "parameters",
            mixed_precision_policy=self._mixed_precision(),
            # The accelerator recomputes blocks itself: Accelerate's FSDP2 path does not restore the random state, so
            # dropout draws other masks in the recomputation and the gradients are wrong.
            activation_checkpointing=False,
        )
        return {"fsdp_plugin": plugin, "parallelism_config": self._parallelism()}

    def _mixed_precision(self) -> MixedPrecisionPolicy | None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from accel_shard.precision import DTYPES

        dtypes = self.policy.dtypes
        if dtypes.compute == dtypes.reduce == dtypes.master:
            return None
        compute = None if dtypes.compute == dtypes.master else DTYPES[dtypes.compute]
        # No output dtype: it would hold for every unit, and give the root's own layers fp32 to work on.
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=DTYPES[dtypes.reduce])

    def _parallelism(self) -> ParallelismConfig | None:
        from accelerate.parallelism_config import ParallelismConfig

        if self.policy.replicas == 1:
            return None
        world, replicas = int(os.environ.get("WORLD_SIZE", "1")), self.policy.replicas
        if world % replicas or world == replicas:
            raise PolicyError(
                f"replicas is {replicas} with {world} ranks: hybrid sharding needs a multiple of replicas, at least "
                f"{2 * replicas} ranks. Start that many, or lower replicas."
            )
        launched = os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", str(world // replicas))
        if int(launched) * replicas != world:
            raise PolicyError(
                f"parallelism_config_dp_shard_size is {launched} with {replicas} replicas and {world} ranks. Allowed "
                f"here: {world // replicas}. Edit the launch config, or start {int(launched) * replicas} ranks."
            )
        return ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=world // replicas)

    def training_arguments(self, *, rehearsing: bool, batch_size: int) -> dict[str, Any]:
        """Return the fields of ``TrainingArguments`` that say this policy."""
        keys = trainer_keys(self.policy, version=2)
        keys["reshard_after_forward"] = self.policy.shard == "parameters"
        if self.policy.offload == "parameters":
            os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_OFFLOAD_PARAMS="true")
        return {"fsdp": True, "fsdp_config": keys, "parallelism_config": self._parallelism()}

    def trainer_plugin_arguments(self, *, rehearsing: bool) -> dict[str, Any]:
        """Return what ``TrainingArguments.fsdp_plugin_args`` lacks: four dtypes, unpinned offload."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        arguments: dict[str, Any] = {}
        if self._mixed_precision() is not None:
            arguments["mixed_precision_policy"] = self._mixed_precision()
        if self.policy.offload == "parameters":
            arguments["cpu_offload"] = CPUOffloadPolicy(pin_memory=not rehearsing)
        return arguments

    def before_prepare(self, accelerator: Accelerator, model: torch.nn.Module, batch_size: int | None) -> None:
        """Name the units, and keep Accelerate from making others of embeddings that cannot be units."""
        from accel_shard.wrap import embeddings_can_be_units

        set_units(accelerator, model, self.policy)
        if not embeddings_can_be_units(model, self.policy):
            # Accelerate asks the model for them; without an answer they stay in the unit around them, or the root.
            self._silenced = model
            model.get_input_embeddings = model.get_output_embeddings = lambda: None  # type: ignore[assignment]

    def after_prepare(self, accelerator: Accelerator, model: torch.nn.Module) -> None:
        """Cast at the border of the whole model: outputs in fp32, as Accelerate's autocast gives them under DDP."""
        from accel_shard.precision import cast_at_the_border

        if self._silenced is not None:
            del self._silenced.get_input_embeddings, self._silenced.get_output_embeddings
            self._silenced = None
        if self.policy.dtypes.compute != "fp32":
            cast_at_the_border(model, self.policy.dtypes.compute)

    def inspect(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Prepared:
        """Read from prepared objects what this rank holds."""
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        from accel_shard.precision import dtype_name

        units = [m for m in model.modules() if isinstance(m, FSDPModule)]
        parameters = list(model.parameters())
        sharded = bool(units) and all(isinstance(p, DTensor) for p in parameters)
        trainable = [p for p in parameters if p.requires_grad]
        masters = frozenset(dtype_name(p.dtype) for p in trainable)
        policies = [m._get_fsdp_state()._mp_policy for m in units]
        names = Counter(type(m).__bases__[1].__name__ for m in units)
        return Prepared(
            kind="FSDP2" if sharded else type(model).__name__,
            weights=sum(_local(p).numel() for p in parameters),
            updated=sum(_local(p).numel() for p in trainable),
            compute=frozenset(dtype_name(p.param_dtype) if p.param_dtype else m for p in policies for m in masters),
            master=masters,
            reduce=frozenset(dtype_name(p.reduce_dtype) if p.reduce_dtype else m for p in policies for m in masters),
            units=dict(names),
        )

    def weight_copies(self, world_size: int) -> int:
        """Return how often each weight element exists over all ranks: once a replica."""
        return self.policy.replicas

    def state_copies(self, world_size: int) -> int:
        """Return how often each element's optimizer state exists over all ranks: once a replica."""
        return self.policy.replicas

    def whole_weights(self, accelerator: Accelerator, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight, gathered one at a time by an all-gather over its shards."""
        from torch.distributed.tensor import DTensor

        from accel_shard.names import canonical

        for name, parameter in model.named_parameters():
            value = parameter.detach()
            if isinstance(value, DTensor):
                # Offloaded shards travel over the device's process group.
                moved: Any = value.to(accelerator.device)
                value = moved.full_tensor()
            yield canonical(name), value

    def layout(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Layout:
        """Describe what this rank holds: its part of each DTensor."""
        from accel_shard.backends.parameter_layout import describe
        from accel_shard.layout import Shard

        def shard_of(_: str, tensor: torch.Tensor) -> Shard:
            return Shard.of_dtensor(tensor) if hasattr(tensor, "placements") else Shard.whole(tensor)

        return describe(model, self.torch_optimizer(model, optimizer), shard_of, replicated=False)

    def clip(self, accelerator: Accelerator, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip to the global norm: one all-reduce of a scalar."""
        import torch
        from torch.distributed.tensor import DTensor

        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        whole: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return whole


def _local(parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
