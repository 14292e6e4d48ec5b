"""Puts a checkpoint that something else wrote into a live run, whatever its policy and number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from accelerate.logging import get_logger

from accel_shard.checkpoint.foreign import open_foreign
from accel_shard.checkpoint.foreign_files import Foreign, OptimizerState, Stored
from accel_shard.checkpoint.run_state import restore_groups
from accel_shard.checkpoint.together import together
from accel_shard.errors import SnapshotError
from accel_shard.layout import Layout, Shard
from accel_shard.names import canonical

if TYPE_CHECKING:
    from accel_shard.accelerator import PolicyAccelerator

__all__ = ["start_from"]

logger = get_logger(__name__)

# How a step is computed, not what: this run's own choice, since the source's device may have been another.
_SWITCHES: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})
_ELEMENTWISE: Final = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "sum", "ax"}
)
_WEIGHTS_ONLY: Final = "Or take over the weights alone, with weights_only=True."
_POSITION: Final = frozenset(
    {"last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "base_lrs", "lr_lambdas"}
)


def start_from(accelerator: PolicyAccelerator, path: Path, *, weights_only: bool = False) -> int:
    """Start a run from a foreign checkpoint. Every rank must call it; they exchange failures and what loading needs.

    Args:
        accelerator: with one prepared model, and one optimizer unless ``weights_only``.
        path: the folder or file.
        weights_only: leave the optimizer, schedulers, scaler and step count as they are.

    Returns:
        Optimizer steps that the source says it has done; 0 if it does not say, or with ``weights_only``.

    Raises:
        SnapshotError: on every rank, if the source cannot be read, or is of another model, optimizer or schedule.
        UnsupportedPolicyError: if this backend cannot carry the stored optimizer state.
    """
    failed = f"could not start from {str(path)!r}"
    with together(failed):
        source = open_foreign(path)
    backend, (model, optimizer) = accelerator.backend, accelerator.trained
    layout = backend.layout(accelerator, model, optimizer)
    names = _Names(source, layout)
    if weights_only:
        with together(failed):
            shards = _match_weights(source, names, layout)
        left = [*_present(source), *source.left]
    else:
        client = backend.torch_optimizer(model, optimizer)
        with together(failed):
            shards = _match_weights(source, names, layout)
            state = _named_optimizer(source, names, layout, client, _trainable(accelerator, model))
            _check_run(accelerator, source)
        left = list(source.left)
        if state is not None:
            restore_groups(client, layout, state.groups)
            shapes = {who: {key: (s.shape, s.dtype) for key, s in held.items()} for who, held in state.states.items()}
            backend.materialize(accelerator, model, optimizer, shapes, state.scalars)
            layout = backend.layout(accelerator, model, optimizer)
            with together(failed):
                shards = _match_weights(source, names, layout)
            shards += [
                (f"{name} ({key})", state.states[name][key], shard)
                for name, held in layout.states.items()
                for key, shard in held.items()
            ]
    with together(failed):
        _fill(shards, names, layout)
    backend.after_load(accelerator, model, optimizer)
    if not weights_only:
        left += _restore_rest(accelerator, model, source)
    _report(source, shards, names.unused(), left, weights_only)
    return 0 if weights_only else source.step or 0


# ---- names -------------------------------------------------------------------------------------------------------


class _Names:
    """Finds the source's tensors by this run's names: without wrappers' parts, and whichever name of a tied weight."""

    def __init__(self, source: Foreign, layout: Layout) -> None:
        own = {*layout.weights, *layout.buffers, *layout.aliases}
        self._layout = layout
        plain = [canonical(name) for name in source.weights]
        wrapped = bool(plain) and all(name.startswith("module.") for name in plain)
        self._prefix = "module." if wrapped and not any(name.startswith("module.") for name in own) else ""
        self._stored = {self.plain(name): stored for name, stored in source.weights.items()}
        self._aliases = {self.plain(alias): self.plain(name) for alias, name in source.aliases.items()}
        self._further: dict[str, list[str]] = {}
        for alias, name in layout.aliases.items():
            self._further.setdefault(name, []).append(alias)
        self._used: set[str] = set()

    def plain(self, name: str) -> str:
        """Return a name of the source without what wrappers added to it."""
        return canonical(name).removeprefix(self._prefix)

    def find(self, name: str) -> list[Stored]:
        """Return what the source has of one of this run's tensors: several if this run ties what it did not."""
        found: dict[str, Stored] = {}
        for candidate in (name, *self._further.get(name, ())):
            where = candidate if candidate in self._stored else self._aliases.get(candidate, "")
            if where in self._stored:
                found[where] = self._stored[where]
        self._used |= found.keys()
        return list(found.values())

    def own(self, name: str) -> str | None:
        """Return this run's name of a parameter of the source; None if there is none."""
        same = self.plain(name)
        for candidate in (same, *(alias for alias, stored in self._aliases.items() if stored == same)):
            if candidate in self._layout.weights:
                return candidate
            if candidate in self._layout.aliases:
                return self._layout.aliases[candidate]
        return None

    def unused(self) -> list[str]:
        """Return the source's tensors that were never asked for."""
        return sorted(self._stored.keys() - self._used)


