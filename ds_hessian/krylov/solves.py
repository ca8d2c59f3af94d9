"""(H + damping I) x = b for several dampings from one Krylov space.

A shift leaves the Krylov space of b as it is, so one Lanczos run serves all dampings; with the
basis stored, the iterates of CG and MINRES are small dense problems:

    CG      (T + damping I) y = |b| e_1               residual beta_m |y_m|
    MINRES  min |[T + damping I; beta_m e_m'] y - |b| e_1|

CG is only defined while T + damping I is positive definite. Where it is not, H + damping I has
negative curvature: that is reported, and CG's result is the last iterate before it.

Cost: one product a step, one for the true residual of each damping; `num_matvecs` stored vectors.
With a preconditioner S Lanczos knows |S r| alone: where a product shows that |r| is larger, steps
follow, so that the true residual is measured twice or more often.

Sources: Hestenes, Stiefel (1952); Paige, Saunders, SIAM J. Numer. Anal. 12 (1975); Frommer, Maass,
SIAM J. Sci. Comput. 20 (1998) (shifts).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian.errors import NumericsError
from ds_hessian.krylov.basis import Storage
from ds_hessian.krylov.lanczos import LanczosOptions, LanczosState, Progress, absolute_error
from ds_hessian.krylov.records import COVERAGE, Array, RitzDecomposition, ritz
from ds_hessian.operators import Congruent, LinearOperator, Metric, Scale, scaled, scaled_in_place

SolveMethod = Literal["cg", "minres"]


@dataclass(frozen=True, kw_only=True, eq=False)
class DampedSystems:
    """The accuracy of the solutions of d systems (H + damping I) x = b.

    Attributes:
        dampings: `(d,)` in loss per squared parameter.
        residuals: `(d,)` |r| / |b| with r = b - (H + damping I) x, measured with one product each.
        converged: `(d,)` whether the residual is within the tolerance.
        limited: `(d,)` whether it is not, but as small as the product's error lets it be: more
            products bring nothing, more exact ones do. Empty in records of versions without it.
        negative_curvature: `(d,)` whether H + damping I was found to be indefinite.
        num_matvecs: Products made, those for the residuals included.
    """

    dampings: Array
    residuals: Array
    converged: NDArray[np.bool_]
    negative_curvature: NDArray[np.bool_]
    num_matvecs: int
    limited: tuple[bool, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution(DampedSystems):
    """Solutions of (H + damping I) x = b for d dampings.

    Attributes:
        x: `(d, n_local)` fp32, this rank's part of the solutions.
        errors: `(d,)` estimate of |x - x_exact|: the residual and three times the product's error,
            over the distance of -damping to the nearest eigenvalue: the smallest |Ritz value +
            damping|, at most |damping|, since most eigenvalues are about zero; or, where -damping
            lies between Ritz values and eigenvalues may be anywhere between them, their distance
            over n. With a preconditioner that of |S^-1 (x - x_exact)|, times
            the norm of S; where it has not converged |r| / damping at least.
        curvature: Smallest Ritz value of H seen, and the bound on its error; with a preconditioner,
            of the preconditioned operator at the smallest damping.
        steps: `(d,)` Krylov dimension of each solution: less than was built where CG stopped at
            negative curvature; 0 means x = 0.
        method: `cg` or `minres`.
    """

    x: Tensor
    errors: Array
    curvature: tuple[float, float]
    steps: NDArray[np.int64]
    method: SolveMethod


def solve(
    operator: LinearOperator,
    b: Tensor,
    dampings: Sequence[float],
    fresh: Callable[[int], Tensor],
    method: SolveMethod = "cg",
    tolerance: float = 1e-4,
    num_matvecs: int = 50,
    preconditioner: Tensor | Metric | None = None,
    storage: Storage | None = None,
    progress: Progress | None = None,
) -> Solution:
    """Solve (H + damping I) x = b for each damping.

    Args:
        operator: Symmetric operator H.
        b: Right-hand side `(n_local,)`; not zero.
        dampings: In loss per squared parameter.
        fresh: Random unit vectors by number.
        method: `cg` for positive definite systems, `minres` for indefinite ones.
        tolerance: Bound on the relative residual; see `Solution.residuals`.
        num_matvecs: Products at most for one Krylov space, without the last true residual.
        preconditioner: A positive diagonal d `(n_local,)`, such as the square root of Adam's second
            moment, or a metric D: the systems are solved as `S (H + damping I) S z = S b`,
            x = S z, with S = (D + damping)^-1/2. Shifts do not commute with it, so each damping
            needs a Krylov space of its own.
        storage: Storage of the basis.
        progress: Called after each step, on every rank.

    Raises:
        NumericsError: b is zero or not finite, no dampings, or a preconditioner that is not
            positive, or of another length.

    Collective.
    """
    if not len(dampings):
        raise NumericsError("solve needs at least one damping, got none")
    norm = operator.space.norm(b)
    if not (math.isfinite(norm) and norm > 0):
        raise NumericsError(f"solve needs a finite right-hand side other than zero; |b| = {norm}")
    if isinstance(preconditioner, Tensor) and preconditioner.shape != b.shape:
        raise NumericsError(
            f"the preconditioner's diagonal must be {tuple(b.shape)} as b is on this rank, got "
            f"{tuple(preconditioner.shape)}"
        )
    goal = _Goal(method, num_matvecs, LanczosOptions(storage=storage or Storage()))
    shifts = np.array(dampings, dtype=np.float64)
    if preconditioner is None:
        space = _Space(operator, b, shifts, goal, fresh, progress)
        space.grow(tolerance)
        x, found = space.solutions(), space.found()
        del space  # its memory, before the products with x
        rests = [
            _measured(operator, b, one, float(shift), unexplained=found.unexplained)
            for one, shift in zip(x, shifts, strict=True)
        ]
        return _solution(x, shifts, rests, [found], norm, tolerance, method)
    parts, rests, spaces = list[Tensor](), list[_Rest](), list[_Found]()
    for shift in map(float, shifts):
        scale: Scale
        if isinstance(preconditioner, Tensor):
            scale, size = _inverse_root(operator, preconditioner, shift)
        else:
            scale = preconditioner.inverse_root(shift)
            size = 1 / math.sqrt(preconditioner.least + shift)
        view = Congruent(operator, scale, shift)
        space = _Space(view, scaled(b, scale), np.zeros(1), goal, fresh, progress)
        x, rest = _preconditioned(space, operator, b, norm, shift, scale, size, tolerance)
        parts.append(x)
        rests.append(rest)
        spaces.append(space.found())
        del space, x
    return _solution(torch.stack(parts), shifts, rests, spaces, norm, tolerance, method)


@dataclass(frozen=True)
class _Goal:
    """The requirements that every Krylov space of a solve has to meet."""

    method: SolveMethod
    num_matvecs: int
    options: LanczosOptions


@dataclass(frozen=True)
class _Small:
    """The solution for one damping in one Krylov space, for |b| = 1: coefficients, residual,
    findings.
    """

    y: Array
    residual: float
    indefinite: bool


@dataclass(frozen=True)
class _Found:
    """What a Krylov space tells of H and of its systems."""

    small: list[_Small]
    products: int
    lowest: tuple[float, float]
    gaps: list[float]
    unexplained: float


@dataclass(frozen=True)
class _Rest:
    """What a solution leaves of b.

    Attributes:
        norm: |r|.
        weighted: |S r|.
        error: The error of |r| by that of the product.
        size: The norm of S.
        damping: The damping of a preconditioned system.
        products: Products made to measure it.
    """

    norm: float
    weighted: float
    error: float
    size: float
    damping: float
    products: int

    @property
    def limited(self) -> bool:
        """Whether it is as small as the product's error lets it be."""
        return self.norm <= COVERAGE * self.error

    def error_of_solution(self, gap: float, converged: bool) -> float:
        """Estimate |x - x_exact| from the distance of the nearest eigenvalue to zero, of the
        preconditioned system where there is one.

        Of that, steps which do not suffice have no Ritz value near those of the many eigenvalues of
        H about zero, where D is large; along their vectors the error is |r| / damping.
        """
        share = self.weighted / self.norm if self.norm else self.size
        weighted = math.hypot(self.weighted, COVERAGE * self.error * share) * self.size
        plain = math.hypot(self.norm, COVERAGE * self.error)
        nearer = plain / abs(self.damping) if self.damping and not converged else 0.0
        return max(weighted / gap if gap else math.inf, nearer)


