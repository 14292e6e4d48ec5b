"""What :mod:`accel_shard.check` looks for: data, not code.

A rule is a key, a condition on the whole file, and what really happens. Each was read in the source of Accelerate
1.15 (``commands/launch.py``, ``utils/launch.py``, ``utils/dataclasses.py``, ``accelerator.py``) and DeepSpeed
0.19.8 (``runtime/config.py``, ``runtime/engine.py``, ``runtime/zero``), named where it is not evident.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["DEEPSPEED_FILE_RULES", "DEEPSPEED_RULES", "FSDP_RULES", "TOP_RULES", "Facts", "Rule"]

ERROR: Final = "error"
WARNING: Final = "warning"

STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_OPT: Final = "zero_optimization.offload_optimizer.device"
_PARAM: Final = "zero_optimization.offload_param.device"
_STAGE: Final = "zero_optimization.stage"

TRUE: Final = ("y", "yes", "t", "true", "on", "1")
FALSE: Final = ("n", "no", "f", "false", "off", "0")

# Sections of an accelerate config: title of the argument group that holds their keys, and the prefix that the
# launcher adds where it is missing (accelerate/commands/launch.py, _validate_launch_command).
SECTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "fsdp_config": ("FSDP Arguments", "fsdp_"),
    "deepspeed_config": ("DeepSpeed Arguments", ""),
    "parallelism_config": ("ParallelismConfig Arguments", ""),
    "megatron_lm_config": ("Megatron-LM Arguments", ""),
    "mpirun_config": ("MPI Arguments", ""),
    "fp8_config": ("FP8 Arguments", "fp8_"),
    "dynamo_config": ("", "dynamo_"),
}
DEEPSPEED_MARKS: Final = frozenset(
    {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16", "bfloat16"}
)
# Top-level keys that something but DeepSpeedConfig reads: accelerate's set_mixed_precision, and DeepSpeedConfig
# itself from the dict of zero.Init (deepspeed/runtime/config.py).
DEEPSPEED_EXTRA: Final = frozenset({"msamp", "sequence_parallel_size"})
_ACT: Final = "activation_checkpointing"
SWITCHES: Final = ("offload_params", "cpu_ram_efficient_loading", _ACT, f"{_ACT}_offload")
FSDP1_SWITCHES: Final = ("use_orig_params", "sync_module_states", "forward_prefetch")
# "auto" is filled by DeepSpeedPlugin and Accelerator._prepare_deepspeed (accelerate); transformers'
# HfTrainerDeepSpeedConfig fills two more. Accelerate stops at any other.
AUTO: Final = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    | {"fp16.enabled", "bf16.enabled", "optimizer.params.lr", "optimizer.params.weight_decay"}
    | {f"scheduler.params.{name}" for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")}
    | {f"zero_optimization.offload_{name}" for name in ("optimizer.device", "param.device")}
    | {f"zero_optimization.offload_{name}" for name in ("optimizer.nvme_path", "param.nvme_path")}
    | {f"zero_optimization.stage3_{name}" for name in ("prefetch_bucket_size", "param_persistence_threshold")}
    | {f"zero_optimization.{name}" for name in ("stage", "reduce_bucket_size")}
    | {"zero_optimization.stage3_gather_16bit_weights_on_model_save"}
)
TRAINER_AUTO: Final = frozenset({"optimizer.params.betas", "optimizer.params.eps"})
# Keys that say what the file is about: worth writing even where they equal the default.
WORTH_SAYING: Final = frozenset({"compute_environment", "distributed_type", "mixed_precision", "num_processes"})
TPU_ONLY: Final = frozenset({"downcast_bf16", "main_training_function", "command_file", "commands"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A config file laid flat, as the launcher and DeepSpeed see it."""

    kind: str = ""
    """``distributed_type`` of an accelerate config."""
    values: Mapping[str, object]
    """Values by argument name (accelerate) or dotted path (DeepSpeed)."""
    written: Mapping[str, str] = field(default_factory=dict)
    """The dotted path in the file of each argument name."""

    def has(self, key: str) -> bool:
        """Tell whether the file sets this key to anything but null."""
        return self.values.get(key) is not None

    def on(self, key: str, default: bool = False) -> bool:
        """Tell whether a switch is on, read as accelerate's ``str_to_bool`` does."""
        return str(self.values.get(key, default)).lower() in TRUE

    def text(self, key: str, default: str = "") -> str:
        """Return a value as upper-case text."""
        value = self.values.get(key)
        return default if value is None else str(value).upper()

    def number(self, key: str, default: int | None = None) -> int | None:
        """Return a whole number, or None where the file gives something else (``auto``)."""
        value = self.values.get(key, default)
        if isinstance(value, str) and value.isdigit():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def below(self, key: str, limit: int, default: int) -> bool:
        """Tell whether a number is known and less than the limit."""
        value = self.number(key, default)
        return value is not None and value < limit


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that is accepted without a word and should not be. Positional: it is the row of a table."""

    level: str
    key: str
    """Argument name or dotted path, as in :attr:`Facts.values`."""
    when: Callable[[Facts], bool]
    message: str
    """May name ``{value}`` and ``{kind}``."""
    absent: str = ""
    """Dotted path to report; the rule is then about a key that is *not* set."""


def _error(key: str, when: Callable[[Facts], bool], message: str, absent: str = "") -> Rule:
    return Rule(ERROR, key, when, message, absent)


def _warning(key: str, when: Callable[[Facts], bool], message: str, absent: str = "") -> Rule:
    return Rule(WARNING, key, when, message, absent)


def _other_than(*kinds: str) -> Callable[[Facts], bool]:
    return lambda facts: facts.kind not in kinds


def _num(facts: Facts, key: str, default: int = 1) -> int:
    return facts.number(key, default) or 0


def _axes(facts: Facts) -> int:
    product = 1
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
        product *= _num(facts, f"parallelism_config_{axis}_size")
    return product


def _rest(facts: Facts) -> int:
    return max(_num(facts, "num_processes"), 0) % max(_num(facts, "num_machines"), 1)


def _fsdp2(facts: Facts) -> bool:
    return facts.kind == "FSDP" and facts.text("fsdp_version", "1") == "2"


def _devices(facts: Facts) -> bool:
    return facts.kind.startswith("MULTI_") and facts.kind != "MULTI_CPU"


def _rendezvous(facts: Facts) -> bool:
    """Several machines, started by torchrun (DeepSpeed's own launchers take the address from the hostfile)."""
    torchrun = facts.kind != "DEEPSPEED" or facts.text("deepspeed_multinode_launcher") == "STANDARD"
    return _num(facts, "num_machines") > 1 and torchrun


def _wrong_product(facts: Facts) -> bool:
    checked = (_fsdp2(facts) or _devices(facts)) and _num(facts, "parallelism_config_sp_size") == 1
    return checked and _num(facts, "num_processes", -1) > 0 and _axes(facts) not in (1, _num(facts, "num_processes"))


def _fsdp1_only(key: str, same: tuple[str, ...], harmless: bool) -> Callable[[Facts], bool]:
    def applies(facts: Facts) -> bool:
        said_twice = key == "fsdp_sharding_strategy" and facts.has("fsdp_reshard_after_forward")
        return _fsdp2(facts) and (said_twice or facts.text(key) in same) == harmless

    return applies


def _same_strategy(facts: Facts) -> bool:
    names = {str(i): name for i, name in enumerate(STRATEGIES, 1)}
    one, two = facts.text("fsdp_reshard_after_forward"), facts.text("fsdp_sharding_strategy", STRATEGIES[0])
    return names.get(one, one) == names.get(two, two)


def _offload_without_checkpointing(facts: Facts) -> bool:
    ready = _fsdp2(facts) and facts.on("fsdp_activation_checkpointing")
    return facts.on("fsdp_activation_checkpointing_offload") and not ready


def _nvme_at_3(key: str) -> Callable[[Facts], bool]:
    return lambda facts: facts.text(key) == "NVME" and facts.number("zero_stage", 2) == 3


def _replaces_optimizer(facts: Facts) -> bool:
    offloads = facts.text(_OPT) in ("CPU", "NVME") and not facts.below(_STAGE, 1, 0)
    return offloads and not facts.has("optimizer") and facts.on("zero_force_ds_cpu_optimizer", True)


def _dead_nvme_path(section: str) -> Callable[[Facts], bool]:
    def applies(facts: Facts) -> bool:
        dead = facts.text(f"{section}.device", "NONE") in ("CPU", "NONE")
        return dead and facts.text(f"{section}.nvme_path") not in ("NONE", "AUTO")

    return applies


# A rule is a row of a table.
# fmt: off

# Keys that people write, and what they mean. Nearest spelling alone would lead them astray.
ALIASES: Final[Mapping[str, str]] = {
    "fsdp_cpu_offload": "fsdp_offload_params",
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "fsdp_transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_gradient_checkpointing": "fsdp_activation_checkpointing",
}

TOP_RULES: Final = (
    _error("use_cpu", lambda f: f.on("use_cpu") and f.kind not in ("NO", "MULTI_CPU"),
        "use_cpu is handed on only by the launcher of NO and MULTI_CPU; distributed_type {kind} wins and takes "
        "the devices that it finds. Remove use_cpu, or set distributed_type to MULTI_CPU."),
    _error("fsdp_config", _other_than("FSDP"),
        "dead with distributed_type {kind}: nothing is sharded. Set distributed_type to FSDP, or remove it."),
    _error("deepspeed_config", _other_than("DEEPSPEED"),
        "dead with distributed_type {kind}: DeepSpeed is not started. Set distributed_type to DEEPSPEED or remove it."),
    _error("megatron_lm_config", _other_than("MEGATRON_LM"),
        "dead with distributed_type {kind}. Set distributed_type to MEGATRON_LM, or remove it."),
    _warning("mpirun_config", _other_than("MULTI_CPU", "NO"),
        "dead with distributed_type {kind}: mpirun is used for MULTI_CPU only."),
    _warning("fp8_config", lambda f: f.text("mixed_precision") != "FP8", "dead unless mixed_precision is fp8."),
    _error("dynamo_config", lambda f: f.kind == "DEEPSPEED" and f.text("dynamo_backend", "NO") != "NO",
        "dead with distributed_type DEEPSPEED: its launcher does not hand on any dynamo setting, so nothing is "
        "compiled. Pass dynamo_backend to Accelerator in code."),
    _error("parallelism_config", lambda f: f.kind in ("NO", "MULTI_CPU", "XLA"),
        "dead with distributed_type {kind}: its launcher does not hand it on."),
    _error("parallelism_config", lambda f: f.kind == "FSDP" and not _fsdp2(f) and _axes(f) > 1,
        "works with FSDP version 2 only; Accelerator stops with a ValueError. Set fsdp_config.fsdp_version to 2."),
    _error("parallelism_config_dp_shard_size",
        lambda f: _devices(f) and _num(f, "parallelism_config_dp_shard_size") > 1,
        "with distributed_type {kind} the model is prepared by plain DDP and nothing is sharded. Set "
        "distributed_type to FSDP and fsdp_config.fsdp_version to 2."),
    _error("parallelism_config",
        lambda f: _fsdp2(f) and all(_num(f, f"parallelism_config_{axis}_size") == 1 for axis in ("dp_shard", "cp")),
        "leaves FSDP no axis to shard over; Accelerator stops with a ValueError. Set "
        "parallelism_config_dp_shard_size above 1."),
    _error("parallelism_config", _wrong_product,
        "the product of its sizes is not num_processes; Accelerator stops with a ValueError. Change one of them."),
    _error("num_processes", lambda f: f.kind == "NO" and _num(f, "num_processes") > 1,
        "{value} processes with distributed_type NO: the launcher starts one. Set distributed_type."),
    _warning("num_processes",
        lambda f: f.kind == "MULTI_CPU" and _num(f, "num_processes") > 1 and not f.has("mpirun_hostfile"),
        "without mpirun_config.mpirun_hostfile the launcher starts one process here, not {value}; it expects to "
        "be started by mpirun itself."),
    _error("num_processes",
        lambda f: f.kind not in ("NO", "MULTI_CPU") and _rest(f) > 0,
        "is the total over all machines, and {value} is not a multiple of num_machines: the rest is dropped."),
    _warning("num_processes", lambda f: f.kind not in ("NO", "MULTI_CPU") and _num(f, "num_processes") > 1,
        "is baked in: with fewer than {value} devices the run ends in 'invalid device ordinal', with more they "
        "idle. Leave it out and pass --num_processes to accelerate launch."),
    _warning("main_process_ip", _rendezvous,
        "num_machines is above 1 but there is no main_process_ip: unless --main_process_ip is passed, the "
        "machines look for a host called 'None'.",
        absent="main_process_ip"),
    _warning("deepspeed_hostfile",
        lambda f: f.kind == "DEEPSPEED" and _num(f, "num_machines") > 1 and not _rendezvous(f),
        "num_machines is above 1 but there is no deepspeed_hostfile: unless --deepspeed_hostfile is passed, "
        "DeepSpeed goes on with this machine alone.",
        absent="deepspeed_config.deepspeed_hostfile"),
)

# Accelerate reads none of these from the environment under version 2, but fsdp_backward_prefetch, which it drops
# with a log line (FullyShardedDataParallelPlugin.__post_init__). The value is what FSDP2 does anyway.
FSDP1_ONLY: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "fsdp_sharding_strategy": (("FULL_SHARD", "1"), "write fsdp_reshard_after_forward: true or false"),
    "fsdp_forward_prefetch": (("FALSE", "NO", "0"), "FSDP2 through Accelerate cannot prefetch; remove it"),
    "fsdp_backward_prefetch": (
        ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "1", "2"),
        "FSDP2 prefetches by itself; remove it",
    ),
    "fsdp_use_orig_params": (("TRUE", "FALSE"), "FSDP2 always keeps the original parameters; remove it"),
    "fsdp_sync_module_states": (("TRUE", "FALSE"), "FSDP2 does not need it; remove it"),
}

