"""What analyses tell of nets that no constant was chosen on holds the truth: benchmarks/bars.py."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from tests.programs import names_of

NAMES = ("hot", "relu", "zero head, 2 classes", "swiglu", "unequal", "saddle", "contrastive")
FIGURES = ("ends of the spectrum", "eigenpairs", "trace", "sharpness", "solve")


@pytest.fixture(scope="module")
def bars() -> dict[str, Any]:
    """The names of benchmarks/bars.py, with all families."""
    return names_of("bars.py")


def ratios(bars: dict[str, Any], name: str, arithmetic: str) -> dict[str, list[float]]:
    """Errors over bars of a family with 8 micro-batches, by analysis."""
    found = defaultdict[str, list[float]](list)
    for what, error, bar in bars["told"](bars["problem"](name, arithmetic, 8), arithmetic):
        found[what].append(error / bar)
    return found


@pytest.mark.full
def test_every_analysis_holds_the_truth(bars: dict[str, Any]) -> None:
    """Ends of a spectrum, eigenpairs, a trace, the sharpness and a solve beside a dense Hessian."""
    found = ratios(bars, "relu", "fp32")
    assert tuple(sorted(found)) == tuple(sorted(FIGURES))
    assert max(map(max, found.values())) <= 1, found


@pytest.mark.full
@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
def test_bars_hold_the_truth_of_all_families(bars: dict[str, Any], arithmetic: str) -> None:
    """95 % of what is told, and nothing is off by three bars."""
    found = {name: ratios(bars, name, arithmetic) for name in NAMES}
    every = np.array([r for by in found.values() for figures in by.values() for r in figures])
    assert np.mean(every <= 1) >= 0.95 and every.max() < 3, found


@pytest.mark.full
@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
def test_bars_hold_with_one_and_with_many_micro_batches(
    bars: dict[str, Any], arithmetic: str
) -> None:
    """Of experts and of nets with kinks and without."""
    ratios = []
    for name in ("moe", "relu", "saddle"):
        for count in (1, 16):
            p = bars["problem"](name, arithmetic, count)
            ratios += [error / bar for _, error, bar in bars["told"](p, arithmetic)]
    assert np.mean(np.array(ratios) <= 1) >= 0.95 and max(ratios) < 3, ratios
