"""One snapshot: a folder that appears under its name only when all of it is on the disk, and that can be checked.

``manifest.json`` comes last. It holds the index of tensors, size and hash of every other file, and a hash of itself;
a folder without a manifest that agrees with its files is no snapshot. No pickle is written or read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from accel_shard.checkpoint.places import Place, place
from accel_shard.checkpoint.plan import Part, StoredTensor, WritePlan, gather, own_rank
from accel_shard.checkpoint.reading import Reading
from accel_shard.checkpoint.storage import HASH, FileRecord, file_size, hash_file, write_json, write_tensors, write_text
from accel_shard.checkpoint.stores import MANIFEST, store_of
from accel_shard.checkpoint.together import attempt, raise_any
from accel_shard.errors import SnapshotError
from accel_shard.layout import Box, Layout, Shard, uncovered

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Snapshot",
    "StagedSnapshot",
    "find_snapshots",
    "remove_snapshot",
]

FORMAT: Final = 1


def find_snapshots(folder: Place, known: dict[Place, int] | None = None) -> list[tuple[int, Place]]:
    """List snapshots with the number of their commit: the order in which they were made in this folder.

    One whose manifest cannot be read has the number -1: it is looked at last, and then refused with its reason. What a
    save left that never ended is none.

    Args:
        folder: where they are.
        known: numbers from earlier calls, added to here. A committed snapshot keeps its number, so its manifest need
            not be read again; it names every piece of every tensor, which is much to read while training waits.

    Raises:
        OSError: if the place cannot be listed.
    """
    store = store_of(folder)
    known, found = {} if known is None else known, []
    paths = store.folders(folder)
    for gone in known.keys() - set(paths):
        del known[gone]  # its name may come again, with another number
    for path in paths:
        try:
            if path not in known:
                if not store.committed(path):
                    continue
                known[path] = int(Snapshot.open(path).manifest["sequence"])
            found.append((known[path], path))
        except SnapshotError:
            found.append((-1, path))
    return found


def remove_snapshot(path: Place) -> bool:
    """Remove a snapshot, unless it was pinned at this very moment; return whether it is gone.

    Raises:
        OSError: if it cannot be removed.
    """
    return store_of(path).remove(path)


@dataclass(frozen=True, slots=True)
class StagedSnapshot:
    """A snapshot that is agreed on and can be written: by :meth:`write`, now or from another thread."""

    target: Place
    plan: WritePlan
    aliases: dict[str, str]
    facts: dict[str, Any]
    own: dict[str, Any]

    failure: str = ""
    """Why this rank could not keep its share for writing; the ranks learn of it when they write."""

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write this rank's files and commit with the others, by a rename on rank 0.

        Every rank must call it, each on the same group. They exchange failures, and their files' sizes and hashes.

        Raises:
            SnapshotError: on every rank, if any rank could not write; nothing appears under ``target`` then.
        """
        # Until all have met after the commit, so that no other run takes this save for dead.
        with contextlib.ExitStack() as claim:
            self._write(claim, group)

    def _write(self, claim: contextlib.ExitStack, group: dist.ProcessGroup | None) -> None:
        target, rank = self.target, own_rank()
        store, work = store_of(target), None
        with attempt() as made:
            if self.failure:
                raise SnapshotError(self.failure)
            if rank == 0:
                needed = (math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in self.plan.index.values())
                work = store.begin(target, sum(needed), claim)
        everyones_made = gather((made, work), group)
        work = everyones_made[0][1]
        _raise_together(target, work, [failure for failure, _ in everyones_made])
        with attempt() as seen:
            store.check_shared(work)
        _raise_together(target, work, gather(seen, group))
        name = f"rank-{rank:05d}"
        files: dict[str, FileRecord] = {}
        with attempt() as written:
            if self.plan.mine:
                files[f"{name}.safetensors"] = write_tensors(work / f"{name}.safetensors", self.plan.mine)
            files[f"{name}.json"] = write_json(work / f"{name}.json", self.own)
        everyones = gather((written, files), group)
        _raise_together(target, work, [failure for failure, _ in everyones])
        with attempt() as committed:
            if rank == 0:
                records = {file: asdict(record) for _, found in everyones for file, record in found.items()}
                store.check_arrived(work, {file: record["size"] for file, record in records.items()})
                write_text(work / MANIFEST, _signed(_manifest(self.aliases, self.plan.index, records, self.facts)))
                store.commit(work, target)
        _raise_together(target, work, gather(committed, group))


def _manifest(
    aliases: Mapping[str, str], index: Mapping[str, StoredTensor], files: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, Any]:
    tensors = {
        key: {
            "shape": list(stored.shape),
            "dtype": stored.dtype,
            "parts": [[p.file, p.entry, list(p.box.offsets), list(p.box.sizes)] for p in stored.parts],
        }
        for key, stored in index.items()
    }
    content = {"format": FORMAT, "hash": HASH, "files": files, "tensors": tensors, "aliases": dict(aliases)}
    return content | dict(facts)


