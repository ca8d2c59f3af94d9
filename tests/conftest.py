"""Pools of ranks that live as long as the test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool, pools_of_ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)`: a pool of n ranks."""
    yield from pools_of_ranks()