FSDP_RULES: Final = (
    *(
        Rule(level, key, _fsdp1_only(key, same, level == WARNING),
             f"is for FSDP version 1; version 2 does not use it ({{value}} has no effect): {hint}.")
        for key, (same, hint) in FSDP1_ONLY.items()
        for level in (ERROR, WARNING)
    ),
    _error("fsdp_reshard_after_forward",
        lambda f: _fsdp2(f) and f.text("fsdp_reshard_after_forward").lower() not in TRUE + FALSE,
        "is {value!r}, but version 2 takes true (as FULL_SHARD) or false (as SHARD_GRAD_OP); the plugin stops "
        "with a ValueError."),
    _error("fsdp_reshard_after_forward", lambda f: not _fsdp2(f) and not _same_strategy(f),
        "is not read with version 1: the launcher always sets fsdp_sharding_strategy (default FULL_SHARD), which "
        "wins. Write fsdp_sharding_strategy (FULL_SHARD, SHARD_GRAD_OP, ...), or set fsdp_version to 2."),
    _warning("fsdp_reshard_after_forward", lambda f: not _fsdp2(f) and _same_strategy(f),
        "is not read with version 1; fsdp_sharding_strategy (default FULL_SHARD) says the same. Remove it."),
    _warning("fsdp_auto_wrap_policy", lambda f: True,
        "is not set, which means NO_WRAP: the whole model is one unit, gathered at once. Write "
        "TRANSFORMER_BASED_WRAP or SIZE_BASED_WRAP.",
        absent="fsdp_config.fsdp_auto_wrap_policy"),
    _warning("fsdp_min_num_params", lambda f: f.text("fsdp_auto_wrap_policy") != "SIZE_BASED_WRAP",
        "is read only with fsdp_auto_wrap_policy SIZE_BASED_WRAP. Remove it, or set that."),
    _error("fsdp_min_num_params",
        lambda f: f.text("fsdp_auto_wrap_policy") == "SIZE_BASED_WRAP" and not f.number("fsdp_min_num_params"),
        "is {value!r}: 0 silently means no wrapping at all, and anything but a whole number stops the plugin "
        "(YAML reads 1e8 as text). Write 100000000."),
    _error("fsdp_transformer_layer_cls_to_wrap", lambda f: f.text("fsdp_auto_wrap_policy") != "TRANSFORMER_BASED_WRAP",
        "is read only with fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP: {value} is not wrapped."),
    _error("fsdp_transformer_layer_cls_to_wrap",
        lambda f: any(c in f.text("fsdp_transformer_layer_cls_to_wrap") for c in " ["),
        "must be one string of class names split by commas without spaces; {value!r} is looked up as written "
        "and not found."),
    _error("fsdp_activation_checkpointing_offload", _offload_without_checkpointing,
        "needs fsdp_activation_checkpointing: true and fsdp_version: 2; the plugin stops with a ValueError."),
    # commands/launch.py tests truth, not text: any string is true, and both have the default "true".
    _error("fsdp_sync_module_states",
        lambda f: not f.values["fsdp_sync_module_states"] and bool(f.values.get("fsdp_cpu_ram_efficient_loading", 1)),
        "is false while fsdp_cpu_ram_efficient_loading is true (its default): the launcher stops with a "
        "ValueError. Set the latter to false, or this to true."),
)

