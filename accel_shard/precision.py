"""The dtypes of a policy, on a model: masters before ``prepare``, names of dtypes for messages."""

from __future__ import annotations

from typing import Final

import torch

from accel_shard.policy import ShardingPolicy

__all__ = ["DTYPES", "cast_masters", "dtype_name"]

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the policy's word for a dtype, or torch's own where the policy has none."""
    return next((name for name, value in DTYPES.items() if value == dtype), str(dtype).removeprefix("torch."))


def cast_masters(model: torch.nn.Module, policy: ShardingPolicy) -> None:
    """Give every trainable weight the policy's master dtype, in place, keeping the ``Parameter`` objects.

    Accelerate's DDP trains a model that was loaded in bf16 with bf16 masters, its FSDP upcasts only if mixed precision
    is on, and DeepSpeed follows yet another rule. Frozen weights keep their dtype, except under FSDP1, whose flat
    parameters must be of one dtype. Local: communicates nothing.
    """
    master = DTYPES[policy.dtypes.master]
    for parameter in model.parameters():
        casts = parameter.requires_grad or policy.backend == "fsdp1"
        if casts and parameter.is_floating_point() and parameter.dtype != master:
            parameter.data = parameter.data.to(master)