_Match = tuple[str, Stored, Shard]


def _match_weights(source: Foreign, names: _Names, layout: Layout) -> list[_Match]:
    matches, missing = [], []
    for name, shard in (*layout.weights.items(), *layout.buffers.items()):
        found = names.find(name)
        if found and found[0].shape != shard.shape:
            raise SnapshotError(
                f"{name!r} has shape {shard.shape} in this run and {found[0].shape} in {str(source.path)!r}. Make the "
                "same model."
            )
        matches += [(name, found[0], shard)] if found else []
        missing += [] if found else [name]
    if missing:
        raise SnapshotError(
            f"{str(source.path)!r} is of another model: it lacks {_some(missing)}; "
            f"only it has {_some(names.unused()) or 'nothing else'}. Make the same model."
        )
    return matches


def _fill(matches: Iterable[_Match], names: _Names, layout: Layout) -> None:
    for name, stored, shard in matches:
        stored.read_into(name, shard)
        for other in names.find(name)[1:] if name in layout.weights else ():
            # This run ties two weights that the source has apart: only if they are one can nothing be lost.
            copy = Shard(shard.shape, shard.dtype, tuple((box, torch.empty_like(part)) for box, part in shard.parts))
            other.read_into(name, copy)
            if not all(torch.equal(a, b) for (_, a), (_, b) in zip(shard.parts, copy.parts, strict=True)):
                raise SnapshotError(
                    f"{name!r} is tied to another weight in this run, and the two differ in the source. Make the model "
                    "without tied weights."
                )


# ---- optimizer ---------------------------------------------------------------------------------------------------


def _trainable(accelerator: PolicyAccelerator, model: torch.nn.Module) -> set[str]:
    named = accelerator.backend.named_module(accelerator, model)
    return {canonical(name) for name, p in named.named_parameters(remove_duplicate=False) if p.requires_grad}


