"""Writes a staged snapshot, now or from a thread of its own while training goes on; one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

import torch.distributed as dist
from accelerate.logging import get_logger

from accel_shard.checkpoint.meeting import Meeting
from accel_shard.checkpoint.places import Place
from accel_shard.checkpoint.snapshot import StagedSnapshot
from accel_shard.errors import SnapshotError

__all__ = ["Writer"]

logger = get_logger(__name__)

Committed: TypeAlias = Callable[[], Callable[[StagedSnapshot], None] | None]


class Writer:
    """Every rank has one, and calls its methods alike unless they say otherwise.

    Args:
        meeting: of all ranks.
        background: write from a thread.
        committed: called on each rank after a commit, in the thread, as long as its object lives.

    Attributes:
        last: step and place of the last snapshot that was written or is in flight; None after a failure.
    """

    def __init__(self, meeting: Meeting, committed: Committed, *, background: bool) -> None:
        self._meeting, self._committed, self._background = meeting, committed, background
        self._thread: threading.Thread | None = None
        self._failure: SnapshotError | None = None
        self.last: tuple[int, Place] | None = None

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed on this rank. Local."""
        return self._failure is not None

    def write(self, staged: StagedSnapshot, step: int) -> None:
        """Write, or begin to, once none is in flight. The snapshot is of this step.

        Raises:
            SnapshotError: on every rank, if any could not write at once.
        """
        assert self._thread is None, "one save at a time"
        if not self._background:
            self._write(staged, None)
        else:
            # The next save must not write into the memory from which this one reads, so the thread stays known.
            self._thread = threading.Thread(
                target=self._write_quietly, args=(staged,), name="accel_shard save", daemon=True
            )
            self._thread.start()
        self.last = step, staged.target

    def _write(self, staged: StagedSnapshot, group: dist.ProcessGroup | None) -> None:
        staged.write(group)
        if (committed := self._committed()) is not None:
            committed(staged)

    def _write_quietly(self, staged: StagedSnapshot) -> None:
        try:
            self._write(staged, self._meeting.writers)
        except SnapshotError as error:
            self._failure = error
        except Exception as error:  # a rank is gone; what it was must reach the loop, not the thread's end
            self._failure = SnapshotError(f"the save to {str(staged.target)!r} broke off: {error!r}")

    def wait(self, limit: float | None = None) -> None:
        """Wait until no save is in flight. Local.

        Args:
            limit: seconds; after them it returns, and the save goes on. The next one waits for it.

        Raises:
            SnapshotError: if the save failed.
        """
        if self._thread is not None:
            self._thread.join(limit)
            if self._thread.is_alive():
                logger.warning("a save was still in flight after %s s", limit)
                return
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            self.last = None
            raise failure

    def finish(self) -> bool:
        """Wait until no save is in flight, and return whether it failed on this rank. Local; raises nothing."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.failed

    def settle(self) -> None:
        """Wait for a save in flight, so that all ranks go on or all raise, whichever of them knows why.

        Raises:
            SnapshotError: on every rank, if it failed on any.
        """
        if self._meeting.any_rank(self.finish())[0]:
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise, on every rank, what one of them knows.

        Raises:
            SnapshotError: always.
        """
        self.wait()
        self.last = None  # on this rank too, or the next save of this step would find the others alone
        raise SnapshotError("a save in the background failed on another rank; see its message")

    def last_wait(self) -> None:
        """Give a save in flight a minute more. Ranks may be gone by now, and no error of its own may hide theirs."""
        try:
            self.wait(limit=60.0)
        except SnapshotError as error:
            logger.error("%s", error)
