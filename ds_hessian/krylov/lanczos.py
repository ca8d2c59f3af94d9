"""Lanczos: orthonormal q_1 .. q_m and the tridiagonal T = Q' H Q of a symmetric operator.

    H Q = Q T + beta_m q_{m+1} e_m'

Each step is one product, the recurrence, and classical Gram-Schmidt against some of what is stored:

| mode | against | stored vectors | ghosts of converged outliers |
|---|---|---|---|
| `full` | the whole basis | m | none |
| `selective` | the last two, converged Ritz vectors | m | none, of the `window` outermost |
| `window` | the last `window` | `window` | after about `window` more steps |
| `none` | the last two | 2 | yes; right for densities, not for counting outliers |

Cost of a step: one product; two reads of those vectors, and one of those in the recurrence; three
all-reduces, of at most their number of scalars and a few more:

    c  = P' w                 w = H q_j: P are the vectors to which T couples q_j, alpha_j = c_j
    w  = w - P c,  c' = Q' w  fused: c' is what errors of products have left along all others
    w  = w - Q c',  beta = |w|

The recurrence leaves nothing of w along the others but products' errors, so one pass against all
is as good as two. Where that pass removes more than it leaves, it is made again, twice.

In mode `selective` rounding is left alone until it matters: the vectors of a plain recurrence lose
their orthogonality along Ritz vectors y = Q s that converge, and nowhere else (Paige), by about

    |y' q_{j+1}|  =  eps |T| / (beta_j |s_j|)         eps the rounding of a step

A Ritz vector is formed when its residual beta_j |s_j| falls below sqrt(eps) |T|: so far the loss is
sqrt(eps) at most, which does not show in T. The step's own residual and all later ones are made
orthogonal to it. Only a residual below sqrt(eps) |T| itself, where the Krylov space is nearly
exhausted, is made orthogonal to the whole basis, in three more all-reduces.
At most `window` are kept, those of the Ritz values farthest from the median of all. eps is that of
fp32, or what the products' errors contribute along one direction. A step reads 2 + `window`
vectors, all on the accelerator; a Ritz vector that converges, the whole basis, once. Right where
the basis is far away (`host`, `disk`).

A thick restart bounds the basis: the run continues from chosen Ritz vectors and the residual; T is
then an arrow followed by a tridiagonal.

Sources: Daniel, Gragg, Kaufman, Stewart, Math. Comp. 30 (1976) (when to repeat); Giraud, Langou,
Rozloznik, van den Eshof, Numer. Math. 101 (2005) (twice is enough);
Parlett, Scott, Math. Comp. 33 (1979) (selective); the paper, section 3 (window); Wu, Simon, SIAM J.
Matrix Anal. 22 (2000) (thick restart).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian import ops
from ds_hessian.errors import NumericsError
from ds_hessian.krylov.basis import Basis, Storage
from ds_hessian.krylov.records import PRODUCT_ROUNDING, ROUNDOFF, LanczosRun
from ds_hessian.operators import LinearOperator, Product, Watched

BREAKDOWN = 32 * ROUNDOFF
"""beta below this share of the largest |T| is rounding of the fp32 vectors: the Krylov space is
exhausted. Relative, since no absolute bound fits Hessians from 1e-8 to 1e8."""

SEPARATE, SETTLED = 0.1, 1e-5
"""A Ritz vector is formed when its residual is also below SEPARATE times the distance to the next
Ritz value whose own is above SETTLED |T|: one in the middle of a cluster would change again."""

COVERED = 0.1
"""A Ritz vector with a smaller part outside of those that are kept is one of them; one whose
squared length is farther from 1 is none."""

_FIGURES = (
    "alphas",
    "betas",
    "diagnostics",
    "asymmetry",
    "unexplained",
    "restarts",
    "products",
    "all_reduces",
    "_dropped",
    "_converged",
)
"""Attributes of a `LanczosState` that are JSON values already."""

Mode = Literal["full", "selective", "window", "none"]
Progress = Callable[["LanczosState"], None]


@dataclass(frozen=True)
class LanczosOptions:
    """Reorthogonalisation and storage of Lanczos' basis.

    Attributes:
        mode: Mode of reorthogonalisation; see the module.
        window: Vectors kept in mode `window`, at least 2; in mode `selective`, Ritz vectors.
        storage: That of the basis; what mode `selective` reads in every step is on the accelerator.
    """

    mode: Mode = "full"
    window: int = 10
    storage: Storage = Storage()

    def __post_init__(self) -> None:
        if self.window < 2:
            raise NumericsError(f"the window must hold at least 2 vectors, got {self.window}")

    def capacity(self, num_matvecs: int) -> int:
        """Return how many of the last vectors a step is made orthogonal to, in a run of so many
        steps.
        """
        if self.mode == "full":
            return num_matvecs
        return min(num_matvecs, self.window if self.mode == "window" else 2)

    def ritz_vectors(self, num_matvecs: int) -> int:
        """Return how many converged Ritz vectors are kept at most in a run of so many steps."""
        return min(num_matvecs, self.window) if self.mode == "selective" else 0


class LanczosState:
    """A run as it grows; `run()` freezes it.

    Args:
        operator: Symmetric operator.
        start: Unit start vector, `(n_local,)` fp32.
        num_matvecs: Steps m wanted; at most the dimension of the space are made. With restarts:
            the size at which the basis is full.
        fresh: `fresh(k)` gives the k-th unit random vector with which to continue when the Krylov
            space is exhausted (repeated eigenvalues, low rank).
        options: Reorthogonalisation and storage of the basis.

    Attributes:
        matrix: `(m, m)` T so far, with the coupling to the next vector.
        products: Products made, by all restarts together.
        unexplained: Largest asymmetry of T that the products' estimated errors do not explain.
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
        self._recent = self.options.capacity(self.num_matvecs)
        self._kept = self.options.ritz_vectors(self.num_matvecs)
        self._archive: Basis | None = None  # the whole basis, where `basis` has the last two
        if self.options.mode == "selective":
            self.basis = Basis(self.space, self._recent + self._kept)
            self._archive = Basis(self.space, self.num_matvecs, self.options.storage)
        else:
            self.basis = Basis(self.space, self._recent, self.options.storage)
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.diagnostics: list[tuple[float, ...]] = []
        self.matrix = np.zeros((self.num_matvecs, self.num_matvecs))
        self.asymmetry = 0.0
        self.unexplained = 0.0
        self.restarts = 0
        self.products = 0
        self.all_reduces = 0
        self._residual: tuple[Tensor, float] | None = None
        self._dropped: list[float] = []  # residuals taken for zero, and parts along Ritz vectors
        # Ritz values whose vectors follow the recent rows, and the step in which they were formed.
        self._converged: list[tuple[float, int]] = []
        self._coefficients = np.zeros((self.num_matvecs, self._kept))  # theirs
        self._pending = self._store(start.clone(), 1.0)

    @property
    def steps(self) -> int:
        """The number of basis vectors that have been multiplied."""
        return len(self.alphas)

    @property
    def done(self) -> bool:
        """True if all steps are made."""
        return self.steps == self.num_matvecs

    def step(self) -> None:
        """Make one product and one new basis vector. Collective."""
        j = self.steps
        row = j % self._recent
        product = self.operator.matvec(self.basis.vector(row))
        before = self.space.all_reduces
        w, numbers = product.vector, self._numbers(j)
        count = len(numbers) + len(self._converged)
        at = min([row, *np.flatnonzero(self.matrix[numbers, j]).tolist()])
        partials = self.basis.project(w, count, at)
        sums = self._reduce(torch.cat([partials, self._pending.to(w.device)]))
        first = sums.new_zeros(count)
        first[at:] = sums[: count - at]
        self._settle(sums[count - at :])
        second = self.basis.subtract_project(w, first)
        if self._archive is not None:  # its norm, so that beta is known before the last reduction
            second = torch.cat([second, ops.dots([(w, w)], self.space.n_owned)])
        second = self._reduce(second)
        square = self.basis.subtract(w, second[:count])
        # w is H times the stored row: per unit length of it, and along unit vectors.
        inverse_squares = self.basis.inverse_squares[:count]
        length = math.sqrt(1 / self.basis.inverse_squares[row])
        dots = torch.cat([second[:at], first[at:]])
        column = dots.numpy() * np.sqrt(inverse_squares) / length
        # What Lanczos takes from before, or sets to zero; the difference is what the products'
        # errors broke.
        along, column = column[len(numbers) :], column[: len(numbers)]
        broken = np.abs(column - self.matrix[numbers, j])[numbers != j]
        self.asymmetry = max(self.asymmetry, float(broken.max(initial=0.0)))
        self.alphas.append(float(column[row]))
        self.matrix[j, j] = column[row]
        self.products += 1
        self.diagnostics.append((*_figures(product), self.basis.rounding[row]))
        self._widen(numbers[numbers != j], broken)
        again = float(second[:count].numpy() ** 2 @ inverse_squares)
        slots, formed = list[int](), square[:0]
        if self._archive is not None and not self.done:
            beta = math.sqrt(max(float(second[-1]) - again, 0.0)) / length
            slots, formed = self._form_converged(self._archive, w, beta)
        sums = self._reduce(torch.cat([square, formed]))
        removed = self._remove(w, slots, sums[1:])
        norm = math.sqrt(max(float(sums[0]) - removed, 0.0))
        self._append(w, norm, math.sqrt(again + removed), length, count)
        self._dropped[-1] += math.hypot(float(np.linalg.norm(along)), math.sqrt(removed))
        self.all_reduces += self.space.all_reduces - before

    def _widen(self, numbers: NDArray[np.int64], asymmetry: NDArray[np.float64]) -> None:
        """Raise error estimates of products to what their asymmetry `q_i'D q_j - q_j'D q_i`
        implies.

        It is at most the sum of their errors; where it is more than these are estimated to be,
        rounding of the basis included, it is the estimate.
        """
        last, scale = self.diagnostics[-1], float(abs(self.matrix).max())
        before = self.unexplained
        restarted = len(self.diagnostics) != self.steps  # older products have no row of their own
        for i, seen in zip(numbers.tolist(), asymmetry.tolist(), strict=True):
            other = last if restarted else self.diagnostics[i]
            rounding = last[-1] + other[-1] + PRODUCT_ROUNDING
            if seen > last[0] + other[0] + rounding * scale:
                self.unexplained = max(self.unexplained, seen)
                last = (max(last[0], seen), *last[1:])
                if not restarted:
                    self.diagnostics[i] = (max(other[0], seen), *other[1:])
        self.diagnostics[-1] = last
        if self.unexplained > before and isinstance(self.operator, Watched):
            self.operator.contradicted()

    def _numbers(self, j: int) -> NDArray[np.int64]:
        """Return the step that stored each row in use: step i writes row i modulo the capacity."""
        rows = np.arange(min(j + 1, self._recent))
        return j - (j - rows) % len(rows)

    def _append(self, w: Tensor, norm: float, again: float, length: float, count: int) -> None:
        """Append what Gram-Schmidt against `count` rows left: `norm` of w, of which the last pass
        removed `again`.
        """
        beta = norm / length
        scale = max(abs(self.matrix).max(), max(self.betas, default=0.0), beta)
        against: tuple[Basis, int] | None = None
        if self._archive is not None and beta <= math.sqrt(ROUNDOFF) * scale:
            # All Ritz values converge at once, more than there is room for: once against all.
            against = self._archive, self.steps
        elif norm <= again and beta > BREAKDOWN * scale:
            against = self.basis, count
        if against is not None:
            basis, rows = against
            coefficients, norm = basis.orthogonalize(w, rows)
            again, beta = float(np.linalg.norm(coefficients)), norm / length
        # The second inequality: rounding of the basis is not orthogonal to what is left.
        exhausted = beta <= BREAKDOWN * scale or norm <= again
        self.betas.append(0.0 if exhausted else beta)
        self._dropped.append(beta if exhausted else 0.0)
        self._residual = None if exhausted else (w, norm)
        if not self.done:
            self._store_residual(self.betas[-1:])

    def _store_residual(self, couplings: Sequence[float] | NDArray[np.float64]) -> None:
        """Store the residual as the next basis vector, coupled to the last ones in T."""
        j = self.steps
        # Without a residual the basis spans an invariant subspace: continue beside it.
        w, norm = self._residual or self._fresh_direction()
        self._residual = None
        self._pending = self._store(w, 1 / norm)
        last = slice(j - len(couplings), j)
        self.matrix[last, j] = self.matrix[j, last] = couplings

    def _fresh_direction(self) -> tuple[Tensor, float]:
        """Return a random vector orthogonal to the basis, and its length."""
        self.restarts += 1
        w = self.fresh(self.restarts)
        if self._archive is not None:
            return w, self._archive.orthogonalize(w, self.steps)[1]
        return w, self.basis.orthogonalize(w, min(self.steps, self._recent))[1]

    def _store(self, w: Tensor, scale: float) -> Tensor:
        """Store `scale * w` as the next step's vector; returns partial sums for `_settle`."""
        row = self.steps % self._recent
        pending = self.basis.store(row, w, scale)
        if self._archive is not None:
            pending = self._archive.store(self.steps, self.basis.vector(row).clone(), 1.0)
        return pending

    def _settle(self, sums: Tensor) -> None:
        """Apply the reduced sums of `_store`."""
        if self._archive is not None:
            self._archive.settle(self.steps, sums)
        else:
            self.basis.settle(self.steps % self._recent, sums)
        self._pending = sums[:0]

    def _form_converged(self, archive: Basis, w: Tensor, beta: float) -> tuple[list[int], Tensor]:
        """Form the Ritz vectors that the residual w, of size beta, shows to have converged.

        They are made orthogonal to each other by their coefficients; the outermost stay.

        Returns the slots they are in, and partial sums (y'y and y'w of each) for `_remove`.
        """
        from scipy.linalg import eigh_tridiagonal

        values, vectors = eigh_tridiagonal(np.array(self.alphas), np.array(self.betas))
        scale, known = float(abs(self.matrix).max()), self._coefficients[: self.steps]
        errors = max(figures[0] for figures in self.diagnostics) / math.sqrt(self.space.n)
        residuals = beta * abs(vectors[-1])
        limits = SEPARATE * _gaps(values, residuals > SETTLED * scale)
        limits = np.minimum(limits, math.sqrt(max(ROUNDOFF * scale, errors) * scale))
        middle, slots = np.median(values), set[int]()
        candidates = np.flatnonzero(residuals <= limits)
        for i in candidates[np.argsort(-abs(values[candidates] - middle))].tolist():
            s = vectors[:, i] - known @ (known.T @ vectors[:, i])
            left = float(np.linalg.norm(s))
            if left < COVERED:
                continue
            slot = len(self._converged)
            if slot == self._kept:
                distances = np.array([abs(value - middle) for value, _ in self._converged])
                slot = int(distances.argmin())
                if distances[slot] >= abs(values[i] - middle):
                    break
                del self._converged[slot]
            self._converged.insert(slot, (float(values[i]), self.steps))
            known[:, slot] = s / left
            slots.add(slot)
        order = sorted(slots)
        if not order:
            return [], torch.zeros(0, dtype=torch.float64, device=w.device)
        formed = archive.combine(known[:, order].T)
        for slot, y in zip(order, formed, strict=True):
            self.basis.replace(self._recent + slot, y)
        pairs = [pair for y in formed for pair in ((y, y), (y, w))]
        return order, ops.dots(pairs, self.space.n_owned)

    def _remove(self, w: Tensor, slots: Sequence[int], sums: Tensor) -> float:
        """Make w orthogonal to the Ritz vectors just formed; returns the square of the part
        removed.
        """
        removed = 0.0
        for slot, (square, dot) in zip(slots, sums.view(-1, 2).tolist(), strict=True):
            # Where the basis has lost its orthogonality (in the bulk, which nothing keeps from it),
            # its combinations are no unit vectors, nor orthogonal to each other: left out.
            row, whole = self._recent + slot, abs(square - 1) < COVERED
            self.basis.inverse_squares[row] = 1 / square if whole else 0.0
            if whole:
                w.sub_(self.basis.vector(row), alpha=dot / square)
                removed += dot**2 / square
        return removed

    @property
    def tridiagonal(self) -> NDArray[np.float64]:
        """Return T of the steps made so far (an arrow and tridiagonal after a restart)."""
        return self.matrix[: self.steps, : self.steps]

    def restart(self, keep: NDArray[np.int64]) -> None:
        """Restart from the Ritz vectors number `keep` (ascending Ritz values) and the residual.

        Frees the other rows of a full basis. Collective.
        """
        assert self.options.mode == "full" and self.done
        values, vectors = np.linalg.eigh(self.tridiagonal)
        couplings = self.betas[-1] * vectors[-1, keep]
        self.basis.rotate(vectors[:, keep].T)
        p = len(keep)
        self.alphas, self.betas = list(map(float, values[keep])), [0.0] * p
        self.matrix[:] = 0
        self.matrix[range(p), range(p)] = self.alphas
        self._store_residual(couplings)

    def combine(self, coefficients: NDArray[np.float64]) -> Tensor:
        """Return rows of coefficients `(k, m)` times the whole basis, `(k, n_local)` fp32.

        Collective for a basis on disk.
        """
        assert self.options.mode in ("full", "selective")
        basis = self._archive or self.basis
        out = basis.combine(coefficients)
        basis.agree()
        return out

    def vectors(self) -> dict[str, Callable[[], Tensor]]:
        """Return {name: function that reads the stored row} of what the next step needs; a name's
        vector never changes.

        Not for a run with thick restarts.
        """
        if self.done:
            return {}
        return {name: partial(basis.read, row) for name, basis, row in self._named_rows()}

    def state_dict(self) -> dict[str, object]:
        """Return everything but the vectors, as JSON values, for `load_state_dict`.

        Collective: one all-reduce of two numbers for a bf16 basis.
        """
        if len(self._pending):
            self._settle(self._reduce(self._pending))
        at = np.nonzero(self.matrix)
        return {
            "coefficients": self._coefficients[: self.steps, : len(self._converged)].tolist(),
            "matrix": [*(index.tolist() for index in at), self.matrix[at].tolist()],
            "inverse_squares": [basis.inverse_squares.tolist() for basis in self._bases()],
            "rounding": [basis.rounding.tolist() for basis in self._bases()],
            **{name: getattr(self, name) for name in _FIGURES},
        }

    def load_state_dict(self, figures: Mapping[str, Any], vector: Callable[[str], Tensor]) -> None:
        """Restore the run that `state_dict` described; of the same operator and settings.

        Args:
            figures: The result of `state_dict`.
            vector: Gives what `vectors` gave, by name, `(n_local,)`.
        """
        self.matrix[:] = 0
        rows, columns, values = figures["matrix"]
        self.matrix[rows, columns] = values
        for i, basis in enumerate(self._bases()):
            basis.inverse_squares[:] = figures["inverse_squares"][i]
            basis.rounding[:] = figures["rounding"][i]
        for name in _FIGURES:
            setattr(self, name, figures[name])
        if self._converged:
            self._coefficients[: self.steps, : len(self._converged)] = figures["coefficients"]
        self._pending = self._pending[:0]
        for name, basis, row in self._named_rows():
            basis.replace(row, vector(name))

    def _reduce(self, partials: Tensor) -> Tensor:
        """Reduce partial sums with the basis' own check of its files."""
        return (self._archive or self.basis).reduce(partials)

    def _bases(self) -> list[Basis]:
        return [self.basis] if self._archive is None else [self.basis, self._archive]

    def _named_rows(self) -> list[tuple[str, Basis, int]]:
        """Return (name, basis, row) of all vectors in use, the next step's included; step i
        multiplies the vector q<i>.
        """
        recent = list(enumerate(self._numbers(self.steps).tolist()))
        if self._archive is None:
            return [(f"q{number}", self.basis, row) for row, number in recent]
        name = "q" if self._archive.exact else "unrounded"
        return [
            *((f"q{number}", self._archive, number) for number in range(self.steps + 1)),
            *((f"{name}{number}", self.basis, row) for row, number in recent),
            *(
                (f"ritz{i}-{step}", self.basis, self._recent + i)
                for i, (_, step) in enumerate(self._converged)
            ),
        ]

    def run(self) -> LanczosRun:
        """Return the record of the steps made so far; of a run that was not restarted."""
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


