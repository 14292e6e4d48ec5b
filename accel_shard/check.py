"""Find what an Accelerate or DeepSpeed config says in vain: unknown, dead and contradicting keys.

Names come from the installed libraries by introspection, so that they age with them; what a known key really does is
data, in :mod:`accel_shard.check_tables`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_shard import check_tables as table
from accel_shard.check_tables import ERROR, SECTIONS, WARNING, Facts, Rule
from accel_shard.errors import PolicyError, unknown_name

__all__ = ["Finding", "check_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One key that needs a second look.

    Attributes:
        level: ``error`` (the key does not do what it says) or ``warning`` (dead weight, or a risky default).
        key: dotted path in the file.
        message: what is wrong, what really happens, what to write instead.
    """

    level: str
    key: str
    message: str


def check_file(path: str | Path) -> list[Finding]:
    """Return what a config file says in vain, errors first; an empty list if it means what it says.

    Args:
        path: an Accelerate config (YAML or JSON) or a DeepSpeed config (JSON).

    Raises:
        PolicyError: for a file that is missing, not YAML or JSON, not a mapping, or neither kind of config.
    """
    values, strict_json = _read(Path(path))
    if "distributed_type" in values or "compute_environment" in values:
        found = list(_check_accelerate(values))
    elif table.DEEPSPEED_MARKS & set(values):
        found = list(_check_deepspeed(values, strict_json))
    else:
        raise PolicyError(
            f"{str(path)!r} is neither an accelerate config (it has no distributed_type) nor a DeepSpeed config (it "
            "has no zero_optimization). Give one of these."
        )
    return sorted(found, key=lambda finding: finding.level != ERROR)


def _error(key: str, message: str) -> Finding:
    return Finding(level=ERROR, key=key, message=message)


def _warning(key: str, message: str) -> Finding:
    return Finding(level=WARNING, key=key, message=message)


