"""The programs in benchmarks/ as tests use them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def names_of(program: str) -> dict[str, Any]:
    """The names of a program that has families, with those of benchmarks/attack.py among all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        found = runpy.run_path(str(BENCHMARKS / program))
    found["FAMILIES"].update(found.get("ATTACK", {}))
    return found
