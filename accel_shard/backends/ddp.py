"""DDP: every rank holds everything; gradients are averaged by all-reduce, overlapped with backward.

With ``shard: optimizer`` each rank holds a share of the optimizer's state, in an optimizer that shares it out itself
(:class:`~accel_shard.layout.ShardsState`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accel_shard.backends.base import Backend, Prepared

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from accel_shard.backends.ddp_buckets import GradientOrder
    from accel_shard.layout import Layout

__all__ = ["DDPBackend"]


class DDPBackend(Backend):
    """Carries out policies with ``shard: none`` and ``optimizer`` on ``torch.nn.parallel.DistributedDataParallel``."""

    distributed_types = ("MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "NO")
    kind = "DDP"
    _order: GradientOrder | None = None

    def launch_config(self) -> dict[str, Any]:
        """Return the keys of an accelerate config file that say this policy."""
        return {"distributed_type": "MULTI_GPU"}

    def accelerator_arguments(self, *, rehearsing: bool) -> dict[str, Any]:
        """Return the arguments of ``accelerate.Accelerator``."""
        from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

        hook = {
            "none": DDPCommunicationHookType.NO,
            "fp16": DDPCommunicationHookType.FP16,
            "bf16": DDPCommunicationHookType.BF16,
            "powersgd": DDPCommunicationHookType.POWER_SGD,
        }[self.policy.gradient_compression]
        # A bucket view saves one copy of the gradients; PowerSGD is the hook that documents it as unsafe.
        handler = DistributedDataParallelKwargs(
            comm_hook=hook, gradient_as_bucket_view=self.policy.gradient_compression != "powersgd"
        )
        return {"cpu": rehearsing, "kwargs_handlers": [handler]}

    def training_arguments(self, *, rehearsing: bool, batch_size: int) -> dict[str, Any]:
        """Return the fields of ``TrainingArguments``: DDP needs none of its own."""
        if self.policy.gradient_compression != "none":
            from accel_shard.errors import UnsupportedPolicyError

            raise UnsupportedPolicyError(
                f"gradient_compression {self.policy.gradient_compression!r} has no TrainingArguments field. "
                "Use gradient_compression 'none', or a loop with policy.accelerator()."
            )
        return {}

    def after_prepare(self, accelerator: Accelerator, model: torch.nn.Module) -> None:
        """Cast at the border of a model that is bf16 throughout; else autocast does it."""
        from accel_shard.precision import cast_at_the_border

        if self.policy.dtypes.master == "bf16":
            cast_at_the_border(model, "bf16")
        from torch.nn.parallel import DistributedDataParallel

        from accel_shard.backends.ddp_buckets import GradientOrder

        inner = getattr(model, "_orig_mod", model)
        # Two ranks add up to the same in any order. PowerSGD would count a backward of zeros as one of its own.
        matters = accelerator.num_processes > 2 and self.policy.gradient_compression != "powersgd"
        if matters and isinstance(inner, DistributedDataParallel):
            self._order = GradientOrder(inner)

    def counters(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the order in which gradients come, which decides how they are summed."""
        return {"gradient_order": self._order.names} if self._order is not None else {}

    def set_counters(self, model: torch.nn.Module, counters: Mapping[str, Any]) -> None:
        """Form the buckets that the run had; a snapshot of another backend has no such order."""
        if self._order is not None:
            self._order.play(counters.get("gradient_order", ()))

    def inspect(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Prepared:
        """Read from prepared objects what this rank holds."""
        from torch.nn.parallel import DistributedDataParallel

        from accel_shard.layout import ShardsState
        from accel_shard.precision import dtype_name

        inner = getattr(model, "_orig_mod", model)
        client = self.torch_optimizer(model, optimizer)
        _refuse_unlike(client, self.policy.shard)
        alone = accelerator.num_processes == 1
        trainable = [p for p in model.parameters() if p.requires_grad]
        masters = frozenset(dtype_name(p.dtype) for p in trainable)
        autocast = accelerator.mixed_precision if accelerator.native_amp else "no"
        return Prepared(
            # One process is what DDP of one rank is; a model without trainable weights has no gradients to average.
            kind="DDP"
            if isinstance(inner, DistributedDataParallel) or alone or not trainable
            else type(inner).__name__,
            weights=sum(p.numel() for p in model.parameters()),
            updated=self._updated(accelerator, trainable, client),
            compute=masters if autocast == "no" else frozenset({autocast}),
            master=frozenset(map(dtype_name, client.master_dtypes())) if isinstance(client, ShardsState) else masters,
            reduce=masters,
            units={},
        )

    def _updated(self, accelerator: Accelerator, trainable: list[Any], client: Any) -> int:
        if self.policy.shard == "none":
            return sum(p.numel() for p in trainable)
        # What no optimizer updates, or none yet, is counted once: as if rank 0 had it.
        given = {id(p) for group in client.param_groups for p in group["params"]} if client is not None else set()
        rest = sum(p.numel() for p in trainable if id(p) not in given) if accelerator.is_main_process else 0
        return rest + (client.updated_elements() if client is not None else 0)

    def weight_copies(self, world_size: int) -> int:
        """Return how often each weight element exists over all ranks: once a rank."""
        return world_size

    def state_copies(self, world_size: int) -> int:
        """Return how often each element's optimizer state exists over all ranks: once a rank, or once."""
        return 1 if self.policy.shard == "optimizer" else world_size

    def whole_weights(self, accelerator: Accelerator, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight; nothing is communicated."""
        from accel_shard.names import canonical

        for name, parameter in self.named_module(accelerator, model).named_parameters():
            yield canonical(name), parameter.detach()

    def layout(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Layout:
        """Describe what this rank holds: all of it, or of the optimizer's state its share."""
        from accel_shard.backends.parameter_layout import describe
        from accel_shard.layout import Shard

        named, client = self.named_module(accelerator, model), self.torch_optimizer(model, optimizer)
        return describe(named, client, lambda _, tensor: Shard.whole(tensor), replicated=True)

    def after_load(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> None:
        """Bring the weights up to date with masters that are shared out. Every rank must call it."""
        from accel_shard.layout import ShardsState

        client = self.torch_optimizer(model, optimizer)
        if isinstance(client, ShardsState):
            client.after_fill()

    def named_module(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model without DDP's prefix."""
        inner: torch.nn.Module = accelerator.unwrap_model(model, keep_torch_compile=False)
        return inner

    def clip(self, accelerator: Accelerator, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip to a global norm; local, because every rank holds whole averaged gradients."""
        import torch

        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _refuse_unlike(client: Any, shard: str) -> None:
    """Refuse an optimizer that shares out its state where the policy does not, or the other way round.

    Raises:
        PolicyNotAppliedError: saying which optimizer is needed.
    """
    from accel_shard.errors import PolicyNotAppliedError
    from accel_shard.layout import NeedsLayout, ShardsState

    if client is None or isinstance(client, NeedsLayout) or isinstance(client, ShardsState) == (shard == "optimizer"):
        return
    raise PolicyNotAppliedError(
        f"shard is {shard!r} on DDP and the optimizer is a {type(client).__name__}, which holds "
        + ("all of its state on every rank" if shard == "optimizer" else "a share of its state")
        + ". Make it with policy.optimizer(params, torch.optim.AdamW, lr=...); for HF Trainer: "
        "Trainer(..., optimizer_cls_and_kwargs=(accel_shard.ShardedOptimizer, {'optimizer': torch.optim.AdamW, ...}))."
    )
