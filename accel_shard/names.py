"""Canonical parameter names: the fully qualified name in the user's own model, whatever wrapped it since."""

from __future__ import annotations

from typing import Final

__all__ = ["canonical"]

# DDP and DeepSpeed, torch.compile, FSDP1, activation checkpointing. DDP's "module." only ever stands in front.
_INNER: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def canonical(name: str) -> str:
    """Return a parameter's fully qualified name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _INNER)
