"""What a snapshot holds of a run, and how it is put back: all that makes the next step the one it would have been."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from accelerate.logging import get_logger

from accel_shard.checkpoint import random_state
from accel_shard.checkpoint.plain import decode, encode
from accel_shard.checkpoint.plan import gather, own_rank
from accel_shard.checkpoint.snapshot import Snapshot
from accel_shard.checkpoint.together import together
from accel_shard.errors import SnapshotError
from accel_shard.layout import Layout, split_state_key

if TYPE_CHECKING:
    from accel_shard.accelerator import PolicyAccelerator

__all__ = ["Collected", "Offer", "restore", "restore_groups", "restore_random_state", "restore_weights"]

logger = get_logger(__name__)

# The loop's own things, as counts of a metric, of which a rank may hold another part than the next one.
_MAY_DIFFER: Final = ("progress", "objects")


@dataclass(frozen=True, slots=True)
class Offer:
    """What the ranks must tell each other of their states before one snapshot can hold them.

    Attributes:
        scalars: hash of the optimizer state without elements to share out.
        buffers: hashes of buffers.
        facts: hashes of what may differ from rank to rank.
    """

    scalars: bytes
    buffers: dict[str, bytes]
    facts: dict[str, bytes]


class Collected:
    """All of a rank's state that is no shard, encoded. Local: making it communicates nothing; it waits for the device.

    Args:
        accelerator: whose run it is.
        layout: of this rank.
        progress: of the loop's own.

    Raises:
        SnapshotError: for something that only pickle could hold.
    """

    def __init__(self, accelerator: PolicyAccelerator, layout: Layout, progress: Mapping[str, Any]) -> None:
        self._facts = _facts(accelerator, layout, progress)
        self._buffers = {name: part.cpu() for name, shard in layout.buffers.items() for _, part in shard.parts}
        self._random = encode(random_state.capture(accelerator.device), "random state")
        self._scalars = _numbers(layout.scalars)
        self.offer = Offer(
            _digest(repr(self._scalars).encode()),
            {name: _digest(t.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in self._buffers.items()},
            {key: _digest(json.dumps(self._facts[key]).encode()) for key in _MAY_DIFFER},
        )

    def settle(self, offers: Sequence[Offer]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the manifest gets beside tensors, and what this rank keeps of its own.

        Every rank must call it. Where they hold the state of different parameters, as under ZeRO, they exchange the
        numbers among it.

        Args:
            offers: of all ranks.

        Raises:
            SnapshotError: on every rank, if they differ in a state of which the snapshot holds one.
        """
        alike = len({offer.scalars for offer in offers}) == 1
        self._facts["optimizer"]["scalars"] = _merged([self._scalars] if alike else gather(self._scalars))
        differed = [key for key in _MAY_DIFFER if len({offer.facts[key] for offer in offers}) > 1]
        # Running statistics differ under FSDP: the snapshot proper has rank 0's.
        apart = {n: t for n, t in self._buffers.items() if len({offer.buffers[n] for offer in offers}) > 1}
        own = {"random": self._random, "buffers": encode(apart, "buffers")}
        own["facts"] = {key: self._facts[key] for key in differed}
        return self._facts | {"differed": differed}, own


