"""Which rank updates what: plain arithmetic, the same on every rank, that knows nothing of tensors or collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

__all__ = ["assign_longest_first", "chunks", "equal_ranges", "runs", "sections"]

Item = TypeVar("Item")

CHUNK_BYTES: Final = (1 << 20, 25 << 20)
"""Of the first chunk, and of the others: DDP's own limits."""


def chunks(sizes: Sequence[int], item_bytes: int, ranks: int) -> list[range]:
    """Cut a row of parameters into chunks, as DDP cuts it into buckets: each ends where its limit is reached.

    It goes on to where the ranks divide it, so that the shares of all chunks differ by no more than those of one.

    Args:
        sizes: elements of each parameter, in the order in which their gradients come.
        item_bytes: of an element.
        ranks: how many share each chunk.
    """
    found, start, total = list[range](), 0, 0
    for number, size in enumerate(sizes):
        total += size
        if total * item_bytes >= CHUNK_BYTES[min(len(found), 1)] and total % ranks == 0:
            found.append(range(start, number + 1))
            start, total = number + 1, 0
    return [*found, range(start, len(sizes))] if start < len(sizes) else found


def equal_ranges(total: int, ranks: int) -> list[tuple[int, int]]:
    """Cut ``total`` elements into one contiguous range a rank.

    The ranges are of one length, so that one all-gather joins them, but for the last ones, which end with the
    elements: no rank holds more than one element above ``total / ranks``.
    """
    length = -(-total // ranks)
    return [(min(rank * length, total), min((rank + 1) * length, total)) for rank in range(ranks)]


def assign_longest_first(sizes: Sequence[float], loads: Sequence[float]) -> list[int]:
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
