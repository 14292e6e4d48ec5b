"""What FSDP1 and FSDP2 share: the plugin's arguments, and the keys of config files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from accel_shard.policy import ShardingPolicy

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

__all__ = ["launch_keys", "plugin_arguments", "set_units", "trainer_keys"]

# What a policy does not speak of, the launch config may: (plugin argument, its variable, value without a launcher).
_LEFT_TO_THE_LAUNCHER: Final[tuple[tuple[str, str, object], ...]] = (
    ("state_dict_type", "FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
    ("cpu_ram_efficient_loading", "FSDP_CPU_RAM_EFFICIENT_LOADING", False),
)


def plugin_arguments(
    policy: ShardingPolicy, *, version: int, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the arguments of ``FullyShardedDataParallelPlugin`` that both versions take."""
    arguments: dict[str, Any] = {"fsdp_version": version}
    if isinstance(policy.wrap, int):
        arguments |= {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": policy.wrap}
    else:
        arguments["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        if policy.wrap != "auto":
            arguments["transformer_cls_names_to_wrap"] = list(policy.wrap)
    for name, variable, default in _LEFT_TO_THE_LAUNCHER:
        if variable not in environ:
            arguments[name] = default
    return arguments


def set_units(accelerator: Accelerator, model: torch.nn.Module, policy: ShardingPolicy) -> None:
    """Write the inferred units into the accelerator's plugin, so that Accelerate need not guess."""
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    from accel_shard.wrap import block_classes

    plugin = accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = list(block_classes(model, policy))
    # A second `prepare` would find the partial of the first model's classes here.
    plugin.auto_wrap_policy = transformer_auto_wrap_policy


def launch_keys(policy: ShardingPolicy, *, version: int) -> dict[str, Any]:
    """Return the ``fsdp_config`` section of an accelerate config file, as both versions write it."""
    keys: dict[str, Any] = {"fsdp_version": version}
    if isinstance(policy.wrap, int):
        keys |= {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": policy.wrap}
    else:
        keys["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        if policy.wrap != "auto":
            keys["fsdp_transformer_layer_cls_to_wrap"] = ",".join(policy.wrap)
    if policy.offload == "parameters":
        keys["fsdp_offload_params"] = True
    if policy.activation_checkpointing:
        keys["fsdp_activation_checkpointing"] = True
    # The launcher's default is true, which under FSDP1 needs a device and hides the model from all ranks but one.
    keys["fsdp_cpu_ram_efficient_loading"] = False
    keys["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    return keys


def trainer_keys(policy: ShardingPolicy, *, version: int) -> dict[str, Any]:
    """Return ``TrainingArguments.fsdp_config`` entries, as both versions write them."""
    renamed = {"fsdp_offload_params": "cpu_offload", "fsdp_version": "version"}
    keys = launch_keys(policy, version=version)
    plain = {renamed.get(key, key.removeprefix("fsdp_")): value for key, value in keys.items()}
    if "transformer_layer_cls_to_wrap" in plain:
        plain["transformer_layer_cls_to_wrap"] = plain["transformer_layer_cls_to_wrap"].split(",")
    return plain
