"""What a snapshot holds of a run, and how it is put back: all that makes the next step the one it would have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from accel_shard.checkpoint import random_state
from accel_shard.checkpoint.plain import decode, encode
from accel_shard.checkpoint.snapshot import Snapshot
from accel_shard.errors import SnapshotError
from accel_shard.layout import Layout

if TYPE_CHECKING:
    from accel_shard.accelerator import PolicyAccelerator

__all__ = ["Offer", "collect", "restore", "restore_random_state"]


@dataclass(frozen=True, slots=True)
class Offer:
    """What the ranks must tell each other before :func:`collect`: scalars of optimizer state, and hashes of buffers."""

    scalars: dict[str, dict[str, Any]]
    digests: dict[str, bytes]

    @classmethod
    def of(cls, layout: Layout) -> Offer:
        """Make this rank's. Local: communicates nothing; waits for the device."""
        return cls(_numbers(layout.scalars), _digests(_buffers(layout)))


def collect(
    accelerator: PolicyAccelerator, layout: Layout, progress: Mapping[str, Any], offers: Sequence[Offer]
) -> tuple[dict[str, Any], Any]:
    """Return what the manifest gets beside tensors, and what this rank keeps of its own. Local: communicates nothing.

    Args:
        accelerator: whose run it is.
        layout: of this rank.
        progress: of the loop's own.
        offers: of all ranks.

    Raises:
        SnapshotError: for something that only pickle could hold.
    """
    model, _ = accelerator.trained
    scalars = _scalars([offer.scalars for offer in offers])
    facts = {
        "progress": encode(dict(progress), "progress"),
        "optimizer": {"groups": encode(layout.groups, "param_groups"), "scalars": encode(scalars, "optimizer state")},
        "schedulers": [encode(s.state_dict(), f"scheduler {i}") for i, s in enumerate(accelerator._schedulers)],
        "scaler": encode(accelerator.scaler.state_dict(), "scaler") if accelerator.scaler is not None else None,
        "objects": [
            encode(thing.state_dict(), f"registered object {i} ({type(thing).__name__})")
            for i, thing in enumerate(accelerator._custom_objects)
        ],
        "counters": accelerator.backend.counters(model),
        "micro_step": accelerator.step,
        "world_size": accelerator.num_processes,
        "policy": accelerator.policy.to_dict(),
    }
    own = {"random": random_state.capture(accelerator.device), "buffers": _of_my_own(_buffers(layout), offers)}
    return facts, encode(own, "rank")


class _Number(NamedTuple):
    dtype: str
    value: Any


def _numbers(scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Turn tensors of no dimension into numbers with their dtypes: a step count a parameter, and tensors pickle slowly.

    They are taken off their device together, since each alone would wait for it.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[tuple[str, str]]] = {}
    plain: dict[str, dict[str, Any]] = {name: dict(values) for name, values in scalars.items()}
    for name, values in scalars.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                alike.setdefault((value.dtype, value.device), []).append((name, key))
    for (dtype, _), places in alike.items():
        found = torch.stack([scalars[name][key].detach() for name, key in places]).tolist()
        for (name, key), number in zip(places, found, strict=True):
            plain[name][key] = _Number(str(dtype).removeprefix("torch."), number)
    return plain


