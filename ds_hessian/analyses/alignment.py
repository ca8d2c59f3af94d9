"""Share of the gradient and of Adam's last step that lies in the top eigenspace, with bars.

Let S be the space of the k wanted eigenvectors, V what Lanczos found of it, with values theta and
residual `R = H V - V diag(theta)`, and mu the most wanted eigenvalue of H in V's complement. The
eigenvalues that belong to S's complement are within `2 |R| / sqrt(3)` of those of H there (Weyl),
so the largest principal angle Theta between the spaces obeys `sin Theta <= |R| / d` with the gap
`d = theta_k - mu - 2 |R| / sqrt(3)` (Davis, Kahan, SIAM J. Numer. Anal. 7 (1970)). A vector at the
angle phi to V is at `phi +- Theta` to S, so its share `cos^2 phi` in S is between
`cos^2 (phi + Theta)` and `cos^2 (phi - Theta)`; principal angles to a third space move by Theta at
most (Knyazev, Argentati, SIAM J. Matrix Anal. 29 (2006)). The spaces of the first j < k vectors lie
in S, so the share in each of them is a lower bound too: it counts where the k-th eigenvalue is one
of several that cannot be separated.

mu is searched from another random vector: an eigenvector that the first search has missed, one of a
close pair above all, is then found in the complement, and widens the bars.

Cost: the products of `eigenpairs` with k pairs and with one more, some `k^2 / 2` inner products.

That most of a gradient lies in the top eigenspace: Gur-Ari, Roberts, Dyer, arXiv 1812.04754.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from torch import Tensor

from ds_hessian import krylov
from ds_hessian.analyses.base import Draw, Journaled, transient
from ds_hessian.analyses.eigenpairs import Eigenpairs, memory_of_eigenpairs
from ds_hessian.analyses.measurement import Measurement
from ds_hessian.backends.protocol import Backend
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError, NumericsError, UnsupportedError
from ds_hessian.krylov.records import Array
from ds_hessian.memory import Item
from ds_hessian.operators import LinearOperator, Product, Watched
from ds_hessian.planning import Settings, Share, storage_of
from ds_hessian.records import Bounded, Estimate, HessianAlignment
from ds_hessian.vector_files import load_vectors
from ds_hessian.vectors import VectorSpace

WEYL = 2 / math.sqrt(3)
"""Largest norm of `[[D, R'], [R, 0]]` for a column `[D, R]` of norm 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment(Journaled[HessianAlignment]):
    """The arguments of an alignment.

    Attributes:
        k: Dimension of the eigenspace.
        which: `LA` largest, `LM` largest magnitude, `SA` smallest.
        tolerance: Bound on the residuals, relative to the largest eigenvalue in magnitude.
        max_matvecs: Products at most, before one for each pair's residual.
        basis_size: Vectors kept; None for 2 k + 20.
        update: Whether Adam's last step counts too; None for where the optimizer is an Adam that
            has made a step.
        earlier: Space to compare with: a file of vectors, a folder that has the record of an
            alignment, or the vectors `(k, n_local)` themselves.
        step: Adam's last step.
    """

    title = "alignment"
    summary = "share of gradient and update in the top eigenspace, and how that space turned"
    record = HessianAlignment

    k: int = 10
    which: krylov.Which = "LA"
    tolerance: float = Eigenpairs.tolerance
    max_matvecs: int = Eigenpairs.max_matvecs
    basis_size: int | None = Eigenpairs.basis_size
    update: bool | None = None
    earlier: Tensor | str | Path | None = transient(None)
    step: Tensor | None = transient(None)

    @property
    def search(self) -> Eigenpairs:
        """The search for the eigenspace."""
        return Eigenpairs(
            k=self.k,
            which=self.which,
            tolerance=self.tolerance,
            max_matvecs=self.max_matvecs,
            basis_size=self.basis_size,
        )

    @property
    def search_beside(self) -> Eigenpairs:
        """The search for the most wanted eigenvalue of the complement."""
        return replace(self.search, k=1, basis_size=None)

    def products(self, config: HessianConfig) -> int:
        """Return the number of products of both searches."""
        return self.search.products(config) + self.search_beside.products(config)

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return both searches, Adam's step, and the earlier space unless the caller has it."""
        loaded = isinstance(self.earlier, str | Path)
        first, then = (
            memory_of_eigenpairs(share, config, search.k, search.size)
            for search in (self.search, self.search_beside)
        )
        stages = {item.stage for item in then}
        return [
            share.vectors("Adam's divisor and step", 2 * (self.update is not False)),
            share.vectors("earlier space", self.k * loaded),
            *first,
            *(replace(item, stage=f"{item.stage} of the complement") for item in then),
            *(share.vectors("space", self.k, stage=f"{s} of the complement") for s in stages),
            share.returned(self.k),
        ]

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return settings with which the search needs less."""
        return self.search.with_less(config)

    def given(self) -> dict[str, object]:
        """Return its arguments; a file may have another path on each rank."""
        given = super().given()
        return {**given, "earlier": "a path"} if isinstance(self.earlier, str | Path) else given

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """Fill in Adam's step and the earlier space."""
        step = None
        if self.update is not False:
            try:
                step = backend.adam().last_step
            except (ConfigError, UnsupportedError):  # the same on every rank
                if self.update:
                    raise
        earlier = self.earlier
        if isinstance(earlier, str | Path):
            path = Path(earlier)
            if path.suffix != ".safetensors":
                path = path / f"{HessianAlignment.kind}.safetensors"
            earlier = load_vectors(backend, path)
        wanted = backend.space.n_local
        if earlier is not None and (earlier.dim() != 2 or earlier.shape[1] != wanted):
            raise ConfigError(
                f"the earlier space must be vectors (k, {wanted}) of this rank, got a tensor of "
                f"shape {tuple(earlier.shape)}: pass those that eigenpairs or load_vectors return"
            )
        return replace(self, update=step is not None, step=step, earlier=earlier)

    def figures(self, run: Measurement, operator: LinearOperator) -> dict[str, object]:
        """Measure shares and angles, with their bars."""
        subject, space = run.subject, run.session.space
        gradient = run.curvature.gradient
        found = _searched(operator, self.search, subject.config, subject.draw, 0)
        vectors = found.vectors
        triangle = _cholesky(_grams(space, vectors, vectors))
        following = None
        if self.k < space.n:
            beside = Complement(operator, vectors, triangle)

            def draw(number: int) -> Tensor:
                return beside.project(subject.draw(number))

            other = _searched(beside, self.search_beside, subject.config, draw, 1)
            following = Estimate(float(other.values[0]), float(other.errors[0]))
        angles = turning_angles(found, following)
        of_gradient = _shares(space, triangle, vectors, gradient, angles)
        of_update = _shares(space, triangle, vectors, self.step, angles)
        between, overlap = np.zeros(0), None
        if isinstance(self.earlier, Tensor):
            between = _principal_angles(space, triangle, vectors, self.earlier)
            overlap = _shared(float((np.cos(between) ** 2).mean()), between, angles[-1])
        return {
            "n": space.n,
            "which": self.which,
            "values": found.values,
            "errors": found.errors,
            "next_value": following,
            "angle": float(angles[-1]),
            "gradient": of_gradient[0],
            "gradient_shares": of_gradient[1],
            "update": of_update[0],
            "update_shares": of_update[1],
            "principal_angles": between,
            "overlap": overlap,
            "vectors": vectors,
            "gradient_norm": run.curvature.gradient_norm,
            "update_norm": None if self.step is None else space.norm(self.step),
            "loss": run.session.loss,
            "num_matvecs": run.curvature.cost.products,
        }


