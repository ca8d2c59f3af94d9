"""Top eigenvalues of H and of Adam's preconditioned H, and curvatures along the training
trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from ds_hessian import krylov
from ds_hessian.analyses.base import Draw, Journaled, transient
from ds_hessian.analyses.eigenpairs import Eigenpairs, memory_of_eigenpairs
from ds_hessian.analyses.measurement import Measurement
from ds_hessian.backends.protocol import Backend
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError, NumericsError, UnsupportedError
from ds_hessian.memory import Item, in_stage
from ds_hessian.operators import Congruent, LinearOperator
from ds_hessian.planning import ELSEWHERE, Settings, Share, storage_of
from ds_hessian.planning.basis import GRAM_SCHMIDT, PRODUCT, RESIDUALS, SPACE
from ds_hessian.records import Estimate, HessianSharpness
from ds_hessian.resume import Journal


class Followed:
    """The eigenvectors that one measurement ended with and the next one starts from.

    Attributes:
        vectors: `(n_local,)` each; that of H, and that of the preconditioned H.
    """

    def __init__(self) -> None:
        self.vectors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Sharpness(Journaled[HessianSharpness]):
    """The arguments of a sharpness measurement.

    Attributes:
        preconditioned: Also of `D^-1/2 H D^-1/2`, with Adam's D, and along Adam's last step; None
            for where the optimizer is an Adam that has made a step.
        tolerance: Bound on the residuals, relative to the eigenvalue, whose own error is quadratic
            in it for an eigenvalue that stands alone.
        max_matvecs: Products at most, beyond those of the first measurement's start.
        warm: Whether there is an earlier measurement to start from.
        followed: The earlier measurement's eigenvectors, which this one replaces.
        adam: What Adam divides by, and its last step.
    """

    title = "sharpness"
    summary = "top eigenvalues along a training, also as Adam sees them"
    record = HessianSharpness

    preconditioned: bool | None = True
    tolerance: float = 0.05
    max_matvecs: int = 5
    warm: bool = transient(False)
    followed: Followed | None = transient(None)
    adam: tuple[Tensor, Tensor] | None = transient(None)

    @property
    def problems(self) -> int:
        """The number of eigenvalue problems: H, and the preconditioned H."""
        return 1 if self.preconditioned is False else 2

    def products(self, config: HessianConfig) -> int:
        """Return the number of products of a measurement that starts from an earlier one."""
        return self.max_matvecs

    def vectors_kept(self, config: HessianConfig) -> int:
        """Return all products, with the starts or the search for them."""
        return self.max_matvecs + self.problems * (1 if self.warm else _SEARCH.products(config))

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return the subspace and its refinement; unless warm, also the starts and their search."""
        problems, m = self.problems, self.max_matvecs
        given = share.vectors("Adam's divisor and step", 2 * (problems - 1))
        subspace = [
            # The last product is counted with the products.
            share.vectors(f"vectors and products, {m}", 2 * m - 1),
            share.vectors("direction of the last one", 1, PRODUCT),
            share.vectors(
                "Ritz vectors and residuals", 2 * problems + (problems > 1), GRAM_SCHMIDT
            ),
        ]
        if self.warm:
            return [given, *subspace]
        search = memory_of_eigenpairs(share, config, _SEARCH.k, _SEARCH.size)
        if problems > 1:  # in the products of the second problem
            scaled = [
                share.vectors("root of the metric", 1),
                share.vectors("vector, scaled", 1, PRODUCT),
            ]
            search += [item for stage in (SPACE, RESIDUALS) for item in in_stage(stage, scaled)]
        starts = share.vectors(f"starts, kept for the next, {problems}", problems)
        return [given, starts, *search, *in_stage("subspace", subspace)]

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return another basis, then only H itself."""
        without: Settings = {"dtype": "bf16", "preconditioned": False}
        return [*ELSEWHERE, without, {**without, "device": "host", "max_matvecs": 3}]

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """Fill in Adam's state, and whether there is a start."""
        adam = None
        if self.preconditioned is None:
            try:
                backend.adam()
                preconditioned = True
            except (ConfigError, UnsupportedError):  # the same on every rank
                preconditioned = False
        else:
            preconditioned = self.preconditioned
        least = 4 if preconditioned else 2
        if self.max_matvecs < least:
            raise ConfigError(f"max_matvecs must be at least {least} here, got {self.max_matvecs}")
        adam = backend.adam() if preconditioned else None
        have = self.followed is not None and len(self.followed.vectors) > preconditioned
        # Some ranks may have a loss of other numbers, or a measurement that has failed late.
        warm = backend.space.everywhere(have)
        return replace(self, preconditioned=preconditioned, adam=adam, warm=warm)

    def figures(self, run: Measurement, operator: LinearOperator) -> dict[str, object]:
        """Compute the estimates, and the curvatures along the gradient and Adam's step."""
        space, hessian, adam = run.session.space, run.curvature, self.adam
        if not space.norm(hessian.gradient):
            raise NumericsError(
                "the gradient is zero, so there is no curvature along it: measure the spectrum "
                "instead"
            )
        metrics = [None] if adam is None else [None, adam[0]]
        starts = self._known(operator)
        warm = bool(starts)
        if not warm:
            search = replace(_SEARCH, tolerance=self.tolerance)
            config, draw = run.subject.config, run.subject.draw
            starts = [_top(operator, draw, metric, search, config) for metric in metrics]
        subspace = krylov.Subspace(operator)
        along = subspace.add(hessian.gradient)
        update_norm = None if adam is None else space.norm(adam[1])
        step = subspace.add(adam[1]) if adam is not None and update_norm else (None, None)
        for _, start in zip(metrics, starts, strict=False):
            subspace.add(start)
        pairs = krylov.refine(subspace, metrics, self.tolerance, self.max_matvecs)
        if self.followed is not None:
            self.followed.vectors = tuple(pair.x for pair in pairs)
        estimates = [Estimate(pair.value, pair.error) for pair in pairs]
        return {
            "eigenvalue_max": estimates[0],
            "preconditioned": None if adam is None else estimates[1],
            "converged": tuple(pair.converged(self.tolerance) for pair in pairs),
            "limited": tuple(pair.limited(self.tolerance) for pair in pairs),
            "gradient_curvature": along[0],
            "gradient_curvature_error": along[1],
            "update_curvature": step[0],
            "update_curvature_error": step[1],
            "update_norm": update_norm,
            "gradient_norm": hessian.gradient_norm,
            "loss": run.session.loss,
            "warm": warm,
            "num_matvecs": hessian.cost.products,
        }

    def _known(self, operator: LinearOperator) -> Sequence[Tensor]:
        """Return starts from an earlier measurement: this process's, or an interrupted one's."""
        known = self.followed.vectors if self.warm and self.followed is not None else ()
        return operator.starts(known) if isinstance(operator, Journal) else known


_SEARCH = Eigenpairs(k=1, which="LA")
"""The search for a first start."""


def _top(
    operator: LinearOperator,
    draw: Draw,
    metric: Tensor | None,
    search: Eigenpairs,
    config: HessianConfig,
) -> Tensor:
    """Return a first x, from Lanczos."""
    scale = None if metric is None else metric.rsqrt()
    view = operator if scale is None else Congruent(operator, scale)
    found = krylov.eigenpairs(
        view,
        draw(0),
        search.k,
        draw,
        search.which,
        search.tolerance,
        search.max_matvecs,
        storage=storage_of(config),
    )
    return found.vectors[0] if scale is None else found.vectors[0] * scale
