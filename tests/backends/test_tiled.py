"""DeepSpeed's tiled layers and losses (ALST) and its cross entropies: products as of whole ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.backends import tiled_jobs as jobs
from tests.nets import DenseHessian
from tests.operators.gauss_newton import ExactGaussNewton
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
WAYS = ("tiled MLP", "tiled layer", "tiled loss", "chunked", "vocabulary", "linear")
WITHOUT_OUTPUTS = ("tiled loss", "linear")  # which never have all logits


@pytest.mark.parametrize(
    ("way", "stage"), cells([(way, stage) for way in WAYS for stage in (0, 3)], [("tiled MLP", 3)])
)
def test_products_are_those_of_the_whole(ranks: Ranks, way: str, stage: int) -> None:
    weights, v, found = ranks(2).run(jobs.products, stage, way, ("hessian", "ggn"))[0]
    # Tiles of a sequence are of equal size here, so that the mean of their means is the mean.
    entries = [entry for rank in (0, 1) for entry in jobs.data(rank)]
    dense = DenseHessian(jobs.Net(), weights, entries)
    flat = dense.flat(v)
    expected = {"hessian": dense.matvec(flat)}
    if way not in WITHOUT_OUTPUTS:
        net = jobs.Net()
        net.load_state_dict({n: w.reshape(net.state_dict()[n].shape) for n, w in weights.items()})
        exact = ExactGaussNewton(net, "head", lambda m, b: m(*b), entries)
        expected["ggn"] = exact(flat)
    else:
        assert "does not support outputs" in found.pop("ggn")
    for name, truth in expected.items():
        product, error = found[name]
        assert (dense.flat(product) - truth).norm() <= min(2 * error, 2e-4) * truth.norm(), name


@pytest.mark.parametrize(
    ("way", "stage"), cells([("tiled MLP", 3), ("tiled loss", 2), ("chunked", 1)], [])
)
def test_training_is_bitwise_the_same(ranks: Ranks, way: str, stage: int) -> None:
    assert all(ranks(2).run(jobs.same_with_and_without, stage, way))


def test_a_loss_that_takes_its_gradient_in_the_forward_is_refused(ranks: Ranks) -> None:
    """TiledFusedLogitsLoss, whose weights have their gradients before the loss is scaled."""
    runs = ranks(2).run(jobs.products, 3, "gradients in the forward", ("hessian",))
    assert all("a backward pass itself" in found["hessian"] for _, _, found in runs)
    assert all(torch.isfinite(w).all() for w in runs[0][0].values())
