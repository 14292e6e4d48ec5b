"""One sharding policy for Hugging Face Accelerate: DDP, FSDP and DeepSpeed ZeRO with the same numbers.

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from accel_shard.accelerator import PolicyAccelerator
    from accel_shard.checkpoint.checkpointer import Checkpointer
    from accel_shard.errors import (
        DataOrderError,
        PolicyError,
        PolicyNotAppliedError,
        SnapshotError,
        UnsupportedPolicyError,
    )
    from accel_shard.export import export_model
    from accel_shard.optim.family import SOAP, GaLore, Muon, Shampoo
    from accel_shard.optim.matrix import MatrixOptimizer
    from accel_shard.optim.parameter_groups import parameter_groups
    from accel_shard.optim.sharded import ShardedOptimizer
    from accel_shard.policy import PRESETS, Precision, ShardingPolicy
    from accel_shard.training_arguments import VerifyPolicy

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "SOAP",
    "Checkpointer",
    "DataOrderError",
    "GaLore",
    "MatrixOptimizer",
    "Muon",
    "PolicyAccelerator",
    "PolicyError",
    "PolicyNotAppliedError",
    "Precision",
    "Shampoo",
    "ShardedOptimizer",
    "ShardingPolicy",
    "SnapshotError",
    "UnsupportedPolicyError",
    "VerifyPolicy",
    "export_model",
    "parameter_groups",
]

_HOME: Final = {
    "Checkpointer": "checkpoint.checkpointer",
    "DataOrderError": "errors",
    "GaLore": "optim.family",
    "MatrixOptimizer": "optim.matrix",
    "Muon": "optim.family",
    "PRESETS": "policy",
    "PolicyAccelerator": "accelerator",
    "PolicyError": "errors",
    "PolicyNotAppliedError": "errors",
    "Precision": "policy",
    "SOAP": "optim.family",
    "Shampoo": "optim.family",
    "ShardedOptimizer": "optim.sharded",
    "ShardingPolicy": "policy",
    "SnapshotError": "errors",
    "UnsupportedPolicyError": "errors",
    "VerifyPolicy": "training_arguments",
    "export_model": "export",
    "parameter_groups": "optim.parameter_groups",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'accel_shard' has no attribute {name!r}")
    return getattr(importlib.import_module(f"accel_shard.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
