"""The sampling error of `v'Hv`, from its spread over the micro-batches of the measurement.

H is a mean over G micro-batches of each rank (where the schedule runs groups of them, over G
groups), H = mean of H_i, so v'Hv is the mean of G numbers `v'H_i v`. Where the micro-batches are
independent draws of the data, the standard error of a mean, their standard deviation over sqrt(G),
is that of v'Hv. For a unit eigenvector v of H it is, to first order, that of the eigenvalue (the
infinitesimal jackknife: the derivative of an eigenvalue in the weight of micro-batch i is `v'H_i
v`). It leaves out the second order: with few micro-batches extreme eigenvalues lie farther out than
those of the whole data (docs/numerics.md).

Source: Jaeckel, The infinitesimal jackknife, Bell Laboratories (1972).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.errors import ConfigError
from ds_hessian.operators.protocol import Curvature


def micro_batch_curvatures(
    operator: Curvature, v: Tensor, displacement: float
) -> NDArray[np.float64]:
    """Return `v'H_i v / v'v` for micro-batch i of all ranks, `(G,)`; the mean is `v'Hv / v'v`.

    A micro-batch counts as G times its part in the mean loss: with token weighting, different
    counts are part of the spread.

    Args:
        operator: The curvature H.
        v: `(n_local,)`, of any length but zero.
        displacement: The displacement h, such as that of a product with v.

    Raises:
        ConfigError: a single micro-batch, which has no spread.
        NumericsError: v is zero or not finite, or a slope is not finite.

    Cost: two gradients over all micro-batches, as a product without trials, or less (see the forms
    of the curvature).

    Collective.
    """
    require_several(operator.session)
    return operator.forms(v, displacement)


def require_several(session: Session) -> None:
    """Raise if there is a single micro-batch, or a single group of them.

    Raises:
        ConfigError: a single one has no spread.
    """
    if session.num_micro_batches < 2:
        group = session.head.per_unit
        why = f" (the schedule runs groups of {group})" if group > 1 else ""
        raise ConfigError(
            f"the error of sampling needs at least {2 * group} micro-batches for each rank{why}, "
            f"got {group}: pass more, or leave `sampling` off"
        )


def standard_error(samples: NDArray[np.float64]) -> float:
    """Return the standard error of the mean of independent samples `(G,)`."""
    return float(samples.std(ddof=1)) / math.sqrt(len(samples))
