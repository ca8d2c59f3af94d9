"""Trace estimators: Hutchinson, Hutch++ and XTrace, each with its standard error.

| method | products | stored vectors | standard error falls as |
|---|---|---|---|
| Hutchinson | m | 1 | |H|_F / sqrt(m) |
| Hutch++ | m | m / 3 | (trace of the tail) / m, or as Hutchinson with a flat spectrum |
| XTrace | m | m / 2 | as Hutch++ or better, all vectors used twice |

Sources: Hutchinson, Comm. Stat. 19 (1990); Meyer, Musco, Musco, Woodruff, SOSA 2021; Epperly,
Tropp, Webber, SIAM J. Matrix Anal. 45 (2024), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from ds_hessian.errors import NumericsError
from ds_hessian.krylov.basis import Basis, Storage
from ds_hessian.krylov.lanczos import BREAKDOWN, absolute_error
from ds_hessian.krylov.records import COVERAGE, Array
from ds_hessian.operators import LinearOperator
from ds_hessian.vectors import Partition

Draw = Callable[[int], Tensor]
Method = Literal["hutchinson", "hutch++", "xtrace"]

Floats = Sequence[float] | Array

CONFIDENCE = 0.99


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceEstimate:
    """The trace of an operator.

    Attributes:
        value: Sum of all eigenvalues, in loss per squared parameter.
        error: Standard error from the probes; of XTrace by the jackknife, of Hutch++ no less than
            their variance, as lengths of products tell it.
        bound: Half width of the 99 % confidence interval (Student), the products' errors included.
        samples: What was averaged: one estimate of the trace for each probe.
        frobenius: Estimated Frobenius norm and its standard error, the products' errors included;
            None but for Hutchinson.
        blocks: Names of the blocks of parameters; empty if none were asked for.
        block_values: `(B,)` trace of each diagonal block.
        block_errors: `(B,)` their standard errors, the products' errors included.
        method: The estimator.
        num_matvecs: Products made.
    """

    value: float
    error: float
    bound: float
    samples: Array
    frobenius: tuple[float, float] | None = None
    blocks: tuple[str, ...] = ()
    block_values: Array = field(default_factory=lambda: np.zeros(0))
    block_errors: Array = field(default_factory=lambda: np.zeros(0))
    method: Method
    num_matvecs: int


def hutchinson(
    operator: LinearOperator, draw: Draw, num_matvecs: int, partition: Partition | None = None
) -> TraceEstimate:
    """Average n v'Hv over random unit vectors; with a partition, for its diagonal blocks too.

    `n |Hv|^2` gives the Frobenius norm from the same products.

    Args:
        operator: Symmetric operator.
        draw: Random unit vectors by number, Gaussian or Rademacher.
        num_matvecs: Products, one a probe; at least 2.
        partition: Blocks whose traces are wanted.

    Raises:
        NumericsError: fewer than 2 probes.

    Collective.
    """
    _require(num_matvecs, 2, "a standard error")
    n, traces, squares, blocks, norms, errors = operator.space.n, [], [], [], [], []
    for p in range(num_matvecs):
        v = draw(p)
        product = operator.matvec(v)
        w = product.vector
        if partition is not None:
            inside = partition.dots([(v, w), (w, w)])
            blocks.append(n * inside[:, 0])
            along, square = inside.sum(0)
        else:
            along, square = operator.space.dots([(v, w), (w, w)]).tolist()
        traces.append(n * along)
        squares.append(n * square)
        norms.append(product.norm)
        errors.append(absolute_error(product))
        del product, w  # their memory, before the next one is made
    samples = np.array(traces)
    square, square_error = _mean(np.array(squares))
    norm = math.sqrt(square)
    spread = square_error / (2 * norm) if norm else 0.0
    inside = np.array(blocks).reshape(num_matvecs, -1)
    sizes = np.zeros(0) if partition is None else partition.sizes
    of_blocks = [
        error_of_forms(forms, norms, errors, n, size)
        for forms, size in zip(inside.T, sizes, strict=True)
    ]
    return _estimate(
        "hutchinson",
        num_matvecs,
        samples,
        error_of_forms(samples, norms, errors, n),
        # By the triangle inequality: `n |e|^2` is that of what the products lack of H.
        frobenius=(norm, math.hypot(spread, _norm(errors) * math.sqrt(n / num_matvecs))),
        blocks=tuple(partition.names) if partition is not None else (),
        block_values=inside.mean(0),
        block_errors=np.hypot(inside.std(0, ddof=1) / math.sqrt(num_matvecs), of_blocks),
    )


def hutch_plus_plus(
    operator: LinearOperator, draw: Draw, num_matvecs: int, storage: Storage | None = None
) -> TraceEstimate:
    """Compute the trace exactly on the range of a third of the products, and estimate the rest by
    Hutchinson.

    Args:
        operator: Symmetric operator.
        draw: Random unit vectors by number.
        num_matvecs: Products m; at least 4. Stores m / 3 vectors.
        storage: Storage of those vectors.

    Raises:
        NumericsError: too few products.

    Collective.
    """
    _require(num_matvecs, 4, "Hutch++ with a standard error")
    space = operator.space
    third = min(num_matvecs // 3, max(space.n - 1, 1))
    basis, _, _, _, count = _range(operator, draw, third, storage)
    exact, errors = 0.0, []
    for i in range(count):
        q = basis.vector(i)
        product = operator.matvec(q)
        exact += space.dot(q, product.vector) * basis.inverse_squares[i]
        errors.append(absolute_error(product))
        del q, product
    if count == space.n:  # nothing is left to estimate
        return _estimate("hutch++", third + count, np.array([exact, exact]), _norm(errors))
    forms, norms, of_rest = [], [], []
    for p in range(third, num_matvecs - count):
        v = draw(p)
        _, length = basis.orthogonalize(v, count)
        product = operator.matvec(v)
        forms.append(space.n * space.dot(v, product.vector))
        norms.append(length * product.norm)
        of_rest.append(length * absolute_error(product))
        del v, product
    of_products = math.hypot(_norm(errors), error_of_forms(forms, norms, of_rest, space.n))
    # Few samples may lie near each other by chance: their variance is known besides.
    samples, mean = exact + np.array(forms), float(np.mean(forms)) / space.n
    second = max(float(np.mean(np.square(norms))) - mean**2, 0.0)
    known = space.n * math.sqrt(2 / (space.n + 2) * second / len(forms))
    error = max(_mean(samples)[1], known)
    return _estimate("hutch++", num_matvecs, samples, of_products, error=error)


def xtrace(
    operator: LinearOperator, draw: Draw, num_matvecs: int, storage: Storage | None = None
) -> TraceEstimate:
    """Apply Hutch++ with one test vector left out in turn, averaged over all of them.

    With W the test vectors, Y = H W = Q R and P_i the projection on the columns of Y but i:
    the estimates are `tr(P_i H) + c_i w_i'(1 - P_i) H (1 - P_i) w_i`, where c_i restores the length
    that a random vector of the remaining dimensions has.

    Args:
        operator: Symmetric operator.
        draw: Random unit vectors by number; Gaussian.
        num_matvecs: Products m, half of them on test vectors; at least 4. Stores m / 2 vectors.
        storage: Storage of those vectors.

    Raises:
        NumericsError: too few products.

    Collective.
    """
    _require(num_matvecs, 4, "XTrace with a standard error")
    space, m = operator.space, min(num_matvecs // 2, operator.space.n)
    basis, triangle, along, of_tests, count = _range(operator, draw, m, storage)
    unit = np.sqrt(basis.inverse_squares[:count])
    inner, projected, errors = np.zeros((count, count)), np.zeros((count, m)), []
    for i in range(m):
        partials = basis.project(draw(i), count)
        projected[:, i] = basis.reduce(partials).numpy() * unit * math.sqrt(space.n)
    for i in range(count):
        product = operator.matvec(basis.vector(i))
        dots = basis.reduce(basis.project(product.vector, count)).numpy()
        inner[:, i] = dots * unit * unit[i]
        errors.append(absolute_error(product))
        del product
    of_products = math.hypot(_norm(errors), of_tests)
    # Nothing is left out: a basis of the whole space, or of one that is all of H, has the trace.
    if count == space.n or m == 1:
        samples = np.full(max(m, 2), np.trace(inner))
        return _estimate("xtrace", m + count, samples, of_products)
    inner = (inner + inner.T) / 2
    left_out = [
        _left_out(i, triangle[:count], inner, projected, along[i], space.n) for i in range(m)
    ]
    samples = np.array([own for own, _ in left_out])
    without = np.array([others for _, others in left_out])  # no test vector i, nor j in the basis
    error = _jackknife(without.sum(0) / (m - 1))
    return _estimate("xtrace", m + count, samples, of_products, error=error)


def _left_out(
    i: int, triangle: Array, inner: Array, projected: Array, along: float, n: int
) -> tuple[float, Array]:
    """Return the estimate without test vector i, and those without i and another j, `(m,)`, 0 for
    i itself; all of it in the coordinates of Q.
    """
    rest = np.delete(triangle, i, 1)
    left, singular, right = np.linalg.svd(rest, full_matrices=False)
    kept = singular > BREAKDOWN * singular.max(initial=0.0)
    left, singular, right = left[:, kept], singular[kept], right[kept]
    w, own = projected[:, i], triangle[:, i]
    u = left @ (left.T @ w)  # P_i w_i
    value = np.trace(left.T @ inner @ left)

    def estimate(trace: float, u: Array, rank: int) -> float:
        outside = along - 2 * u @ own + u @ inner @ u
        length2 = n - u @ u
        return float(trace + (n - rank) / length2 * outside if length2 > 1e-6 * n else trace)

    others = np.zeros(len(triangle.T))
    for place, j in enumerate(np.delete(np.arange(len(others)), i)):
        # The direction of column j that the other columns do not have, if there is one.
        s, rank = left @ (right[:, place] / singular), len(singular)
        alone = right[:, place] @ right[:, place] > 1 - 1e-6
        s = s / np.linalg.norm(s) if alone else 0 * s
        others[j] = estimate(value - s @ inner @ s, u - s * (s @ w), rank - alone)
    return estimate(value, u, len(singular)), others


def _jackknife(values: Array) -> float:
    """Return the standard error of an estimate from those without one of its m test vectors each.

    All estimates of XTrace share vectors: they scatter less than they are wrong. Source: Efron,
    Stein, Ann. Stat. 9 (1981): it is not too small in the mean.
    """
    return float(math.sqrt(len(values) - 1) * values.std())


def _range(
    operator: LinearOperator, draw: Draw, m: int, storage: Storage | None
) -> tuple[Basis, Array, Array, float, int]:
    """Return an orthonormal basis of the products with m random vectors of length sqrt(n).

    Returns the basis Q, R `(m, m)` with H W = Q R, w_i' H w_i `(m,)`, their `error_of_forms`, and
    the number of rows; less than m where products depend on each other.
    """
    space = operator.space
    basis, count = Basis(space, m, storage), 0
    triangle, along, norms, errors = np.zeros((m, m)), np.zeros(m), np.zeros(m), np.zeros(m)
    length = math.sqrt(space.n)
    for i in range(m):
        v = draw(i)
        product = operator.matvec(v)
        w = product.vector
        along[i], norms[i] = space.n * space.dot(v, w), product.norm
        errors[i] = absolute_error(product)
        coefficients, norm = basis.orthogonalize(w, count)
        triangle[:count, i] = length * coefficients
        if norm > BREAKDOWN * norms.max():
            triangle[count, i] = length * norm
            stored = basis.store(count, w, 1 / norm)
            basis.settle(count, basis.reduce(stored) if len(stored) else stored)
            count += 1
        del v, product, w
    return basis, triangle, along, error_of_forms(along, norms, errors, space.n), count


def error_of_forms(
    forms: Floats, norms: Floats, errors: Floats, n: int, size: int | None = None
) -> float:
    """Return what the errors of products are in the mean of n v'Hv over random unit vectors v.

    Truncation lies along Hv. Of noise, which has any direction, v sees a part of `1 / sqrt(n)`. A
    product that is no larger than its error may miss all of Hv, wherever that lies.

    Args:
        forms: `(k,)` n v'Hv, or the part of it in a block.
        norms: `(k,)` |Hv|.
        errors: `(k,)` their errors.
        n: The dimension.
        size: Coordinates of the block; None for all.
    """
    along, lengths, of = (np.asarray(figures, np.float64) for figures in (forms, norms, errors))
    relative = of / np.maximum(lengths, 1e-300)
    size = n if size is None else size
    known = np.hypot(relative * along, math.sqrt(size) * of)
    return float(np.where(relative < 1, known, math.sqrt(n) * math.sqrt(size) * of).mean())


def _require(num_matvecs: int, least: int, what: str) -> None:
    if num_matvecs < least:
        raise NumericsError(f"{what} needs at least {least} products, got {num_matvecs}")


def _mean(samples: Array) -> tuple[float, float]:
    return float(samples.mean()), float(samples.std(ddof=1)) / math.sqrt(len(samples))


def _norm(errors: list[float]) -> float:
    return math.sqrt(math.fsum(e * e for e in errors))


def _estimate(
    method: Method,
    num_matvecs: int,
    samples: Array,
    of_products: float,
    error: float | None = None,
    **figures: object,
) -> TraceEstimate:
    """Make the record; the standard error is that of independent samples unless one is given."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    value, independent = _mean(samples)
    error = independent if error is None else error
    student = float(stdtrit(len(samples) - 1, (1 + CONFIDENCE) / 2))
    return TraceEstimate(
        value=value,
        error=error,
        bound=math.hypot(student * error, COVERAGE * of_products),
        samples=samples,
        method=method,
        num_matvecs=num_matvecs,
        **figures,  # type: ignore[arg-type]
    )
