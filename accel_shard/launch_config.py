"""Accelerate config files: written from a policy, read back as one, without importing torch or accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from accel_shard.backends import backend_for
from accel_shard.environment import fields_from_launch
from accel_shard.errors import PolicyError, UnsupportedPolicyError
from accel_shard.policy import ShardingPolicy

__all__ = [
    "SHIPPED",
    "config_folder",
    "launch_environment",
    "policy_from_config",
    "read_config",
    "shipped_configs",
    "write_config",
]

# What each shipped file shards and when to choose it. The multi-node one is fsdp2 with three more keys.
SHIPPED: Final[Mapping[str, str]] = {
    "ddp": "Shards nothing: the model, its gradients and optimizer state fit on one device. Fewest bytes sent.",
    "zero1": "Shards the optimizer state (DeepSpeed ZeRO-1): weights and gradients fit, Adam's state does not.",
    "zero2": "Shards gradients and optimizer state (DeepSpeed ZeRO-2): weights fit, the rest does not.",
    "zero3": "Shards weights, gradients and optimizer state (DeepSpeed ZeRO-3): the model fits on no single device.",
    "zero3_offload": "ZeRO-3 with weights and optimizer state in host memory: all devices are too small; slow.",
    "fsdp1": "Shards everything with FSDP1: for code that needs its flat parameters; else choose fsdp2.",
    "fsdp2": "Shards weights, gradients and optimizer state (FSDP2): the first choice when the model does not fit.",
    "fsdp2_keep_params": "FSDP2 keeping weights gathered from forward to backward: one all-gather less, more memory.",
    "fsdp2_offload": "FSDP2 with weights, gradients and optimizer state in host memory: all devices are too small.",
    "hsdp": "FSDP2 inside groups of 2, replicated over the groups: many nodes with slow links between them.",
    "multi_node": "FSDP2 over 2 nodes. Start it on each node, with --machine_rank 0 and 1.",
}

_NODES: Final = {"num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29500}


def config_folder() -> Path:
    """Return the folder of the shipped configs: inside an installed package, beside it in a checkout.

    Raises:
        PolicyError: if the installation has lost them.
    """
    package = Path(__file__).parent
    for folder in (package / "accelerate_configs", package.parent / "accelerate_configs"):
        if folder.is_dir():
            return folder
    raise PolicyError("the shipped accelerate_configs are not installed. Write one with `accel-shard config NAME`.")


def shipped_configs() -> dict[str, str]:
    """Return the text of every shipped config by its name (the file's stem)."""
    texts = {}
    for name, comment in SHIPPED.items():
        nodes = name == "multi_node"
        policy = ShardingPolicy.load("fsdp2" if nodes else name)
        texts[name] = write_config(policy, name=name, comment=comment, nodes=nodes)
    return texts


def write_config(policy: ShardingPolicy, *, name: str = "", comment: str = "", nodes: bool = False) -> str:
    """Return an accelerate config file that says this policy, as text.

    Raises:
        UnsupportedPolicyError: if the policy says something that no accelerate config can carry.
    """
    _refuse_unwritable(policy)
    config = {"compute_environment": "LOCAL_MACHINE"} | _plain_config(policy) | (_NODES if nodes else {})
    return _comments(policy, name, comment, nodes) + _render(config)


def _refuse_unwritable(policy: ShardingPolicy) -> None:
    written = fields_from_launch(launch_environment(_plain_config(policy)))
    lost = {n: v for n, v in policy.flat().items() if v != ShardingPolicy().flat()[n] and n not in written}
    if lost:
        named = ", ".join(f"{name}={value}" for name, value in lost.items())
        raise UnsupportedPolicyError(
            f"an accelerate config cannot carry {named}. Keep the policy in a file of its own and give it to the "
            "recipe (--policy FILE) or to the environment (ACCEL_SHARD_POLICY=FILE)."
        )


def _plain_config(policy: ShardingPolicy) -> dict[str, Any]:
    compute = "no" if policy.dtypes.compute == "fp32" else policy.dtypes.compute
    dynamo = {"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if policy.compile else {}
    settled = backend_for(policy).launch_config()
    return {"distributed_type": settled.pop("distributed_type"), "mixed_precision": compute} | settled | dynamo


def _comments(policy: ShardingPolicy, name: str, comment: str, nodes: bool) -> str:
    lines = [comment] if comment else []
    file = f"accelerate_configs/{name}.yaml" if name else "THIS_FILE"
    ranks = "RANKS" if nodes or policy.replicas > 1 else "DEVICES"
    lines.append(f"accelerate launch --config_file {file} --num_processes {ranks} recipes/finetune.py")
    if policy.backend == "deepspeed" and policy.gradient_clipping is None:
        lines.append(
            "Plain Accelerate clips at 1.0 unless gradient_clipping is set here; accel_shard does as it is told."
        )
    if policy.replicas > 1:
        lines.append("RANKS must be dp_replicate_size x dp_shard_size.")
    return "".join(f"# {line}\n" for line in lines)


def _render(config: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(config), sort_keys=False))


def read_config(path: str | Path) -> dict[str, Any]:
    """Return an accelerate config file (YAML or JSON) as a mapping.

    Raises:
        PolicyError: if it is missing, unreadable or not an accelerate config.
    """
    import yaml

    file = Path(path)
    if not file.is_file():
        raise PolicyError(f"config file {str(path)!r} does not exist.")
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PolicyError(f"config file {str(path)!r} is neither YAML nor JSON: {error}") from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise PolicyError(f"{str(path)!r} is not an accelerate config: it has no distributed_type.")
    return config


def policy_from_config(config: Mapping[str, Any]) -> ShardingPolicy:
    """Return the policy that an accelerate config comes to under ``ShardingPolicy.from_environment``.

    Raises:
        PolicyError: for a kind of run, or a value, that no policy can express.
    """
    kinds = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "FSDP", "DEEPSPEED")
    if config.get("distributed_type") not in kinds:
        raise UnsupportedPolicyError(
            f"distributed_type is {config.get('distributed_type')!r}. Allowed: {', '.join(kinds)}."
        )
    try:
        return ShardingPolicy.load(fields_from_launch(launch_environment(config)))
    except (AttributeError, TypeError) as error:
        raise PolicyError(f"the config has a section or value of the wrong kind: {error}") from error


def launch_environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sharding part of the environment that ``accelerate launch`` would make of a config."""
    environ = {"ACCELERATE_MIXED_PRECISION": str(config.get("mixed_precision") or "no")}
    kind = config.get("distributed_type")
    if kind != "DEEPSPEED":  # there the launcher drops it
        environ["ACCELERATE_DYNAMO_BACKEND"] = str((config.get("dynamo_config") or {}).get("dynamo_backend", "NO"))
    if config.get("parallelism_config"):
        environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        environ |= {key.upper(): str(value) for key, value in config["parallelism_config"].items()}
    if kind == "FSDP":
        environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}
        renamed = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
        for key, value in (config.get("fsdp_config") or {}).items():
            name = (key if key.startswith("fsdp") else f"fsdp_{key}").upper()
            environ[renamed.get(name, name)] = str(value).lower() if isinstance(value, bool) else str(value)
    elif kind == "DEEPSPEED":
        environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ""}
        keys = config.get("deepspeed_config") or {}
        environ |= {name: str(keys[key]) for key, name in _DEEPSPEED_VARIABLES.items() if key in keys}
    elif kind == "MEGATRON_LM":
        environ["ACCELERATE_USE_MEGATRON_LM"] = "true"
    return environ


_DEEPSPEED_VARIABLES: Final = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
}
