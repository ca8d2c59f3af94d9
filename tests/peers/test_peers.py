"""Other tools on the same net, data and vectors, in fp64 by double backward: they agree with ours.

They are the optional extra `peers`; without one, its tests skip.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

import ds_hessian
from ds_hessian.krylov import eigenpairs
from ds_hessian.operators import FiniteDifferenceHessian
from ds_hessian.vectors import random_vector
from tests.operators.nets import Exact, backend_of, batches, loss_of, measuring, mlp, train
from tests.plain.test_kronecker import factors_of, matrix_of

K = 3


def trained() -> nn.Module:
    """611 weights, neither at the start nor memorised: positive and negative eigenvalues."""
    return train(mlp(), batches(), 30)


def curvlinops_of(net: nn.Module, name: str, parameters: Any = None, **settings: Any) -> Any:
    """A linear operator of curvlinops on the micro-batches in fp64."""
    curvlinops = pytest.importorskip(
        "curvlinops", reason="curvlinops is not installed (extra `peers`)"
    )
    data = [(x.double(), y) for x, y in batches()]
    parameters = list(net.parameters()) if parameters is None else parameters
    # check_deterministic would evaluate everything twice more.
    settings |= {"check_deterministic": False}
    return getattr(curvlinops, name)(net, nn.CrossEntropyLoss(), parameters, data, **settings)


def by_curvlinops(net: nn.Module) -> Any:
    return curvlinops_of(net, "HessianLinearOperator")


def by_hessian_eigenthings(net: nn.Module) -> Any:
    peer = pytest.importorskip(
        "hessian_eigenthings", reason="hessian-eigenthings is not installed (extra `peers`)"
    )
    return peer.HessianOperator(net, batches(), loss_of)


def multiply(operator: Any, v: Tensor) -> Tensor:
    """`(n,)` fp64, by either peer."""
    return operator.matvec(v) if hasattr(operator, "matvec") else operator @ v


def extreme(operator: Any, n: int) -> NDArray[np.float64]:
    """The K eigenvalues of largest magnitude by SciPy's eigsh (ARPACK), descending in magnitude."""

    def matvec(v: NDArray[np.float64]) -> NDArray[np.float64]:
        return multiply(operator, torch.from_numpy(v.ravel().copy())).detach().numpy()

    values = eigsh(LinearOperator((n, n), matvec, dtype=np.float64), K, which="LM", tol=1e-10)[0]
    return np.asarray(values[np.argsort(-abs(values))])


@pytest.mark.parametrize("peer", [by_curvlinops, by_hessian_eigenthings])
def test_products_agree(peer: Any) -> None:
    net = trained()
    reference, theirs = Exact(net, batches()), peer(copy.deepcopy(net).double())
    backend = backend_of(net)
    with measuring(backend, batches()) as session:
        operator = FiniteDifferenceHessian(session)
        for seed in range(3):
            v = random_vector(backend.layout, backend.space, seed)
            expected = multiply(theirs, v.double()).detach()
            # Theirs and our fp64 reference are the same function: only rounding is between them.
            assert (reference(v) - expected).norm() <= 1e-12 * expected.norm()
            product = operator.matvec(v)
            assert product.error is not None and product.error < 1e-2
            off = (product.vector.double() - expected).norm() / expected.norm()
            assert off <= 2 * product.error


@pytest.mark.parametrize("peer", [by_curvlinops, by_hessian_eigenthings])
def test_the_largest_eigenvalues_agree_with_those_of_eigsh(peer: Any) -> None:
    net = trained()
    backend = backend_of(net)
    expected = extreme(peer(copy.deepcopy(net).double()), backend.space.n)
    with measuring(backend, batches()) as session:
        pairs = eigenpairs(
            FiniteDifferenceHessian(session),
            random_vector(backend.layout, backend.space, 0),
            K,
            lambda number: random_vector(backend.layout, backend.space, number),
        )
    assert pairs.converged.all()
    assert (abs(pairs.values - expected) <= pairs.errors).all()


def test_the_largest_eigenvalues_agree_with_hessian_eigenthings_own_lanczos() -> None:
    net = trained()
    theirs = by_hessian_eigenthings(copy.deepcopy(net).double())
    import hessian_eigenthings

    found = hessian_eigenthings.lanczos(theirs, k=K, max_iter=40, tol=1e-8, seed=0)
    assert found.converged.all()
    backend = backend_of(net)
    expected = extreme(theirs, backend.space.n)
    assert np.allclose(found.eigenvalues.numpy(), expected, rtol=1e-6)


def test_products_with_the_gauss_newton_matrix_agree() -> None:
    net = trained()
    theirs = curvlinops_of(copy.deepcopy(net).double(), "GGNLinearOperator")
    settings = {"operator": "ggn", "progress": False}
    hessian = ds_hessian.attach(net, config=settings).use(batches(), loss_of)
    for seed in range(3):
        v = hessian.random_vector(seed=seed)
        product = hessian.matvec(v)
        expected = (theirs @ v.double()).detach()
        off = (product.vector.double() - expected).norm() / expected.norm()
        assert product.error is not None and off <= 2 * product.error < 2e-2


@pytest.mark.parametrize(
    ("kind", "name"), [("kfac", "KFACLinearOperator"), ("ekfac", "EKFACLinearOperator")]
)
def test_kronecker_factors_agree(kind: str, name: str) -> None:
    net = trained()
    wide = copy.deepcopy(net).double()
    weights = [p for p in wide.parameters() if p.ndim == 2]
    theirs = curvlinops_of(wide, name, weights, fisher_type="empirical")
    dense = (theirs @ torch.eye(sum(p.numel() for p in weights), dtype=torch.float64)).detach()
    begin = 0
    for found in factors_of(net, batches(), loss_of, kinds=(kind,)):
        ours = matrix_of(found.forms[kind])
        block = dense[begin : begin + len(ours), begin : begin + len(ours)]
        assert (ours - block).norm() <= 1e-4 * block.norm()
        begin += len(ours)
    assert begin == len(dense)
