"""Failing together: what goes wrong on one rank is raised on every rank, before they meet in the next collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from accel_shard.checkpoint.plan import gather, rank_count
from accel_shard.errors import SnapshotError

__all__ = ["attempt", "raise_any", "together"]


@contextlib.contextmanager
def attempt() -> Iterator[list[str]]:
    """Collect a failure of this rank instead of raising it: the other ranks are about to meet in a collective."""
    failure: list[str] = []
    try:
        yield failure
    except SnapshotError as error:
        failure.append(str(error))
    except Exception as error:
        failure.append(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def together(outcome: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block that itself communicates nothing; if it fails on any rank, raise on every rank.

    Every rank must enter it, on the same group. They exchange failures at its end.

    Args:
        outcome: what a failure means, the start of the message.
        group: of all ranks; None is the default group.

    Raises:
        SnapshotError: with each failing rank's reason.
    """
    with attempt() as failure:
        yield
    raise_any(outcome, gather(failure, group))


def raise_any(outcome: str, everyones: Sequence[list[str]]) -> None:
    """Raise if any rank failed. Local; given what :func:`attempt` collected on all ranks.

    Raises:
        SnapshotError: with each failing rank's reason.
    """
    failures = {rank: found[0] for rank, found in enumerate(everyones) if found}
    if failures:
        raise SnapshotError(f"{outcome}. {_listed(failures)}")


def _listed(failures: dict[int, str]) -> str:
    """Return the ranks' reasons in one line; a reason that all of them have stands once."""
    reasons = set(failures.values())
    if len(failures) == rank_count() and len(reasons) == 1:
        return reasons.pop()
    return "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
