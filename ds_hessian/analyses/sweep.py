"""Curvature at scale h: `v'Hv` and the product's diagnostics over a range of displacements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian.analyses.base import Analysis, transient
from ds_hessian.analyses.measurement import Measurement, Subject
from ds_hessian.backends.protocol import Backend
from ds_hessian.config import LEAST_DISPLACEMENT, HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.krylov import LanczosState, ritz_vectors
from ds_hessian.memory import Item, in_stage
from ds_hessian.operators import default_range, memory_of_sweep, sweep
from ds_hessian.planning import Settings, Share, memory_of_lanczos
from ds_hessian.planning.basis import GRAM_SCHMIDT
from ds_hessian.records import DisplacementSweep
from ds_hessian.vectors import random_vector

TOP_STEPS = 10
"""Lanczos steps for the direction `top`: it is to point there, not to be the eigenvector."""


CROSSED: dict[str, Any] = {"finite_difference": {"kinks": "crossed"}}
"""The setting with which products are of the function itself."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep(Analysis[DisplacementSweep]):
    """The arguments of a sweep over displacements.

    Attributes:
        directions: Among `random` (a unit Gaussian vector), `top` (the largest eigenvalue's vector,
            from ten Lanczos steps) and `gradient`; none for vectors of the caller's own.
        displacements: Ascending; None for three in each decade from rounding noise to |w|.
        vectors: Directions `(n_local,)` of the caller's own, by name.
    """

    title = "displacement_sweep"
    summary = "curvature along directions over a range of displacements"
    resumes = False

    directions: Sequence[str] = ("random", "top", "gradient")
    displacements: Sequence[float] | None = None
    vectors: Mapping[str, Tensor] | None = transient(None)

    def products(self, config: HessianConfig) -> int:
        """Return one product for each direction and displacement, and those of the search for
        `top`.
        """
        if self.displacements is None:
            raise ConfigError(
                "how many products displacement_sweep takes depends on the model: give --products"
            )
        search = TOP_STEPS * ("top" in self.directions)
        return len(tuple(self.directions)) * len(self.displacements) + search

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return the directions, two products at a time, and the search for `top`."""
        names = tuple(self.directions)
        products = [share.vectors("directions", len(names))]
        products += memory_of_sweep(share.n_local, share.tier)
        if "top" not in names:
            return products
        before = names.index("top")
        search = [
            share.vectors("directions before it", before),
            *memory_of_lanczos(share.n_local, share.tier, min(TOP_STEPS, share.n)),
            share.vectors("Ritz vector being formed", 1, GRAM_SCHMIDT),
        ]
        return [*in_stage("top direction", search), *in_stage("products", products)]

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return the same without the search for `top`."""
        return [{"directions": [name for name in self.directions if name != "top"]}]

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """Return the same sweep.

        Raises:
            ConfigError: no directions, or displacements that do not ascend.
        """
        h = [] if self.displacements is None else list(self.displacements)
        ascend = h == sorted(set(h)) and all(x >= LEAST_DISPLACEMENT for x in h)
        if not ascend or not (self.directions or self.vectors):
            raise ConfigError(
                "displacement_sweep needs directions and ascending displacements, 2^-126 at least, "
                f"got {list(self.vectors or self.directions)} and {h}"
            )
        return self

    def run(self, subject: Subject) -> DisplacementSweep:
        """Measure. Collective."""
        # A sweep shows the function itself, at all scales.
        subject = replace(subject, config=subject.config.with_overrides(**CROSSED))
        with subject.open() as (run, _):
            vectors = self._vectors(run)
            given = self.displacements
            h = default_range(run.session) if given is None else list(given)
            points = [sweep(run.curvature, v, h) for v in vectors.values()]
            gradient_norm = run.curvature.gradient_norm

        def stack(name: str) -> NDArray[np.float64]:
            return np.array([[getattr(point, name) for point in row] for row in points])

        return DisplacementSweep(
            n=subject.backend.space.n,
            directions=tuple(vectors),
            displacements=np.array(h),
            curvatures=stack("curvature"),
            norms=stack("norm"),
            changes=stack("change"),
            nonlinearities=stack("nonlinearity"),
            fidelities=stack("fidelity"),
            loss=run.session.loss,
            gradient_norm=gradient_norm,
            cost=run.cost(),
            provenance=run.provenance(),
        )

    def _vectors(self, run: Measurement) -> dict[str, Tensor]:
        if self.vectors is not None:
            return dict(self.vectors)
        found = dict[str, Tensor]()
        for name in self.directions:
            if name == "random":
                found[name] = _gaussian(run, run.subject.config.seed)
            elif name == "gradient":
                found[name] = run.curvature.gradient.clone()
            elif name == "top":
                found[name] = _top_direction(run)
            else:
                raise ConfigError(
                    f'there is no direction {name!r}: give "random", "top" or "gradient", or '
                    "vectors of your own by name"
                )
        return found


def _gaussian(run: Measurement, seed: int) -> Tensor:
    return random_vector(run.session.layout, run.session.space, seed)


def _top_direction(run: Measurement) -> Tensor:
    start = _gaussian(run, run.subject.config.seed)
    state = LanczosState(run.curvature, start, TOP_STEPS, lambda k: _gaussian(run, k))
    while not state.done:
        state.step()
    top: Tensor = ritz_vectors(state, [-1])[0]
    return top
