"""Canonical parameter names: the fully qualified name in the user's own model, whatever wrapped it since."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

__all__ = ["canonical", "persistent_buffers"]

# DDP and DeepSpeed, torch.compile, FSDP1, activation checkpointing. DDP's "module." only ever stands in front.
_INNER: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def canonical(name: str) -> str:
    """Return a parameter's fully qualified name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _INNER)


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state dict holds, by canonical name."""
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[canonical(f"{prefix}.{name}" if prefix else name)] = buffer.detach()
    return found
