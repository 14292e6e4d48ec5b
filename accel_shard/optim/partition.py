"""Which rank updates what: plain arithmetic, the same on every rank, that knows nothing of tensors or collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["assign_longest_first", "equal_ranges", "runs", "sections"]

Item = TypeVar("Item")


def equal_ranges(total: int, ranks: int) -> list[tuple[int, int]]:
    """Cut ``total`` elements into one contiguous range a rank.

    The ranges are of one length, so that one all-gather joins them, but for the last ones, which end with the
    elements: no rank holds more than one element above ``total / ranks``.
    """
    length = -(-total // ranks)
    return [(min(rank * length, total), min((rank + 1) * length, total)) for rank in range(ranks)]


def assign_longest_first(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Give each item an owner: the largest first, each to who has least so far.

    Args:
        sizes: of the items.
        loads: what each rank has already.

    Returns:
        The owner of each item. No rank gets more than its share and the largest item.
    """
    loads, owners = list(loads), [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


def sections(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Line items up so that what a rank owns is one contiguous range.

    Returns:
        The order of the items, and the range of elements of each rank.
    """
    order = sorted(range(len(sizes)), key=lambda i: owners[i])
    ends, at = [], 0
    for rank in range(ranks):
        start = at
        at += sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        ends.append((start, at))
    return order, ends


def runs(items: Sequence[Item], alike: Callable[[Item, Item], bool]) -> Iterator[list[Item]]:
    """Yield the longest stretches of items in which each is like the one before it."""
    run: list[Item] = []
    for item in items:
        if run and not alike(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run
