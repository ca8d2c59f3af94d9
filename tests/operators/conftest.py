"""Families on which no constant was chosen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs import names_of


@pytest.fixture(scope="module")
def attack() -> dict[str, Any]:
    """The names of benchmarks/attack.py."""
    return names_of("attack.py")


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    """The names of benchmarks/runs.py."""
    return names_of("runs.py")
