"""Compare what Accelerate really prepared with what the policy asked for; any difference is an error."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_shard.backends import backend_for
from accel_shard.backends.base import Prepared
from accel_shard.errors import PolicyNotAppliedError
from accel_shard.policy import ShardingPolicy

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from accel_shard.backends.base import Backend

__all__ = ["Expected", "expect", "verify_connection", "verify_prepared"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a model must come to, counted before ``prepare`` changes it.

    Attributes:
        weights: elements of all its parameters, tied ones once.
        trainable: those that require gradients.
        units: modules that must be wrapped, by class name (FSDP only).
    """

    weights: int
    trainable: int
    units: dict[str, int]


def expect(model: torch.nn.Module, policy: ShardingPolicy) -> Expected:
    """Count a model that has not been prepared yet. Local: communicates nothing."""
    from accel_shard.wrap import units_of

    # A parameter made under deepspeed.zero.Init is an empty tensor that knows its size.
    counts = [(int(getattr(p, "ds_numel", p.numel())), p.requires_grad) for p in model.parameters()]
    return Expected(
        weights=sum(count for count, _ in counts),
        trainable=sum(count for count, trains in counts if trains),
        units=units_of(model, policy) if policy.backend in ("fsdp", "fsdp1") else {},
    )


def verify_connection(accelerator: Accelerator, policy: ShardingPolicy) -> None:
    """Check, before any model exists, that the ranks are one run on the backend of the policy. Local.

    Raises:
        PolicyNotAppliedError: if Accelerate chose another backend, or sees another number of ranks.
    """
    import torch.distributed as dist

    launched = int(os.environ.get("WORLD_SIZE", "1"))
    connected = dist.get_world_size() if dist.is_initialized() else 1
    if not launched == connected == accelerator.num_processes:
        raise PolicyNotAppliedError(
            f"the launcher started {launched} ranks, torch.distributed connects {connected}, Accelerate sees "
            f"{accelerator.num_processes}: these would be separate runs. Build the accelerator with "
            "policy.accelerator() before anything else touches accelerate."
        )
    backend, kind = backend_for(policy), accelerator.distributed_type.name
    if kind not in backend.distributed_types or (kind == "NO" and connected > 1):
        raise PolicyNotAppliedError(
            f"backend {policy.backend!r} was asked for and Accelerate chose {kind}. Allowed: "
            f"{', '.join(backend.distributed_types)}. An Accelerator or PartialState made earlier in this process "
            "keeps its choice: make this one first."
        )
    version = getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", None)
    wanted = {"fsdp": 2, "fsdp1": 1}.get(policy.backend)
    if version != wanted:
        raise PolicyNotAppliedError(
            f"backend {policy.backend!r} needs FSDP version {wanted}; Accelerate has {version}."
        )


def verify_prepared(
    accelerator: Accelerator,
    policy: ShardingPolicy,
    model: torch.nn.Module,
    optimizer: Any,
    expected: Expected,
    *,
    backend: Backend | None = None,
    accumulation: int | None = None,
) -> Prepared:
    """Compare a prepared model and optimizer with the policy: shards, units, dtypes, backend and ranks.

    Every rank must call it; it sums three numbers over all ranks, and raises on every rank if any rank found fault.

    Args:
        accelerator: the one that prepared them.
        policy: what was asked for.
        model: the prepared model.
        optimizer: the prepared optimizer, or None.
        expected: from :func:`expect`, before ``prepare``.
        backend: the backend object that prepared them; a fresh one by default.
        accumulation: the accumulation steps in force, if it is not the accelerator that counts them (HF Trainer).

    Returns:
        What this rank holds.

    Raises:
        PolicyNotAppliedError: listing each difference.
    """
    backend = backend or backend_for(policy)
    verify_connection(accelerator, policy)
    prepared = backend.inspect(accelerator, model, optimizer)
    faults = _local_faults(policy, backend, prepared, expected)
    if prepared.kind == backend.kind:
        steps = accelerator.gradient_accumulation_steps if accumulation is None else accumulation
        faults += _setting_faults(policy, accelerator, steps) + _stranger_faults(policy, model, optimizer)
    weights, updated, faulty = _sum_over_ranks(accelerator, prepared.weights, prepared.updated, int(bool(faults)))
    world = accelerator.num_processes
    for what, got, whole, copies in (
        ("weights", weights, expected.weights, backend.weight_copies(world)),
        ("optimizer state", updated, expected.trainable, backend.state_copies(world)),
    ):
        if got != whole * copies:
            faults.append(
                f"{what}: all ranks together hold {got:,} elements; {copies} x {whole:,} = {whole * copies:,} were "
                f"expected for shard {policy.shard!r}"
            )
    if faulty and not faults:
        faults.append("another rank found a difference; see its message")
    if faults:
        raise PolicyNotAppliedError(f"policy [{policy.to_line()}] was not applied: " + "; ".join(faults) + ".")
    return prepared


def _local_faults(policy: ShardingPolicy, backend: Backend, prepared: Prepared, expected: Expected) -> list[str]:
    if prepared.kind != backend.kind:
        return [f"backend: {backend.kind} was asked for, {prepared.kind} was prepared"]
    faults = []
    for part in ("master", "compute", "reduce"):
        got, wanted = getattr(prepared, part), getattr(policy.dtypes, part)
        if got != {wanted} and expected.trainable:
            faults.append(f"precision.{part}: {wanted} was asked for, {'+'.join(sorted(got))} is there")
    for name, count in expected.units.items():
        if prepared.units.get(name, 0) < count:
            faults.append(f"wrap: {prepared.units.get(name, 0)} of {count} {name} modules are FSDP units")
    return faults


def _setting_faults(policy: ShardingPolicy, accelerator: Accelerator, steps: int) -> list[str]:
    faults = []
    if steps != policy.gradient_accumulation_steps:
        faults.append(f"gradient_accumulation_steps: {policy.gradient_accumulation_steps} asked for, {steps} set")
    if policy.backend == "deepspeed":
        config = accelerator.deepspeed_plugin.deepspeed_config
        faults += [f"DeepSpeed config: {path} is still 'auto'" for path in _autos(config)]
        clipping = config.get("gradient_clipping")
        if clipping != (policy.gradient_clipping or 0.0):
            faults.append(f"gradient_clipping: {policy.gradient_clipping} asked for, {clipping} set")
    return faults


def _stranger_faults(policy: ShardingPolicy, model: torch.nn.Module, optimizer: Any) -> list[str]:
    """Find parameters of the optimizer that the prepared model does not have: they would never train."""
    if optimizer is None or policy.backend == "deepspeed":
        return []
    known = {id(p) for p in model.parameters()}
    strangers = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    return [f"optimizer: {strangers} of its parameters are not the prepared model's"] if strangers else []


def _autos(config: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            found.append(prefix + key)
    return found


def _sum_over_ranks(accelerator: Accelerator, *numbers: int) -> list[int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(numbers, dtype=torch.int64, device=accelerator.device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return [int(n) for n in total.tolist()]
