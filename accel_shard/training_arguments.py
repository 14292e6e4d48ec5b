"""HF Trainer under a policy: ``TrainingArguments`` that say it, and a callback that checks it was done.

Upstream names that this rests on (transformers 5.24): the documented fields ``fsdp``, ``fsdp_config``, ``deepspeed``,
``parallelism_config``, ``accelerator_config`` and ``use_cpu``, and ``TrainingArguments.fsdp_plugin_args``, from which
``Trainer.create_accelerator_and_postprocess`` builds its plugin.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from transformers import TrainerCallback, TrainingArguments

from accel_shard import rehearsal
from accel_shard.backends import backend_for
from accel_shard.environment import launcher_fields_set_aside, refuse_other_launch
from accel_shard.errors import PolicyError, PolicyNotAppliedError
from accel_shard.export import ExportSource, export_prepared
from accel_shard.policy import ShardingPolicy
from accel_shard.precision import cast_masters
from accel_shard.same_start import start_from_rank_zero
from accel_shard.verify import expect, verify_prepared

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["VerifyPolicy", "training_arguments"]

_SAID_BY_THE_POLICY: Final = {
    "bf16": "precision",
    "fp16": "precision",
    "fsdp": "backend",
    "fsdp_config": "backend",
    "deepspeed": "backend",
    "parallelism_config": "replicas",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "activation_checkpointing": "activation_checkpointing",
    "activation_checkpointing_kwargs": "activation_checkpointing",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing",
    "torch_compile": "compile",
    "use_cpu": "backend",
}


def training_arguments(policy: ShardingPolicy, **arguments: Any) -> TrainingArguments:
    """Build ``TrainingArguments`` for plain ``Trainer``. Every rank must call it, before its model is made.

    Without a device it also connects the CPU ranks for rehearsal. Give the trainer :class:`VerifyPolicy` too.

    Args:
        policy: what to do.
        **arguments: fields of ``TrainingArguments`` that a policy does not say.

    Raises:
        PolicyError: if an argument says again what the policy says, or contradicts ``global_batch_size``.
        UnsupportedPolicyError: if ``TrainingArguments`` or this machine cannot carry the policy out.
    """
    for name in arguments.keys() & _SAID_BY_THE_POLICY.keys():
        raise PolicyError(f"{name}={arguments[name]!r} is said by the policy's field {_SAID_BY_THE_POLICY[name]!r}.")
    refuse_other_launch(policy)
    backend, rehearsing = backend_for(policy), rehearsal.is_needed()
    if policy.backend != "ddp" and "LOCAL_RANK" not in os.environ:
        raise PolicyError(f"backend {policy.backend!r} shards over ranks, and this process was started alone.")
    batch_size = _batch_size(policy, arguments)
    fields: dict[str, Any] = {
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": policy.gradient_accumulation_steps,
        "max_grad_norm": policy.gradient_clipping or 0.0,
        "torch_compile": policy.compile,
        **_precision(policy),
    }
    settled = backend.training_arguments(rehearsing=rehearsing, batch_size=batch_size)
    if policy.activation_checkpointing and policy.backend != "fsdp1":
        settled.get("fsdp_config", {}).pop("activation_checkpointing", None)
        known = {field.name for field in dataclasses.fields(TrainingArguments)}
        name = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in known)
        fields |= {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    if rehearsing:
        fields |= _before_rehearsal(policy)
    elif policy.backend == "deepspeed":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    with launcher_fields_set_aside():
        built = TrainingArguments(**fields | settled | arguments)
    if policy.backend in ("fsdp", "fsdp1"):
        _complete_plugin_arguments(built, backend.trainer_plugin_arguments(rehearsing=rehearsing))
        if rehearsing:
            # TrainingArguments reset Accelerate's state, so this comes after them.
            rehearsal.enter(policy)
    return built


def _precision(policy: ShardingPolicy) -> dict[str, bool]:
    compute, master = policy.dtypes.compute, policy.dtypes.master
    return {"bf16": compute == "bf16" != master, "fp16": compute == "fp16"}


def _before_rehearsal(policy: ShardingPolicy) -> dict[str, Any]:
    if policy.backend != "deepspeed":
        rehearsal.refuse_on_cpu(policy)
        return {"use_cpu": True}
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    rehearsal.enter(policy)
    PartialState(**rehearsal.deepspeed_group_arguments())
    return {}


def _batch_size(policy: ShardingPolicy, arguments: dict[str, Any]) -> int:
    given, total = arguments.pop("per_device_train_batch_size", None), policy.global_batch_size
    whole = int(os.environ.get("WORLD_SIZE", "1")) * policy.gradient_accumulation_steps
    if total is None:
        return 8 if given is None else int(given)  # 8 is the default of TrainingArguments
    if total % whole or given not in (None, total // whole):
        raise PolicyError(
            f"global_batch_size is {total} and per_device_train_batch_size is {given} on {whole} ranks x accumulation "
            f"steps. {'Allowed: ' + str(total // whole) if total % whole == 0 else 'Nothing divides it'}."
        )
    return total // whole


def _complete_plugin_arguments(built: TrainingArguments, extra: dict[str, Any]) -> None:
    if not isinstance(getattr(built, "fsdp_plugin_args", None), dict):
        raise PolicyNotAppliedError(
            "this version of transformers has no TrainingArguments.fsdp_plugin_args, without which Trainer would not "
            "get the policy's dtypes. Use the version of constraints.txt."
        )
    built.fsdp_plugin_args.update(extra)


class VerifyPolicy(TrainerCallback):  # type: ignore[misc]
    """Gives a plain ``Trainer`` the policy's masters and rank 0's weights, and checks what it prepared.

    Use: ``trainer.add_callback(VerifyPolicy(policy, trainer))``, before ``trainer.train()``, on every rank.
    """

    def __init__(self, policy: ShardingPolicy, trainer: Trainer) -> None:
        self._policy, self._trainer, self._backend = policy, trainer, backend_for(policy)
        cast_masters(trainer.model, policy)
        if policy.backend != "ddp":
            start_from_rank_zero(trainer.accelerator, trainer.model)
        self._backend.remember(trainer.model)
        self._expected = expect(trainer.model, policy)
        self._own_optimizer = trainer.optimizer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare; every rank calls it, and it sums three numbers over the ranks.

        Raises:
            PolicyNotAppliedError: on every rank, if Trainer prepared something else.
        """
        trainer = self._trainer
        if self._policy.backend == "fsdp1" and state.global_step:
            raise PolicyNotAppliedError(
                "Trainer resumed under FSDP1, where Accelerate silently restores no optimizer state. Use backend "
                "'fsdp'."
            )
        verify_prepared(
            trainer.accelerator,
            self._policy,
            trainer.model_wrapped,
            trainer.optimizer,
            self._expected,
            accumulation=args.gradient_accumulation_steps,
        )
        self._backend.introduce(trainer.accelerator, trainer.model_wrapped, trainer.optimizer)
        used: Any = getattr(trainer.model_wrapped, "basic_optimizer", None) or trainer.optimizer
        used = getattr(used, "optimizer", used)
        if self._own_optimizer is not None and used is not self._own_optimizer:
            raise PolicyNotAppliedError(
                f"Trainer was given the optimizer {type(self._own_optimizer).__name__} and trains with "
                f"{type(used).__name__}: under DeepSpeed it drops its argument `optimizers`. Give it "
                "optimizer_cls_and_kwargs=(class, arguments) instead."
            )  # fmt: skip

    def export(self, folder: str | Path, **options: Any) -> Path:
        """Export the trained model as :func:`~accel_shard.export_model` does. Every rank must call it."""
        trainer = self._trainer
        source = ExportSource(trainer.accelerator, self._policy, self._backend, {})
        return export_prepared(source, trainer.model_wrapped, folder, **options)