_CPU_ADAM = (
    "Accelerate replaces the optimizer made in code by DeepSpeedCPUAdam (Adagrad and Lion by their CPU kin), whatever "
    'its class. To keep it, set "zero_force_ds_cpu_optimizer": false in a DeepSpeed JSON'
)
_PHANTOM = (
    "DeepSpeed's 16-bit optimizer of stage 0 runs one optimizer step with zero gradients when it is built, which puts "
    "Adam's bias correction off by one. Use stage 1."
)
_DEAD_BELOW_3 = "dead below ZeRO stage 3. Remove it, or set zero_stage to 3."
_NVME_BELOW_3 = "below stage 3 nvme is taken as cpu: DeepSpeed swaps to NVMe at stage 3 only. Write cpu."
_PARAM_BELOW_3 = "dead below stage 3: DeepSpeed offloads parameters only when it shards them. Remove it."
_OPTIMIZER_AT_0 = "nothing is offloaded at stage 0, but DeepSpeedCPUAdam still replaces the optimizer. Use stage 1."

DEEPSPEED_RULES: Final = (
    _warning("gradient_clipping", lambda f: True,
        "is not set, but gradients are clipped at 1.0 all the same (accelerator.clip_grad_norm_(x) ignores x). "
        'Write the norm that you want; for no clipping, use a DeepSpeed JSON with "gradient_clipping": 0.0.',
        absent="deepspeed_config.gradient_clipping"),
    _error("gradient_clipping", lambda f: f.text("gradient_clipping") in ("0", "0.0"),
        "0 is dropped by DeepSpeedPlugin, so that DeepSpeed clips at its default, 1.0. For no clipping, use a "
        'DeepSpeed JSON with "gradient_clipping": 0.0.'),
    _warning("offload_optimizer_device",
        lambda f: f.text("offload_optimizer_device") in ("CPU", "NVME") and not f.below("zero_stage", 1, 2),
        _CPU_ADAM + ", named by deepspeed_config_file."),
    _error("offload_optimizer_device",
        lambda f: f.text("offload_optimizer_device") in ("CPU", "NVME") and f.below("zero_stage", 1, 2),
        _OPTIMIZER_AT_0),
    _error("offload_optimizer_device",
        lambda f: f.text("offload_optimizer_device") == "NVME" and f.number("zero_stage", 2) in (1, 2), _NVME_BELOW_3),
    _error("offload_param_device",
        lambda f: f.text("offload_param_device") in ("CPU", "NVME") and f.below("zero_stage", 3, 2), _PARAM_BELOW_3),
    *(
        _error(f"offload_{what}_device", _nvme_at_3(f"offload_{what}_device"),
            "the launcher hands on no NVMe path, so a folder called 'none' in the working directory is used. "
            "Use a DeepSpeed JSON, named by deepspeed_config_file, with nvme_path.")
        for what in ("optimizer", "param")
    ),
    _warning("zero3_init_flag", lambda f: f.on("zero3_init_flag") and f.below("zero_stage", 3, 2),
        _DEAD_BELOW_3),
    _warning("zero3_save_16bit_model", lambda f: f.on("zero3_save_16bit_model") and f.below("zero_stage", 3, 2),
        _DEAD_BELOW_3),
    _warning("zero_stage", lambda f: f.number("zero_stage") == 0 and f.text("mixed_precision") in ("BF16", "FP16"),
        _PHANTOM),
)

