"""One snapshot: a folder that appears under its name only when all of it is on the disk, and that can be checked.

``manifest.json`` comes last. It holds the index of tensors, size and hash of every other file, and a hash of itself;
a folder without a manifest that agrees with its files is no snapshot. No pickle is written or read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from accel_shard.checkpoint.leftovers import claimed, partial_for, set_aside, sweep
from accel_shard.checkpoint.plan import Part, StoredTensor, WritePlan, gather, plan_writes
from accel_shard.checkpoint.storage import HASH, FileRecord, flush_folder, hash_file, write_json, write_tensors
from accel_shard.checkpoint.together import attempt, listed, together
from accel_shard.errors import SnapshotError
from accel_shard.layout import Box, Layout, Shard, uncovered

__all__ = [
    "FORMAT",
    "MANIFEST",
    "PIN",
    "Snapshot",
    "StagedSnapshot",
    "find_snapshots",
    "remove_snapshot",
    "stage_snapshot",
]

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
PIN: Final = "pinned"
"""An empty file of this name keeps a snapshot from being removed."""


def find_snapshots(folder: Path, known: dict[Path, int] | None = None) -> list[tuple[int, Path]]:
    """List snapshots with the number of their commit: the order in which they were made in this folder.

    One whose manifest cannot be read has the number -1: it is looked at last, and then refused with its reason.

    Args:
        folder: where they are.
        known: numbers from earlier calls, added to here. A committed snapshot keeps its number, so its manifest need
            not be read again; it names every piece of every tensor, which is much to read while training waits.
    """
    known, found = {} if known is None else known, []
    paths = list(folder.glob("step-*"))
    for gone in known.keys() - set(paths):
        del known[gone]  # its name may come again, with another number
    for path in paths:
        try:
            if path not in known:
                known[path] = int(Snapshot.open(path).manifest["sequence"])
            found.append((known[path], path))
        except SnapshotError:
            found.append((-1, path))
    return found


def remove_snapshot(path: Path) -> bool:
    """Remove a snapshot, unless it was pinned at this very moment; return whether it is gone.

    A rename comes first: a removal that is killed must not leave half of it under its name.
    """
    trash = set_aside(path)
    if (trash / PIN).exists():
        trash.rename(path)
        return False
    shutil.rmtree(trash, ignore_errors=True)
    return True


@dataclass(frozen=True, slots=True)
class StagedSnapshot:
    """A snapshot that is agreed on and can be written: by :meth:`write`, now or from another thread."""

    target: Path
    plan: WritePlan
    aliases: dict[str, str]
    facts: dict[str, Any]
    own: dict[str, Any]

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
        target, rank = self.target, dist.get_rank() if dist.is_initialized() else 0
        partial = Path(gather(str(partial_for(target)), group)[0])
        with attempt() as made:
            if rank == 0:
                self._make_room(partial, claim)
        _raise_together(target, partial, made, group)
        with attempt() as seen:
            if not partial.is_dir():
                raise FileNotFoundError(
                    "the folder that rank 0 made is not there: the ranks do not share this disk. Save to a folder that "
                    "all nodes see"
                )
        _raise_together(target, partial, seen, group)
        name = f"rank-{rank:05d}"
        files: dict[str, FileRecord] = {}
        with attempt() as written:
            if self.plan.mine:
                files[f"{name}.safetensors"] = write_tensors(partial / f"{name}.safetensors", self.plan.mine)
            files[f"{name}.json"] = write_json(partial / f"{name}.json", self.own)
        everyones = gather(files, group)
        _raise_together(target, partial, written, group)
        with attempt() as committed:
            if rank == 0:
                records = {file: asdict(record) for found in everyones for file, record in found.items()}
                _commit(partial, target, _manifest(self.aliases, self.plan.index, records, self.facts))
        _raise_together(target, partial, committed, group)

    def _make_room(self, partial: Path, claim: contextlib.ExitStack) -> None:
        if self.target.exists():
            raise FileExistsError(f"{str(self.target)!r} exists already")
        _make_durable(partial.parent)
        sweep(partial.parent)  # before the space is looked at: a killed save's folder may be what fills the disk
        claim.enter_context(claimed(partial))
        partial.mkdir()
        needed = sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in self.plan.index.values())
        free = shutil.disk_usage(partial).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free")


def stage_snapshot(
    target: Path,
    layout: Layout,
    facts: Mapping[str, Any],
    own: Mapping[str, Any],
    buffers: dict[str, torch.Tensor] | None = None,
) -> StagedSnapshot:
    """Agree on who writes what, and optionally copy this rank's share to host memory.

    Every rank must call it; they exchange what they hold (not the data).

    Args:
        target: the final folder; it must not exist.
        layout: of this rank.
        facts: plain data that rank 0 puts into the manifest.
        own: plain data of this rank alone, as its random state.
        buffers: host memory by entry, made here where it is missing and used again at the next call; training may go
            on when this returns. None leaves the live tensors in the plan: nothing may change before they are written.
    """
    plan = plan_writes(layout)
    if buffers is not None:
        with together("could not copy the state to host memory, so nothing was saved"):
            plan = WritePlan(_to_host(plan.mine, buffers), plan.index)
    return StagedSnapshot(target, plan, dict(layout.aliases), dict(facts), dict(own))


def _to_host(
    entries: list[tuple[str, torch.Tensor]], buffers: dict[str, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    for stale in buffers.keys() - {name for name, _ in entries}:
        del buffers[stale]
    devices = set()
    for name, tensor in entries:
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffers[name] = buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        buffer.copy_(tensor, non_blocking=True)
        devices.add(tensor.device)
    for device in devices:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
    return [(name, buffers[name]) for name, _ in entries]


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


def _commit(partial: Path, target: Path, manifest: dict[str, Any]) -> None:
    write_json(partial / MANIFEST, {"digest": _digest(manifest), "manifest": manifest})
    flush_folder(partial)
    partial.rename(target)
    try:
        flush_folder(target.parent)
    except OSError:
        target.rename(partial)  # what is reported as a failure must not stand there as a snapshot
        raise


def _make_durable(folder: Path) -> None:
    """Make a folder and those above it, each of them flushed into the one above."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush_folder(path.parent)


