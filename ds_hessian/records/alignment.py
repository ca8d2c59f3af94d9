"""The record of an alignment: how much of gradient and update lies in the top eigenspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ds_hessian.krylov import Which
from ds_hessian.krylov.records import Array
from ds_hessian.records.base import Measured
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.fields import Axes


@dataclass(frozen=True)
class Bounded:
    """A figure whose error bar is not symmetric.

    Attributes:
        value: The figure as it was found.
        lower: The least that it can truly be.
        upper: The most that it can be.
    """

    value: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.value:.4f} (between {self.lower:.4f} and {self.upper:.4f})"


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianAlignment(Measured):
    """Alignment of gradient and update with the space of the k wanted eigenvectors.

    A share is `|P x|^2 / |x|^2` with the projection P on the space; that of a random direction is
    k / n. The space is known to within `angle`. Where it is pi / 2, the k-th and the next
    eigenvalue cannot be separated, and the k wanted ones are no definite space: a share's lower
    bound is then that of the part of it that is definite.

    Attributes:
        n: Number of parameters.
        which: `LA` largest, `LM` largest magnitude, `SA` smallest.
        values: `(k,)` the eigenvalues, the most wanted first.
        errors: `(k,)` bound on the distance of each to the nearest eigenvalue.
        next_value: The most wanted eigenvalue of their complement, searched from another random
            vector; None where k = n. Where it is no less wanted than the k-th, an eigenvector of
            the space was missed, or the two belong to one eigenvalue.
        angle: Bound on the largest principal angle between the space that was found and the true
            one, in radians.
        gradient: Share of the gradient; None where it is zero.
        gradient_shares: `(k,)` share of the gradient along each eigenvector; empty where the
            gradient is zero.
        update: Share of Adam's last step, without its weight decay; None without Adam, or where
            the step is zero.
        update_shares: `(k,)` share of the step along each eigenvector; empty where that is None.
        principal_angles: Angles between the space and the earlier one, ascending, in radians, each
            known to within `angle`; empty without an earlier one.
        overlap: Mean squared cosine of the principal angles; None without an earlier space.
        vectors: `(k, n_local)` unit eigenvectors, for a later measurement to compare with.
        gradient_norm: |g|.
        update_norm: |u|, with the learning rate of that step (the present one where no step was
            made since the attach); None without Adam.
        loss: Mean loss over the measured micro-batches.
        num_matvecs: Products made.
    """

    kind: ClassVar[str] = "alignment"
    arrays: ClassVar[dict[str, Axes]] = {
        "values": Axes("k", finite=True),
        "errors": Axes("k", least=0),
        "gradient_shares": Axes("k", optional=True),
        "update_shares": Axes("k", optional=True),
        "principal_angles": Axes("angles"),
    }
    sharded: ClassVar[dict[str, str]] = {"vectors": "k"}

    n: int
    which: Which
    values: Array
    errors: Array
    next_value: Estimate | None
    angle: float
    gradient: Bounded | None
    gradient_shares: Array
    update: Bounded | None
    update_shares: Array
    principal_angles: Array
    overlap: Bounded | None
    vectors: Tensor
    gradient_norm: float
    update_norm: float | None
    loss: float
    num_matvecs: int
