"""FSDP1 (``FullyShardedDataParallel`` with ``use_orig_params``): each rank a range of each flattened unit."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accel_shard.backends.base import Backend, Prepared
from accel_shard.backends.fsdp_plugin import launch_keys, plugin_arguments, set_units, trainer_keys

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision

    from accel_shard.layout import FlatTensor, Layout

__all__ = ["FSDP1Backend"]


class FSDP1Backend(Backend):
    """Carries out ``shard: gradients`` and ``parameters`` with FSDP1, for code that still needs it."""

    distributed_types = ("FSDP",)
    kind = "FSDP1"

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self._shapes: dict[str, torch.Size] = {}
        self._sizes: list[list[int]] = []

    @property
    def _strategy(self) -> str:
        return "FULL_SHARD" if self.policy.shard == "parameters" else "SHARD_GRAD_OP"

    def launch_config(self) -> dict[str, Any]:
        """Return the keys of an accelerate config file that say this policy."""
        fsdp = launch_keys(self.policy, version=1)
        # The launcher always sets a sharding strategy, and it beats fsdp_reshard_after_forward.
        fsdp["fsdp_sharding_strategy"] = self._strategy
        return {"distributed_type": "FSDP", "fsdp_config": fsdp}

    def accelerator_arguments(self, *, rehearsing: bool) -> dict[str, Any]:
        """Return the arguments of ``accelerate.Accelerator``."""
        from accelerate.utils import FullyShardedDataParallelPlugin

        arguments = plugin_arguments(self.policy, version=1)
        if rehearsing:
            # Both need a device in FSDP1; the accelerator itself gives every rank the weights of rank 0.
            arguments |= {"sync_module_states": False, "cpu_ram_efficient_loading": False}
        if "FSDP_BACKWARD_PREFETCH" not in os.environ:
            arguments["backward_prefetch"] = "BACKWARD_PRE"
        plugin = FullyShardedDataParallelPlugin(
            **arguments,
            reshard_after_forward=self._strategy,
            sharding_strategy=self._strategy,
            use_orig_params=True,
            mixed_precision_policy=self._mixed_precision(),
            activation_checkpointing=self.policy.activation_checkpointing,
        )
        return {"fsdp_plugin": plugin}

    def _mixed_precision(self) -> MixedPrecision | None:
        from torch.distributed.fsdp import MixedPrecision

        from accel_shard.precision import DTYPES

        dtypes = self.policy.dtypes
        if dtypes.compute == dtypes.reduce == dtypes.master:
            return None
        compute = None if dtypes.compute == dtypes.master else DTYPES[dtypes.compute]
        return MixedPrecision(param_dtype=compute, reduce_dtype=DTYPES[dtypes.reduce])

    def training_arguments(self, *, rehearsing: bool, batch_size: int) -> dict[str, Any]:
        """Return the fields of ``TrainingArguments`` that say this policy."""
        keys = trainer_keys(self.policy, version=1)
        keys |= {"reshard_after_forward": self._strategy.lower(), "use_orig_params": True}
        keys |= {"backward_prefetch": "backward_pre", "sync_module_states": not rehearsing}
        return {"fsdp": True, "fsdp_config": keys}

    def trainer_plugin_arguments(self, *, rehearsing: bool) -> dict[str, Any]:
        """Return what ``TrainingArguments.fsdp_plugin_args`` lacks: the four dtypes, and the strategy that wins."""
        arguments: dict[str, Any] = {"sharding_strategy": self._strategy}
        if self._mixed_precision() is not None:
            arguments["mixed_precision_policy"] = self._mixed_precision()
        return arguments

    def before_prepare(self, accelerator: Accelerator, model: torch.nn.Module, batch_size: int | None) -> None:
        """Name the units, and remember the shapes that flattening hides."""
        set_units(accelerator, model, self.policy)
        self.remember(model)

    def remember(self, model: torch.nn.Module) -> None:
        """Remember the shapes of a model that is about to be flattened."""
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._sizes = []

    def after_prepare(self, accelerator: Accelerator, model: torch.nn.Module) -> None:
        """Cast at the border of a model that is bf16 throughout; else autocast does it."""
        from accel_shard.precision import cast_at_the_border

        if self.policy.dtypes.master == "bf16":
            cast_at_the_border(model, "bf16")

    def inspect(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Prepared:
        """Read from prepared objects what this rank holds."""
        from accel_shard.precision import dtype_name

        units = _units(model)
        parameters = list(model.parameters())
        trainable = [p for p in parameters if p.requires_grad]
        masters = frozenset(dtype_name(p.dtype) for p in trainable)
        mixed = [unit.mixed_precision for unit in units]
        return Prepared(
            kind="FSDP1" if units and units[0] is getattr(model, "_orig_mod", model) else type(model).__name__,
            weights=sum(p.numel() for p in parameters),
            updated=sum(p.numel() for p in trainable),
            compute=frozenset(dtype_name(p.param_dtype) if p.param_dtype else m for p in mixed for m in masters),
            master=masters,
            reduce=frozenset(dtype_name(p.reduce_dtype) if p.reduce_dtype else m for p in mixed for m in masters),
            units=dict(Counter(_wrapped_class(unit) for unit in units)),
        )

    def weight_copies(self, world_size: int) -> int:
        """Return how often each weight element exists over all ranks: once."""
        return 1

    def state_copies(self, world_size: int) -> int:
        """Return how often each element's optimizer state exists over all ranks: once."""
        return 1

    def _range_sizes(self, accelerator: Accelerator, model: torch.nn.Module) -> list[list[int]]:
        """Return, rank by rank, how many elements of each parameter it holds: one all-gather, the first time."""
        import torch
        import torch.distributed as dist

        assert self._shapes, "the model was not prepared by this backend"
        if self._sizes:
            return self._sizes
        group = _units(model)[0].process_group
        own = torch.tensor([p.numel() for p in model.parameters()], device=accelerator.device)
        sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, own, group=group)
        self._sizes = torch.stack(sizes).tolist()
        return self._sizes

    def whole_weights(self, accelerator: Accelerator, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight; each is put together by one all-gather of its ranges."""
        import torch
        import torch.distributed as dist

        from accel_shard.names import canonical

        group = _units(model)[0].process_group
        pieces = [(canonical(name), p.detach().reshape(-1)) for name, p in model.named_parameters()]
        table = self._range_sizes(accelerator, model)
        for index, (name, piece) in enumerate(pieces):
            counts = [row[index] for row in table]
            # Collectives want equal sizes; ranges of one parameter differ from rank to rank.
            padded = torch.nn.functional.pad(piece, (0, max(counts) - piece.numel()))
            gathered = [torch.empty_like(padded) for _ in counts]
            dist.all_gather(gathered, padded, group=group)
            whole = torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
            yield name, whole.view(self._shapes[name])

    def _starts(self, accelerator: Accelerator, model: torch.nn.Module) -> dict[str, int]:
        """Return where this rank's range of each parameter starts: one all-gather."""
        import torch.distributed as dist

        from accel_shard.names import canonical

        table, rank = self._range_sizes(accelerator, model), dist.get_rank(_units(model)[0].process_group)
        names = [canonical(name) for name, _ in model.named_parameters()]
        return {name: sum(row[index] for row in table[:rank]) for index, name in enumerate(names)}

    def flat_tensors(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> list[FlatTensor] | None:
        """Describe the tensors in an optimizer's groups: each is a range of one parameter."""
        from accel_shard.backends.parameter_layout import name_parameters
        from accel_shard.layout import FlatTensor, Held

        starts = self._starts(accelerator, model)
        names = {id(p): name for name, p in name_parameters(model)[0].items()}
        return [
            FlatTensor(p, index, (Held(p, tuple(self._shapes[n]), starts[n], 0, p.numel()),))
            for index, group in enumerate(self.torch_optimizer(model, optimizer).param_groups)
            for p in group["params"]
            for n in (names[id(p)],)
        ]

    def layout(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Layout:
        """Describe what this rank holds: a range of each flattened parameter."""
        from accel_shard.backends.parameter_layout import describe
        from accel_shard.layout import Shard

        starts = self._starts(accelerator, model)

        def shard_of(name: str, tensor: torch.Tensor) -> Shard:
            return Shard.flat_range(self._shapes[name], starts[name], tensor.detach().reshape(-1))

        return describe(model, self.torch_optimizer(model, optimizer), shard_of, replicated=False)

    def clip(self, accelerator: Accelerator, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip to the global norm: one all-reduce of a scalar."""
        norm: torch.Tensor = _units(model)[0].clip_grad_norm_(max_norm)
        return norm


def _units(model: torch.nn.Module) -> list[FSDP]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.fsdp_modules(model)


def _wrapped_class(unit: FSDP) -> str:
    inner = unit.module
    return type(getattr(inner, "_checkpoint_wrapped_module", inner)).__name__
