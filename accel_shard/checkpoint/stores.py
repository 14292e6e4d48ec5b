"""How snapshots come to be, are found and go: on a disk that all ranks see, and in an object store.

On a disk its files are written into a folder beside, flushed, and appear by one rename. An object store has neither
rename nor flush: files go under a name that is new, and ``manifest.json``, put last, is the commit; a folder without it
is no snapshot.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from accel_shard.checkpoint.leftovers import claimed, partial_for, set_aside, sweep
from accel_shard.checkpoint.places import Place, RemotePath

__all__ = ["MANIFEST", "PIN", "Sink", "Source", "Store", "flush_folder", "store_of"]

MANIFEST: Final = "manifest.json"
PIN: Final = "pinned"
"""An empty file of this name keeps a snapshot from being removed."""
_FOLDERS: Final = "step-"


class Sink(ABC):
    """A new file that is being written."""

    @abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Write all of it."""

    @abstractmethod
    def finish(self) -> None:
        """Close the file; when this returns it is durable."""

    @abstractmethod
    def discard(self) -> None:
        """Give up a file that could not be written."""


class Source(ABC):
    """A file that is read in ranges, from several threads at once.

    Attributes:
        size: of the file, in bytes.
    """

    size: int

    @abstractmethod
    def read_into(self, at: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``at`` on; fewer are an :class:`OSError`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""


class Store(ABC):
    """How snapshots are made, found and removed in one kind of place.

    Attributes:
        readers: threads that read at once; what is far away is worth more of them.
        gap: bytes that are rather read in vain than left out by a second request.
    """

    readers: int
    gap: int

    @abstractmethod
    def folders(self, root: Any) -> list[Any]:
        """List what may be snapshots."""

    @abstractmethod
    def committed(self, folder: Any) -> bool:
        """Tell whether a folder is, or ever was, a snapshot; else it is what a save left that did not end."""

    @abstractmethod
    def begin(self, target: Any, needed: int, claim: contextlib.ExitStack) -> Any:
        """Return the folder to write the files of ``target`` to. Rank 0 alone calls it, and holds ``claim`` meanwhile.

        Raises:
            OSError: if the target exists, or has no room for ``needed`` bytes.
        """

    @abstractmethod
    def check_shared(self, work: Any) -> None:
        """Check on another rank that it sees what :meth:`begin` made."""

    @abstractmethod
    def create(self, path: Any) -> Sink:
        """Create a file that does not exist."""

    @abstractmethod
    def check_arrived(self, work: Any, sizes: Mapping[str, int]) -> None:
        """Check on rank 0, before the manifest is written, that the files of all ranks are there."""

    @abstractmethod
    def commit(self, work: Any, target: Any) -> None:
        """Make the snapshot be: ``work`` has all files and its manifest came last. Rank 0 alone calls it."""

    @abstractmethod
    def abandon(self, work: Any) -> None:
        """Remove what a failed save has written, as far as that can be done."""

    @abstractmethod
    def remove(self, folder: Any) -> bool:
        """Remove a snapshot, unless it was pinned at this very moment; return whether it is gone.

        A removal that is killed on the way leaves no half of it that looks whole.
        """

    @abstractmethod
    def source(self, path: Any) -> Source:
        """Open a file for reading in ranges."""


class _DiskSink(Sink):
    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        self._file.close()


class _DiskSource(Source):
    def __init__(self, path: Path) -> None:
        self._path, self._handle = path, os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._handle).st_size

    def read_into(self, at: int, target: memoryview) -> None:
        while target:
            count = os.preadv(self._handle, [target], at)
            if not count:
                raise OSError(errno.EIO, f"ends at byte {at}", str(self._path))
            at, target = at + count, target[count:]

    def close(self) -> None:
        os.close(self._handle)


