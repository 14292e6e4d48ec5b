"""``ShardingPolicy``: what is sharded, said once, in the field's words, for every backend.

A policy is data. It knows nothing of Accelerate: :mod:`accel_shard.backends` turns it into plugins, configs and
``TrainingArguments``, and :mod:`accel_shard.support` says which backend honours which field. The methods at the
end of the class are doors to those modules, opened when they are called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_shard.errors import PolicyError, UnsupportedPolicyError, unknown_name
from accel_shard.support import find_refusal
from accel_shard.vocabulary import (
    BACKEND,
    COMPRESSION,
    DTYPES,
    OFFLOAD,
    REDUCE,
    SHARD,
    choose,
    parse_clipping,
    parse_wrap,
    positive,
)

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

    from accel_shard.accelerator import PolicyAccelerator

__all__ = ["PRESETS", "Precision", "ShardingPolicy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Four dtypes, with one meaning on every backend.

    Attributes:
        master: dtype of the copy of the weights that the optimizer updates.
        compute: dtype of the matrix products of forward and backward.
        reduce: dtype in which gradients travel between ranks and are summed.
        save: dtype of exported weights.
    """

    master: str = "fp32"
    compute: str = "fp32"
    reduce: str = "fp32"
    save: str = "fp32"

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            choose(f"precision.{item.name}", getattr(self, item.name), DTYPES)
        if self.master == "fp16":
            raise PolicyError("precision.master is 'fp16': updates underflow in it. Allowed: fp32, bf16.")
        if self.master == "bf16" and (self.compute, self.reduce) != ("bf16", "bf16"):
            raise PolicyError(
                f"precision.master is 'bf16' with compute {self.compute!r} and reduce {self.reduce!r}: gradients of "
                "bf16 weights are bf16. Set both to bf16, or master to fp32."
            )

    @classmethod
    def parse(cls, value: object) -> Precision:
        """Read a shorthand (``fp32``, ``bf16``, ``fp16``), a mapping of the four names, or a ``Precision``.

        A shorthand is the dtype of ``compute``; masters, reductions and saved weights stay fp32, which is the
        only choice that DDP, FSDP and DeepSpeed all offer.

        Raises:
            PolicyError: for an unknown dtype or key.
        """
        if isinstance(value, Precision):
            return value
        if isinstance(value, Mapping):
            names = [item.name for item in dataclasses.fields(cls)]
            for key in value:
                if key not in names:
                    raise PolicyError(unknown_name("precision key", str(key), names))
            return cls(**value)
        return cls(compute=choose("precision", value, DTYPES))

    def plain(self) -> str | dict[str, str]:
        """Return the shortest form that :meth:`parse` reads back as this object."""
        if self == Precision(compute=self.compute):
            return self.compute
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingPolicy:
    """How the training state is sharded, and what goes with it.

    Attributes:
        shard: ``none``, ``optimizer``, ``gradients`` or ``parameters``; cumulative, as ZeRO stages 0, 1, 2, 3.
        backend: ``ddp``, ``fsdp`` (version 2), ``fsdp1`` or ``deepspeed``; ``auto`` is ``ddp`` for the first two
            values of ``shard`` and ``fsdp`` for the others.
        replicas: hybrid sharding: copies of the sharded state; the number of ranks must be a multiple of it.
        tensor_parallel: size of that mesh axis.
        context_parallel: size of that mesh axis.
        precision: a shorthand or four dtypes, see :class:`Precision`.
        wrap: units of FSDP: ``auto`` (the model's ``_no_split_modules``, else its repeated blocks), class names,
            or the number of parameters from which a module is a unit.
        offload: what lives in host memory between uses: ``none``, ``optimizer`` or ``parameters`` (both).
        offload_path: folder on NVMe for what is offloaded, instead of host memory.
        activation_checkpointing: recompute each unit's activations in backward.
        compile: ``torch.compile`` the model with inductor.
        gradient_clipping: largest global norm of the gradients; None is off.
        gradient_accumulation_steps: micro-batches in one optimizer step.
        global_batch_size: samples in one optimizer step over all ranks; None leaves it to the loader.
        gradient_reduce: who gets a gradient with ``shard: optimizer`` on DDP: ``all`` ranks, or only the ``owner`` that
            updates its weight, which sends a third less.
        gradient_compression: DDP communication hook: ``none``, ``fp16``, ``bf16`` or ``powersgd``.
        local_sgd: optimizer steps that each rank does by itself before the ranks average their weights; 1 averages
            gradients at each step, as DDP does.

    Raises:
        PolicyError: for a value outside its vocabulary.
        UnsupportedPolicyError: for a combination that the backend refuses; it names the nearest that works.
    """

    shard: str = "none"
    backend: str = "auto"
    replicas: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    precision: Precision | str = dataclasses.field(default_factory=Precision)
    wrap: str | tuple[str, ...] | int = "auto"
    offload: str = "none"
    offload_path: str | None = None
    activation_checkpointing: bool = False
    compile: bool = False
    gradient_clipping: float | None = None
    gradient_accumulation_steps: int = 1
    global_batch_size: int | None = None
    gradient_reduce: str = "all"
    gradient_compression: str = "none"
    local_sgd: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", Precision.parse(self.precision))
        object.__setattr__(self, "wrap", parse_wrap(self.wrap))
        choose("shard", self.shard, SHARD)
        choose("backend", self.backend, BACKEND)
        choose("offload", self.offload, OFFLOAD)
        choose("gradient_reduce", self.gradient_reduce, REDUCE)
        choose("gradient_compression", self.gradient_compression, COMPRESSION)
        for name in ("replicas", "tensor_parallel", "context_parallel", "gradient_accumulation_steps", "local_sgd"):
            positive(name, getattr(self, name))
        if self.global_batch_size is not None:
            positive("global_batch_size", self.global_batch_size)
        for name in ("activation_checkpointing", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"{name} is {getattr(self, name)!r}. Allowed: true, false.")
        object.__setattr__(self, "gradient_clipping", parse_clipping(self.gradient_clipping))
        if self.offload_path is not None and self.offload == "none":
            raise PolicyError("offload_path is set but offload is 'none'. Set offload to optimizer or parameters.")
        if self.backend == "auto":
            resolved = "ddp" if self.shard in ("none", "optimizer") else "fsdp"
            object.__setattr__(self, "backend", resolved)
        self._refuse_unsupported()

    def _refuse_unsupported(self) -> None:
        refusal = find_refusal(self.backend, self.flat())
        if refusal is None:
            return
        got = self.flat()[refusal.field]
        given = "".join(f", {name} {self.flat()[name]!r}" for name in refusal.when)
        change = ", ".join(f"{name}={value!r}" for name, value in refusal.instead.items())
        raise UnsupportedPolicyError(
            f"{refusal.field} {got!r} is refused on backend {self.backend!r}{given}: {refusal.reason}. "
            f"The nearest policy that works has {change}."
        )

    def flat(self) -> dict[str, object]:
        """Return every field with its value, precision as four dotted names: the form of the support table."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        precision = self.dtypes
        del values["precision"]
        return values | {f"precision.{f.name}": getattr(precision, f.name) for f in dataclasses.fields(precision)}

    @property
    def dtypes(self) -> Precision:
        """The four dtypes, whatever form ``precision`` was given in."""
        assert isinstance(self.precision, Precision)
        return self.precision

    @property
    def masters_apart(self) -> bool:
        """Whether weights on DDP are copies of masters that are shared out: gradients, so weights, of a lower dtype."""
        sharded = self.backend == "ddp" and self.shard == "optimizer"
        return sharded and self.dtypes.master != self.dtypes.reduce

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage of the same meaning: 0, 1, 2 or 3."""
        return SHARD.index(self.shard)

    def replace(self, **changes: object) -> ShardingPolicy:
        """Return a copy with some fields changed; ``precision.compute=...`` style keys are allowed in a dict.

        Raises:
            PolicyError: for an unknown field or a value that makes no sense.
        """
        return ShardingPolicy.load(self.to_dict() | {"backend": self.backend} | changes)

    # ---- forms: dict, YAML, one line -------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain data."""
        default = ShardingPolicy()
        values: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value != getattr(default, item.name):
                values[item.name] = list(value) if isinstance(value, tuple) else value
        if "precision" in values:
            values["precision"] = self.dtypes.plain()
        return values

    def to_yaml(self) -> str:
        """Return the policy as a YAML document."""
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False)) if self.to_dict() else "preset: ddp\n"

    def to_line(self) -> str:
        """Return the one-line form that command lines and the environment carry, ``field=value,field=value``."""
        parts = []
        for name, value in self.to_dict().items():
            if isinstance(value, dict):
                parts += [f"{name}.{key}={dtype}" for key, dtype in value.items()]
            elif isinstance(value, list):
                parts.append(f"{name}={'+'.join(value)}")
            else:
                parts.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
        return ",".join(parts) or "ddp"

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | ShardingPolicy) -> ShardingPolicy:
        """Read a policy from a preset name, a YAML file, the one-line form, or a mapping.

        A mapping (and so a YAML file) may name a ``preset`` to start from. The one-line form may too:
        ``fsdp2,precision=bf16,gradient_clipping=1.0``; the first part is a preset or a file.

        Raises:
            PolicyError: for an unknown preset, a missing file, or an unknown or senseless field.
        """
        if isinstance(source, ShardingPolicy):
            return source
        if isinstance(source, Mapping):
            return cls._from_mapping(source)
        head, *rest = str(source).split(",")
        assigned = [_parse_assignment(part) for part in ([head] if "=" in head else []) + rest]
        changes = dict(assigned)
        if len(changes) < len(assigned):
            raise PolicyError(f"the policy {str(source)!r} says a field twice. Say it once.")
        if "=" in head:
            return cls._from_mapping(changes)
        return cls._from_mapping(_read_base(head) | changes)

    @classmethod
    def _from_mapping(cls, values: Mapping[str, Any]) -> ShardingPolicy:
        fields = {item.name for item in dataclasses.fields(cls)}
        merged: dict[str, Any] = {}
        if "preset" in values:
            merged.update(_preset(values["preset"]))
        for key, value in values.items():
            if key == "preset":
                continue
            name, _, part = str(key).partition(".")
            if name not in fields or (part and name != "precision"):
                raise PolicyError(unknown_name("policy field", str(key), sorted(fields | {"preset"})))
            if part:
                # Not parsed yet: the parts make sense together only.
                given = merged.get(name, "fp32")
                parts = dict(given) if isinstance(given, Mapping) else dataclasses.asdict(Precision.parse(given))
                merged[name] = parts | {part: value}
            else:
                merged[name] = value
        return cls(**merged)

    # ---- doors to the modules above --------------------------------------------------------------------------

    @classmethod
    def from_environment(cls, policy: str | None = None, **overrides: Any) -> ShardingPolicy:
        """Read what ``accelerate launch`` (or ``ACCEL_SHARD_POLICY``) set; see :mod:`accel_shard.environment`."""
        from accel_shard.environment import policy_from_environment

        return policy_from_environment(policy, **overrides)

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables that :meth:`from_environment` reads back as this policy."""
        return {"ACCEL_SHARD_POLICY": self.to_line()}

    def accelerator(self, **arguments: Any) -> PolicyAccelerator:
        """Build an :class:`accelerate.Accelerator` that does what this policy says. Every rank must call it."""
        from accel_shard.accelerator import PolicyAccelerator

        return PolicyAccelerator(self, **arguments)

    def optimizer(
        self, params: Any, kind: Callable[..., torch.optim.Optimizer], *, reduce: str | None = None, **settings: Any
    ) -> Any:
        """Build an optimizer that shards its state as this policy says; local.

        ``kind(params, **settings)``, or with ``shard: optimizer`` on DDP a
        :class:`~accel_shard.ShardedOptimizer` that runs it. ``PolicyAccelerator.prepare`` makes one of a plain
        optimizer too; HF Trainer does not, and must be given this one.

        Args:
            params: parameters, or groups of them.
            kind: a class, or a factory.
            reduce: as the field ``gradient_reduce``, which counts if this is None.
            **settings: what ``kind`` takes beside the parameters.

        Raises:
            PolicyError: for ``reduce`` where nothing is shared out by the optimizer, or against the field.
        """
        from accel_shard.optim.under_policy import is_asked_for, make

        # One that works on whole parameters shares out its state itself (layout.NeedsLayout).
        if reduce is None and (not is_asked_for(self) or hasattr(kind, "bind_to")):
            return kind(params, **settings)

        return make(self, params, kind, reduce, settings)

    def training_arguments(self, **arguments: Any) -> TrainingArguments:
        """Build ``transformers.TrainingArguments`` that do what this policy says. Every rank must call it."""
        from accel_shard.training_arguments import training_arguments

        return training_arguments(self, **arguments)

    def explain(self) -> str:
        """Return, field by field, what will really be done."""
        from accel_shard.explain import explain_policy

        return explain_policy(self)


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ddp": {"shard": "none", "backend": "ddp"},
    "ddp_sharded": {"shard": "optimizer", "backend": "ddp"},
    "zero1": {"shard": "optimizer", "backend": "deepspeed"},
    "zero2": {"shard": "gradients", "backend": "deepspeed"},
    "zero3": {"shard": "parameters", "backend": "deepspeed"},
    "zero3_offload": {"shard": "parameters", "backend": "deepspeed", "offload": "parameters"},
    "fsdp1": {"shard": "parameters", "backend": "fsdp1"},
    "fsdp2": {"shard": "parameters", "backend": "fsdp"},
    "fsdp2_keep_params": {"shard": "gradients", "backend": "fsdp"},
    "fsdp2_offload": {"shard": "parameters", "backend": "fsdp", "offload": "parameters"},
    "hsdp": {"shard": "parameters", "backend": "fsdp", "replicas": 2},
}


def _preset(name: object) -> Mapping[str, Any]:
    if name not in PRESETS:
        raise PolicyError(unknown_name("preset", str(name), PRESETS, "Or give the path of a YAML file."))
    return PRESETS[str(name)]


def _read_base(head: str) -> dict[str, Any]:
    if head in PRESETS:
        return dict(PRESETS[head])
    path = Path(head)
    if not path.is_file():
        if path.suffix or "/" in head:
            raise PolicyError(f"policy file {head!r} does not exist.")
        return dict(_preset(head))
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise PolicyError(f"policy file {head!r} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise PolicyError(f"policy file {head!r} holds {type(values).__name__}; a mapping of fields is needed.")
    if "distributed_type" in values or "compute_environment" in values:
        raise PolicyError(
            f"{head!r} is an accelerate config, not a policy file. Pass it to `accelerate launch --config_file`, "
            "or see what it does with `accel-shard explain`."
        )
    return values


def _parse_assignment(part: str) -> tuple[str, Any]:
    import yaml

    name, separator, text = part.partition("=")
    if not separator or not name.strip():
        raise PolicyError(f"policy part {part!r} is not of the form field=value.")
    if name.strip() == "wrap" and not text.isdigit():
        return "wrap", text.split("+") if text != "auto" else "auto"
    return name.strip(), yaml.safe_load(text)
