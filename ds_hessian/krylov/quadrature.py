"""Stochastic Lanczos quadrature (SLQ): spectral density and trace from a few random vectors.

For a random unit vector v, `sum_i w_i f(theta_i)` over the Ritz pairs of a Lanczos run from v is
an estimate of `trace(f(H)) / n`, exact for polynomials of degree below 2 m up to the randomness of
v. Several probes are averaged.

Source: Ubaru, Chen, Saad, SIAM J. Matrix Anal. 38 (2017); bounds: Chen, Trogdon, Ubaru, ICML 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from ds_hessian.krylov.lanczos import LanczosOptions, LanczosState, lanczos
from ds_hessian.krylov.records import LanczosRun, RitzDecomposition
from ds_hessian.operators import LinearOperator
from ds_hessian.vectors import Layout, ProbeKind, random_vector


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
    """One Lanczos run for each of `num_probes` random vectors.

    Probe p starts from random vector number p, whatever `num_probes`, so a run of more probes
    begins with the runs of fewer; after the k-th exhausted space it goes on with p + k 2^32.

    Args:
        operator: Symmetric operator.
        layout: Of the operator's vectors.
        num_matvecs: Steps of each run.
        num_probes: Number of runs.
        seed: Of the random vectors.
        kind: Their distribution.
        progress: Called with the probe's number after each step, on every rank.
        options: Reorthogonalisation and storage of the basis.
        before: Runs of the first probes, made before an interruption.
        restore: Of the run that was interrupted, the first one to be made; see `lanczos`.

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
    """Trace of the operator and its standard error, from the first moments of the runs.

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
    relative = [
        r.product_errors[0] / math.hypot(r.alphas[0], r.betas[0]) for r in runs if r.betas[0]
    ]
    return n * mean, math.hypot(error, n * abs(mean) * float(np.mean(relative or [0.0])))


def _second_moment(run: LanczosRun, pairs: RitzDecomposition, n: int) -> float:
    """`trace(H^2) / n`, with no converged outlier counted for less than one eigenvalue."""
    plain = run.alphas[0] ** 2 + run.betas[0] ** 2  # |H v|^2
    outlier = pairs.errors < 0.01 * abs(pairs.values)
    missing = np.where(outlier, np.maximum(1 / n - pairs.weights, 0.0), 0.0)
    return float(plain + missing @ pairs.values**2)