def _signed(manifest: Mapping[str, Any]) -> str:
    # Sorted and without line breaks: what is hashed is what is stored, and json's fast encoder serves. The pure Python
    # one, which breaks lines, would hold up training for long where there are many tensors.
    text = json.dumps(manifest, sort_keys=True)
    return f'{{"digest": "{_digest(text)}", "manifest": {text}}}'


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _raise_together(target: Place, work: Place | None, everyones: list[list[str]]) -> None:
    if any(everyones) and work is not None and own_rank() == 0:
        store_of(work).abandon(work)
    raise_any(f"could not write {str(target)!r}; nothing appeared there", everyones)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed snapshot, opened for reading."""

    folder: Place
    manifest: dict[str, Any]
    digest: str
    """Of the manifest, and so of all that it names."""

    @classmethod
    def open(cls, folder: str | Place) -> Snapshot:
        """Read a manifest and check that it is whole.

        Raises:
            SnapshotError: if there is none, it was changed, or it is of a newer format.
        """
        path = place(folder)
        try:
            content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            digest, manifest = content["digest"], content["manifest"]
        except FileNotFoundError:
            raise SnapshotError(f"{str(path)!r} is no snapshot: it has no {MANIFEST}.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SnapshotError(f"the manifest of {str(path)!r} cannot be read: {error!r}") from error
        if _digest(json.dumps(manifest, sort_keys=True)) != digest:
            raise SnapshotError(f"the manifest of {str(path)!r} was changed after it was written.")
        if manifest["format"] > FORMAT:
            raise SnapshotError(
                f"{str(path)!r} has format {manifest['format']}; this version of accel_shard reads up to {FORMAT}."
            )
        return cls(path, manifest, digest)

    def verify(self, *, contents: bool = True, share: tuple[int, int] = (0, 1)) -> None:
        """Compare every file with the manifest. Local: communicates nothing.

        Args:
            contents: hash the files too; else compare their sizes only.
            share: ``(rank, ranks)``: hash this rank's share of the files.

        Raises:
            SnapshotError: naming the first file that differs.
        """
        mine = _shared_out({name: record["size"] for name, record in self.manifest["files"].items()}, share[1])[
            share[0]
        ]
        for name, record in sorted(self.manifest["files"].items()):
            path = self.folder / name
            try:
                size = file_size(path)
                if size != record["size"]:
                    raise SnapshotError(f"{str(path)!r} has {size} bytes; the manifest says {record['size']}.")
                if contents and name in mine and hash_file(path, self.manifest["hash"]) != record["hash"]:
                    raise SnapshotError(f"{str(path)!r} is not what was written: its hash differs.")
            except OSError as error:
                raise SnapshotError(f"{str(path)!r} cannot be read: {error}") from error

    def tensor(self, key: str) -> StoredTensor:
        """Return where a tensor is.

        Raises:
            SnapshotError: if the snapshot does not have it.
        """
        tensors = self.manifest["tensors"]
        kind, _, name = key.partition(".")
        # A weight that was tied when it was saved is stored once, under the first of its names.
        found = tensors.get(key) or tensors.get(f"{kind}.{self.manifest['aliases'].get(name)}")
        if found is None:
            raise SnapshotError(f"{str(self.folder)!r} has no tensor {key!r}.")
        parts = tuple(Part(f, e, Box(tuple(o), tuple(s))) for f, e, o, s in found["parts"])
        return StoredTensor(tuple(found["shape"]), found["dtype"], parts)

    def rank_facts(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank of the saving run wrote of itself, or None if there was no such rank."""
        name = f"rank-{rank:05d}.json"
        if name not in self.manifest["files"]:
            return None
        try:
            facts: dict[str, Any] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{str(self.folder / name)!r} cannot be read: {error}") from error
        return facts

    def check_whole(self, key: str) -> None:
        """Check that the pieces of a tensor cover it.

        Raises:
            SnapshotError: if a piece of it is nowhere.
        """
        stored = self.tensor(key)
        missing = uncovered(Box.whole(stored.shape), [part.box for part in stored.parts])
        if missing:
            raise SnapshotError(f"{key!r} is not whole in {str(self.folder)!r}: {missing[0]} is nowhere.")

    def read_into(self, layout: Layout) -> None:
        """Fill every shard of a layout, as :meth:`read_shards`."""
        self.read_shards(layout.tensors())

    def read_shards(self, shards: Iterable[tuple[str, Shard]]) -> None:
        """Fill shards, whatever boxes the snapshot was written in. Local: communicates nothing.

        Raises:
            SnapshotError: if a tensor is missing, has another shape, or is not covered by what was written.
        """
        with Reading(self.folder) as reading:
            for key, shard in shards:
                stored = self.tensor(key)
                if stored.shape != shard.shape:
                    raise SnapshotError(
                        f"{key!r} has shape {shard.shape} in this run and {stored.shape} in {str(self.folder)!r}."
                    )
                for box, destination in shard.parts:
                    reading.fill(key, stored, box, destination)


def _shared_out(sizes: Mapping[str, int], ranks: int) -> list[set[str]]:
    """Give each rank files to hash, the largest first, each to who has least: the same on every rank."""
    loads, shares = [0] * ranks, [set[str]() for _ in range(ranks)]
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        least = loads.index(min(loads))
        loads[least] += size
        shares[least].add(name)
    return shares
