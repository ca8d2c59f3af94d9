"""Lanczos: orthonormal q_1 .. q_m and the tridiagonal T = Q' H Q of a symmetric operator.

    H Q = Q T + beta_m q_{m+1} e_m'

Each step is one product and classical Gram-Schmidt, twice (CGS2), against some of what is stored:

| mode | against | stored vectors | ghosts of converged outliers |
|---|---|---|---|
| `full` | the whole basis | m | none |
| `window` | the last `window` | `window` | after about `window` more steps |
| `none` | the last two | 2 | yes; right for densities, not for counting outliers |

Cost of a step: one product; three reads of those vectors; three all-reduces, of at most their
number of scalars and a few more:

    c  = Q' w                 w = H q_j: all dot products in one pass, alpha_j = c_j
    w  = w - Q c,  c' = Q' w  fused
    w  = w - Q c',  beta = |w|

A thick restart bounds the basis: it goes on from chosen Ritz vectors and the residual; T is then an
arrow followed by a tridiagonal.

Sources: Giraud, Langou, Rozloznik, van den Eshof, Numer. Math. 101 (2005) (twice is enough);
the paper, section 3 (window); Wu, Simon, SIAM J.
Matrix Anal. 22 (2000) (thick restart).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian.errors import NumericsError
from ds_hessian.krylov.basis import Basis, Storage
from ds_hessian.krylov.records import LanczosRun
from ds_hessian.operators import LinearOperator, Product

ROUNDOFF = 2.0**-24
"""Of the fp32 vectors."""

BREAKDOWN = 32 * ROUNDOFF
"""beta below this share of the largest |T| is rounding of the fp32 vectors: the Krylov space is
exhausted. Relative, since no absolute bound fits Hessians from 1e-8 to 1e8."""

_FIGURES = (
    "alphas",
    "betas",
    "diagnostics",
    "asymmetry",
    "restarts",
    "products",
    "all_reduces",
    "_dropped",
)
"""Attributes of a `LanczosState` that are JSON values already."""

Mode = Literal["full", "window", "none"]
Progress = Callable[["LanczosState"], None]


@dataclass(frozen=True)
class LanczosOptions:
    """How Lanczos keeps its basis.

    Attributes:
        mode: Of reorthogonalisation; see the module.
        window: Vectors kept in mode `window`, at least 2.
        storage: Of the basis.
    """

    mode: Mode = "full"
    window: int = 10
    storage: Storage = Storage()

    def __post_init__(self) -> None:
        if self.window < 2:
            raise NumericsError(f"the window must hold at least 2 vectors, got {self.window}")

    def capacity(self, num_matvecs: int) -> int:
        """Vectors stored for a run of so many steps."""
        if self.mode == "full":
            return num_matvecs
        return min(num_matvecs, self.window if self.mode == "window" else 2)


class LanczosState:
    """A run as it grows; `run()` freezes it.

    Args:
        operator: Symmetric operator.
        start: Unit start vector, `(n_local,)` fp32.
        num_matvecs: Steps m wanted; at most the dimension of the space are made. With restarts:
            the size at which the basis is full.
        fresh: `fresh(k)` gives the k-th unit random vector with which to go on when the Krylov
            space is exhausted (repeated eigenvalues, low rank).
        options: See `LanczosOptions`.

    Attributes:
        matrix: `(m, m)` T so far, with the coupling to the next vector.
        products: Products made, by all restarts together.
    """

    def __init__(
        self,
        operator: LinearOperator,
        start: Tensor,
        num_matvecs: int,
        fresh: Callable[[int], Tensor],
        options: LanczosOptions | None = None,
    ) -> None:
        self.operator, self.space, self.fresh = operator, operator.space, fresh
        self.options = options or LanczosOptions()
        self.num_matvecs = min(num_matvecs, self.space.n)
        if self.num_matvecs < 1:
            raise NumericsError(f"num_matvecs must be at least 1, got {num_matvecs}")
        capacity = self.options.capacity(self.num_matvecs)
        self.basis = Basis(self.space, capacity, self.options.storage)
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.diagnostics: list[tuple[float, ...]] = []
        self.matrix = np.zeros((self.num_matvecs, self.num_matvecs))
        self.asymmetry = 0.0
        self.restarts = 0
        self.products = 0
        self.all_reduces = 0
        self._residual: tuple[Tensor, float] | None = None
        self._dropped: list[float] = []  # residuals that were taken for zero
        self._pending = self.basis.store(0, start.clone(), 1.0)

    @property
    def steps(self) -> int:
        """Vectors of the basis that have been multiplied."""
        return len(self.alphas)

    @property
    def done(self) -> bool:
        """All steps made."""
        return self.steps == self.num_matvecs

    def step(self) -> None:
        """One product, one new basis vector. Collective."""
        j = self.steps
        row = j % len(self.basis.rows)
        product = self.operator.matvec(self.basis.vector(row))
        before = self.space.all_reduces
        w, numbers = product.vector, self._numbers(j)
        count, partials = len(numbers), self.basis.project(product.vector, len(numbers))
        sums = self.space.reduce(torch.cat([partials, self._pending.to(w.device)]))
        first = sums[:count]
        self.basis.settle(row, sums[count:])
        second = self.space.reduce(self.basis.subtract_project(w, first))
        square = self.space.reduce(self.basis.subtract(w, second))
        # w is H times the stored row: per unit length of it, and along unit vectors.
        inverse_squares = self.basis.inverse_squares[:count]
        length = math.sqrt(1 / self.basis.inverse_squares[row])
        column = first.numpy() * np.sqrt(inverse_squares) / length
        # What Lanczos takes from before, or sets to zero; the difference is what the products'
        # errors broke.
        broken = np.abs(column - self.matrix[numbers, j])[numbers != j]
        self.asymmetry = max(self.asymmetry, float(broken.max(initial=0.0)))
        self.alphas.append(float(column[row]))
        self.matrix[j, j] = column[row]
        self.products += 1
        self.diagnostics.append((*_figures(product), self.basis.rounding[row]))
        again = math.sqrt(float(second.numpy() ** 2 @ inverse_squares))
        self._append(w, math.sqrt(float(square[0])), again, length)
        self.all_reduces += self.space.all_reduces - before

    def _numbers(self, j: int) -> NDArray[np.int64]:
        """The step that stored each row in use: step i writes row i modulo the capacity."""
        rows = np.arange(min(j + 1, len(self.basis.rows)))
        return j - (j - rows) % len(rows)

    def _append(self, w: Tensor, norm: float, again: float, length: float) -> None:
        """Take in what Gram-Schmidt left: `norm` of w, of which the second pass removed `again`."""
        beta = norm / length
        scale = max(abs(self.matrix).max(), max(self.betas, default=0.0), beta)
        # The second inequality: rounding of the basis is not orthogonal to what is left.
        exhausted = beta <= BREAKDOWN * scale or norm <= again
        self.betas.append(0.0 if exhausted else beta)
        self._dropped.append(beta if exhausted else 0.0)
        self._residual = None if exhausted else (w, norm)
        if not self.done:
            self._store_residual(self.betas[-1:])

    def _store_residual(self, couplings: Sequence[float] | NDArray[np.float64]) -> None:
        """The residual becomes the next basis vector, coupled to the last ones in T."""
        j = self.steps
        # Without a residual the basis spans an invariant subspace: go on beside it.
        w, norm = self._residual or self._fresh_direction()
        self._residual = None
        self._pending = self.basis.store(j % len(self.basis.rows), w, 1 / norm)
        last = slice(j - len(couplings), j)
        self.matrix[last, j] = self.matrix[j, last] = couplings

    def _fresh_direction(self) -> tuple[Tensor, float]:
        """A random vector orthogonal to the basis, and its length."""
        self.restarts += 1
        w = self.fresh(self.restarts)
        return w, self.basis.orthogonalize(w, min(self.steps, len(self.basis.rows)))[1]

    @property
    def tridiagonal(self) -> NDArray[np.float64]:
        """T of the steps made so far (after a restart: arrow and tridiagonal)."""
        return self.matrix[: self.steps, : self.steps]

    def restart(self, keep: NDArray[np.int64]) -> None:
        """Go on from the Ritz vectors number `keep` (ascending Ritz values) and the residual.

        Frees the other rows of a full basis. Collective.
        """
        assert self.options.mode == "full" and self.done
        values, vectors = np.linalg.eigh(self.tridiagonal)
        couplings = self.betas[-1] * vectors[-1, keep]
        self.basis.replace(self.basis.combine(vectors[:, keep].T))
        p = len(keep)
        self.alphas, self.betas = list(map(float, values[keep])), [0.0] * p
        self.matrix[:] = 0
        self.matrix[range(p), range(p)] = self.alphas
        self._store_residual(couplings)

    def vectors(self) -> dict[str, Tensor]:
        """{name: row as stored} of what the next step needs; a name's vector never changes.

        Of a run without thick restarts.
        """
        if self.done:
            return {}
        return {f"q{number}": self.basis.rows[row] for row, number in self._rows_in_use()}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the vectors, as JSON values, for `load_state_dict`.

        Collective: one all-reduce of two numbers for a bf16 basis.
        """
        if len(self._pending):
            self.basis.settle(self.steps % len(self.basis.rows), self.space.reduce(self._pending))
            self._pending = self._pending[:0]
        at = np.nonzero(self.matrix)
        return {
            "matrix": [*(index.tolist() for index in at), self.matrix[at].tolist()],
            "inverse_squares": self.basis.inverse_squares.tolist(),
            "rounding": self.basis.rounding.tolist(),
            **{name: getattr(self, name) for name in _FIGURES},
        }

    def load_state_dict(self, figures: Mapping[str, Any], vector: Callable[[str], Tensor]) -> None:
        """Become the run whose `state_dict` these are; of the same operator and settings.

        Args:
            figures: See `state_dict`.
            vector: Gives what `vectors` gave, by name, `(n_local,)`.
        """
        self.matrix[:] = 0
        rows, columns, values = figures["matrix"]
        self.matrix[rows, columns] = values
        self.basis.inverse_squares[:] = figures["inverse_squares"]
        self.basis.rounding[:] = figures["rounding"]
        for name in _FIGURES:
            setattr(self, name, figures[name])
        self._pending = self._pending[:0]
        for row, number in self._rows_in_use():
            self.basis.rows[row].copy_(vector(f"q{number}"))

    def _rows_in_use(self) -> list[tuple[int, int]]:
        """(row, the step that multiplies it) of the basis, the next step's vector included."""
        return list(enumerate(self._numbers(self.steps).tolist()))

    def run(self) -> LanczosRun:
        """The record of the steps made so far; of a run that was not restarted."""
        figures = np.array(self.diagnostics).T
        alphas, betas = np.array(self.alphas), np.array(self.betas)
        # What column j of H Q - Q T owes to rounding: that of the next basis vector in its storage
        # (or all of it), and two or three times that of the fp32 product.
        column = np.sqrt(alphas**2 + betas**2 + np.append(0.0, betas[:-1]) ** 2)
        stored = np.append(figures[-1][1:], 0.0) * betas + self._dropped
        return LanczosRun(
            alphas=alphas,
            betas=betas,
            product_errors=figures[0],
            displacements=figures[1],
            nonlinearities=figures[2],
            fidelities=figures[3],
            trials=figures[4],
            rounding_errors=np.hypot(stored, 2 * ROUNDOFF * column),
            asymmetry=self.asymmetry,
            all_reduces=self.all_reduces,
        )


