"""Stochastic Lanczos quadrature (SLQ): spectral density and trace from a few random vectors.

For a random unit vector v, `sum_i w_i f(theta_i)` over the Ritz pairs of a Lanczos run from v is
an estimate of `trace(f(H)) / n`, exact for polynomials of degree below 2 m up to the randomness of
v. Several probes are averaged.

Sources: Ubaru, Chen, Saad, SIAM J. Matrix Anal. 38 (2017); Chen, Trogdon, Ubaru, ICML 2021 (bounds
of the cumulative distribution); Golub, Meurant, Matrices, Moments and Quadrature (2010), chapter 6
(Gauss-Radau rules).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from ds_hessian.krylov.lanczos import LanczosOptions, LanczosState, lanczos
from ds_hessian.krylov.records import Array, LanczosRun, RitzDecomposition
from ds_hessian.krylov.traces import error_of_forms
from ds_hessian.operators import LinearOperator
from ds_hessian.vectors import Layout, ProbeKind, random_vector

RADAU_LIMIT = 1e8
"""Largest entry of a Gauss-Radau matrix, in units of the largest Ritz value or beta."""

PLACES = 32
"""Parts of an interval in which a node is moved to find an extreme integral."""


def slq(
    operator: LinearOperator,
    layout: Layout,
    num_matvecs: int,
    num_probes: int,
    seed: int,
    kind: ProbeKind = "gaussian",
    progress: Callable[[int, LanczosState], None] | None = None,
    options: LanczosOptions | None = None,
    before: Sequence[LanczosRun] = (),
    restore: Callable[[LanczosState], None] | None = None,
) -> list[LanczosRun]:
    """Run Lanczos once for each of `num_probes` random vectors.

    Probe p starts from random vector number p, whatever `num_probes`, so a run of more probes
    begins with the runs of fewer; after the k-th exhausted space it continues with p + k 2^32.

    Args:
        operator: Symmetric operator.
        layout: Layout of the operator's vectors.
        num_matvecs: Steps of each run.
        num_probes: Number of runs.
        seed: Seed of the random vectors.
        kind: Their distribution.
        progress: Called with the probe's number after each step, on every rank.
        options: Reorthogonalisation and storage of the basis.
        before: Runs of the first probes, made before an interruption.
        restore: Restores the interrupted run, the first one to be made; see `lanczos`.

    Collective.
    """
    runs = list(before)
    for probe in range(len(before), num_probes):

        def fresh(k: int, probe: int = probe) -> Tensor:
            return random_vector(layout, operator.space, seed, probe + (k << 32), kind)

        report = None if progress is None else partial(progress, probe)
        runs.append(lanczos(operator, fresh(0), num_matvecs, fresh, report, options, restore))
        restore = None
    return runs


def trace_estimate(
    runs: Sequence[LanczosRun], decompositions: Sequence[RitzDecomposition], n: int
) -> tuple[float, float]:
    """Return the trace of the operator and its standard error, from the first moments of the runs.

    `n v'Hv` is unbiased. With mean eigenvalue `mu = trace / n`, its variance over a uniform unit
    vector is `2 n^2 / (n + 2) * (trace(H^2) / n - mu^2)`, and at most about that for Rademacher
    entries; the second moment is `|Hv|^2`, measured in each run. An outlier's quadrature weight is
    too noisy for that (a single probe can miss it), so the second moment is also taken with weight
    1/n for every converged outlier and the larger value used; with several probes, their own
    spread is used where it is larger still. The products' errors are added.

    Returns:
        (trace, standard error), in units of loss per squared parameter.
    """
    first = np.array([run.alphas[0] for run in runs])
    mean = float(first.mean())
    second = np.mean(
        [_second_moment(run, pairs, n) for run, pairs in zip(runs, decompositions, strict=True)]
    )
    error = n * math.sqrt(2 / (n + 2) * max(float(second) - mean**2, 0.0) / len(runs))
    if len(runs) > 1:
        error = max(error, n * float(first.std(ddof=1)) / math.sqrt(len(runs)))
    norms = np.array([math.hypot(run.alphas[0], run.betas[0]) for run in runs])
    errors = np.array([run.product_errors[0] for run in runs])
    return n * mean, math.hypot(error, error_of_forms(n * first, norms, errors, n))


def _second_moment(run: LanczosRun, pairs: RitzDecomposition, n: int) -> float:
    """Return `trace(H^2) / n`, with no converged outlier counted for less than one eigenvalue."""
    plain = run.alphas[0] ** 2 + run.betas[0] ** 2  # |H v|^2
    outlier = pairs.errors < 0.01 * abs(pairs.values)
    missing = np.where(outlier, np.maximum(1 / n - pairs.weights, 0.0), 0.0)
    return float(plain + missing @ pairs.values**2)


def measure_bounds(alphas: Array, betas: Array, x: Array) -> tuple[Array, Array]:
    """Return bounds on the spectral measure of the start vector to the left of each x.

    That measure puts the weight `(v'u_i)^2` on every eigenvalue. Its moments up to degree 2 m,
    which is all that a run knows, belong to the Gauss-Radau rule of m + 1 nodes with one node at x,
    and by the inequalities of Chebyshev, Markov and Stieltjes::

        sum of weights left of x  <=  measure of (-inf, x)  <=  measure of (-inf, x]  <=  the same
                                                                and the weight at x

    which no bound from these moments improves on. They hold for exact products; errors of products
    move the eigenvalues to which they belong.

    Args:
        alphas: `(m,)` of a run.
        betas: `(m,)` of the same run, the residual's included.
        x: `(k,)` eigenvalues.

    Returns:
        Lower and upper bounds, `(k,)` each. They meet where the Krylov space was exhausted (a beta
        of zero): then the measure is known, but for the weight at x itself.
    """
    alphas, betas, values, vectors = _gauss(alphas, betas)
    if betas[-1] == 0:
        sums = np.append(0.0, np.cumsum(vectors[0] ** 2))
        return sums[np.searchsorted(values, x)], sums[np.searchsorted(values, x, side="right")]
    bounds = []
    for point, (_, weights) in zip(x, _radau(alphas, betas, values, vectors, x), strict=True):
        # Nodes and Ritz values interlace, which tells the number of nodes left of x.
        sums = np.append(0.0, np.cumsum(weights))
        left = int(np.searchsorted(values, point))
        bounds.append((sums[left], min(float(sums[left + 1]), 1.0)))
    lower, upper = np.array(bounds).reshape(-1, 2).T
    return lower, upper


def negative_bounds(alphas: Array, betas: Array) -> tuple[float, float]:
    """Return bounds on the integral of `min(x, 0)` over the spectral measure of the start vector.

    Of the measures with the moments that a run knows, those of the extreme integrals have m + 1
    points: they are Gauss-Radau rules. Each of these has one node between the two Ritz values that
    are next to zero on either side (or beyond both ends, where all have one sign), so that moving
    a node there finds all of them. The upper bound is the rule with a node at zero.

    Args:
        alphas: `(m,)` of a run.
        betas: `(m,)` of the same run, the residual's included.

    Returns:
        Lower and upper bound, which meet where the Krylov space was exhausted.
    """
    alphas, betas, values, vectors = _gauss(alphas, betas)
    found = [float(vectors[0] ** 2 @ np.minimum(values, 0.0))]
    if betas[-1] == 0:
        return found[0], found[0]
    right = int(np.searchsorted(values, 0.0))
    steps = (1 - np.cos(np.pi * np.arange(1, PLACES) / PLACES)) / 2
    if 0 < right < len(values):
        places = values[right - 1] + (values[right] - values[right - 1]) * steps
    else:
        places = float(abs(values).max()) * steps / (1 - steps) * (1 if right else -1)
    for nodes, weights in _radau(alphas, betas, values, vectors, np.append(places, 0.0)):
        found.append(float(weights @ np.minimum(nodes, 0.0)))
    return min(found), max(found)


def _gauss(alphas: Array, betas: Array) -> tuple[Array, Array, Array, Array]:
    """Return the entries of a run up to where its Krylov space was exhausted, and the eigenvalues
    and eigenvectors of their matrix.
    """
    from scipy.linalg import eigh_tridiagonal

    steps = int(np.argmax(betas == 0)) + 1 if (betas == 0).any() else len(alphas)
    alphas, betas = alphas[:steps], betas[:steps]
    return alphas, betas, *eigh_tridiagonal(alphas, betas[:-1])


def _radau(
    alphas: Array, betas: Array, values: Array, vectors: Array, x: Array
) -> Iterator[tuple[Array, Array]]:
    """Yield the nodes and weights of the Gauss-Radau rule with a node at each x."""
    from scipy.linalg import eigh_tridiagonal

    couplings = (betas[-1] * vectors[-1]) ** 2
    scale = float(max(abs(values).max(), betas.max()))
    for point in x:
        # The last diagonal entry that makes x an eigenvalue. It has poles at the Ritz values;
        # RADAU_LIMIT keeps the others' digits, and misplaces x by at most its inverse there.
        with np.errstate(divide="ignore", invalid="ignore"):
            shift = float(np.nan_to_num(np.sum(couplings / (values - point)), nan=np.inf))
        last = float(np.clip(point + shift, -RADAU_LIMIT * scale, RADAU_LIMIT * scale))
        nodes, rule = eigh_tridiagonal(np.append(alphas, last), betas)
        yield nodes, rule[0] ** 2
