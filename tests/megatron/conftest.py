"""Ranks of their own: the shim of a process that runs Megatron on CPU is not undone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        found = importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        skip = pytest.mark.skip(reason="megatron-core is not installed: pip install megatron-core")
        for item in items:
            if "tests/megatron/" in str(item.path):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def megatron_ranks() -> Iterator[Callable[[int], RankPool]]:
    """`megatron_ranks(n)`: a pool of n ranks, started at its first use and again after a hang."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or not all(p.is_alive() for p in pool.processes):
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
