"""Top eigenvalues of pencils with a known answer, from one subspace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_hessian.krylov import Subspace, refine
from tests.krylov.matrices import SPECTRA, Matrix


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_both_problems_converge_and_lie_within_their_bars(noise: float) -> None:
    operator = Matrix.of(SPECTRA["spiked"], noise)
    diagonal = torch.logspace(-1, 1, operator.space.n, dtype=torch.float64)
    metric, root = operator.shard(diagonal), diagonal.rsqrt()
    subspace = Subspace(operator)
    subspace.add(operator.fresh()(0))
    pairs = refine(subspace, [None, metric], 0.02, 60)
    assert len(subspace) < 60 and operator.products == len(subspace)
    for pair, h in zip(
        pairs, (operator.matrix, root[:, None] * operator.matrix * root), strict=True
    ):
        exact = torch.linalg.eigvalsh(h).numpy()
        assert pair.converged(0.02)
        assert np.abs(exact - pair.value).min() <= pair.error
        assert pair.value == pytest.approx(exact[-1], rel=0.01)
    x = operator.full(pairs[1].x)
    assert float(x @ (diagonal * x)) == pytest.approx(1.0, rel=1e-4)
    true = root * (operator.matrix @ x) - pairs[1].value * x / root
    rounding = 8 * 2.0**-24 * pairs[1].value  # of x and of its products in fp32
    assert float(true.norm()) <= pairs[1].error + rounding


def test_the_same_direction_twice_does_no_harm() -> None:
    operator = Matrix.of(SPECTRA["spiked"])
    start = operator.fresh()(0)
    once, twice = Subspace(operator), Subspace(operator)
    curvature, _ = once.add(start)
    twice.add(start)
    twice.add(3 * start)
    assert once.top().value == pytest.approx(curvature, rel=1e-6)
    assert twice.top().value == pytest.approx(curvature, rel=1e-6)