def _read(path: Path) -> tuple[dict[str, Any], bool]:
    if not path.is_file():
        raise PolicyError(f"config file {str(path)!r} does not exist.")
    import yaml

    strict_json = True
    try:
        text = path.read_text(encoding="utf-8")
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            if path.suffix == ".json":
                raise
            strict_json = False
            values = yaml.safe_load(text)
    except (UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML or JSON"
        raise PolicyError(f"config file {str(path)!r} is not {kind}: {error}") from error
    if not isinstance(values, dict):
        raise PolicyError(f"config file {str(path)!r} holds {type(values).__name__}; a mapping of keys is needed.")
    return {str(key): value for key, value in values.items()}, strict_json


def _apply(rules: Iterable[Rule], facts: Facts) -> Iterator[Finding]:
    for rule in rules:
        value = facts.values.get(rule.key)
        present = value not in (None, "", [], {})
        if present == bool(rule.absent) or not rule.when(facts):
            continue
        message = rule.message.format(value=value, kind=facts.kind)
        yield Finding(level=rule.level, key=rule.absent or facts.written.get(rule.key, rule.key), message=message)


# ---- accelerate configs ----------------------------------------------------------------------------------------


def _check_accelerate(config: dict[str, Any]) -> Iterator[Finding]:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

    sagemaker = config.get("compute_environment") == "AMAZON_SAGEMAKER"
    fields = {f.name: f for f in dataclasses.fields(SageMakerConfig if sagemaker else ClusterConfig)}
    # Two old names that BaseConfig.process_config still translates.
    names = [*fields, "fp16", "dynamo_backend"]
    for key in config:
        if key not in names:
            yield _error(key, unknown_name("key", key, names, "accelerate refuses to start."))
    if "distributed_type" not in config:
        yield _error("distributed_type", "is missing: accelerate refuses to start. Add it.")
    if sagemaker or "distributed_type" not in config:
        return
    facts = _flatten(config)
    wrong = list(_choices(facts))
    yield from wrong
    if any(finding.key == "distributed_type" for finding in wrong):
        return
    yield from _apply(table.TOP_RULES, facts)
    live = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
    for section in SECTIONS:
        dead = section in live.values() and section != live.get(facts.kind)
        if isinstance(config.get(section), dict) and not dead:
            yield from _section_names(section, config[section])
    if facts.kind == "FSDP":
        yield from _apply(table.FSDP_RULES, facts)
    if facts.kind == "DEEPSPEED":
        yield from _deepspeed_section(facts)
    yield from _dead_top_level(config, facts, fields)


def _flatten(config: Mapping[str, Any]) -> Facts:
    """Lay the sections flat, as the launcher does: ``somedict.key`` becomes the argument ``key``, prefixed."""
    values: dict[str, object] = {}
    written: dict[str, str] = {}
    for section, (_, prefix) in SECTIONS.items():
        content = config.get(section)
        for key, value in content.items() if isinstance(content, dict) else ():
            name = key if str(key).startswith(prefix) else f"{prefix}{key}"
            values[name], written[name] = value, f"{section}.{key}"
    values.update(config)
    return Facts(kind=str(config.get("distributed_type")), values=values, written=written)


def _section_names(section: str, content: Mapping[str, Any]) -> Iterator[Finding]:
    owners, read = _launcher_names()
    names = [name for name, owner in owners.items() if owner == section]
    prefix = SECTIONS[section][1]
    for raw, value in content.items():
        key = str(raw) if str(raw).startswith(prefix) else f"{prefix}{raw}"
        path = f"{section}.{raw}"
        if key in names:
            if key not in read and str(value).lower() not in ("none", "auto"):
                yield _error(path, "accelerate launch parses it, but hands it on to nothing. Use a DeepSpeed JSON.")
        elif key in table.ALIASES:
            yield _error(path, f"nothing reads {raw!r}; {table.ALIASES[key]!r} is meant.")
        elif f"{section}_{key}" in names:
            yield _error(path, f"nothing reads {raw!r}; write {section}_{key}.")
        elif key in owners:
            yield _warning(path, f"belongs to {owners[key]}; the launcher copies it from here by accident. Move it.")
        elif raw in owners:
            message = f"belongs to {owners[str(raw)]}; here it becomes {key!r}, which nothing reads. Move it."
            yield _error(path, message)
        else:
            message = unknown_name(f"key of {section}", key, names, "Nothing reads it, and accelerate does not say so.")
            yield _error(path, message)


def _launcher_names() -> tuple[dict[str, str], set[str]]:
    """Return the section (or 'the top level') of each argument of the launcher, and the names that it reads."""
    from accelerate.commands import launch as command
    from accelerate.utils import launch as environment

    source = inspect.getsource(command) + inspect.getsource(environment)
    read = set(re.findall(r'args(?:\.|, ")(\w+)', source))
    titles = {title: section for section, (title, _) in SECTIONS.items()}
    owners = {}
    for group in command.launch_command_parser()._action_groups:
        for action in group._group_actions:
            section = titles.get(group.title or "-", "the top level")
            owners[action.dest] = "dynamo_config" if action.dest.startswith("dynamo_") else section
    # No argument of its own, but read with getattr.
    owners |= dict.fromkeys(re.findall(r'getattr\(args, "(fsdp_\w+)"', source), "fsdp_config")
    # setup_fp8_env walks over all arguments with this prefix.
    return owners, read | {name for name in owners if name.startswith("fp8_")}


def _choices(facts: Facts) -> Iterator[Finding]:
    from accelerate import utils as u
    from accelerate.utils import constants as c

    fsdp2 = facts.text("fsdp_version", "1") == "2"
    switch = [*table.TRUE, *table.FALSE]
    exact = {"compute_environment": list(u.ComputeEnvironment), "distributed_type": list(u.DistributedType)}
    exact |= {"dynamo_mode": c.TORCH_DYNAMO_MODES, "deepspeed_multinode_launcher": c.DEEPSPEED_MULTINODE_LAUNCHERS}
    folded = {"mixed_precision": list(u.PrecisionType), "dynamo_backend": list(u.DynamoBackend)}
    if facts.kind == "FSDP":
        exact["fsdp_version"] = ["1", "2"]
        folded["fsdp_auto_wrap_policy"] = c.FSDP_AUTO_WRAP_POLICY
        folded["fsdp_state_dict_type"] = c.FSDP2_STATE_DICT_TYPE if fsdp2 else c.FSDP_STATE_DICT_TYPE
        folded |= {f"fsdp_{name}": switch for name in table.SWITCHES + (() if fsdp2 else table.FSDP1_SWITCHES)}
        if not fsdp2:
            folded["fsdp_sharding_strategy"] = c.FSDP_SHARDING_STRATEGY
            folded["fsdp_backward_prefetch"] = c.FSDP_BACKWARD_PREFETCH
    if facts.kind == "DEEPSPEED":
        exact["zero_stage"] = ["0", "1", "2", "3"]
        folded |= {f"offload_{what}_device": ["none", "cpu", "nvme"] for what in ("optimizer", "param")}
        folded["zero3_init_flag"] = switch
    for fold, allowed in ((False, exact), (True, folded)):
        for key, names in allowed.items():
            yield from _choice(facts, key, [str(getattr(name, "value", name)) for name in names], fold)


def _choice(facts: Facts, key: str, names: list[str], fold: bool) -> Iterator[Finding]:
    value = facts.values.get(key)
    path = facts.written.get(key, key)
    text = str(value).upper() if fold else str(value)
    # The fsdp plugin takes the numbers of its enums too.
    numbers = [str(i + 1) for i in range(len(names))] if fold and key.startswith("fsdp_") else []
    if value is None or text in [*numbers, *(name.upper() if fold else name for name in names)]:
        return
    if value is False and "no" in [name.lower() for name in names]:
        yield _error(path, "YAML reads a bare no as false, which is refused. Write 'no' quoted.")
    else:
        yield _error(path, unknown_name(f"value of {key}", str(value), names))


def _deepspeed_section(facts: Facts) -> Iterator[Finding]:
    name = facts.values.get("deepspeed_config_file")
    if name is None or name == "none":
        yield from _apply(table.DEEPSPEED_RULES, facts)
    else:
        yield from _with_deepspeed_file(str(name), facts)
    if (facts.number("num_machines", 1) or 0) > 1:
        return
    for key in ("hostfile", "exclusion_filter", "inclusion_filter", "multinode_launcher"):
        if facts.has(f"deepspeed_{key}"):
            path = facts.written[f"deepspeed_{key}"]
            yield _warning(path, "dead: it is read with num_machines above 1 only.")


def _with_deepspeed_file(name: str, facts: Facts) -> Iterator[Finding]:
    from accelerate.utils import DeepSpeedPlugin

    source = inspect.getsource(DeepSpeedPlugin._deepspeed_config_checks)
    for variable in re.findall(r'"ACCELERATE_(?:DEEPSPEED_)?(\w+)"', source):
        if facts.has(variable.lower()):
            message = "with deepspeed_config_file this key makes DeepSpeedPlugin stop. Say it in that file only."
            yield _error(facts.written.get(variable.lower(), variable.lower()), message)
    path = facts.written["deepspeed_config_file"]
    if not Path(name).is_file():
        yield _error(path, f"{name!r} does not exist (looked up from the working directory).")
        return
    try:
        values, strict_json = _read(Path(name))
    except PolicyError as error:
        yield _error(path, str(error))
        return
    for found in _check_deepspeed(values, strict_json, facts.number("num_processes")):
        yield dataclasses.replace(found, key=f"{path}.{found.key}")


def _dead_top_level(config: dict[str, Any], facts: Facts, fields: Mapping[str, Any]) -> Iterator[Finding]:
    """Find keys that equal their default, that only a TPU reads, and that the launcher never copies."""
    from accelerate.commands.launch import launch_command_parser

    # An argument with a default is never None, so that _validate_launch_command never takes the value in the file.
    # tpu_use_cluster is copied by a line of its own.
    shadowed = {action.dest for action in launch_command_parser()._actions if action.default is not None}
    boilerplate = []
    for key in (key for key in config if key in fields and key not in table.WORTH_SAYING):
        default = fields[key].default
        default = False if default is dataclasses.MISSING else default
        same = config[key] in (None, [], {}, default) or (key, config[key]) == ("gpu_ids", "all")
        same = same or (key == "same_network" and facts.number("num_machines", 1) == 1)
        if same or (default is False and str(config[key]).lower() in table.FALSE):
            boilerplate.append(key)
        elif facts.kind != "XLA" and (key in table.TPU_ONLY or key.startswith("tpu_")):
            yield _warning(key, f"dead with distributed_type {facts.kind}: a TPU reads it.")
        elif key in shadowed and key != "tpu_use_cluster":
            yield _error(key, f"accelerate launch never takes it from a file. Pass --{key} on the command line.")
    if boilerplate:
        yield _warning(", ".join(boilerplate), "equal to the default or without use here: dead weight.")


# ---- DeepSpeed configs -----------------------------------------------------------------------------------------


def _check_deepspeed(config: dict[str, Any], strict_json: bool, ranks: int | None = None) -> Iterator[Finding]:
    if not strict_json:
        message = "the file is not JSON, and Accelerate reads a DeepSpeed config as JSON only. Convert it."
        yield _error("zero_optimization", message)
    flat = dict(_paths(config))
    facts = Facts(values=flat)
    yield from _deepspeed_names(config)
    yield from _apply(table.DEEPSPEED_FILE_RULES, facts)
    for key, value in flat.items():
        if value == "auto" and key in table.TRAINER_AUTO:
            message = '"auto" is filled by Trainer only; with a plain Accelerator, prepare stops with a ValueError.'
            yield _warning(key, message)
        elif value == "auto" and key not in table.AUTO:
            message = 'nothing fills this "auto": Accelerator.prepare stops with a ValueError. Write a value.'
            yield _error(key, message)
        stage3 = key.startswith("zero_optimization.stage3_") and value is not False
        if stage3 and facts.below("zero_optimization.stage", 3, 0):
            yield _warning(key, "dead below ZeRO stage 3. Remove it.")
    yield from _batch_sizes(facts, ranks)


def _paths(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")


def _batch_sizes(facts: Facts, ranks: int | None) -> Iterator[Finding]:
    total, micro = facts.number("train_batch_size"), facts.number("train_micro_batch_size_per_gpu")
    # DeepSpeedPlugin writes 1 where the file says nothing.
    steps = facts.number("gradient_accumulation_steps", 1)
    if not total or not micro or not steps:
        return
    known = ranks if ranks and ranks > 0 else None
    if total != micro * steps * known if known else total % (micro * steps):
        message = (
            f"{total} is not train_micro_batch_size_per_gpu {micro} * gradient_accumulation_steps {steps} * "
            f"{known or 'any number of'} ranks: "
            'DeepSpeed stops with an AssertionError. Write "auto".'
        )
        yield _error("train_batch_size", message)


def _deepspeed_names(config: dict[str, Any]) -> Iterator[Finding]:
    try:
        from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS as removed
        from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        names = sorted((_keys_that_deepspeed_reads() | table.DEEPSPEED_EXTRA) - set(removed))
    except Exception as error:
        message = f"the names of keys were not checked, since deepspeed cannot be imported ({error})."
        yield _warning("zero_optimization", message)
        return
    for key in config:
        if key in removed:
            yield _error(key, f"DeepSpeed stops: {removed[key]}")
        # Underscores and slashes at the start are how people write comments in JSON.
        elif key not in names and key[:1] not in "_/#":
            message = unknown_name("key", key, names, "Nothing reads it, and DeepSpeed does not say so.")
            yield _error(key, message)
    models = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}
    for section, model in models.items():
        yield from _model_names(section, config.get(section), model)


def _keys_that_deepspeed_reads() -> set[str]:
    """Let DeepSpeed read a config that writes down which keys it is asked for."""
    from deepspeed.runtime.config import DeepSpeedConfig

    asked: set[str] = set()

    class Recorder(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

    DeepSpeedConfig(Recorder(train_micro_batch_size_per_gpu=1))
    return asked


def _model_names(path: str, content: object, model: Any) -> Iterator[Finding]:
    """Compare a section with the pydantic model that DeepSpeed reads it into, and so on downwards."""
    if not isinstance(content, dict):
        return
    from typing import get_args

    fields = dict(model.model_fields) | {field.alias: field for field in model.model_fields.values() if field.alias}
    for key, value in content.items():
        if key not in fields:
            message = unknown_name(f"key of {path}", str(key), fields, "DeepSpeed refuses it at prepare.")
            yield _error(f"{path}.{key}", message)
            continue
        note = fields[key].annotation
        for part in (note, *get_args(note)):
            if hasattr(part, "model_fields"):
                yield from _model_names(f"{path}.{key}", value, part)