class _Space:
    """The Krylov space of b, which grows until all shifts have converged.

    Args:
        operator: H, or the preconditioned operator.
        b: The right-hand side in its coordinates.
        shifts: The dampings.
        goal: The requirements.
        fresh: Random unit vectors by number.
        progress: Called after each step.
    """

    def __init__(
        self,
        operator: LinearOperator,
        b: Tensor,
        shifts: Array,
        goal: _Goal,
        fresh: Callable[[int], Tensor],
        progress: Progress | None,
    ) -> None:
        self.norm, self._shifts, self._goal = operator.space.norm(b), shifts, goal
        self._state = LanczosState(operator, b / self.norm, goal.num_matvecs, fresh, goal.options)
        self._progress = progress
        self._beside = 0
        self.small = list[_Small]()

    @property
    def finished(self) -> bool:
        """Whether it grows no more."""
        stopped = self._goal.method == "cg" and all(one.indefinite for one in self.small)
        made = self._state.steps + self._beside
        full = self._state.done or made >= self._goal.num_matvecs
        return full or self._state.betas[-1] == 0 or stopped

    def grow(self, tolerance: float) -> None:
        """Make steps until all residuals over |b| are half of `tolerance`, at least one. They are
        those of the operator's coordinates.
        """
        while True:
            self._state.step()
            if self._progress is not None:
                self._progress(self._state)
            method = self._goal.method
            self.small = [_small(self._state, float(shift), method) for shift in self._shifts]
            enough = [
                s.residual <= tolerance / 2 or (s.indefinite and method == "cg") for s in self.small
            ]
            if all(enough) or self.finished:
                return

    def rejected(self, products: int) -> None:
        """Count products that a solution took which was not good enough."""
        self._beside += products

    def solutions(self) -> Tensor:
        """Return those of all shifts, `(len(shifts), n_local)`, in the operator's coordinates."""
        coefficients = np.zeros((len(self._shifts), self._state.steps))
        for row, small in zip(coefficients, self.small, strict=True):
            row[: len(small.y)] = self.norm * small.y
        return self._state.combine(coefficients)

    def found(self) -> _Found:
        """Return what it tells."""
        pairs = ritz(self._state.run())
        return _Found(
            small=self.small,
            products=self._state.products + self._beside,
            lowest=(float(pairs.values[0]), float(pairs.errors[0])),
            gaps=[_gap(pairs, float(shift), self._state) for shift in self._shifts],
            unexplained=self._state.unexplained,
        )


