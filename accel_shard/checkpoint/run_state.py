"""What a snapshot holds of a run, and how it is put back: all that makes the next step the one it would have been."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from accelerate.logging import get_logger

from accel_shard.checkpoint import random_state
from accel_shard.checkpoint.plain import decode, encode
from accel_shard.checkpoint.plan import gather
from accel_shard.checkpoint.snapshot import Snapshot
from accel_shard.checkpoint.together import together
from accel_shard.errors import SnapshotError
from accel_shard.layout import Layout, split_state_key

if TYPE_CHECKING:
    from accel_shard.accelerator import PolicyAccelerator

__all__ = ["collect", "restore", "restore_groups", "restore_random_state", "restore_weights"]

logger = get_logger(__name__)

# The loop's own things, as counts of a metric, of which a rank may hold another part than the next one.
_MAY_DIFFER: Final = ("progress", "objects")


def collect(accelerator: PolicyAccelerator, layout: Layout, progress: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return what the manifest gets beside tensors, and what this rank keeps of its own. Every rank must call it.

    Raises:
        SnapshotError: for something that only pickle could hold.
    """
    buffers = _buffers_of_my_own(layout)
    scalars: dict[str, Any] = {}
    with together("the optimizer's state cannot be saved, so nothing was"):
        mine = {name: encode(values, f"optimizer state of {name}") for name, values in layout.scalars.items()}
    for rank, theirs in enumerate(gather(mine)):
        for name, values in theirs.items():
            _check_same(name, scalars.setdefault(name, values), values, rank)
    with together("the run's state cannot be saved, so nothing was"):
        facts = _facts(accelerator, layout, progress, scalars)
        own = encode({"random": random_state.capture(accelerator.device), "buffers": buffers}, "rank")
    digests = gather({key: hashlib.blake2b(json.dumps(facts[key]).encode()).digest() for key in _MAY_DIFFER})
    facts["differed"] = [key for key in _MAY_DIFFER if len({digest[key] for digest in digests}) > 1]
    return facts, own | {"facts": {key: facts[key] for key in facts["differed"]}}


def _check_same(name: str, first: dict[str, Any], values: dict[str, Any], rank: int) -> None:
    """Refuse a state beside the sharded tensors in which ranks differ: the snapshot would hold one rank's only."""
    for key in first.keys() | values.keys():
        one, other = json.dumps(first.get(key)), json.dumps(values.get(key))  # as text: nan is itself there
        if one != other:
            raise SnapshotError(
                f"the optimizer's state {key!r} of {name!r} is a number, or data without a shape, and rank {rank} has "
                f"another than the ranks before it: {other[:80]} against {one[:80]}. Such a state must be the same on "
                "every rank; keep what differs in a tensor of the parameter's shape."
            )


def _facts(
    accelerator: PolicyAccelerator, layout: Layout, progress: Mapping[str, Any], scalars: dict[str, Any]
) -> dict[str, Any]:
    model, _ = accelerator.trained
    return {
        "progress": encode(dict(progress), "progress"),
        "optimizer": {"groups": encode(layout.groups, "param_groups"), "scalars": scalars},
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


def _buffers_of_my_own(layout: Layout) -> dict[str, torch.Tensor]:
    """Return the buffers in which ranks differ, as running statistics do under FSDP: the snapshot proper has one."""
    whole = {name: part.cpu() for name, shard in layout.buffers.items() for _, part in shard.parts}
    digests = {n: hashlib.blake2b(t.reshape(-1).view(torch.uint8).numpy().tobytes()).digest() for n, t in whole.items()}
    everyones = gather(digests)
    return {name: tensor for name, tensor in whole.items() if any(d[name] != digests[name] for d in everyones)}


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
        restore_groups(client, backend.layout(accelerator, model, optimizer), decode(facts["optimizer"]["groups"]))
        backend.materialize(accelerator, model, optimizer, _state_shapes(snapshot), scalars)
    layout = backend.layout(accelerator, model, optimizer)
    # What comes after may be collective: a rank that cannot read must not leave the others waiting there.
    mine: dict[str, Any] = {}
    with together(f"could not load {str(snapshot.folder)!r}; the run's state is no longer what it was"):
        snapshot.read_into(layout)
        if facts["world_size"] == accelerator.num_processes:
            own = snapshot.rank_facts(accelerator.process_index)
            assert own is not None, "a snapshot has facts of each of its ranks"
            for name, value in decode(own["buffers"]).items():
                for _, part in layout.buffers[name].parts:
                    part.copy_(value)
            mine = own.get("facts", {})
        elif facts.get("differed"):
            logger.warning(
                "ranks differed in %s when %s was saved by %d ranks; now all %d get what rank 0 had",
                " and ".join(facts["differed"]), snapshot.folder, facts["world_size"], accelerator.num_processes,
            )  # fmt: skip
    backend.after_load(accelerator, model, optimizer)
    backend.set_counters(model, facts["counters"])
    _restore_each("scheduler", accelerator._schedulers, facts["schedulers"])
    _restore_each("registered object", accelerator._custom_objects, mine.get("objects", facts["objects"]))
    if accelerator.scaler is not None and facts["scaler"] is not None:
        accelerator.scaler.load_state_dict(decode(facts["scaler"]))
    accelerator.step = facts["micro_step"]
    progress: dict[str, Any] = decode(mine.get("progress", facts["progress"]))
    return progress


def restore_weights(accelerator: PolicyAccelerator, snapshot: Snapshot) -> None:
    """Put the weights and buffers back, and nothing else. Every rank must call it.

    Raises:
        SnapshotError: if the snapshot is of another model.
    """
    backend, (model, optimizer) = accelerator.backend, accelerator.trained
    layout = backend.layout(accelerator, model, optimizer)
    snapshot.read_shards((key, shard) for key, shard in layout.tensors() if not key.startswith("optim."))
    backend.after_load(accelerator, model, optimizer)


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
            name, state = split_state_key(key)
            shapes.setdefault(name, {})[state] = (tuple(stored["shape"]), getattr(torch, stored["dtype"]))
    return shapes


def restore_groups(client: Any, layout: Layout, stored: list[dict[str, Any]]) -> None:
    """Set hyperparameters, group by group. A group is known by the names of its parameters, in any order.

    Raises:
        SnapshotError: if the groups are not the same.
    """
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
