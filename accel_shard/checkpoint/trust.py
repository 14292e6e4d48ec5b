"""Which snapshot to go on from: found by rank 0, looked at by all, and trusted only if all see the same whole one."""

from __future__ import annotations

from accel_shard.checkpoint.folder import SnapshotFolder
from accel_shard.checkpoint.meeting import SHARED, check_one_folder
from accel_shard.checkpoint.places import Place
from accel_shard.checkpoint.plan import gather, own_rank, rank_count
from accel_shard.checkpoint.snapshot import Snapshot
from accel_shard.checkpoint.stores import MANIFEST, store_of
from accel_shard.checkpoint.together import attempt, raise_any
from accel_shard.errors import SnapshotError

__all__ = ["candidates", "is_snapshot", "trusted"]


def candidates(folder: SnapshotFolder) -> list[Place]:
    """Return the folder's snapshots, the last committed first, as rank 0 sees them. Every rank must call it.

    Raises:
        SnapshotError: on every rank, if the ranks do not see the same.
    """
    found: list[Place] = []
    sees = False
    with attempt() as failure:
        found = folder.arrive() if own_rank() == 0 else []
        sees = bool(store_of(folder.path).folders(folder.path))
    everyones = gather((failure, str(folder.path), found, sees))
    raise_any(f"could not look for snapshots in {str(folder.path)!r}", [failure for failure, *_ in everyones])
    check_one_folder([path for _, path, _, _ in everyones])
    seers = [rank for rank, (*_, saw) in enumerate(everyones) if saw]
    if seers and 0 not in seers:
        raise _not_shared(folder.path, f"ranks {seers} see snapshots there, rank 0 does not")
    newest_first: list[Place] = everyones[0][2]
    return newest_first


def is_snapshot(path: Place) -> bool:
    """Tell whether a folder is one of ours. Every rank must call it.

    Raises:
        SnapshotError: on every rank, if they do not see the same.
    """
    seen = False
    with attempt() as failure:
        seen = (path / MANIFEST).is_file()
    everyones = gather((failure, seen))
    raise_any(f"could not look at {str(path)!r}", [failure for failure, _ in everyones])
    blind = [rank for rank, (_, saw) in enumerate(everyones) if not saw]
    if 0 < len(blind) < len(everyones):
        raise _not_shared(path, f"ranks {blind} do not see it")
    return not blind


def trusted(path: Place) -> tuple[Snapshot | None, str]:
    """Check a snapshot with all ranks, each its share of the files; return it, or why not. Every rank must call it.

    Raises:
        SnapshotError: on every rank, if the ranks do not see the same.
    """
    snapshot: Snapshot | None = None
    with attempt() as fault:
        snapshot = Snapshot.open(path)
        snapshot.verify(share=(own_rank(), rank_count()))
    seen: str | bool = snapshot.digest if snapshot is not None else False
    if fault:
        with attempt():
            seen = (path / MANIFEST).exists()
    everyones = gather((seen, fault))
    digests = {digest for digest, _ in everyones if isinstance(digest, str)}
    blind = [rank for rank, (digest, _) in enumerate(everyones) if digest is False]
    if len(digests) > 1 or 0 < len(blind) < len(everyones):
        raise _not_shared(path, f"ranks {blind} do not see it" if blind else "it is not the same on each of them")
    faults = [texts[0] for _, texts in everyones if texts]
    return (None, faults[0]) if faults else (snapshot, "")


def _not_shared(path: Place, what: str) -> SnapshotError:
    return SnapshotError(f"the ranks do not share {str(path)!r}: {what}. {SHARED}")