def _preconditioned(
    space: _Space,
    operator: LinearOperator,
    b: Tensor,
    norm: float,
    shift: float,
    scale: Scale,
    size: float,
    tolerance: float,
) -> tuple[Tensor, _Rest]:
    """Return the solution x whose |r| / |b| is within the tolerance, or the last; `norm` is |b|.

    Lanczos knows |S r|; a product tells |r|, and how much smaller the former has to be.
    """
    within = tolerance
    while True:
        space.grow(within)
        x = scaled_in_place(space.solutions()[0], scale)
        rest = _measured(operator, b, x, shift, scale, size)
        if rest.norm <= tolerance * norm or rest.limited or space.finished:
            return x, rest
        space.rejected(rest.products)
        within = space.small[0].residual * tolerance * norm / rest.norm
        del x


def _gap(pairs: RitzDecomposition, shift: float, state: LanczosState) -> float:
    """Return the distance of -shift to the nearest eigenvalue, from ascending Ritz values; 0 where
    it may be less than what errors of products make of them.

    Inside of the spectrum Ritz values do not tell where eigenvalues are, unless the Krylov space is
    exhausted: the nearest of n evenly spread ones is expected at 1/n of the distance between those
    to both sides; but most of a net's eigenvalues lie about zero, down to what errors of products
    let be seen (Sagun, Evci, Guney, Dauphin and Bottou, 2017), where few steps have no Ritz value.
    """
    values = pairs.values
    nearest = max(float((abs(values + shift) - pairs.inexact).min()), 0.0)
    if state.betas[-1] == 0:
        return nearest
    if shift:  # without one it may be a preconditioned system, whose eigenvalues do not
        values = np.sort(np.append(values, 0.0))
        nearest = min(nearest, max(abs(shift), float(pairs.inexact.min())))
    above = int(np.searchsorted(values, -shift))
    if not 0 < above < len(values):
        return nearest
    spread = float(values[above] - values[above - 1]) / state.space.n
    if values[above - 1] <= 0 <= values[above]:
        spread = min(spread, max(abs(shift), float(pairs.inexact.min())))
    return min(nearest, spread)


