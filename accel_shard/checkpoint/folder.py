"""The folder that a run saves into, as rank 0 sees it: what is there, whose it is, where the next goes, what may go."""

from __future__ import annotations

import itertools
import uuid

from accelerate.logging import get_logger

from accel_shard.checkpoint.places import Place
from accel_shard.checkpoint.snapshot import Snapshot, find_snapshots, remove_snapshot
from accel_shard.checkpoint.stores import PIN
from accel_shard.errors import SnapshotError

__all__ = ["SnapshotFolder"]

logger = get_logger(__name__)


class SnapshotFolder:
    """One launch's view of a folder of snapshots. Local; rank 0 alone calls its methods.

    Args:
        path: of the folder; it need not exist.

    Attributes:
        launch: goes into each manifest, and tells this launch's snapshots from another's.
        refused: snapshots that turned out bad.
    """

    def __init__(self, path: Place) -> None:
        self.path, self.launch = path, uuid.uuid4().hex
        self.refused: set[Place] = set()
        self._known: dict[Place, int] = {}
        self._own: set[Place] = set()
        self._scores: dict[Place, tuple[str, float | None]] = {}
        self._arrived_at: int | None = None

    def arrive(self) -> list[Place]:
        """Return the snapshots, the last committed first. Whatever is there now was there before this launch."""
        found = find_snapshots(self.path, self._known)
        for path in [path for number, path in found if number < 0]:
            try:
                found.append((int(Snapshot.open(path).manifest["sequence"]), path))  # the disk has thought better of it
                found.remove((-1, path))
            except SnapshotError as error:
                logger.warning("not a snapshot that can be read, and so older than all that can: %s", error)
        self._arrived_at = _newest(found)
        return [path for _, path in sorted(found, reverse=True)]

    def place_for(self, step: int) -> tuple[Place, int]:
        """Return the folder and the number of the next commit.

        Raises:
            SnapshotError: if another run has committed here since this one arrived.
            OSError: if the place cannot be listed.
        """
        found = find_snapshots(self.path, self._known)
        if self._arrived_at is None:
            self._arrived_at = _newest(found)
        for number, path in found:
            if number > self._arrived_at and path not in self._own:
                self._own_or_refuse(path)
        number = _newest(found) + 1
        # A folder that an earlier run filled further than this one has come, or one with what a killed save left.
        name = plain = f"step-{step:09d}"
        for suffix in itertools.count(number):
            if not (self.path / name).exists():
                break
            name = f"{plain}-{suffix}"
        return self.path / name, number

    def _own_or_refuse(self, path: Place) -> None:
        if Snapshot.open(path).manifest.get("launch") != self.launch:
            raise SnapshotError(
                f"{path.name} was written by another run after this one had begun. Two runs that save into one folder "
                "would remove and resume each other's snapshots. Give each a folder of its own; if the other is an "
                "earlier launch of this run that still lives, end it and start this one again."
            )
        self._own.add(path)

    def best(self, run: str, mode: str) -> Place | None:
        """Return the snapshot of a run with the lowest (``min``) or highest (``max``) score; the last of equals.

        Raises:
            OSError: if the place cannot be listed.
        """
        scored = []
        for number, path in find_snapshots(self.path, self._known):
            if number >= 0 and path not in self.refused:
                if path not in self._scores:
                    facts = Snapshot.open(path).manifest
                    self._scores[path] = facts.get("run", ""), facts.get("score")
                whose, score = self._scores[path]
                if whose == run and score is not None:
                    scored.append((-score if mode == "min" else score, number, path))
        return max(scored)[2] if scored else None

    def retain(self, keep: int, best: Place | None = None) -> None:
        """Remove all but so many of the newest, the best and the pinned ones; only ever called after a newer commit.

        What cannot be read as a snapshot, or was refused, neither counts nor goes: it may be somebody else's folder, or
        the fault of the disk. Nothing is raised: the new snapshot is safe, and other ranks know nothing of this.
        """
        try:
            found = sorted(find_snapshots(self.path, self._known), reverse=True)
            good = [path for number, path in found if number >= 0 and path not in self.refused]
        except OSError as error:
            logger.warning("could not look for old snapshots in %s: %s", self.path, error)
            return
        for path in good[keep:]:
            try:
                if path != best and not (path / PIN).exists():
                    remove_snapshot(path)
            except OSError as error:
                logger.warning("could not remove the old snapshot %s: %s", path, error)


def _newest(found: list[tuple[int, Place]]) -> int:
    # One that cannot be read may have had any number since the newest that can.
    return max([0, *(number for number, _ in found)]) + sum(number < 0 for number, _ in found)
