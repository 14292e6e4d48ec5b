"""Every rank starts from rank 0's weights and buffers, as under DDP.

FSDP would shard whatever each rank happens to hold, and DeepSpeed leaves buffers alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate.logging import get_logger

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["start_from_rank_zero"]

logger = get_logger(__name__)

_CHUNK = 1 << 20  # elements in double precision at a time


def start_from_rank_zero(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Overwrite, in place, the parameters and buffers that differ from rank 0's.

    Every rank must call it with a model of the same structure, not yet sharded. It gathers two numbers a tensor;
    only tensors that differ are broadcast, one at a time. It does nothing for tensors without data (meta device),
    or that DeepSpeed has partitioned, and nothing where Accelerate itself loads on rank 0 only.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if accelerator.num_processes == 1 or (plugin is not None and plugin.cpu_ram_efficient_loading):
        return
    everything = (*model.named_parameters(), *model.named_buffers())
    tensors = [(name, t.detach()) for name, t in everything if not t.is_meta and not hasattr(t, "ds_id")]
    if not tensors:
        return
    sums = torch.stack([_fingerprint(tensor) for _, tensor in tensors]).to(accelerator.device)
    gathered = [torch.empty_like(sums) for _ in range(accelerator.num_processes)]
    dist.all_gather(gathered, sums)
    # Bit patterns, so that NaN equals NaN.
    bits = torch.stack(gathered).view(torch.int64)
    differs = (bits != bits[0]).any(dim=2).any(dim=0).tolist()
    for (_, tensor), wrong in zip(tensors, differs, strict=True):
        if wrong:
            moved = tensor.to(accelerator.device)
            dist.broadcast(moved, src=0)
            tensor.copy_(moved)
    names = [name for (name, _), wrong in zip(tensors, differs, strict=True) if wrong]
    if names:
        logger.warning(
            "%d tensors differed between ranks (first: %s); rank 0's were taken on every rank, as DDP does.",
            len(names), names[0], main_process_only=True,
        )  # fmt: skip


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return two numbers that differ when values or their order do: a sum weighted by position, and a norm."""
    values = tensor.reshape(-1)
    if not values.is_floating_point():
        values = values.to(torch.float64)
    weights = torch.arange(1, 1 + min(_CHUNK, max(1, values.numel())), dtype=torch.float64, device=values.device)
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for start in range(0, values.numel(), _CHUNK):
        chunk = values[start : start + _CHUNK]
        # The total goes on into the next chunk, so that chunks cannot be exchanged either.
        total = total * 1.0009765625 + (chunk.to(torch.float64) * weights[: chunk.numel()]).sum()
    return torch.stack([total, torch.linalg.vector_norm(values, dtype=torch.float64)]).cpu()