def _named_optimizer(
    source: Foreign, names: _Names, layout: Layout, client: Any, trainable: set[str]
) -> OptimizerState | None:
    """Return the source's optimizer state under this run's names, group by group as in this run.

    Raises:
        SnapshotError: naming what differs.
    """
    if client is None:
        return None
    theirs, where = source.optimizer, str(source.path)
    if theirs is None:
        raise SnapshotError(
            f"{where!r}, {source.kind}, holds no optimizer state, and this run has an optimizer. Give a whole "
            f"checkpoint. {_WEIGHTS_ONLY}"
        )
    if len(theirs.groups) != len(layout.groups):
        raise SnapshotError(
            f"the optimizer in {where!r} has {len(theirs.groups)} parameter groups of "
            f"{[len(g['params']) for g in theirs.groups]} parameters, and this run's has {len(layout.groups)} of "
            f"{[len(g['params']) for g in layout.groups]}. Make the same groups. {_WEIGHTS_ONLY}"
        )
    _check_kind(theirs, client, where)
    state = OptimizerState([])
    for number, (group, own) in enumerate(zip(theirs.groups, layout.groups, strict=True)):
        called = _call(group, own["params"], names, f"parameter group {number} in {where!r}")
        _check_members(number, {n for n in called.values() if n}, set(own["params"]), trainable, where)
        # What this run's optimizer has no use for stays away from it: DeepSpeed's and apex's keep more.
        settings = {key: value for key, value in group.items() if key in own and key not in _SWITCHES}
        state.groups.append(settings | {"params": own["params"]})
        for who, name in called.items():
            if name is not None:
                state.states |= {name: theirs.states[who]} if who in theirs.states else {}
                # FusedAdam counts steps once a group.
                counted = {"step": group["step"]} if "step" in group and who in theirs.states else {}
                scalars = {k: _scalar(k, v, client) for k, v in (counted | theirs.scalars.get(who, {})).items()}
                state.scalars |= {name: scalars} if scalars else {}
    for name, held in state.states.items():
        for key, stored in held.items():
            if key in _ELEMENTWISE and stored.shape != layout.weights[name].shape:
                raise SnapshotError(
                    f"the optimizer state {key!r} of {name!r} has shape {stored.shape} in {where!r}, and the weight "
                    f"has {layout.weights[name].shape}: its parameters come in another order. Make the same groups."
                )
    return state


def _call(group: Mapping[str, Any], own: list[str], names: _Names, what: str) -> dict[Any, str | None]:
    """Say, for each parameter of a group as the file calls it, what this run calls it."""
    given = group["params"]
    stated = given if all(isinstance(who, str) for who in given) else group.get("param_names")
    if stated is not None:
        called = {who: names.own(name) for who, name in zip(given, stated, strict=True)}
        strangers = [name for name, who in zip(stated, given, strict=True) if called[who] is None]
        if strangers:
            raise SnapshotError(f"{what} has {_some(strangers)}, which this run's model does not have.")
        return called
    if len(given) != len(own):
        raise SnapshotError(
            f"{what} has {len(given)} parameters, by number only, and this run's group has {len(own)}: which is which "
            f"cannot be told. Make the same groups (of frozen weights, DeepSpeed keeps none). {_WEIGHTS_ONLY}"
        )
    return dict(zip(given, own, strict=True))


def _check_members(number: int, theirs: set[str], own: set[str], trainable: set[str], where: str) -> None:
    """Compare a group's members; frozen ones do not count, since some backends keep them in groups and some do not."""
    differ = (theirs ^ own) & trainable
    if differ:
        raise SnapshotError(
            f"parameter group {number} is not the same: {_some(sorted(differ & theirs)) or 'nothing'} only in "
            f"{where!r}, {_some(sorted(differ & own)) or 'nothing'} only in this run. Make the same groups. "
            f"{_WEIGHTS_ONLY}"
        )


def _check_kind(theirs: OptimizerState, client: Any, where: str) -> None:
    # A flag that is off is not asked for: later versions of torch added them, and DeepSpeed's Adam has none.
    asked = {key for key, value in client.defaults.items() if value is not None and not isinstance(value, bool)}
    needed = asked - _SWITCHES
    for number, group in enumerate(theirs.groups):
        if needed - group.keys():
            raise SnapshotError(
                f"{where!r} is of another optimizer than this run's {type(client).__name__}: its parameter group "
                f"{number} has no {_some(sorted(needed - group.keys()))}. Make the same optimizer. {_WEIGHTS_ONLY}"
            )


def _scalar(key: str, value: Any, client: Any) -> Any:
    """Return a step count as torch's optimizers want it: a tensor, where others and older ones keep a number."""
    if key == "step" and isinstance(value, (int, float)) and type(client).__module__.startswith("torch.optim"):
        return torch.tensor(float(value))
    return value


# ---- the rest ----------------------------------------------------------------------------------------------------


