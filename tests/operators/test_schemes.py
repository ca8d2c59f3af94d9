"""Every difference formula: its order on polynomials, its products and their errors on nets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.operators import SCHEMES, FiniteDifferenceHessian
from tests.operators.nets import (
    Exact,
    backend_of,
    batches,
    costs,
    drawn,
    measuring,
    mlp,
    relative,
    train,
)
from tests.tiers import cells

DRAWS = 3

BEST = {"forward": 2.5e-3, "central": 3e-4, "fourth_order": 6e-5}
"""fp32: about ten times u^(p / (p + 1)), what the order of each scheme allows."""


class Scalar(nn.Module):
    """One weight in fp64, so that truncation is all there is."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))


def curvature(scheme: str, loss: Callable[[Tensor], Tensor], w: float, h: float) -> float:
    backend = ModuleBackend(Scalar(w))
    with measuring(backend, [None], lambda m, _: loss(m.w.double()).sum()) as session:
        operator = FiniteDifferenceHessian(session, scheme=scheme)
        return float(operator.product_at(torch.ones(1), h).vector)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_is_exact_for_losses_up_to_its_order(scheme: str) -> None:
    degree = SCHEMES[scheme].order + 1  # of the loss: two above that of the Hessian's error
    exact = degree * (degree - 1) * 1.5 ** (degree - 2)
    assert curvature(scheme, lambda w: w**degree, 1.5, 0.25) == pytest.approx(exact, rel=1e-5)


def test_schemes_differ_from_the_hessian_by_their_first_missing_term() -> None:
    # w^4 at 1, h = 1/4: (4 (1 + h)^3 - 4) / h = 12 + 12 h + 4 h^2 and 12 + 4 h^2.
    assert curvature("forward", lambda w: w**4, 1.0, 0.25) == pytest.approx(15.25)
    assert curvature("central", lambda w: w**4, 1.0, 0.25) == pytest.approx(12.25)
    # w^6: the fourth-order error is -4 h^4 times f^(6) / 5! = 6: 30 - 24 h^4.
    assert curvature("fourth_order", lambda w: w**6, 1.0, 0.25) == pytest.approx(30 - 24 / 256)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("steps", cells([0, 40], [40]), ids=["untrained", "trained"])
def test_products_reach_the_error_of_their_order(scheme: str, steps: int) -> None:
    data, errors, estimates = batches(), [], []
    for net in drawn(train(mlp(), data, steps), DRAWS):
        backend, exact = backend_of(net), Exact(net, data)
        with measuring(backend, data) as session:
            operator = FiniteDifferenceHessian(session, scheme=scheme)
            for v, truth in exact.krylov(backend, 8):
                product = operator.matvec(v)
                errors.append(relative(product.vector, truth))
                estimates.append(product.error or 0.0)
    largest = [max(errors[i : i + 8]) for i in range(0, len(errors), 8)]
    assert sum(largest) < DRAWS * BEST[scheme]
    within = [1 / 3 < e / t < 3 for e, t in zip(estimates, errors, strict=True)]
    assert sum(within) >= 6 * DRAWS, (estimates, errors)


@pytest.mark.parametrize("scheme", cells(SCHEMES, []))
def test_cost_is_that_of_the_scheme_and_a_quarter(scheme: str) -> None:
    data, own, found, count = batches(16), len(SCHEMES[scheme].nodes), list[float](), 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    for net in drawn(train(mlp(), data, 40), DRAWS):
        backend, exact = backend_of(net), Exact(net, data)
        with measuring(backend, data) as session:
            operator = FiniteDifferenceHessian(session, scheme=scheme)
            handle = net.register_forward_pre_hook(counted)
            found += costs(operator, (v for v, _ in exact.krylov(backend, 20)))
            handle.remove()
    assert sum(found) == pytest.approx(count / 16)
    # One trial of 1/8 (with a one-sided scheme also the side that is not part of the product), and
    # a search for the first vectors.
    sides = 2 if SCHEMES[scheme].one_sided else own
    once = [cost for cost in found if cost < own + 1]  # what is not made again
    assert sum(once) / len(once) < own + (2 * sides - own) / 8 + own / 16, found
    assert len(once) >= 0.8 * len(found), found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fidelity_is_that_of_the_step_between_the_inner_nodes(scheme: str) -> None:
    data = batches(2)
    backend = backend_of(mlp(), bf16=True)
    v = torch.nn.functional.normalize(torch.ones(backend.layout.n_local), dim=0)
    with measuring(backend, data) as session:
        operator = FiniteDifferenceHessian(session, scheme=scheme)
        for h in (1e-3, 10.0):
            points = []
            for node in SCHEMES[scheme].differences[0][:2]:
                session.displace(v, node * h)
                flat = [p.detach().flatten().double() for p in backend.module.parameters()]
                points.append(torch.cat(flat))
            moved = points[0] - points[1]
            cosine = float(moved @ v.double() / moved.norm())
            assert operator.product_at(v, h).fidelity == pytest.approx(cosine, abs=1e-6)
