"""What a policy asks of optimizers on DDP: which are sharded, how a plain one is, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_shard.errors import PolicyError
from accel_shard.layout import FlatTensor, NeedsLayout, ShardsState
from accel_shard.optim.sharded import ShardedOptimizer
from accel_shard.policy import ShardingPolicy

__all__ = [
    "adopt",
    "attach",
    "clip_shares",
    "is_asked_for",
    "let_ask",
    "master_of",
    "refuse_sharded",
    "sends_to_owners",
]


def is_asked_for(policy: ShardingPolicy) -> bool:
    """Tell whether the optimizer must share out its state itself; other backends do it for a plain one."""
    return (policy.backend, policy.shard) == ("ddp", "optimizer")


def sends_to_owners(optimizer: Any) -> bool:
    """Tell whether a rank has the gradients of its own share only: ``reduce="owner"``."""
    return getattr(optimizer, "reduce", "all") == "owner"


def master_of(policy: ShardingPolicy) -> torch.dtype | None:
    """Return ``master`` of :class:`ShardedOptimizer` under a policy: bf16 masters are bf16 weights, updated as such."""
    return torch.float32 if policy.dtypes.master == "fp32" else None


def refuse_sharded(optimizer: Any, policy: ShardingPolicy) -> None:
    """Refuse a sharded optimizer under a policy that shards otherwise.

    Raises:
        PolicyError: saying what to use.
    """
    if isinstance(optimizer, ShardsState) and not isinstance(optimizer, NeedsLayout) and not is_asked_for(policy):
        raise PolicyError(
            f"the optimizer is a {type(optimizer).__name__}, and the policy has backend {policy.backend!r} and shard "
            f"{policy.shard!r}. Use preset 'ddp_sharded', or the plain optimizer."
        )


def let_ask(optimizer: Any, tensors: Callable[[], Sequence[FlatTensor] | None]) -> None:
    """Let an optimizer of whole parameters ask what its tensors are made of, once it is stepped. Local."""
    if isinstance(optimizer, NeedsLayout):
        optimizer.bind_to(tensors)


def adopt(optimizer: torch.optim.Optimizer, policy: ShardingPolicy) -> ShardedOptimizer:
    """Shard an optimizer that was made already, with the state that it has; it must not be stepped any more. Local.

    The parameter groups are shared with it, so a scheduler that was made for it acts on the sharded one.

    Raises:
        ValueError: if its class cannot be called again with its own settings, or cannot be sharded.
    """
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    given = {key: value for key, value in optimizer.defaults.items() if key in known}
    try:
        groups = [dict(group) for group in optimizer.param_groups]
        sharded = ShardedOptimizer(groups, lambda params: kind(params, **given), master=master_of(policy))
    except TypeError as error:
        raise ValueError(
            f"the optimizer is a {kind.__name__}, which cannot be made anew from its defaults ({error}). Make it "
            f"sharded: ShardedOptimizer(params, lambda params: {kind.__name__}(params, ...))."
        ) from error
    if optimizer.state:
        sharded.load_state_dict(optimizer.state_dict())
        optimizer.state.clear()
    sharded.param_groups, sharded.stands_for = optimizer.param_groups, optimizer
    return sharded


def attach(optimizer: Any, model: Any, policy: ShardingPolicy) -> None:
    """Let DDP send gradients to their owners only, if that is how the optimizer was made. Every rank must call it.

    Raises:
        PolicyError: if the policy needs DDP's only hook for something else.
    """
    inner = getattr(model, "_orig_mod", model)
    if not sends_to_owners(optimizer) or not isinstance(inner, DistributedDataParallel):
        return
    if policy.gradient_compression != "none":
        raise PolicyError(
            f"the optimizer has reduce 'owner' and gradient_compression is {policy.gradient_compression!r}; DDP has "
            "one communication hook. Use reduce 'all', or gradient_compression 'none'."
        )
    optimizer.attach(inner)


def clip_shares(owner: Any, parameters: Iterable[Any], limit: float, norm_type: float) -> torch.Tensor:
    """Clip where a rank has the gradients of its own share only, and return the global norm. Every rank must call it.

    Raises:
        PolicyError: if not all parameters are given.
    """
    given = {id(p) for p in parameters}
    missing = sum(id(p) not in given and p.requires_grad for group in owner.param_groups for p in group["params"])
    if missing:
        raise PolicyError(
            f"the optimizer has reduce 'owner', so only all of its parameters can be clipped; {missing} of them are "
            "left out here. Use reduce 'all'."
        )
    norm: torch.Tensor = owner.clip_grad_norm_(limit, norm_type)
    return norm
