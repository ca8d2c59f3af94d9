"""Displacements and estimates on families on which nothing was chosen: benchmarks/families.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.programs import names_of
from tests.tiers import cells

SMALL = ("recurrence", "zero head", "lora", "huge loss", "sigmoid head", "nearly linear")
"""Reporting families whose best constants are found in seconds."""
COUNTS = (1, 4, 8, 16)
CELLS = [(name, kind) for name in SMALL for kind in ("fp32", "bf16", "fp32 passes")]


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    """The names of benchmarks/families.py."""
    return names_of("families.py")


@pytest.fixture(scope="module")
def rows(families: dict[str, Any]) -> dict[str, list[Any]]:
    """Rows of each arithmetic, as tests of single families leave them."""
    return {}


def measured(families: dict[str, Any], name: str, arithmetic: str) -> Any:
    """The row of a family, each with one of the numbers of micro-batches."""
    count = COUNTS[(SMALL.index(name) + ("fp32", "bf16", "fp32 passes").index(arithmetic)) % 4]
    p = families["problem"](name, arithmetic, count)
    row = families["Row"](name, arithmetic, count)
    return families["measure"](row, p, families["best_constants"](p, arithmetic))


@pytest.mark.parametrize(("name", "arithmetic"), cells(CELLS, [("lora", "fp32")]))
def test_no_estimate_is_below_a_fifth_of_the_error(
    families: dict[str, Any], rows: dict[str, list[Any]], name: str, arithmetic: str
) -> None:
    row = measured(families, name, arithmetic)
    rows.setdefault(arithmetic, []).append(row)
    ratio, told = families["shares"]([row])
    assert told.min() > 0.2 and ratio.max() < 4


@pytest.mark.full
@pytest.mark.parametrize("arithmetic", ["fp32", "bf16", "fp32 passes"])
def test_displacements_are_near_the_best_constant_of_each_vector(
    families: dict[str, Any], rows: dict[str, list[Any]], arithmetic: str
) -> None:
    """Within 2x in 95 %, and estimates within 3x in 90 %; in bf16 more of them are too large
    (docs/numerics.md)."""
    found = rows.get(arithmetic, [])
    known = {row.family for row in found}
    found += [measured(families, name, arithmetic) for name in SMALL if name not in known]
    ratio, told = families["shares"](found)
    assert np.mean(ratio <= 2) >= 0.95, ratio
    near = np.mean((told > 1 / 3) & (told < 3))
    assert near >= (0.8 if arithmetic == "bf16" else 0.9), told
