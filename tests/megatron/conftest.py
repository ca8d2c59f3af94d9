"""Ranks of their own: the shim of a process that runs Megatron on CPU is not undone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool, pools_of_ranks


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
def megatron_ranks(built: None) -> Iterator[Callable[[int], RankPool]]:
    """`megatron_ranks(n)`: a pool of n ranks.

    A model with experts is never freed once Megatron has run it, and its 16 process groups, whose
    threads poll, take a tenth of a processor: after one of them a pool is started anew.
    """
    yield from pools_of_ranks(threads=80)
