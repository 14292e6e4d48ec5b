"""Fixtures: pools of connected ranks, kept for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from rank_pool import RankPool

# The machines are noisy: an example that takes long is no failure.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")


def _pool(world: int) -> Iterator[RankPool]:
    pool = RankPool(world)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two connected ranks."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    """Three connected ranks: two add up to the same in any order, and four halve everything evenly."""
    yield from _pool(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four connected ranks."""
    yield from _pool(4)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """The pool of as many ranks as the test's parameter says: 2, 3 or 4."""
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}[request.param])
    return pool
