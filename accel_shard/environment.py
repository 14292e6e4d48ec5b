"""Read a policy out of the environment that ``accelerate launch`` sets, or out of ``ACCEL_SHARD_POLICY``.

``accelerate launch --config_file X.yaml`` turns its file into environment variables (accelerate 1.15:
``accelerate.utils.launch.prepare_multi_gpu_env`` and ``prepare_deepspeed_cmd_env``). Each variable that says
something about sharding is read here, or refused by name; none is ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from accel_shard.errors import PolicyError, UnsupportedPolicyError
from accel_shard.policy import ShardingPolicy
from accel_shard.vocabulary import SHARD

__all__ = ["POLICY_VARIABLE", "deepspeed_file", "fields_from_launch", "policy_from_environment", "refuse_other_launch"]

POLICY_VARIABLE: Final = "ACCEL_SHARD_POLICY"

_PRECISION: Final = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
_FSDP1_STRATEGY: Final = {"FULL_SHARD": "parameters", "SHARD_GRAD_OP": "gradients", "1": "parameters", "2": "gradients"}


def policy_from_environment(
    policy: str | None = None, *, environ: Mapping[str, str] | None = None, **overrides: Any
) -> ShardingPolicy:
    """Return the policy that this process was launched with.

    Sources, which must not contradict each other: the argument ``policy`` (a preset, file or one-line form, as from
    a command line), the variable ``ACCEL_SHARD_POLICY``, and what ``accelerate launch`` set. With none of them the
    policy is ``ddp``. Nothing is communicated.

    Args:
        policy: a preset name, a policy file or the one-line form; None if the user gave none.
        environ: the environment to read; the process's own by default.
        **overrides: fields said elsewhere, as a recipe's flags; None means not said.

    Raises:
        PolicyError: if two sources say different things about one field.
        UnsupportedPolicyError: if the launcher was told something that no policy can express.
    """
    environ = os.environ if environ is None else environ
    own = environ.get(POLICY_VARIABLE)
    launched = fields_from_launch(environ)
    sources = {"the policy argument": policy, POLICY_VARIABLE: own}
    given = {name: ShardingPolicy.load(value) for name, value in sources.items() if value}
    if len(given) == 2:
        first, second = given.values()
        _refuse_conflict(first.flat(), "the policy argument", second.flat(), POLICY_VARIABLE)
    if given:
        source, base = next(iter(given.items()))
        _refuse_conflict(launched, "the accelerate launch config", base.flat(), source)
    else:
        source, base = "the accelerate launch config", ShardingPolicy.load(launched)
    said = {name: value for name, value in overrides.items() if value is not None}
    default = ShardingPolicy().flat()
    settled = {name: value for name, value in base.flat().items() if value != default.get(name)}
    changed = base.replace(**said)
    _refuse_conflict({n: v for n, v in changed.flat().items() if n in said}, "a command-line option", settled, source)
    return changed


def refuse_other_launch(policy: ShardingPolicy) -> None:
    """Refuse a policy that contradicts what ``accelerate launch`` was told in this process.

    Raises:
        PolicyError: naming each field and its two values.
    """
    launched = fields_from_launch(os.environ)
    _refuse_conflict(launched, "the accelerate launch config", policy.flat(), "the policy in the code")


def _refuse_conflict(first: Mapping[str, object], name: str, second: Mapping[str, object], other: str) -> None:
    clashes = [key for key, value in first.items() if key in second and _plain(second[key]) != _plain(value)]
    if clashes:
        listed = "; ".join(f"{key} is {first[key]!r} in {name} and {second[key]!r} in {other}" for key in clashes)
        raise PolicyError(f"one policy, said twice: {listed}. Say it in one place.")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def fields_from_launch(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the policy fields (flat names) that ``accelerate launch`` settled; empty if it was not used.

    Raises:
        UnsupportedPolicyError: for a launcher setting that no policy can express.
    """
    if _true(environ, "ACCELERATE_USE_MEGATRON_LM"):
        raise UnsupportedPolicyError("the launch config asks for Megatron-LM. Allowed: MULTI_GPU, FSDP, DEEPSPEED.")
    fields: dict[str, Any] = {}
    # Accelerate sets the USE variables itself when it is given a plugin; only the launcher sets the second ones.
    if _true(environ, "ACCELERATE_USE_FSDP") and "FSDP_VERSION" in environ:
        fields = _fsdp_fields(environ)
    elif _true(environ, "ACCELERATE_USE_DEEPSPEED") and "ACCELERATE_CONFIG_DS_FIELDS" in environ:
        fields = _deepspeed_fields(environ)
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in _PRECISION:
        raise UnsupportedPolicyError(
            f"mixed_precision is {precision!r} in the launch config. Allowed: {', '.join(_PRECISION)}."
        )
    if precision != "no":
        fields["precision.compute"] = _PRECISION[precision]
    dynamo = environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper()
    if dynamo not in ("NO", "", "INDUCTOR"):
        raise UnsupportedPolicyError(f"dynamo_backend is {dynamo!r} in the launch config. Allowed: no, inductor.")
    if dynamo == "INDUCTOR":
        fields["compile"] = True
    if _true(environ, "ACCELERATE_USE_PARALLELISM_CONFIG") and fields.get("backend") != "fsdp":
        raise UnsupportedPolicyError(
            "the launch config has a parallelism_config, which needs FSDP with fsdp_version 2."
        )
    return fields


