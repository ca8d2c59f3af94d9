"""Share of the gradient and of Adam's last step that lies in the top eigenspace, with bars.

Let S be the space of the k wanted eigenvectors, and V what Lanczos found of it, with residual
`R = H V - V (V'HV)`. Where the k-th value is d above the next eigenvalue, the largest principal
angle Theta between the two spaces obeys `sin Theta <= |R| / d` (Davis, Kahan, SIAM J. Numer. Anal.
7 (1970)). A vector at the angle phi to V is at `phi +- Theta` to S, so its share `cos^2 phi` in S
is between `cos^2 (phi + Theta)` and `cos^2 (phi - Theta)`; principal angles to a third space move
by Theta at most (Knyazev, Argentati, SIAM J. Matrix Anal. 29 (2006)). The spaces of the first j < k
vectors lie in S, so the share in each of them is a lower bound too: it counts where the k-th
eigenvalue is one of several that cannot be told apart.

Cost: the products of `eigenpairs` with k + 1 pairs, and some `k^2 / 2` inner products.

That most of a gradient lies in the top eigenspace: Gur-Ari, Roberts, Dyer, arXiv 1812.04754.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from ds_hessian import krylov
from ds_hessian.analyses.base import Journaled, transient
from ds_hessian.analyses.eigenpairs import Eigenpairs, memory_of_eigenpairs
from ds_hessian.analyses.measurement import Measurement
from ds_hessian.backends.protocol import Backend
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError, NumericsError, UnsupportedError
from ds_hessian.krylov.records import Array
from ds_hessian.memory import Item
from ds_hessian.operators import LinearOperator
from ds_hessian.planning import Settings, Share, storage_of
from ds_hessian.records import Bounded, Estimate, HessianAlignment
from ds_hessian.vector_files import load_vectors
from ds_hessian.vectors import VectorSpace


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment(Journaled[HessianAlignment]):
    """An alignment.

    Attributes:
        k: Dimension of the eigenspace.
        which: `LA` largest, `LM` largest magnitude, `SA` smallest.
        tolerance: Bound on the residuals, relative to the largest eigenvalue in magnitude.
        max_matvecs: Products at most, before one for each pair's residual.
        basis_size: Vectors kept; None for 2 k + 22.
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
        """The search for the space, and for the eigenvalue that follows it."""
        return Eigenpairs(
            k=self.k + 1,
            which=self.which,
            tolerance=self.tolerance,
            max_matvecs=self.max_matvecs,
            basis_size=self.basis_size,
        )

    def products(self, config: HessianConfig) -> int:
        """Those of the search."""
        return self.search.products(config)

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """The search, Adam's step, and the earlier space unless the caller has it."""
        loaded = isinstance(self.earlier, str | Path)
        return [
            share.vectors("Adam's divisor and step", 2 * (self.update is not False)),
            share.vectors("earlier space", self.k * loaded),
            *memory_of_eigenpairs(share, config, self.search.k, self.search.size),
        ]

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """What the search could do with."""
        return self.search.with_less(config)

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """With Adam's step and the earlier space filled in."""
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
                f"shape {tuple(earlier.shape)}"
            )
        return replace(self, update=step is not None, step=step, earlier=earlier)

    def figures(self, run: Measurement, operator: LinearOperator) -> dict[str, Any]:
        """Shares, angles and their bars."""
        subject, space, search = run.subject, run.session.space, self.search
        found = krylov.eigenpairs(
            operator,
            subject.draw(0),
            min(search.k, space.n),
            subject.draw,
            which=search.which,
            tolerance=search.tolerance,
            max_matvecs=search.max_matvecs,
            basis_size=search.basis_size,
            storage=storage_of(subject.config),
        )
        vectors, gradient = found.vectors[: self.k], run.curvature.gradient
        angles = turning_angles(found, self.k)
        triangle = _cholesky(_grams(space, vectors, vectors))
        of_gradient = _shares(space, triangle, vectors, gradient, angles)
        of_update = _shares(space, triangle, vectors, self.step, angles)
        between, overlap = np.zeros(0), None
        if isinstance(self.earlier, Tensor):
            between = _principal_angles(space, triangle, vectors, self.earlier)
            overlap = _shared(float((np.cos(between) ** 2).mean()), between, angles[-1])
        after = found.values[self.k :], found.errors[self.k :]
        return {
            "n": space.n,
            "which": self.which,
            "values": found.values[: self.k],
            "errors": found.errors[: self.k],
            "next_value": Estimate(*(float(x[0]) for x in after)) if len(after[0]) else None,
            "angle": float(angles[-1]),
            "gradient": of_gradient[0],
            "gradient_shares": of_gradient[1],
            "update": of_update[0],
            "update_shares": of_update[1],
            "principal_angles": between,
            "overlap": overlap,
            "vectors": vectors.clone(),
            "gradient_norm": run.curvature.gradient_norm,
            "update_norm": None if self.step is None else space.norm(self.step),
            "loss": run.session.loss,
            "num_matvecs": found.num_matvecs,
        }


def turning_angles(found: krylov.Eigenpairs, k: int) -> Array:
    """`(k,)` bounds on the angle between the first j vectors and the true space, j = 1 .. k."""
    height = {"LM": abs(found.values), "LA": found.values, "SA": -found.values}[found.which]
    following = np.append(height[1:] + found.errors[1:], -math.inf)  # where k = n nothing follows
    gaps = height - following
    residuals = np.sqrt(np.cumsum(found.errors**2))
    sines = np.divide(residuals, gaps, out=np.ones_like(gaps), where=gaps > residuals)
    angles: Array = np.arcsin(sines)[:k]
    return angles


def _grams(space: VectorSpace, a: Tensor, b: Tensor) -> Array:
    """Inner products of the rows of two sets of vectors."""
    found = space.dots([(x, y) for x in a for y in b]).numpy()
    grams: Array = found.reshape(len(a), len(b))
    return grams


def _cholesky(grams: Array) -> Array:
    return np.asarray(np.linalg.cholesky(grams), dtype=np.float64)


def _shares(
    space: VectorSpace, triangle: Array, vectors: Tensor, x: Tensor | None, angles: Array
) -> tuple[Bounded | None, Array]:
    """Share of x in the space, with its bar, and along each vector; None and nothing for zero."""
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
    """Angles between the two spaces, ascending."""
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
    """The mean squared cosine of angles that are known to within `angle`."""
    least = np.cos(np.minimum(between + angle, math.pi / 2)) ** 2
    most = np.cos(np.maximum(between - angle, 0.0)) ** 2
    return Bounded(value, float(least.mean()), float(most.mean()))
