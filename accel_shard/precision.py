"""The dtypes of a policy, on a model: masters before ``prepare``, names of dtypes for messages."""

from __future__ import annotations

from typing import Any, Final

import torch

from accel_shard.policy import ShardingPolicy

__all__ = ["DTYPES", "cast_at_the_border", "cast_masters", "dtype_name"]

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the policy's word for a dtype, or torch's own where the policy has none."""
    return next((name for name, value in DTYPES.items() if value == dtype), str(dtype).removeprefix("torch."))


def cast_masters(model: torch.nn.Module, policy: ShardingPolicy) -> None:
    """Give every trainable weight the policy's master dtype, in place, keeping the ``Parameter`` objects.

    Where masters live apart from the weights (``policy.masters_apart``) these get the dtype of ``reduce``, and masters
    are made from them, rounded as they are: DeepSpeed does so too.

    Accelerate's DDP trains a model that was loaded in bf16 with bf16 masters, its FSDP upcasts only if mixed precision
    is on, and DeepSpeed follows yet another rule. Frozen weights keep their dtype, except under FSDP1, whose flat
    parameters must be of one dtype. Local: communicates nothing.
    """
    master = DTYPES[policy.dtypes.reduce if policy.masters_apart else policy.dtypes.master]
    for parameter in model.parameters():
        casts = parameter.requires_grad or policy.backend == "fsdp1"
        if hasattr(parameter, "ds_id"):  # made under zero.Init: a partition already, DeepSpeed makes its masters
            continue
        if casts and parameter.is_floating_point() and parameter.dtype != master:
            parameter.data = parameter.data.to(master)


def cast_at_the_border(model: torch.nn.Module, compute: str) -> None:
    """Cast what floats into a model to its compute dtype, and what comes out to fp32, as autocast does under DDP."""
    from accelerate.utils import recursively_apply
    from accelerate.utils.operations import convert_to_fp32

    dtype = DTYPES[compute]

    def cast(value: Any) -> Any:
        return recursively_apply(lambda t: t.to(dtype) if t.is_floating_point() else t, value)

    model.register_forward_pre_hook(lambda _, args, kwargs: (cast(args), cast(kwargs)), with_kwargs=True)
    model.register_forward_hook(lambda _, args, output: convert_to_fp32(output))