DEEPSPEED_FILE_RULES: Final = (
    _error("zero_optimization", lambda f: True,
        'is missing: DeepSpeedPlugin stops with a ValueError. Write {{"stage": 0}} for none.',
        absent="zero_optimization"),
    _error("train_micro_batch_size_per_gpu", lambda f: not f.has("train_batch_size"),
        'neither this nor train_batch_size is set: DeepSpeed stops with an AssertionError. Write "auto".',
        absent="train_micro_batch_size_per_gpu"),
    _error("fp16.enabled", lambda f: f.on("fp16.enabled") and f.on("bf16.enabled"),
        "fp16 and bf16 are both enabled: DeepSpeed stops with an AssertionError. Choose one."),
    _error("bfloat16", lambda f: not f.has("bf16"),
        'Accelerate adds "bf16": {{"enabled": false}} where "bf16" is missing, and DeepSpeed then skips this old '
        'name. Write "bf16".'),
    _warning("bf16.enabled", lambda f: f.on("bf16.enabled") and f.below(_STAGE, 1, 0), _PHANTOM),
    _warning("fp16.enabled", lambda f: f.on("fp16.enabled") and f.below(_STAGE, 1, 0), _PHANTOM),
    _warning("gradient_clipping", lambda f: True,
        "is not set, but DeepSpeed clips at 1.0 by default (accelerator.clip_grad_norm_(x) ignores x). Write the "
        "norm that you want, or 0.0 for off.",
        absent="gradient_clipping"),
    _warning(_OPT, _replaces_optimizer, _CPU_ADAM + "."),
    _error(_OPT, lambda f: f.text(_OPT) in ("CPU", "NVME") and f.below(_STAGE, 1, 0), _OPTIMIZER_AT_0),
    _error(_OPT, lambda f: f.text(_OPT) == "NVME" and f.number(_STAGE, 0) in (1, 2), _NVME_BELOW_3),
    _error(_PARAM, lambda f: f.text(_PARAM) in ("CPU", "NVME") and f.below(_STAGE, 3, 0), _PARAM_BELOW_3),
    *(
        _warning(f"zero_optimization.offload_{what}.nvme_path", _dead_nvme_path(f"zero_optimization.offload_{what}"),
            'is read only where "device" is "nvme". Remove it, or set that.')
        for what in ("optimizer", "param")
    ),
    _warning("zero_optimization.round_robin_gradients",
        lambda f: f.on("zero_optimization.round_robin_gradients") and f.number(_STAGE, 0) in (1, 2),
        "training is right, but safe_get_full_fp32_param and its kin return the wrong tensors. Remove it if "
        "anything reads or writes them."),
    _warning("optimizer", lambda f: True,
        "Accelerator.prepare stops if the code makes an optimizer too (it wants DummyOptim), and Trainer uses "
        "this one in place of its own. Remove it, unless the code relies on it."),
    _warning("scheduler", lambda f: True,
        "Accelerator.prepare stops if the code makes a scheduler too (it wants DummyScheduler), and Trainer uses "
        "this one in place of its own. Remove it, unless the code relies on it."),
    _warning("steps_per_print", lambda f: True, "DeepSpeedPlugin overwrites it with infinity. Remove it."),
)
