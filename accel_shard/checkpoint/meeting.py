"""How ranks agree before and after a save: over their hosts, so that no device has to be waited for."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from accel_shard.checkpoint.places import Place
from accel_shard.checkpoint.plan import gather, rank_count
from accel_shard.errors import SnapshotError

__all__ = ["SHARED", "Meeting", "check_one_folder"]

_ROOM: Final = 2048
"""Bytes that :meth:`Meeting.gather` exchanges without asking first how many there are."""

SHARED = "All ranks must see one folder: put it on a disk that all nodes mount. Nothing was loaded."


class Meeting:
    """Groups of all ranks. Every rank must make one.

    Args:
        patience: seconds that a rank waits in :meth:`meet` for the others.

    Attributes:
        writers: the group for the thread that writes, apart from those that the loop uses meanwhile.
    """

    def __init__(self, patience: float) -> None:
        self._patience = datetime.timedelta(seconds=patience)
        several = rank_count() > 1
        self._votes = _group("votes") if several else None
        self._barrier = _group("barrier", self._patience) if several else None
        # Ranks write different amounts to disks of different speed: how long one may wait is for the disk to say.
        self.writers = _group("writers", datetime.timedelta(hours=6)) if several else None

    def any_rank(self, *flags: bool) -> list[bool]:
        """Return for each flag whether any rank has it. Every rank must call it."""
        votes = torch.tensor(flags, dtype=torch.int32)
        if self._votes is not None:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._votes)
        return [bool(vote) for vote in votes.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks. Every rank must call it.

        Small values take one exchange, where :func:`~accel_shard.checkpoint.plan.gather` takes two: it is a wait.
        """
        if self._votes is None:
            return [value]
        packed = pickle.dumps(value)
        mine = torch.zeros(_ROOM, dtype=torch.uint8)
        if len(packed) <= _ROOM - 8:
            content = len(packed).to_bytes(8, "big") + packed
            mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        everyones = torch.empty(rank_count() * _ROOM, dtype=torch.uint8)
        dist.all_gather_into_tensor(everyones, mine, group=self._votes)
        rows = [row.numpy().tobytes() for row in everyones.view(-1, _ROOM)]
        lengths = [int.from_bytes(row[:8], "big") for row in rows]
        if not all(lengths):  # some rank's did not fit
            return gather(value, self._votes)
        return [pickle.loads(row[8 : 8 + length]) for row, length in zip(rows, lengths, strict=True)]

    def meet(self) -> None:
        """Wait for all ranks to come here.

        Raises:
            SnapshotError: naming the absent, after the patience.
        """
        if self._barrier is None:
            return
        try:
            dist.monitored_barrier(self._barrier, timeout=self._patience, wait_all_ranks=True)
        except RuntimeError as error:
            raise SnapshotError(
                f"not every rank called save within {self._patience.total_seconds():g} s, so nothing was saved. Every "
                f"rank must call it, not the main process alone. {error}"
            ) from error


def _group(name: str, timeout: datetime.timedelta | None = None) -> Any:
    return dist.new_group(backend="gloo", timeout=timeout, group_desc=f"accel_shard {name}")


def check_one_folder(given: Sequence[str | Place]) -> None:
    """Check that all ranks were given the same folder. Local.

    Raises:
        SnapshotError: if not.
    """
    if len(set(given)) > 1:
        listed = [str(folder) for folder in given]
        raise SnapshotError(f"folder differs from rank to rank: {listed}. Give them the same one, on a shared disk.")