def _small(state: LanczosState, shift: float, method: SolveMethod) -> _Small:
    m, t = state.steps, state.tridiagonal + shift * np.eye(state.steps)
    lowest = np.linalg.eigvalsh(t)[0]
    if method == "minres":
        rectangle = np.vstack([t, np.append(np.zeros(m - 1), state.betas[-1])])
        right = np.append(1.0, np.zeros(m))
        y = np.linalg.lstsq(rectangle, right, rcond=None)[0]
        return _Small(y, float(np.linalg.norm(rectangle @ y - right)), bool(lowest <= 0))
    definite = m  # order of the largest leading block that is positive definite
    while definite and np.linalg.eigvalsh(t[:definite, :definite])[0] <= 0:
        definite -= 1
    if definite == 0:
        return _Small(np.zeros(0), 1.0, True)
    y = np.linalg.solve(t[:definite, :definite], np.append(1.0, np.zeros(definite - 1)))
    return _Small(y, float(state.betas[definite - 1] * abs(y[-1])), definite < m)


def _inverse_root(operator: LinearOperator, diagonal: Tensor, shift: float) -> tuple[Tensor, float]:
    """Return (d + shift)^-1/2, which must exist, and its norm."""
    shifted = diagonal + shift
    owned = shifted[: operator.space.n_owned]
    bad = float((~((owned > 0) & torch.isfinite(owned))).sum())
    count = float(operator.space.reduce(torch.tensor([bad], dtype=torch.float64))[0])
    if count:
        raise NumericsError(
            f"preconditioner + damping must be positive and finite everywhere; at damping {shift} "
            f"it is not in {count:.0f} coordinates: raise the damping or the preconditioner"
        )
    least = operator.space.of_all_ranks(float(owned.min()) if len(owned) else math.inf).min()
    return shifted.rsqrt(), 1 / math.sqrt(least)


def _measured(
    operator: LinearOperator,
    b: Tensor,
    x: Tensor,
    shift: float,
    scale: Scale | None = None,
    size: float = 1.0,
    unexplained: float = 0.0,
) -> _Rest:
    """Measure the true residual of a solution, by one product.

    Args:
        operator: H.
        b: The right-hand side.
        x: The solution.
        shift: The damping.
        scale: S; None for 1.
        size: The norm of S.
        unexplained: Asymmetry that the errors of earlier products do not explain.
    """
    space, error, products = operator.space, 0.0, 0
    length = space.norm(x)
    if length > 0:
        product = operator.matvec(x)
        error, products = max(absolute_error(product), unexplained) * length, 1
        rest = product.vector.add_(x, alpha=shift).sub_(b)
    else:
        rest = b.clone()
    norm = weighted = space.norm(rest)
    if scale is not None:
        weighted = space.norm(scaled_in_place(rest, scale))
    damping = 0.0 if scale is None else shift
    return _Rest(norm, weighted, error, size, damping, products)


def _solution(
    x: Tensor,
    shifts: Array,
    rests: Sequence[_Rest],
    spaces: Sequence[_Found],
    norm: float,
    tolerance: float,
    method: SolveMethod,
) -> Solution:
    """Return what the residuals tell of the solutions x; `norm` is |b|."""
    small = [one for found in spaces for one in found.small]
    gaps = [gap for found in spaces for gap in found.gaps]
    residuals = np.array([rest.norm for rest in rests]) / norm
    converged = residuals <= tolerance
    each = list(zip(rests, gaps, map(bool, converged), strict=True))
    return Solution(
        dampings=shifts,
        x=x,
        residuals=residuals,
        errors=np.array([rest.error_of_solution(gap, enough) for rest, gap, enough in each]),
        converged=converged,
        limited=tuple(rest.limited and not enough for rest, _, enough in each),
        negative_curvature=np.array([one.indefinite for one in small]),
        curvature=min(found.lowest for found in spaces),
        steps=np.array([len(one.y) for one in small]),
        method=method,
        num_matvecs=sum(f.products for f in spaces) + sum(rest.products for rest in rests),
    )
