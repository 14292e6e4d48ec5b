"""Activation checkpointing: one mechanism for every backend that has none of its own that is right."""

from __future__ import annotations

from torch import nn

from accel_shard.policy import ShardingPolicy
from accel_shard.wrap import block_classes

__all__ = ["checkpoint_blocks"]


def checkpoint_blocks(model: nn.Module, policy: ShardingPolicy) -> None:
    """Wrap a model's blocks, in place, so that backward recomputes their activations with the same dropout masks.

    The blocks are those that ``wrap`` names or infers as units. Local: communicates nothing.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        CheckpointWrapper,
        checkpoint_wrapper,
    )

    classes = block_classes(model, policy)
    # The innermost first: a name leads through a wrapper to the wrapper's own child.
    for name, module in sorted(model.named_modules(), key=lambda item: -item[0].count(".")):
        if type(module).__name__ in classes and not isinstance(module, CheckpointWrapper):
            model.set_submodule(name, checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT))
