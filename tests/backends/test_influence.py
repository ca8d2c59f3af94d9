"""Influence of examples against the dense fp64 Hessian, and against training without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.backends import jobs
from tests.nets import DenseHessian, TinyGPT, batch
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.full
def test_scores_are_those_of_the_dense_hessian(ranks: Ranks) -> None:
    results = ranks(2).run(jobs.influences, 12.0)
    weights, found, *_ = results[0]
    assert np.array_equal(found.scores, results[1][1].scores)
    assert all(kept for _, _, kept, _ in results)
    for _, _, _, refusals in results:
        assert len(refusals) == 2
        assert "at least one micro-batch" in refusals[0] and "same number" in refusals[1]

    def gradient(micro_batches: list[Any]) -> Tensor:
        return DenseHessian(TinyGPT(), weights, micro_batches).gradient.detach()

    dense = DenseHessian(TinyGPT(), weights, [batch(500 + i, 0) for i in range(jobs.TOTAL)])
    matrix, asked = dense.matrix(), gradient([batch(700, 0), batch(701, 0)])
    examples = torch.stack([gradient([batch(500 + i, 0)]) for i in range(3)])
    assert found.converged.all() and not found.negative_curvature.any()
    for damping, scores, errors in zip(found.dampings, found.scores, found.errors, strict=True):
        x = torch.linalg.solve(matrix + damping * torch.eye(len(matrix)), asked)
        exact = (examples @ x).numpy()
        off = abs(scores - exact)
        assert (off <= errors).all()
        assert (off <= 2e-3 * float(x.norm()) * examples.norm(dim=1).numpy()).all()


def newton(x: Tensor, y: Tensor, keep: Tensor, damping: float) -> Tensor:
    """The minimum of sum over kept examples / N + damping |w|^2 / 2, in fp64."""
    w = x.new_zeros(x.shape[1])
    for _ in range(30):
        p = torch.sigmoid(x @ w)
        gradient = x.T @ (keep * (p - y)) / len(x) + damping * w
        hessian = (x.T * (keep * p * (1 - p))) @ x / len(x) + damping * torch.eye(len(w))
        w = w - torch.linalg.solve(hessian, gradient)
    return w


@pytest.mark.full
def test_scores_foretell_what_training_without_an_example_does(ranks: Ranks) -> None:
    generator = torch.Generator().manual_seed(3)
    n, damping = 40, 0.1
    x = torch.randn(n + 8, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(n + 8, generator=generator, dtype=torch.float64)
    y = (x.sum(1) + noise > 0).double()
    asked, x, y, answers = x[n:], x[:n], y[:n], y[n:]

    def query_loss(w: Tensor) -> Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(asked @ w, answers)

    best = newton(x, y, torch.ones(n).double(), damping)

    def changes(part: float) -> Any:
        """Of the query's loss, where so much of the weight of each example in turn is taken."""
        retrained = []
        for i in range(n):
            keep = torch.ones(n, dtype=torch.float64)
            keep[i] -= part
            retrained.append(float(query_loss(newton(x, y, keep, damping)) - query_loss(best)))
        return np.array(retrained)

    examples = [(x[i : i + 1].float(), y[i : i + 1].float()) for i in range(n)]
    query = (asked.float(), answers.float())
    found = ranks(2).run(jobs.influences_at, best, query, examples, damping)[0]
    foretold = found.scores[0] / n
    # Scores leave out what is of second order in the part: 1 / (n damping) = 0.25 of it or so.
    without, less = changes(1.0), changes(0.02)
    assert np.corrcoef(foretold, without)[0, 1] > 0.99
    assert np.abs(0.02 * foretold - less).max() < 2 * 0.25 * 0.02 * np.abs(less).max()
