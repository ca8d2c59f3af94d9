"""Influence of training examples on the loss of a query: one solve, and one gradient an example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import numpy as np

from ds_hessian import krylov
from ds_hessian.analyses.base import Analysis, transient
from ds_hessian.analyses.measurement import Subject
from ds_hessian.analyses.solve import Solve
from ds_hessian.backends.protocol import Backend, Objective, Session
from ds_hessian.config import HessianConfig
from ds_hessian.memory import Item
from ds_hessian.planning import Settings, Share
from ds_hessian.records import HessianInfluence


@dataclass(frozen=True, kw_only=True, eq=False)
class Influence(Analysis[HessianInfluence]):
    """The arguments of the influence of examples on a query.

    Attributes:
        dampings: Added to H, in loss per squared parameter.
        method: `cg` or `minres`.
        tolerance: Bound on the relative residual of the solve.
        num_matvecs: Products at most; None for the configuration's.
        preconditioner: As of `Solve`: `adam` or `ekfac`.
        query: Micro-batches whose mean loss is the target.
        examples: Micro-batches, each an example; they need not be as many as those of the query.
    """

    title = "influence"
    summary = "influence of training examples on the loss of a query"

    dampings: Sequence[float]
    method: krylov.SolveMethod = "minres"
    tolerance: float = Solve.tolerance
    num_matvecs: int | None = Solve.num_matvecs
    preconditioner: Literal["adam", "ekfac"] | None = None
    query: Objective | None = transient(None)
    examples: Objective | None = transient(None)

    @property
    def system(self) -> Solve:
        """The solve with the query's gradient, which is not known yet."""
        return Solve(
            dampings=self.dampings,
            method=self.method,
            tolerance=self.tolerance,
            num_matvecs=self.num_matvecs,
            preconditioner=self.preconditioner,
        )

    def products(self, config: HessianConfig) -> int:
        """Return the number of products of the solve."""
        return self.system.products(config)

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return the query's gradient, and what the solve holds."""
        return [share.vectors("gradient", 1), *self.system.memory(share, config)]

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return settings with which the solve needs less."""
        return self.system.with_less(config)

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """Fill in the number of products."""
        return replace(self, num_matvecs=self.system.prepared(backend, config).num_matvecs)

    def run(self, subject: Subject) -> HessianInfluence:
        """Measure. Collective."""
        assert self.query is not None and self.examples is not None
        space = subject.backend.space
        gradient = space.zeros()
        with _evaluating(subject, self.query) as session:
            session.add_gradient(gradient, range(session.num_micro_batches))
            assert session.gradient_scale is not None
            gradient *= session.gradient_scale
            loss = session.loss
        system = self.system.prepared(subject.backend, subject.config)
        found = replace(system, b=gradient).run(subject)
        dots = []
        with _evaluating(subject, self.examples) as session:
            count = session.num_micro_batches
            for i in range(count):
                gradient.zero_()
                session.add_gradient(gradient, range(i, i + 1))
                pairs = [(x, gradient) for x in found.x]
                dots.append(space.dots([*pairs, (gradient, gradient)]).numpy())
            assert session.gradient_scale is not None
            scale = session.gradient_scale * count
        *scores, squares = np.array(dots).T
        systems: dict[str, Any] = {
            f.name: getattr(found, f.name) for f in fields(krylov.DampedSystems)
        }
        return HessianInfluence(
            **systems,
            scores=scale * np.array(scores),
            errors=found.errors[:, None] * scale * np.sqrt(squares),
            query_loss=loss,
            cost=found.cost,
            provenance=found.provenance,
        )


@contextmanager
def _evaluating(subject: Subject, objective: Objective) -> Iterator[Session]:
    """Guard evaluations of another loss, at the weights."""
    with subject.backend.measuring(objective, subject.passes) as session:
        session.displace(None, 0.0)
        yield session