def _fsdp_fields(environ: Mapping[str, str]) -> dict[str, Any]:
    if environ.get("FSDP_VERSION", "1") == "2":
        fields = {"backend": "fsdp"}
        reshard = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
        if reshard not in ("true", "false"):
            raise UnsupportedPolicyError(f"fsdp_reshard_after_forward is {reshard!r}. FSDP2 takes true or false.")
        fields["shard"] = "parameters" if reshard == "true" else "gradients"
    else:
        fields = {"backend": "fsdp1"}
        strategy = environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
        if strategy not in _FSDP1_STRATEGY:
            raise UnsupportedPolicyError(
                f"fsdp_sharding_strategy is {strategy!r}. Allowed with FSDP1: FULL_SHARD, SHARD_GRAD_OP. "
                "For hybrid sharding use fsdp_version 2 with a parallelism_config, for no sharding use MULTI_GPU."
            )
        fields["shard"] = _FSDP1_STRATEGY[strategy]
        if environ.get("FSDP_USE_ORIG_PARAMS", "true").lower() != "true":
            raise UnsupportedPolicyError("fsdp_use_orig_params is false. Allowed: true, or optimizers lose the names.")
    return fields | _fsdp_extras(environ)


def _fsdp_extras(environ: Mapping[str, str]) -> dict[str, Any]:
    # The launcher exports each of these whether it was told or not, so the default says nothing.
    fields: dict[str, Any] = {}
    if _true(environ, "FSDP_OFFLOAD_PARAMS"):
        fields["offload"] = "parameters"
    if _true(environ, "FSDP_ACTIVATION_CHECKPOINTING"):
        fields["activation_checkpointing"] = True
    if (wrap := _fsdp_wrap(environ)) != "auto":
        fields["wrap"] = wrap
    if _true(environ, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"):
        raise UnsupportedPolicyError("fsdp_activation_checkpointing_offload has no field in a policy. Remove it.")
    if _true(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        fields["replicas"] = _whole(
            "parallelism_config_dp_replicate_size", environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")
        )
        fields["tensor_parallel"] = _whole("parallelism_config_tp_size", environ.get("PARALLELISM_CONFIG_TP_SIZE", "1"))
        fields["context_parallel"] = _whole(
            "parallelism_config_cp_size", environ.get("PARALLELISM_CONFIG_CP_SIZE", "1")
        )
        if _whole("parallelism_config_sp_size", environ.get("PARALLELISM_CONFIG_SP_SIZE", "1")) > 1:
            raise UnsupportedPolicyError("parallelism_config_sp_size has no field in a policy. Allowed: 1.")
    return fields


def _fsdp_wrap(environ: Mapping[str, str]) -> str | list[str] | int:
    kind = environ.get("FSDP_AUTO_WRAP_POLICY", "").upper()
    if kind == "SIZE_BASED_WRAP":
        return _whole("fsdp_min_num_params", environ.get("FSDP_MIN_NUM_PARAMS", "0"))
    if kind == "TRANSFORMER_BASED_WRAP":
        names = environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
        return [name.strip() for name in names.split(",")] if names else "auto"
    raise UnsupportedPolicyError(
        f"fsdp_auto_wrap_policy is {kind or 'not set'}: the whole model would be one unit, gathered at once. "
        "Allowed: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP."
    )


def _deepspeed_fields(environ: Mapping[str, str]) -> dict[str, Any]:
    if environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none":
        return fields_from_deepspeed_json(deepspeed_file(environ))
    stage = _whole("zero_stage", environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    fields: dict[str, Any] = {"backend": "deepspeed", "shard": _stage_to_shard(stage)}
    optimizer = environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    parameters = environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none")
    fields["offload"] = _offload(optimizer, parameters)
    clipping = environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if clipping != "auto" and _number("gradient_clipping", clipping) > 0:
        fields["gradient_clipping"] = _number("gradient_clipping", clipping)
    accumulation = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if accumulation.isdigit():
        fields["gradient_accumulation_steps"] = int(accumulation)
    return fields


def deepspeed_file(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the DeepSpeed JSON that the launch config names, or an empty mapping.

    Raises:
        PolicyError: if it is missing or is not a JSON object.
    """
    name = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if name == "none":
        return {}
    if not Path(name).is_file():
        raise PolicyError(f"deepspeed_config_file {name!r} does not exist.")
    try:
        config = json.loads(Path(name).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise PolicyError(f"deepspeed_config_file {name!r} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise PolicyError(f"deepspeed_config_file {name!r} holds no JSON object.")
    return config


def fields_from_deepspeed_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy fields that a DeepSpeed JSON settles; ``auto`` settles nothing.

    Raises:
        UnsupportedPolicyError: for a section that would replace what the code says.
    """
    for section in ("optimizer", "scheduler"):
        if section in config:
            raise UnsupportedPolicyError(
                f"the DeepSpeed config has a section {section!r}, which would replace the one in the code. Remove it."
            )
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        raise PolicyError("the DeepSpeed config has no section zero_optimization; Accelerate needs one.")
    if zero.get("round_robin_gradients"):
        raise UnsupportedPolicyError(
            "zero_optimization.round_robin_gradients makes DeepSpeed's tensor access return wrong tensors. Remove it."
        )
    optimizer, parameters = zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}
    fields = _numbers_of_json(config) | {
        "backend": "deepspeed",
        "shard": _stage_to_shard(_whole("zero_optimization.stage", zero.get("stage", 0))),
        "offload": _offload(optimizer.get("device", "none"), parameters.get("device", "none")),
    }
    if "nvme" in (optimizer.get("device"), parameters.get("device")):
        fields["offload_path"] = optimizer.get("nvme_path") or parameters.get("nvme_path")
    for dtype in ("bf16", "fp16"):
        if config.get(dtype, {}).get("enabled") is True:
            fields["precision.compute"] = dtype
    return fields


def _numbers_of_json(config: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    clipping, accumulation = config.get("gradient_clipping", "auto"), config.get("gradient_accumulation_steps", "auto")
    if clipping != "auto" and clipping:
        fields["gradient_clipping"] = _number("gradient_clipping", clipping)
    if accumulation != "auto":
        fields["gradient_accumulation_steps"] = _whole("gradient_accumulation_steps", accumulation)
    if config.get("train_batch_size", "auto") != "auto":
        fields["global_batch_size"] = _whole("train_batch_size", config["train_batch_size"])
    return fields


def _whole(name: str, value: object) -> int:
    try:
        if isinstance(value, bool) or int(str(value)) < 0:
            raise ValueError
    except ValueError:
        raise PolicyError(f"{name} is {value!r}. Allowed: whole numbers.") from None
    return int(str(value))


def _number(name: str, value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise PolicyError(f"{name} is {value!r}. Allowed: numbers.") from None


def _stage_to_shard(stage: int) -> str:
    if stage not in range(len(SHARD)):
        raise PolicyError(f"zero_stage is {stage}. Allowed: 0, 1, 2, 3.")
    return SHARD[stage]


def _offload(optimizer: str, parameters: str) -> str:
    if parameters not in ("none", None):
        if optimizer in ("none", None):
            raise UnsupportedPolicyError(
                f"offload_param_device is {parameters!r} and offload_optimizer_device is 'none'. A policy offloads "
                "parameters with their optimizer state; set both, or neither."
            )
        return "parameters"
    return "none" if optimizer in ("none", None) else "optimizer"


def _true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "false").lower() == "true"


@contextlib.contextmanager
def launcher_fields_set_aside() -> Iterator[None]:
    """Let a plugin be built from a whole config although the launch config named some of its fields too.

    ``DeepSpeedPlugin`` refuses that, because it would ignore the launcher's fields. They are in the policy already.
    """
    fields = os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    try:
        yield
    finally:
        if fields is not None:
            os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = fields