def _facts(accelerator: PolicyAccelerator, layout: Layout, progress: Mapping[str, Any]) -> dict[str, Any]:
    model, _ = accelerator.trained
    return {
        "progress": encode(dict(progress), "progress"),
        "optimizer": {"groups": encode(layout.groups, "param_groups")},
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


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class _Number(NamedTuple):
    dtype: str
    value: Any


def _numbers(scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Turn tensors of no dimension into numbers with their dtypes: a step count a parameter, and tensors pickle slowly.

    They are taken off their device together, since each alone would wait for it. Everything else is encoded.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[tuple[str, str]]] = {}
    told: dict[str, dict[str, Any]] = {}
    for name, values in scalars.items():
        told[name] = {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and not value.dim():
                alike.setdefault((value.dtype, value.device), []).append((name, key))
                told[name][key] = None  # keeps the order
            else:
                told[name][key] = encode(value, f"optimizer state of {name}.{key}")
    for (dtype, _), places in alike.items():
        found = torch.stack([scalars[name][key].detach() for name, key in places]).tolist()
        for (name, key), number in zip(places, found, strict=True):
            told[name][key] = _Number(str(dtype).removeprefix("torch."), number)
    return told


def _merged(everyones: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Put together what all ranks have, encoded."""
    merged: dict[str, dict[str, Any]] = {}
    for rank, theirs in enumerate(everyones):
        for name, values in theirs.items():
            _check_same(name, merged.setdefault(name, values), values, rank)
    encoded: dict[str, Any] = {}  # mostly one step count, once a parameter
    for values in merged.values():
        for value in values.values():
            if isinstance(value, _Number) and repr(value) not in encoded:
                encoded[repr(value)] = encode(torch.tensor(value.value, dtype=getattr(torch, value.dtype)), "")
    return {
        name: {key: encoded[repr(value)] if isinstance(value, _Number) else value for key, value in values.items()}
        for name, values in merged.items()
    }


def _check_same(name: str, first: dict[str, Any], values: dict[str, Any], rank: int) -> None:
    """Refuse a state beside the sharded tensors in which ranks differ: the snapshot would hold one rank's only."""
    if first is values or first == values:
        return
    for key in first.keys() | values.keys():
        one, other = repr(first.get(key)), repr(values.get(key))  # as text: nan is itself there
        if one != other:
            raise SnapshotError(
                f"the optimizer's state {key!r} of {name!r} is a number, or data without a shape, and rank {rank} has "
                f"another than the ranks before it: {other[:80]} against {one[:80]}. Such a state must be the same on "
                "every rank; keep what differs in a tensor of the parameter's shape."
            )


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
    _take_own(accelerator, snapshot)
    _restore_each("scheduler", accelerator._schedulers, facts["schedulers"])
    _restore_each("registered object", accelerator._custom_objects, mine.get("objects", facts["objects"]))
    if accelerator.scaler is not None and facts["scaler"] is not None:
        accelerator.scaler.load_state_dict(decode(facts["scaler"]))
    accelerator.step = facts["micro_step"]
    progress: dict[str, Any] = decode(mine.get("progress", facts["progress"]))
    return progress


def _take_own(accelerator: PolicyAccelerator, snapshot: Snapshot) -> None:
    """Put back what ranks had of their own, and say what has no place here."""
    stored = {
        key.removeprefix("own."): (tuple(entry["shape"]), getattr(torch, entry["dtype"]))
        for key, entry in snapshot.manifest["tensors"].items()
        if key.startswith("own.")
    }
    used: set[str] = set()
    with together(f"could not load {str(snapshot.folder)!r}; the run's state is no longer what it was"):
        used = accelerator.backend.take_own(
            accelerator, *accelerator.trained, stored,
            lambda shards: snapshot.read_shards((f"own.{key}", shard) for key, shard in shards),
        )  # fmt: skip
    left = sorted(stored.keys() - used)
    if left:
        logger.warning(
            "%d tensors of %s have no place under policy [%s] and were left (first: %s)",
            len(left), snapshot.folder, accelerator.policy.to_line(), left[0], main_process_only=True,
        )  # fmt: skip


def restore_weights(accelerator: PolicyAccelerator, snapshot: Snapshot) -> None:
    """Put the weights and buffers back, and nothing else. Every rank must call it.

    Raises:
        SnapshotError: if the snapshot is of another model.
    """
    backend, (model, optimizer) = accelerator.backend, accelerator.trained
    layout = backend.layout(accelerator, model, optimizer)
    snapshot.read_shards((key, shard) for key, shard in layout.tensors() if key.startswith(("model.", "buffer.")))
    backend.after_load(accelerator, model, optimizer)


def restore_random_state(accelerator: PolicyAccelerator, snapshot: Snapshot) -> None:
    """Give this rank the random state that it had, or a new stream if the saving run had no such rank. Local."""
    rank = own_rank()
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
