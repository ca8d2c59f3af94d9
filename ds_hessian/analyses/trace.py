"""The trace with its standard error, and of diagonal blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from ds_hessian import krylov
from ds_hessian.analyses.base import Blocks, Journaled, partition, transient
from ds_hessian.analyses.measurement import Measurement
from ds_hessian.backends.protocol import Backend
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.krylov.traces import Method
from ds_hessian.memory import Item
from ds_hessian.operators import LinearOperator
from ds_hessian.planning import (
    ELSEWHERE,
    FEWEST,
    Settings,
    Share,
    halves,
    memory_of_basis,
    storage_of,
)
from ds_hessian.records import HessianTrace

METHODS: dict[str, Callable[..., krylov.TraceEstimate]] = {
    "hutch++": krylov.hutch_plus_plus,
    "xtrace": krylov.xtrace,
}
"""Methods that store a basis."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace(Journaled[HessianTrace]):
    """The arguments of a trace.

    Attributes:
        method: `hutchinson` stores one vector, `hutch++` num_matvecs / 3, `xtrace` half.
        num_matvecs: Products; None for the configuration's.
        blocks: Blocks whose own traces come from the same products (Hutchinson only): `layers`,
            `parameters`, or {block: regular expression of names}.
    """

    title = "trace"
    summary = "the trace, and those of diagonal blocks"
    record = HessianTrace

    method: Method = "hutchinson"
    num_matvecs: int | None = None
    blocks: Blocks | None = transient(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method != "hutchinson" and self.blocks is not None:
            raise ConfigError(
                f'method must be "hutchinson" (the only one with blocks), "hutch++" or "xtrace", '
                f"got {self.method!r} with blocks = {self.blocks!r}"
            )

    def products(self, config: HessianConfig) -> int:
        """Return its own number of products, or the configuration's."""
        return config.num_matvecs if self.num_matvecs is None else self.num_matvecs

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return a probe, and the basis of the methods that have one."""
        products = self.products(config)
        rows = {"hutchinson": 0, "hutch++": products // 3, "xtrace": products // 2}[self.method]
        rows = min(rows, share.n)
        basis = memory_of_basis(share.n_local, share.tier, rows, storage_of(config))
        return [*basis, share.vectors("probe", 1)]

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return another basis, fewer products, or Hutchinson's method, which has no basis."""
        if self.method == "hutchinson":
            return []
        fewer = halves("num_matvecs", self.products(config), FEWEST)
        return [*ELSEWHERE, *fewer, {"method": "hutchinson"}]

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """Fill in the number of products."""
        return replace(self, num_matvecs=self.products(config))

    def figures(self, run: Measurement, operator: LinearOperator) -> dict[str, object]:
        """Compute the estimate."""
        subject = run.subject
        products = self.products(subject.config)
        if self.method == "hutchinson":
            blocks = None if self.blocks is None else partition(subject.backend, self.blocks)
            return vars(krylov.hutchinson(operator, subject.draw, products, blocks))
        storage = storage_of(subject.config)
        return vars(METHODS[self.method](operator, subject.draw, products, storage))
