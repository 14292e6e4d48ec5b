"""The registry: the only place that knows more than one backend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from accel_shard.backends.base import Backend
    from accel_shard.policy import ShardingPolicy

__all__ = ["backend_for"]

_HOME: Final = {
    "ddp": ("ddp", "DDPBackend"),
    "fsdp1": ("fsdp1", "FSDP1Backend"),
    "fsdp": ("fsdp2", "FSDP2Backend"),
    "deepspeed": ("deepspeed", "DeepSpeedBackend"),
}


def backend_for(policy: ShardingPolicy) -> Backend:
    """Return the backend object that carries out a policy. Imports that backend's module only."""
    module, name = _HOME[policy.backend]
    backend: Backend = getattr(importlib.import_module(f"accel_shard.backends.{module}"), name)(policy)
    return backend
