"""What killed saves and removals leave in a folder, and how to know that nobody owns it any more.

A save holds a lock on a file beside its unfinished folder. The system drops the lock with the process, however it
ends, on whatever node; so a lock that can be had says that its save is dead. Where a file system has no locks there is
no file either, and then nothing is removed: it might be a living save's.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from accelerate.logging import get_logger

__all__ = ["claimed", "partial_for", "set_aside", "sweep"]

logger = get_logger(__name__)

_LOCK: Final = ".saving-"


def partial_for(target: Path) -> Path:
    """Return a new name beside a snapshot's, under which it is written."""
    return target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:12]}")


@contextlib.contextmanager
def claimed(partial: Path) -> Iterator[None]:
    """Own an unfinished folder while the block runs. Local; rank 0 alone enters it, before it makes the folder.

    Raises:
        OSError: if nothing can be written there.
    """
    lock = partial.with_name(_LOCK + partial.name.rpartition("-")[2])
    with lock.open("xb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # no locks here, or another run's sweep has just looked: then nobody may judge this save dead
            lock.unlink(missing_ok=True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the disk may have gone read-only; that must not hide why
                if not partial.exists():  # else the next save clears it up: the lock is let go, but stays as its mark
                    lock.unlink()


def set_aside(path: Path) -> Path:
    """Rename a folder to one that anybody may remove, and return it. Who renames first has it; a commit loses nothing.

    Raises:
        OSError: if it is gone, or cannot be renamed.
    """
    trash = path.with_name(f".{path.name.lstrip('.')}.trash-{uuid.uuid4().hex[:12]}")
    path.rename(trash)
    return trash


def sweep(folder: Path) -> None:
    """Remove what no living save can own. Local; rank 0 alone calls it, before a save. It never fails."""
    try:
        for trash in folder.glob(".step-*.trash*"):
            shutil.rmtree(trash, ignore_errors=True)
        for lock in folder.glob(f"{_LOCK}*"):
            _sweep_one(folder, lock)
    except OSError as error:
        logger.warning("could not clear up %s: %s", folder, error)


def _sweep_one(folder: Path, lock: Path) -> None:
    try:
        # For writing, or network file systems grant no exclusive lock.
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for partial in folder.glob(f".step-*.partial-{lock.name.removeprefix(_LOCK)}"):
                logger.info("removing %s, which a killed save left", partial)
                shutil.rmtree(set_aside(partial), ignore_errors=True)
            lock.unlink()
    except BlockingIOError:
        return  # its save lives
    except FileNotFoundError:
        return  # it has just ended, or somebody else swept it