def _gaps(values: NDArray[np.float64], near: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the distance of each value to the closest other one that is `near`; inf where there is
    none.
    """
    distances = np.where(near, abs(values[:, None] - values), math.inf)
    np.fill_diagonal(distances, math.inf)
    return np.asarray(distances.min(axis=1))


def absolute_error(product: Product) -> float:
    """Estimate |H v - product| for a unit v; at least the rounding of fp32."""
    return max(product.error or 0.0, ROUNDOFF) * product.norm


def _figures(product: Product) -> tuple[float, ...]:
    """Return the figures of a product that are kept: its vector becomes the next basis vector."""
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
        fresh: Random unit vectors by number, for exhausted Krylov spaces.
        progress: Called after each step, on every rank.
        options: Reorthogonalisation and storage.
        restore: Called with the new state, to make it an interrupted run's.

    Raises:
        NumericsError: a product is not finite.

    Collective.
    """
    state = LanczosState(operator, start, num_matvecs, fresh, options)
    del start  # the basis has it: one vector less throughout, where the caller keeps none
    if restore is not None:
        restore(state)
    while not state.done:
        state.step()
        if progress is not None:
            progress(state)
    return state.run()


def ritz_vectors(state: LanczosState, numbers: Sequence[int]) -> Tensor:
    """Return unit Ritz vectors by number (0 of the smallest Ritz value, -1 of the largest), fp32.

    `(len(numbers), n_local)`. Of a run that stores its whole basis and was not restarted.

    Cost: one read of the basis, one all-reduce each.
    """
    from scipy.linalg import eigh_tridiagonal

    k = state.steps
    _, vectors = eigh_tridiagonal(np.array(state.alphas), np.array(state.betas[: k - 1]))
    out = state.combine(vectors[:, list(numbers)].T)
    for y in out:
        y /= state.space.norm(y)
    return out
