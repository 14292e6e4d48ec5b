"""What a policy, or an existing accelerate config, really does: field by field, in words. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from accel_shard.errors import PolicyError
from accel_shard.launch_config import policy_from_config, read_config
from accel_shard.policy import ShardingPolicy

__all__ = ["explain_config", "explain_file_or_name", "explain_policy", "explain_versions"]

_SHARD: Final[Mapping[str, str]] = {
    "none": "every rank holds all weights, gradients and optimizer state",
    "optimizer": "each rank holds and updates a share of the optimizer state; weights and gradients are whole",
    "gradients": "each rank holds a share of gradients and optimizer state",
    "parameters": "each rank holds a share of weights, gradients and optimizer state; weights gathered unit by unit",
}

_MEANS: Final[Mapping[str, str]] = {
    "ddp": "torch DistributedDataParallel: all-reduce of gradients, overlapped with backward",
    "local": "torch DistributedDataParallel, whose gradients stay where they are",
    "fsdp1": "torch FullyShardedDataParallel with use_orig_params: all-gather weights, reduce-scatter gradients",
    "fsdp": "torch fully_shard on DTensors: all-gather weights, reduce-scatter gradients",
    "deepspeed": "DeepSpeed ZeRO stage {stage}",
}


def explain_policy(policy: ShardingPolicy) -> str:
    """Return, field by field, what ``policy.accelerator()`` will really do."""
    rows = [(name, _shown(value), _words(policy, name, value)) for name, value in _ordered(policy).items()]
    width, wider = max(len(r[0]) for r in rows), max(len(r[1]) for r in rows)
    lines = [f"{name:<{width}}  {value:<{wider}}  {words}".rstrip() for name, value, words in rows]
    return "\n".join([f"policy: {policy.to_line()}", *lines]) + "\n"


def explain_config(config: Mapping[str, Any]) -> str:
    """Return what an accelerate config comes to with this package, and where plain Accelerate differs.

    Raises:
        PolicyError: if it says something that no policy can express.
    """
    policy = policy_from_config(config)
    differences = _plain_accelerate(config, policy)
    text = explain_policy(policy)
    if differences:
        text += "\nThe same file under plain Accelerate:\n" + "".join(f"  - {line}\n" for line in differences)
    return text


def explain_versions() -> str:
    """Return the installed versions that decide what is done, without importing them."""
    from importlib import metadata

    names = ("accel_shard", "torch", "accelerate", "transformers", "deepspeed", "safetensors")
    found = []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} (not installed)")
    return "versions: " + ", ".join(found) + "\n"


def _ordered(policy: ShardingPolicy) -> dict[str, object]:
    from accel_shard.support import FIELDS

    flat = policy.flat()
    return {"backend": flat["backend"]} | {name: flat[name] for name in FIELDS}


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _words(policy: ShardingPolicy, name: str, value: object) -> str:
    """Say one field in words; empty where the value says it all."""
    engine = policy.backend == "deepspeed"
    words: dict[str, str] = {
        "backend": _MEANS["local" if policy.local_sgd > 1 else policy.backend].format(stage=policy.zero_stage),
        "shard": _SHARD[policy.shard] + _keeps(policy),
        "replicas": "one sharded copy over all ranks" if policy.replicas == 1 else f"{value} sharded copies (HSDP)",
        "precision.master": "dtype of the copy that the optimizer updates"
        + ("; each rank has its share of it, and the weights are in precision.reduce" if policy.masters_apart else ""),
        "precision.compute": _compute(policy),
        "precision.reduce": "gradients travel and are summed in it",
        "precision.save": "exported weights",
        "wrap": _wrap(policy),
        "offload": {"none": "", "optimizer": "optimizer state in host memory"}.get(
            policy.offload, "weights and optimizer state in host memory"
        ),
        "activation_checkpointing": "blocks are recomputed in backward" if value is True else "",
        "gradient_clipping": ("inside DeepSpeed's step" if engine else "by the global norm, at each step")
        if value is not None
        else ("off; 0.0 is written into the DeepSpeed config, which would clip at 1.0" if engine else "off"),
        "gradient_accumulation_steps": "micro-batches an optimizer step"
        + (", gradients reduced at each" if policy.shard in ("gradients", "parameters") else ""),
        "gradient_reduce": "each gradient goes to the rank that updates it only" if value == "owner" else "",
        "local_sgd": _local(policy),
        "global_batch_size": "checked against the loader" if value is not None else "whatever the loader gives",
    }
    return words.get(name, "")


def _keeps(policy: ShardingPolicy) -> str:
    if policy.backend == "ddp" and policy.shard == "optimizer":
        return "; updated weights are sent to all ranks (ShardedOptimizer)"
    if policy.backend in ("fsdp", "fsdp1") and policy.shard == "gradients":
        return "; weights too, but they stay gathered from forward to backward"
    if policy.backend == "deepspeed" and policy.shard == "parameters":
        return "; those under 10,000 elements stay whole as well"
    return ""


def _compute(policy: ShardingPolicy) -> str:
    compute, master = policy.dtypes.compute, policy.dtypes.master
    if compute == master:
        return "that of the masters"
    means = {"ddp": "autocast", "fsdp": "weights are cast when gathered", "fsdp1": "weights are cast when gathered"}
    return means.get(policy.backend, "a low-precision copy of the weights beside the masters")


def _local(policy: ShardingPolicy) -> str:
    if policy.local_sgd == 1:
        return "off"
    clips = "; each rank clips by the norm of its own gradients" if policy.gradient_clipping is not None else ""
    return f"steps that each rank does by itself; then all average their weights, not the optimizer's state{clips}"


def _wrap(policy: ShardingPolicy) -> str:
    if policy.backend not in ("fsdp", "fsdp1"):
        return ""
    if policy.wrap == "auto":
        return "the model's _no_split_modules, else its repeated blocks"
    return "modules from that many parameters on" if isinstance(policy.wrap, int) else "these classes"


def _plain_accelerate(config: Mapping[str, Any], policy: ShardingPolicy) -> list[str]:
    lines = ["a prepared scheduler steps once for each rank at every optimizer step; here once"]
    if policy.backend == "deepspeed":
        keys = config.get("deepspeed_config") or {}
        if "deepspeed_config_file" not in keys and not keys.get("gradient_clipping"):
            lines.append("gradients are clipped at 1.0, DeepSpeed's default, because gradient_clipping is not set")
        if policy.offload != "none":
            lines.append("your optimizer is replaced by DeepSpeedCPUAdam; here it is kept")
    if policy.backend in ("fsdp", "fsdp1") and policy.dtypes.compute != "fp32":
        lines.append(f"gradients are reduced in {policy.dtypes.compute}; here in {policy.dtypes.reduce}")
    if policy.backend == "fsdp" and policy.activation_checkpointing:
        lines.append("recomputed blocks draw other dropout masks than the forward did; here the same")
    if policy.backend != "ddp":
        lines.append("without a device the ranks fall back to plain DDP or to separate runs; here they rehearse")
    return lines


def explain_file_or_name(source: str) -> str:
    """Explain a preset, a policy (file or one line), or an accelerate config file, whichever ``source`` is.

    Raises:
        PolicyError: if it is none of them.
    """
    if Path(source).is_file():
        try:
            config = read_config(source)
        except PolicyError:
            return explain_policy(ShardingPolicy.load(source))
        return explain_config(config)
    return explain_policy(ShardingPolicy.load(source))