class _Disk(Store):
    # Where each rank has a core, a second thread would only take it from the others.
    readers = max(1, min(4, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    gap = 1 << 16

    def folders(self, root: Path) -> list[Path]:
        return list(root.glob(f"{_FOLDERS}*"))

    def committed(self, folder: Path) -> bool:
        return True  # its name came by the rename

    def begin(self, target: Path, needed: int, claim: contextlib.ExitStack) -> Path:
        if target.exists():
            raise FileExistsError(f"{str(target)!r} exists already")
        _make_durable(target.parent)
        sweep(target.parent)  # before the space is looked at: a killed save's folder may be what fills the disk
        work = partial_for(target)
        claim.enter_context(claimed(work))
        work.mkdir()
        free = shutil.disk_usage(work).free
        if free < needed:
            self.abandon(work)
            raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free")
        return work

    def check_shared(self, work: Path) -> None:
        if not work.is_dir():
            raise FileNotFoundError(
                "the folder that rank 0 made is not there: the ranks do not share this disk. Save to a folder that "
                "all nodes see"
            )

    def create(self, path: Path) -> Sink:
        return _DiskSink(path)

    def check_arrived(self, work: Path, sizes: Mapping[str, int]) -> None:
        """Every rank saw the folder that its files are in, and flushed them."""

    def commit(self, work: Path, target: Path) -> None:
        flush_folder(work)
        work.rename(target)
        try:
            flush_folder(target.parent)
        except OSError:
            target.rename(work)  # what is reported as a failure must not stand there as a snapshot
            raise

    def abandon(self, work: Path) -> None:
        shutil.rmtree(work, ignore_errors=True)

    def remove(self, folder: Path) -> bool:
        trash = set_aside(folder)
        if (trash / PIN).exists():
            trash.rename(folder)
            return False
        shutil.rmtree(trash, ignore_errors=True)
        return True

    def source(self, path: Path) -> Source:
        return _DiskSource(path)


class _RemoteSink(Sink):
    def __init__(self, path: RemotePath) -> None:
        self._path, self._written = path, 0
        with path.opened() as (system, inner):
            try:
                self._file = system.open(inner, "wb")
            except FileNotFoundError:  # a file system that has real folders
                system.makedirs(system._parent(inner), exist_ok=True)
                self._file = system.open(inner, "wb")

    def write(self, data: bytes | memoryview) -> None:
        with self._path.opened():
            self._file.write(data)
        self._written += len(data)

    def finish(self) -> None:
        with self._path.opened() as (system, inner):
            self._file.close()
            arrived = system.info(inner)["size"]
        if arrived != self._written:
            raise OSError(errno.EIO, f"{arrived} of {self._written} bytes arrived", str(self._path))

    def discard(self) -> None:
        # Closing would put what there is so far; most kinds of file can be told to forget it.
        with contextlib.suppress(Exception):
            self._file.discard()
            self._file.closed = True


class _RemoteSource(Source):
    def __init__(self, path: RemotePath) -> None:
        self._path = path
        with path.opened() as (system, inner):
            self.size = int(system.info(inner)["size"])

    def read_into(self, at: int, target: memoryview) -> None:
        with self._path.opened() as (system, inner):
            data = system.cat_file(inner, start=at, end=at + len(target)) if target else b""
        if len(data) != len(target):
            raise OSError(errno.EIO, f"gave {len(data)} of {len(target)} bytes from {at} on", str(self._path))
        target[:] = data

    def close(self) -> None:
        """Nothing is held between two requests."""


class _Remote(Store):
    readers = 8
    gap = 1 << 20

    def folders(self, root: RemotePath) -> list[RemotePath]:
        with root.opened() as (system, path):
            try:
                found = _listing(system, path)
            except FileNotFoundError:
                return []
        return [root / name for name in sorted(found) if name.startswith(_FOLDERS)]

    def committed(self, folder: RemotePath) -> bool:
        return (folder / MANIFEST).exists()

    def begin(self, target: RemotePath, needed: int, claim: contextlib.ExitStack) -> RemotePath:
        if target.exists():
            raise FileExistsError(f"{str(target)!r} exists already")
        return target

    def check_shared(self, work: RemotePath) -> None:
        """There is nothing to see before the first file is there; all are looked for before the commit."""

    def create(self, path: RemotePath) -> Sink:
        return _RemoteSink(path)

    def check_arrived(self, work: RemotePath, sizes: Mapping[str, int]) -> None:
        with work.opened() as (system, path):
            there = _listing(system, path)
        for name, size in sizes.items():
            if there.get(name) != size:
                raise FileNotFoundError(
                    f"{str(work / name)!r} should have {size} bytes, and rank 0 sees {there.get(name, 'none')}: the "
                    "ranks do not share this store (memory:// is one process's own), or somebody removes files from it"
                )

    def commit(self, work: RemotePath, target: RemotePath) -> None:
        """The manifest is there: that was it."""

    def abandon(self, work: RemotePath) -> None:
        with contextlib.suppress(OSError):
            self.remove(work)

    def remove(self, folder: RemotePath) -> bool:
        if (folder / PIN).exists():
            return False
        manifest = folder / MANIFEST
        if manifest.exists():
            manifest.unlink()
        with folder.opened() as (system, path):
            system.rm(path, recursive=True)
        return True

    def source(self, path: RemotePath) -> Source:
        return _RemoteSource(path)


def _listing(system: Any, path: str) -> dict[str, int | None]:
    system.invalidate_cache(path)
    return {str(e["name"]).rstrip("/").rpartition("/")[2]: e.get("size") for e in system.ls(path, detail=True)}


_DISK, _REMOTE = _Disk(), _Remote()


def store_of(where: Place) -> Store:
    """Return how snapshots are handled at a place."""
    return _REMOTE if isinstance(where, RemotePath) else _DISK


def _make_durable(folder: Path) -> None:
    """Make a folder and those above it, each of them flushed into the one above."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Make a folder's entries durable, so that a file in it or a rename of it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