class Complement:
    """A symmetric operator in the complement of some of its approximate eigenvectors.

    Args:
        operator: H.
        vectors: `(k, n_local)`.
        triangle: `(k, k)` Cholesky factor of their inner products.

    One product of H, and two small all-reduces a product.
    """

    def __init__(self, operator: LinearOperator, vectors: Tensor, triangle: Array) -> None:
        self.operator, self.space = operator, operator.space
        self.vectors, self.triangle = vectors, triangle

    def project(self, x: Tensor) -> Tensor:
        """Remove from x, in place, what lies in the span of the vectors. Collective."""
        dots = np.linalg.solve(self.triangle, _grams(self.space, self.vectors, x[None]))
        for vector, dot in zip(self.vectors, np.linalg.solve(self.triangle.T, dots), strict=True):
            x.sub_(vector, alpha=float(dot[0]))
        return x

    def matvec(self, v: Tensor) -> Product:
        """Multiply a vector `v` of the complement; the absolute error is that of `Hv`."""
        product = self.operator.matvec(v)
        w = self.project(product.vector)
        squares = self.space.dots([(w, w), (v, v)]).tolist()
        norm = math.sqrt(squares[0] / squares[1])
        error = product.error
        if error is not None and norm > 0:
            error *= product.norm / norm
        return replace(product, vector=w, norm=norm, error=error)

    def contradicted(self) -> None:
        """Tell the operator. Collective."""
        if isinstance(self.operator, Watched):
            self.operator.contradicted()