def _check_run(accelerator: PolicyAccelerator, source: Foreign) -> None:
    """Compare what comes after the tensors before any is changed."""
    here, there = len(accelerator._schedulers), len(source.schedulers)
    if here != there:
        raise SnapshotError(
            f"{str(source.path)!r} has {there} schedulers, and this run has {here}. Prepare as many. {_WEIGHTS_ONLY}"
        )
    for number, scheduler in enumerate(accelerator._schedulers):
        source.schedulers[number] = _in_steps(number, source.schedulers[number], scheduler.state_dict(), source)
    here, there = len(accelerator._custom_objects), len(source.objects)
    if here and there and here != there:
        raise SnapshotError(
            f"{str(source.path)!r} has {there} registered objects, and this run has {here}. Register as "
            f"many. {_WEIGHTS_ONLY}"
        )


def _in_steps(number: int, stored: dict[str, Any], own: Mapping[str, Any], source: Foreign) -> dict[str, Any]:
    """Return a scheduler's state counted in optimizer steps. A plain ``Accelerator`` steps it once a rank instead."""
    steps = source.optimizer.steps if source.optimizer is not None else None
    if not steps or source.ranks in (None, 1) or stored.get("last_epoch") != steps * source.ranks:
        return stored
    differ = [key for key in stored if key not in _POSITION and stored[key] != own.get(key)]
    if differ:
        raise SnapshotError(
            f"scheduler {number} in {str(source.path)!r} counted {stored['last_epoch']} steps in {steps} optimizer "
            f"steps: Accelerate steps it once for each of {source.ranks} ranks. Here a step is an optimizer step, and "
            f"{_some(differ)} would have to be counted so too. Make the schedule anew after resume. {_WEIGHTS_ONLY}"
        )
    logger.info(
        "scheduler %d counted %d steps, one for each of %d ranks; it goes on at optimizer step %d",
        number, stored["last_epoch"], source.ranks, steps, main_process_only=True,
    )  # fmt: skip
    return {**stored, "last_epoch": steps, "_step_count": steps + 1}


def _restore_rest(accelerator: PolicyAccelerator, model: torch.nn.Module, source: Foreign) -> list[str]:
    """Restore counters, schedulers, scaler and objects, and say what was left."""
    left = []
    known = {"global_steps": source.step} if source.step is not None else {}
    accelerator.backend.set_counters(model, source.counters or known)
    for scheduler, state in zip(accelerator._schedulers, source.schedulers, strict=True):
        scheduler.load_state_dict(state)
    for thing, state in zip(accelerator._custom_objects, source.objects, strict=False):
        thing.load_state_dict(state)
    if source.objects and not accelerator._custom_objects:
        left.append("registered objects (this run has none)")
    if source.scaler is not None and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(source.scaler)
    elif source.scaler is not None:
        left.append("the loss scaler (this run has none)")
    if source.optimizer is not None and not accelerator._optimizers:
        left.append("the optimizer (this run has none)")
    return left


def _present(source: Foreign) -> list[str]:
    parts = {"the optimizer": source.optimizer, "schedulers": source.schedulers, "the loss scaler": source.scaler}
    return [name for name, part in (parts | {"registered objects": source.objects}).items() if part]


def _report(source: Foreign, matches: list[_Match], unused: list[str], left: list[str], weights_only: bool) -> None:
    cast = sorted({f"{s.dtype} to {shard.dtype}" for _, s, shard in matches if s.dtype != shard.dtype})
    if cast:
        logger.warning("tensors of %s were cast: %s", source.path, ", ".join(cast), main_process_only=True)
    if unused:
        logger.warning("%s holds tensors that this run's model has not: %s", source.path, ", ".join(unused),
                       main_process_only=True)  # fmt: skip
    what = "its weights alone" if weights_only else f"after step {'unknown' if source.step is None else source.step}"
    left = [*left, "random state", "position in the data beyond the step count"]
    logger.info("started from %s, %s (%s). Not taken over: %s", source.path, source.kind, what, ", ".join(left),
                main_process_only=True)  # fmt: skip


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
