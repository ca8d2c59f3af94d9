"""Solutions of (H + damping I) x = b, for several dampings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from torch import Tensor

from ds_hessian import krylov
from ds_hessian.analyses.base import Journaled, transient
from ds_hessian.analyses.measurement import Measurement
from ds_hessian.backends.protocol import Backend
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.krylov import LanczosOptions
from ds_hessian.memory import Item, in_stage
from ds_hessian.operators import LinearOperator, Metric
from ds_hessian.operators.kronecker import (
    KroneckerMetric,
    Layer,
    find_layers,
    foreseen_shapes,
    memory_of_factors,
)
from ds_hessian.planning import (
    ELSEWHERE,
    FEWEST,
    Settings,
    Share,
    halves,
    memory_of_lanczos,
    storage_of,
)
from ds_hessian.planning.basis import GRAM_SCHMIDT, PRODUCT, RESIDUALS, SPACE
from ds_hessian.records import HessianSolution


@dataclass(frozen=True, kw_only=True, eq=False)
class Solve(Journaled[HessianSolution]):
    """The arguments of damped systems with one right-hand side.

    Attributes:
        dampings: Added to H, in loss per squared parameter.
        method: `cg`, which stops at negative curvature and says so, or `minres`.
        tolerance: Bound on the relative residual.
        num_matvecs: Products at most for a Krylov space, which is stored; None for the
            configuration's.
        preconditioner: `adam` for what Adam divides by, `sqrt(v) + eps` (bias-corrected); `ekfac`
            for Kronecker factors of the linear layers (`ds_hessian.operators.kronecker.metric`);
            `diagonal` for one of the caller's own. With any, one Krylov space for each damping.
        b: Right-hand side `(n_local,)`.
        diagonal: Positive diagonal of the preconditioner `(n_local,)`.
        shapes: Outputs and inputs of the layers that have Kronecker factors.
        found: These layers.
        ranks: Ranks that share the factors.
    """

    title = "solve"
    summary = "solutions of (H + damping I) x = b"
    record = HessianSolution

    dampings: Sequence[float]
    method: krylov.SolveMethod = "cg"
    tolerance: float = 1e-3
    num_matvecs: int | None = None
    preconditioner: Literal["adam", "ekfac", "diagonal"] | None = None
    shapes: tuple[tuple[int, int], ...] = transient(())
    found: Sequence[Layer] = transient(())
    ranks: int = transient(1)
    rank: int | None = transient(None)
    b: Tensor | None = transient(None)
    diagonal: Tensor | None = transient(None)

    def products(self, config: HessianConfig) -> int:
        """Return the products of the Krylov space, and one for each damping's residual."""
        return self._space(config) + len(self.dampings)

    def _space(self, config: HessianConfig) -> int:
        return config.num_matvecs if self.num_matvecs is None else self.num_matvecs

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return Krylov space and solutions, without `b` and a diagonal of the caller's own."""
        d, steps = len(self.dampings), min(self._space(config), share.n)
        options = LanczosOptions(storage=storage_of(config))
        space = memory_of_lanczos(share.n_local, share.tier, steps, options)
        results = [share.vectors(f"solutions, {d}", d)]
        always = [share.vectors("preconditioner", self.preconditioner in ("adam", "ekfac"))]
        always += memory_of_factors(
            self.shapes, share.tier, ("kfac", "ekfac"), ranks=self.ranks, rank=self.rank
        )
        if self.preconditioner is None:
            space.append(share.vectors("solutions being formed", d, GRAM_SCHMIDT))
        else:
            space += [
                share.vectors("right-hand side, scaled", 1),
                share.vectors("vector, scaled", 1, PRODUCT),
                share.vectors("solutions so far", max(d - 1, 0)),
                share.vectors("solution being formed", 1, GRAM_SCHMIDT),
            ]
            always.append(share.vectors("root of the preconditioner", 1))
        stages = [*in_stage(SPACE, space), *in_stage(RESIDUALS, results)]
        return [*always, *stages, share.returned(d)]

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return another basis, or fewer products."""
        return [*ELSEWHERE, *halves("num_matvecs", self._space(config), FEWEST)]

    def settings(self) -> dict[str, object]:
        """Return the arguments as JSON values; dampings become plain numbers."""
        return {**super().settings(), "dampings": list(map(float, self.dampings))}

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """Fill in the number of products, Adam's diagonal and the layers with factors."""
        own, kind = self.diagonal, self.preconditioner
        if kind == "diagonal" and own is None:
            raise ConfigError(f'the preconditioner is a diagonal, "adam" or "ekfac", got {kind!r}')
        if kind == "adam":
            own = backend.adam()[0]
        found = find_layers(backend, None)[0] if kind == "ekfac" else ()
        return replace(
            self,
            num_matvecs=self._space(config),
            diagonal=own,
            shapes=tuple(layer.shape for layer in found),
            found=found,
            ranks=backend.space.world_size,
            rank=backend.space.rank,
        )

    def foreseen(self, backend: Backend) -> Self:
        """Fill in the sizes of the layers with factors, as far as this rank knows them."""
        if self.shapes or self.preconditioner != "ekfac":
            return self
        space, shapes = backend.space, tuple(foreseen_shapes(backend, None))
        return replace(self, shapes=shapes, ranks=space.world_size, rank=space.rank)

    def figures(self, run: Measurement, operator: LinearOperator) -> dict[str, object]:
        """Compute the solutions."""
        config, draw = run.subject.config, run.subject.draw
        assert self.b is not None
        metric: Tensor | Metric | None = self.diagonal
        if self.preconditioner == "ekfac":
            metric = KroneckerMetric(run.session, run.subject.backend, self.found)
        limits = self.method, self.tolerance, self._space(config), metric, storage_of(config)
        return vars(krylov.solve(operator, self.b, self.dampings, draw, *limits))