def _searched(
    operator: LinearOperator, search: Eigenpairs, config: HessianConfig, draw: Draw, start: int
) -> krylov.Eigenpairs:
    first = draw(start)
    return krylov.eigenpairs(
        operator,
        first / operator.space.norm(first),
        search.k,
        draw,
        which=search.which,
        tolerance=search.tolerance,
        max_matvecs=search.max_matvecs,
        basis_size=search.basis_size,
        storage=storage_of(config),
    )


def turning_angles(found: krylov.Eigenpairs, following: Estimate | None) -> Array:
    """Return `(k,)` bounds on the angle of the first j vectors to the true space, j = 1 .. k.

    Args:
        found: The k pairs.
        following: The most wanted eigenvalue of their complement; None where there is none.
    """
    values = np.append(found.values, [] if following is None else following.value)
    height = {"LM": abs(values), "LA": values, "SA": -values}[found.which]
    residuals = np.sqrt(np.cumsum(found.errors**2))
    k = len(residuals)
    beside = -math.inf if following is None else float(height[k]) + following.error
    below = np.maximum(np.append(height[1:k], -math.inf), beside) + WEYL * residuals[-1]
    gaps = height[:k] - below
    sines = np.divide(residuals, gaps, out=np.ones_like(gaps), where=gaps > residuals)
    angles: Array = np.arcsin(sines)
    return angles


def _grams(space: VectorSpace, a: Tensor, b: Tensor) -> Array:
    """Return the inner products of the rows of two sets of vectors."""
    found = space.dots([(x, y) for x in a for y in b]).numpy()
    grams: Array = found.reshape(len(a), len(b))
    return grams


def _cholesky(grams: Array) -> Array:
    return np.asarray(np.linalg.cholesky(grams), dtype=np.float64)


def _shares(
    space: VectorSpace, triangle: Array, vectors: Tensor, x: Tensor | None, angles: Array
) -> tuple[Bounded | None, Array]:
    """Return the share of x in the space, with its bar, and along each vector; None for x = 0."""
    square = 0.0 if x is None else space.dot(x, x)
    if x is None or square == 0:
        return None, np.zeros(0)
    dots = _grams(space, vectors, x[None])[:, 0] / math.sqrt(square)
    # The first j coordinates in an orthonormal basis whose first j vectors span the first j.
    nested = np.cumsum(np.linalg.solve(triangle, dots) ** 2).clip(0.0, 1.0)
    away = np.arccos(np.sqrt(nested))  # from the space of the first j vectors
    lower = np.cos(np.minimum(away + angles, math.pi / 2)) ** 2
    upper = math.cos(max(float(away[-1] - angles[-1]), 0.0)) ** 2
    return Bounded(float(nested[-1]), float(lower.max()), upper), dots**2


def _principal_angles(
    space: VectorSpace, triangle: Array, vectors: Tensor, earlier: Tensor
) -> Array:
    """Return the angles between the two spaces, ascending."""
    try:
        other = _cholesky(_grams(space, earlier, earlier))
    except np.linalg.LinAlgError:
        raise NumericsError(
            f"the {len(earlier)} vectors of the earlier space are linearly dependent: pass some "
            "that are not"
        ) from None
    cosines = np.linalg.solve(triangle, _grams(space, vectors, earlier))
    cosines = np.linalg.solve(other, cosines.T)
    angles: Array = np.arccos(np.linalg.svd(cosines, compute_uv=False).clip(0.0, 1.0))
    return angles


def _shared(value: float, between: Array, angle: float) -> Bounded:
    """Return the mean squared cosine of angles that are known to within `angle`."""
    least = np.cos(np.minimum(between + angle, math.pi / 2)) ** 2
    most = np.cos(np.maximum(between - angle, 0.0)) ** 2
    return Bounded(value, float(least.mean()), float(most.mean()))
