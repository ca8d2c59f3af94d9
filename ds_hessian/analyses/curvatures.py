"""Curvatures along the gradient, Adam's last step and vectors: cheap enough for every 100 steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from torch import Tensor

from ds_hessian.analyses.base import Analysis, transient
from ds_hessian.analyses.measurement import Measurement, Subject
from ds_hessian.backends.protocol import Backend
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.memory import Item
from ds_hessian.planning import Share
from ds_hessian.records.curvatures import HessianCurvatures
from ds_hessian.vector_files import load_vectors

NAMES = ("gradient", "update")


@dataclass(frozen=True, kw_only=True, eq=False)
class Curvatures(Analysis[HessianCurvatures]):
    """The arguments of curvatures along directions.

    Attributes:
        directions: Among `gradient` and `update` (Adam's last step without its weight decay); None
            for both, without `update` where there is no Adam that has made a step.
        vectors: Directions `(n_local,)` of the caller's own by name, or the path of a file that
            `save_vectors` or `save` wrote.
    """

    title = "curvatures"
    summary = "curvatures along gradient, update and vectors, by forwards alone for G"
    resumes = False

    directions: Sequence[str] | None = None
    vectors: Mapping[str, Tensor] | str | Path | None = transient(None)
    update: Tensor | None = transient(None)

    def products(self, config: HessianConfig) -> int:
        """Return one for each direction; vectors of one's own are not known before."""
        return len(NAMES if self.directions is None else self.directions)

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return the update; the gradient is the operator's."""
        return [share.vectors("Adam's divisor and step", 2)]

    def given(self) -> dict[str, object]:
        """Return its arguments; a file may have another path on each rank."""
        given = super().given()
        return {**given, "vectors": "a path"} if isinstance(self.vectors, str | Path) else given

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """Fill in Adam's step, and the vectors of a file.

        Raises:
            ConfigError: there is no such direction, or no Adam that has made a step.
        """
        names = NAMES if self.directions is None else tuple(self.directions)
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            raise ConfigError(
                f"there is no direction {unknown[0]!r}: give {' or '.join(map(repr, NAMES))}, and "
                "vectors of your own as vectors="
            )
        update = None
        if "update" in names:
            try:
                update = backend.adam().last_step
                if not backend.space.norm(update):
                    raise ConfigError(
                        "Adam's last step was of length zero, and has no curvature along it: make "
                        "one with a learning rate above 0 first"
                    )
            except (ConfigError, UnsupportedError):  # the same on every rank
                if self.directions is not None:
                    raise
                names = ("gradient",)
        vectors = self.vectors
        if isinstance(vectors, (str, Path)):
            loaded = load_vectors(backend, Path(vectors))
            vectors = {f"vector {i + 1}": v for i, v in enumerate(loaded)}
        return replace(self, directions=names, vectors=vectors, update=update)

    def run(self, subject: Subject) -> HessianCurvatures:
        """Measure. Collective."""
        with subject.open() as (run, _):
            found, space = self._vectors(run), run.session.space
            curvatures = [run.curvature.along(v) for v in found.values()]
            norms = [space.norm(v) for v in found.values()]
            gradient_norm = run.curvature.gradient_norm
        return HessianCurvatures(
            directions=tuple(found),
            values=np.array([c.value for c in curvatures], dtype=np.float64),
            errors=np.array([c.error for c in curvatures], dtype=np.float64),
            norms=np.array(norms, dtype=np.float64),
            displacements=np.array([c.displacement for c in curvatures], dtype=np.float64),
            gradient_norm=gradient_norm,
            loss=run.session.loss,
            cost=run.cost(),
            provenance=run.provenance(),
        )

    def _vectors(self, run: Measurement) -> dict[str, Tensor]:
        assert self.directions is not None and not isinstance(self.vectors, (str, Path))
        given: dict[str, Tensor | None] = {
            "gradient": run.curvature.gradient,
            "update": self.update,
        }
        found = {name: given[name] for name in self.directions}
        return {n: v for n, v in {**found, **(self.vectors or {})}.items() if v is not None}