def _digest(manifest: Mapping[str, Any]) -> str:
    import hashlib

    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _raise_together(target: Path, partial: Path, failure: list[str], group: dist.ProcessGroup | None) -> None:
    failures = {rank: found[0] for rank, found in enumerate(gather(failure, group)) if found}
    if not failures:
        return
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    raise SnapshotError(f"could not write {str(target)!r}; nothing appeared there. {listed(failures)}")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed snapshot, opened for reading."""

    folder: Path
    manifest: dict[str, Any]
    digest: str
    """Of the manifest, and so of all that it names."""

    @classmethod
    def open(cls, folder: str | Path) -> Snapshot:
        """Read a manifest and check that it is whole.

        Raises:
            SnapshotError: if there is none, it was changed, or it is of a newer format.
        """
        path = Path(folder)
        try:
            content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            digest, manifest = content["digest"], content["manifest"]
        except FileNotFoundError:
            raise SnapshotError(f"{str(path)!r} is no snapshot: it has no {MANIFEST}.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SnapshotError(f"the manifest of {str(path)!r} cannot be read: {error!r}") from error
        if _digest(manifest) != digest:
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
        for number, (name, record) in enumerate(sorted(self.manifest["files"].items())):
            path = self.folder / name
            try:
                size = path.stat().st_size
                if size != record["size"]:
                    raise SnapshotError(f"{str(path)!r} has {size} bytes; the manifest says {record['size']}.")
                mine = number % share[1] == share[0]
                if contents and mine and hash_file(path, self.manifest["hash"]) != record["hash"]:
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
        path = self.folder / f"rank-{rank:05d}.json"
        if not path.is_file():
            return None
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
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
        with contextlib.ExitStack() as stack:
            files: dict[str, Any] = {}

            def opened(name: str) -> Any:
                if name not in files:
                    from safetensors import safe_open

                    files[name] = stack.enter_context(safe_open(self.folder / name, framework="pt"))
                return files[name]

            for key, shard in shards:
                stored = self.tensor(key)
                if stored.shape != shard.shape:
                    raise SnapshotError(
                        f"{key!r} has shape {shard.shape} in this run and {stored.shape} in {str(self.folder)!r}."
                    )
                for box, destination in shard.parts:
                    _fill(key, box, destination, stored, opened)


def _fill(key: str, box: Box, destination: torch.Tensor, stored: StoredTensor, opened: Any) -> None:
    used = []
    for part in stored.parts:
        shared = part.box.intersect(box) if box.sizes else box
        if shared is None:
            continue
        used.append(part.box)
        file = opened(part.file)
        if shared.sizes:
            piece = file.get_slice(part.entry)[shared.slices(inside=part.box)]
            destination[shared.slices(inside=box)].copy_(piece)
        else:
            destination.copy_(file.get_tensor(part.entry))
    missing = uncovered(box, used)
    if missing:
        raise SnapshotError(f"{key!r} is not whole in the snapshot: {missing[0]} is nowhere.")
