"""Every rank starts from rank 0's weights, as under DDP. FSDP would shard whatever each rank happens to hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate.logging import get_logger

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["start_from_rank_zero"]

logger = get_logger(__name__)


def start_from_rank_zero(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Overwrite, in place, the parameters and buffers that differ from rank 0's.

    Every rank must call it with a model of the same structure, not yet sharded. It gathers two numbers a tensor;
    only tensors that differ are broadcast, one at a time. It does nothing for tensors without data (meta device),
    and nothing where Accelerate itself loads on rank 0 only.
    """
    plugin = accelerator.state.fsdp_plugin
    if accelerator.num_processes == 1 or plugin.cpu_ram_efficient_loading:
        return
    tensors = [(n, t.detach()) for n, t in (*model.named_parameters(), *model.named_buffers()) if not t.is_meta]
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
    values = tensor.reshape(-1)
    if not values.is_floating_point():
        values = values.to(torch.float64)
    return torch.stack([values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64)]).cpu()
