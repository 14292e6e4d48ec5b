"""Where snapshots are: a path on a disk, or one below a URL that fsspec knows.

Whether a URL can be reached, and with which credentials, is fsspec's to say (its configuration files and ``FSSPEC_*``
variables, and those of the library behind it, such as ``AWS_ENDPOINT_URL``).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from accel_shard.errors import SnapshotError

__all__ = ["Place", "RemotePath", "place"]


@dataclass(frozen=True, order=True, slots=True)
class RemotePath:
    """A file or folder below a URL, with the few methods of :class:`pathlib.Path` that snapshots need."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that this is in."""
        return RemotePath(self.url.rstrip("/").rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        """Return the path of a neighbour."""
        return self.parent / name

    def exists(self) -> bool:
        """Ask the store."""
        with self.opened() as (system, path):
            return bool(system.exists(path))

    def is_file(self) -> bool:
        """Ask the store."""
        with self.opened() as (system, path):
            return bool(system.isfile(path))

    def read_bytes(self) -> bytes:
        """Fetch a whole file."""
        with self.opened() as (system, path):
            return bytes(system.cat_file(path))

    def read_text(self, encoding: str = "utf-8") -> str:
        """Fetch a whole file."""
        return self.read_bytes().decode(encoding)

    def touch(self) -> None:
        """Put an empty file there."""
        with self.opened() as (system, path):
            system.pipe_file(path, b"")

    def unlink(self) -> None:
        """Remove a file."""
        with self.opened() as (system, path):
            system.rm_file(path)

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[Any, str]]:
        """Give the fsspec file system and its own path, and turn what the libraries behind it raise into OSError."""
        try:
            yield _file_system(self.url)
        except (OSError, SnapshotError):
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.url) from error


Place: TypeAlias = Path | RemotePath


def place(where: str | Path | RemotePath) -> Place:
    """Return the place that a path or a URL names. Local: communicates nothing.

    Raises:
        ValueError: for a URL that was a :class:`~pathlib.Path` on its way, or that chains two.
        SnapshotError: if fsspec, or what it needs for this kind of URL, is not installed.
    """
    if isinstance(where, RemotePath):
        return where
    text = str(where)
    first = Path(text).parts[:1]
    if "://" not in text:
        if first and first[0].endswith(":") and len(first[0]) > 2:
            raise ValueError(
                f"{text!r} looks like a URL that was made a Path, which takes one of its slashes. Pass URLs as str."
            )
        return Path(where)
    if "::" in text:
        raise ValueError(f"{text!r} chains URLs. Allowed: one URL that can be written to, such as s3://bucket/run.")
    _file_system(text)
    return RemotePath(text.rstrip("/"))


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise SnapshotError(f"{url!r} is a URL, which needs fsspec: pip install 'accel_shard[remote]'.") from None
    try:
        # A listing that was kept would not show what another rank, or another run, has put there since.
        system, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise SnapshotError(f"{url!r} needs a package that is not installed: {error}") from error
    except ValueError as error:
        raise SnapshotError(f"{url!r} is no URL that fsspec knows: {error}") from error
    return system, str(path)
