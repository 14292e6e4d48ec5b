"""What a backend must offer. Add one by writing one module beside this one and naming it in the registry."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_shard.policy import ShardingPolicy

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from accel_shard.backends.parameter_layout import StateShape
    from accel_shard.layout import FlatTensor, Layout

__all__ = ["Backend", "Prepared"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What one rank really holds after ``prepare``, read from the prepared objects, never from the policy.

    Attributes:
        kind: the backend's own word for what it prepared, as ``FSDP2`` or ``ZeRO stage 2``.
        weights: elements of the model's weights that live on this rank between steps, padding left out.
        updated: elements of trainable weights whose optimizer state lives on this rank.
        compute: dtypes in which the units compute.
        master: dtypes of the copies that the optimizer updates.
        reduce: dtypes in which gradients are reduced.
        units: wrapped units by class name (FSDP only).
    """

    kind: str
    weights: int
    updated: int
    compute: frozenset[str]
    master: frozenset[str]
    reduce: frozenset[str]
    units: dict[str, int]


class Backend(abc.ABC):
    """Carries out one policy. Methods import torch when called, so that a config can be written without it."""

    distributed_types: tuple[str, ...]
    """The ``accelerate.utils.DistributedType`` names that mean this backend."""
    kind: str
    """What :class:`Prepared` must say."""

    def __init__(self, policy: ShardingPolicy) -> None:
        self.policy = policy

    @abc.abstractmethod
    def launch_config(self) -> dict[str, Any]:
        """Return the keys of an accelerate config file that say this policy. Imports nothing heavy."""

    @abc.abstractmethod
    def accelerator_arguments(self, *, rehearsing: bool) -> dict[str, Any]:
        """Return the arguments of ``accelerate.Accelerator``, ``kwargs_handlers`` included. Nothing is ``auto``."""

    @abc.abstractmethod
    def training_arguments(self, *, rehearsing: bool, batch_size: int) -> dict[str, Any]:
        """Return the fields of ``transformers.TrainingArguments`` that say this policy."""

    def trainer_plugin_arguments(self, *, rehearsing: bool) -> dict[str, Any]:
        """Return what ``TrainingArguments.fsdp_plugin_args`` must hold beside what its fields can say."""
        return {}

    def before_prepare(self, accelerator: Accelerator, model: torch.nn.Module, batch_size: int | None) -> None:  # noqa: B027
        """Adjust plugins to a model just before ``prepare``; ``batch_size`` is per rank and micro-batch."""

    def remember(self, model: torch.nn.Module) -> None:  # noqa: B027
        """Remember of a model what ``prepare`` will hide. :meth:`before_prepare` does it too."""

    def after_prepare(self, accelerator: Accelerator, model: torch.nn.Module) -> None:  # noqa: B027
        """Give a prepared model what the backend leaves out."""

    @abc.abstractmethod
    def inspect(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Prepared:
        """Read from prepared objects what this rank holds. Local: communicates nothing."""

    @abc.abstractmethod
    def weight_copies(self, world_size: int) -> int:
        """Return how often each weight element exists over all ranks, between steps."""

    @abc.abstractmethod
    def state_copies(self, world_size: int) -> int:
        """Return how often each element's optimizer state exists over all ranks."""

    @abc.abstractmethod
    def whole_weights(self, accelerator: Accelerator, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(fully qualified name, whole weight)`` one parameter at a time, in the model's order.

        Every rank must iterate to the end: sharded backends gather each parameter when it is asked for, and free it
        afterwards. The value is the master copy where there is one. Tied weights come once, by their first name.
        """

    @abc.abstractmethod
    def layout(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Layout:
        """Describe what this rank holds of a prepared model and its prepared optimizer (or None).

        Every rank must call it: FSDP1 gathers the sizes of its ranges. The shards are views of live memory.
        """

    def flat_tensors(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> list[FlatTensor] | None:
        """Describe the tensors in an optimizer's groups; None if they are the parameters, or DTensors of them.

        Every rank must call it: FSDP1 gathers the sizes of its ranges.
        """
        return None

    def named_module(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module in a prepared model whose parameters have the user's names, up to canonical ones."""
        return model

    def materialize(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: Any,
        shapes: Mapping[str, Mapping[str, StateShape]],
        scalars: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Give the optimizer state of these shapes, and scalars, so that a new :meth:`layout` can be filled."""
        from accel_shard.backends.parameter_layout import materialize

        layout, named = self.layout(accelerator, model, None), self.named_module(accelerator, model)
        materialize(layout, named, self.torch_optimizer(model, optimizer), shapes, scalars)

    def after_load(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> None:  # noqa: B027
        """Bring what is derived from the filled shards up to date. Every rank must call it."""

    def counters(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return plain data that the backend keeps of its own, for a snapshot."""
        return {}

    def set_counters(self, model: torch.nn.Module, counters: Mapping[str, Any]) -> None:  # noqa: B027
        """Put back what :meth:`counters` returned, or what another backend did. Every rank must call it."""

    def torch_optimizer(self, model: torch.nn.Module, optimizer: Any) -> Any:
        """Return the torch optimizer inside a prepared one, whose ``param_groups`` hold the hyperparameters."""
        return getattr(optimizer, "optimizer", optimizer)

    @abc.abstractmethod
    def clip(self, accelerator: Accelerator, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip already unscaled gradients to a global norm and return that norm. Collective where sharded."""
