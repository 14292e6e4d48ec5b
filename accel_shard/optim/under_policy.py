"""What a policy asks of optimizers on DDP: which are sharded, how a plain one is, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_shard.errors import PolicyError
from accel_shard.layout import NeedsLayout, ShardsState
from accel_shard.optim.sharded import ShardedOptimizer
from accel_shard.policy import ShardingPolicy

__all__ = ["adopt", "attach", "clip_shares", "is_asked_for", "make", "master_of", "refuse_sharded", "sends_to_owners"]


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


def make(
    policy: ShardingPolicy, params: Any, kind: Callable[..., torch.optim.Optimizer], reduce: str | None,
    settings: Mapping[str, Any],
) -> ShardedOptimizer:  # fmt: skip
    """Make a sharded optimizer for a policy; local.

    Raises:
        PolicyError: if the policy leaves no choice of ``reduce``.
    """
    if not is_asked_for(policy):
        raise PolicyError(
            f"reduce is {reduce!r}, and the policy has backend {policy.backend!r} and shard {policy.shard!r}, where "
            "the optimizer shares out nothing. Use preset 'ddp_sharded', or leave reduce out. If it is a setting of "
            "the optimizer's own, give a factory: lambda params: kind(params, reduce=...)."
        )
    if reduce == "all" and policy.gradient_reduce == "owner":
        raise PolicyError("reduce is 'all' here and gradient_reduce 'owner' in the policy. Say it in one place.")
    how = policy.gradient_reduce if reduce is None else reduce
    return ShardedOptimizer(params, kind, master=master_of(policy), reduce=how, **settings)


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
        sharded = ShardedOptimizer(
            groups, lambda params: kind(params, **given), master=master_of(policy), reduce=policy.gradient_reduce
        )
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
        PolicyError: if the policy needs DDP's only hook for something else, or gradients that are gone by then.
    """
    inner = getattr(model, "_orig_mod", model)
    if policy.gradient_reduce == "owner" and isinstance(optimizer, ShardsState) and not sends_to_owners(optimizer):
        what = "needs whole gradients. Use gradient_reduce 'all'."
        if not isinstance(optimizer, NeedsLayout):
            what = "was made with reduce 'all'. Make it with policy.optimizer(...), or with reduce='owner'."
        raise PolicyError(f"gradient_reduce is 'owner' in the policy and the {type(optimizer).__name__} {what}")
    if getattr(optimizer, "in_backward", False):
        for name, off in (("gradient_clipping", None), ("gradient_accumulation_steps", 1)):
            if (value := getattr(policy, name)) != off:
                raise PolicyError(
                    f"the optimizer has in_backward=True and {name} is {value!r} in the policy: when backward is over, "
                    f"the gradients have been used and are gone. Use in_backward=False, or {name} {off!r}."
                )
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
