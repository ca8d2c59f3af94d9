"""(H + damping I) x = b for several dampings from one Krylov space.

A shift leaves the Krylov space of b as it is, so one Lanczos run serves all dampings; with the
basis stored, the iterates of CG and MINRES are small dense problems:

    CG      (T + damping I) y = |b| e_1               residual beta_m |y_m|
    MINRES  min |[T + damping I; beta_m e_m'] y - |b| e_1|

CG is only defined while T + damping I is positive definite. Where it is not, H + damping I has
negative curvature: that is reported, and CG's result is the last iterate before it.

Cost: one product a step, one for the true residual of each damping; `num_matvecs` stored vectors.

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
        residuals: `(d,)` |r| / |b| with r = b - (H + damping I) x, measured with one product each;
            with a preconditioner |S r| / |S b|.
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
        errors: `(d,)` estimate of |x - x_exact|: the residual and twice the product's error, over
            the distance of -damping to the nearest eigenvalue: the smallest |Ritz value + damping|,
            at most |damping|, since most eigenvalues are about zero;
            or, where -damping lies between Ritz values and eigenvalues may be anywhere between
            them, their distance over n. With a preconditioner that of |S^-1 (x - x_exact)|, times
            the norm of S.
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
        num_matvecs: Steps at most, for one Krylov space.
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
    goal = _Goal(method, tolerance, num_matvecs, LanczosOptions(storage=storage or Storage()))
    shifts = np.array(dampings, dtype=np.float64)
    if preconditioner is None:
        space, x = _solve(operator, b, shifts, goal, fresh, progress)
        whole = [None] * len(shifts), [1.0] * len(shifts)
        return _measured(operator, b, x, shifts, goal, [space], *whole)
    spaces, parts, scales, sizes = list[_Space](), list[Tensor](), list[Scale | None](), []
    for shift in map(float, shifts):
        scale: Scale
        if isinstance(preconditioner, Tensor):
            scale, size = _inverse_root(operator, preconditioner, shift)
        else:
            scale = preconditioner.inverse_root(shift)
            size = 1 / math.sqrt(preconditioner.least + shift)
        view = Congruent(operator, scale, shift)
        space, x = _solve(view, scaled(b, scale), np.zeros(1), goal, fresh, progress)
        spaces.append(space)
        parts.append(scaled_in_place(x[0], scale)[None])
        scales.append(scale)
        sizes.append(size)
    x = torch.cat(parts)
    parts.clear()  # their memory, before the products with x
    return _measured(operator, b, x, shifts, goal, spaces, scales, sizes)


@dataclass(frozen=True)
class _Goal:
    """The requirements that every Krylov space of a solve has to meet."""

    method: SolveMethod
    tolerance: float
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
class _Space:
    """The Krylov space of b, up to where all shifts have converged."""

    small: list[_Small]
    products: int
    lowest: tuple[float, float]
    gaps: list[float]
    unexplained: float


def _solve(
    operator: LinearOperator,
    b: Tensor,
    shifts: Array,
    goal: _Goal,
    fresh: Callable[[int], Tensor],
    progress: Progress | None,
) -> tuple[_Space, Tensor]:
    """Return the space of b, and the solutions for all shifts, `(len(shifts), n_local)`."""
    norm = operator.space.norm(b)
    state = LanczosState(operator, b / norm, goal.num_matvecs, fresh, goal.options)
    del b
    while not state.done:
        state.step()
        if progress is not None:
            progress(state)
        systems = [_small(state, float(shift), goal.method) for shift in shifts]
        enough = [
            s.residual <= goal.tolerance / 2 or (s.indefinite and goal.method == "cg")
            for s in systems
        ]
        if all(enough) or state.betas[-1] == 0:
            break
    pairs = ritz(state.run())
    coefficients = np.zeros((len(shifts), state.steps))
    for row, small in zip(coefficients, systems, strict=True):
        row[: len(small.y)] = norm * small.y
    space = _Space(
        small=systems,
        products=state.products,
        lowest=(float(pairs.values[0]), float(pairs.errors[0])),
        gaps=[_gap(pairs, float(shift), state) for shift in shifts],
        unexplained=state.unexplained,
    )
    return space, state.combine(coefficients)


def _gap(pairs: RitzDecomposition, shift: float, state: LanczosState) -> float:
    """Return the distance of -shift to the nearest eigenvalue, from ascending Ritz values; 0 where
    it may be less than what errors of products make of them.

    Inside of the spectrum Ritz values do not tell where eigenvalues are, unless the Krylov space is
    exhausted: the nearest of n evenly spread ones is expected at 1/n of the distance between those
    to both sides; but most of a net's eigenvalues lie about zero, down to what errors of products
    let be seen (Sagun, Evci, Guney, Dauphin and Bottou, 2017), where few steps have no Ritz value.
    """
    values, above = pairs.values, int(np.searchsorted(pairs.values, -shift))
    nearest = max(float((abs(values + shift) - pairs.inexact).min()), 0.0)
    if state.betas[-1] == 0:
        return nearest
    if shift:  # without one it may be a preconditioned system, whose eigenvalues do not
        nearest = min(nearest, max(abs(shift), float(pairs.inexact.min())))
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
    shifts: Array,
    goal: _Goal,
    spaces: Sequence[_Space],
    scales: Sequence[Scale | None],
    sizes: Sequence[float],
) -> Solution:
    """Measure true residuals, by one product for each damping.

    Args:
        operator: H.
        b: The right-hand side.
        x: The solutions.
        shifts: The dampings.
        goal: The requirements.
        spaces: The Krylov spaces.
        scales: S of each damping.
        sizes: The norm of S.
    """
    space = operator.space
    small = [one for s in spaces for one in s.small]
    gaps = [gap for s in spaces for gap in s.gaps]
    residuals, product_errors, lengths = list[float](), list[float](), list[float]()
    unexplained = max(s.unexplained for s in spaces) if scales[0] is None else 0.0
    products = sum(s.products for s in spaces)
    for one, shift, scale in zip(x, map(float, shifts), scales, strict=True):
        rest, error, length = b.clone(), 0.0, space.norm(one)
        if length > 0:
            product = operator.matvec(one)
            rest -= product.vector.add_(one, alpha=shift)
            error = max(absolute_error(product), unexplained) * length
            products += 1
            del product
        plain = space.norm(rest)
        norm = space.norm(b if scale is None else scaled(b, scale))
        weighted = plain
        if scale is not None:
            rest = scaled_in_place(rest, scale)
            weighted = space.norm(rest)
        residuals.append(weighted / norm)
        # The product's error, scaled as the residual is.
        product_errors.append(error / norm * (weighted / plain if plain else 0.0))
        lengths.append(norm)
        del rest
    measured, doubt = np.array(residuals), COVERAGE * np.array(product_errors)
    converged = measured <= goal.tolerance
    with np.errstate(divide="ignore"):
        errors = np.hypot(measured, doubt) * np.array(lengths) * np.array(sizes) / np.array(gaps)
    return Solution(
        dampings=shifts,
        x=x,
        residuals=measured,
        errors=errors,
        converged=converged,
        limited=tuple(map(bool, ~converged & (measured <= doubt))),
        negative_curvature=np.array([one.indefinite for one in small]),
        curvature=min(s.lowest for s in spaces),
        steps=np.array([len(one.y) for one in small]),
        method=goal.method,
        num_matvecs=products,
    )