def absolute_error(product: Product) -> float:
    """Estimated |H v - product| for a unit v; at least the rounding of fp32."""
    return max(product.error or 0.0, ROUNDOFF) * product.norm


def _figures(product: Product) -> tuple[float, ...]:
    """What is kept of a product: its vector becomes the next basis vector."""
    return (
        (product.error or 0.0) * product.norm,
        product.displacement,
        math.nan if product.nonlinearity is None else product.nonlinearity,
        product.fidelity,
        float(product.trials),
    )


def lanczos(
    operator: LinearOperator,
    start: Tensor,
    num_matvecs: int,
    fresh: Callable[[int], Tensor],
    progress: Progress | None = None,
    options: LanczosOptions | None = None,
    restore: Callable[[LanczosState], None] | None = None,
) -> LanczosRun:
    """Run `num_matvecs` steps of Lanczos.

    Args:
        operator: Symmetric operator.
        start: Unit start vector, `(n_local,)` fp32.
        num_matvecs: Steps wanted.
        fresh: See `LanczosState`.
        progress: Called after each step, on every rank.
        options: Reorthogonalisation and storage.
        restore: Called with the new state, to make it an interrupted run's.

    Raises:
        NumericsError: a product is not finite.

    Collective.
    """
    state = LanczosState(operator, start, num_matvecs, fresh, options)
    if restore is not None:
        restore(state)
    while not state.done:
        state.step()
        if progress is not None:
            progress(state)
    return state.run()


def top_vector(state: LanczosState) -> Tensor:
    """The unit Ritz vector of the largest Ritz value, `(n_local,)` fp32.

    Cost: one read of the basis, one all-reduce.
    """
    from scipy.linalg import eigh_tridiagonal

    k = state.steps
    _, vectors = eigh_tridiagonal(np.array(state.alphas), np.array(state.betas[: k - 1]))
    out = state.basis.combine(vectors[:, -1:].T)[0]
    return out / state.space.norm(out)