def _scalars(everyones: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Put together what all ranks have, as tensors where they were."""
    merged: dict[str, dict[str, Any]] = {}
    for theirs in everyones:
        for name, values in theirs.items():
            merged.setdefault(name, values)
    return {
        name: {
            key: torch.tensor(value.value, dtype=getattr(torch, value.dtype)) if isinstance(value, _Number) else value
            for key, value in values.items()
        }
        for name, values in merged.items()
    }


def _buffers(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: part.cpu() for name, shard in layout.buffers.items() for _, part in shard.parts}


def _digests(buffers: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    import hashlib

    return {n: hashlib.blake2b(t.reshape(-1).view(torch.uint8).numpy().tobytes()).digest() for n, t in buffers.items()}


def _of_my_own(buffers: Mapping[str, torch.Tensor], offers: Sequence[Offer]) -> dict[str, torch.Tensor]:
    """Return the buffers in which ranks differ, as running statistics do under FSDP: the snapshot proper has one."""
    return {name: tensor for name, tensor in buffers.items() if len({offer.digests[name] for offer in offers}) > 1}


def restore(accelerator: PolicyAccelerator, snapshot: Snapshot) -> dict[str, Any]:
    """Put everything but the random state back, and return the progress. Every rank must call it.

    Raises:
        SnapshotError: if the snapshot is of another model or other parameter groups.
        UnsupportedPolicyError: if this backend cannot carry the stored optimizer state.
    """
    backend, (model, optimizer) = accelerator.backend, accelerator.trained
    facts = snapshot.manifest
    scalars = decode(facts["optimizer"]["scalars"])
    client = backend.torch_optimizer(model, optimizer)
    if client is not None:
        _restore_groups(client, backend.layout(accelerator, model, optimizer), decode(facts["optimizer"]["groups"]))
        backend.materialize(accelerator, model, optimizer, _state_shapes(snapshot), scalars)
    layout = backend.layout(accelerator, model, optimizer)
    snapshot.read_into(layout)
    if facts["world_size"] == accelerator.num_processes:
        own = snapshot.rank_facts(accelerator.process_index)
        assert own is not None, "a snapshot has facts of each of its ranks"
        for name, value in decode(own["buffers"]).items():
            for _, part in layout.buffers[name].parts:
                part.copy_(value)
    backend.after_load(accelerator, model, optimizer)
    backend.set_counters(model, facts["counters"])
    _restore_each("scheduler", accelerator._schedulers, facts["schedulers"])
    _restore_each("registered object", accelerator._custom_objects, facts["objects"])
    if accelerator.scaler is not None and facts["scaler"] is not None:
        accelerator.scaler.load_state_dict(decode(facts["scaler"]))
    accelerator.step = facts["micro_step"]
    progress: dict[str, Any] = decode(facts["progress"])
    return progress


def restore_random_state(accelerator: PolicyAccelerator, snapshot: Snapshot) -> None:
    """Give this rank the random state that it had, or a new stream if the saving run had no such rank. Local."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = snapshot.rank_facts(rank)
    if own is not None:
        random_state.restore(decode(own["random"]), accelerator.device)
        return
    first = snapshot.rank_facts(0)
    assert first is not None, "a snapshot has a rank 0"
    random_state.derive(decode(first["random"]), rank)


def _restore_each(kind: str, things: list[Any], states: list[Any]) -> None:
    if len(things) != len(states):
        raise SnapshotError(f"the snapshot has {len(states)} of: {kind}; this run has {len(things)}. Prepare the same.")
    for thing, state in zip(things, states, strict=True):
        thing.load_state_dict(decode(state))


def _state_shapes(snapshot: Snapshot) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    shapes: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for key, stored in snapshot.manifest["tensors"].items():
        if key.startswith("optim."):
            name, _, state = key.removeprefix("optim.").rpartition(".")
            shapes.setdefault(name, {})[state] = (tuple(stored["shape"]), getattr(torch, stored["dtype"]))
    return shapes


def _restore_groups(client: Any, layout: Layout, stored: list[dict[str, Any]]) -> None:
    """Set hyperparameters, group by group. A group is known by the names of its parameters, in any order."""
    own = [set(group["params"]) for group in layout.groups]
    theirs = [set(group["params"]) for group in stored]
    if own != theirs:
        strangers = sorted(set().union(*own) ^ set().union(*theirs))
        raise SnapshotError(
            f"the snapshot's parameter groups are not this run's: {len(theirs)} groups of {[len(t) for t in theirs]} "
            f"parameters against {len(own)} of {[len(o) for o in own]}"
            + (f"; only in one of them: {', '.join(strangers[:5])}" if strangers else "")
        )
    for group, saved in zip(client.param_groups, stored, strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            current = group.get(key)
            if isinstance(current, torch.Tensor):
                current.fill_(value)  # a tensor learning rate is captured by graphs; keep the object
            else:
                group[key] = tuple(value) if isinstance(current, tuple) else value
