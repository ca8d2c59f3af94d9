"""How close the Kronecker-factored curvatures of optimizers are to the Hessian of each weight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from ds_hessian.analyses.base import Analysis, transient
from ds_hessian.analyses.measurement import Subject, cost_of
from ds_hessian.backends.protocol import Backend, Session
from ds_hessian.backends.restricted import Choice, Restricted, RestrictedSession
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.krylov.kronecker import Comparison, Effort, compare
from ds_hessian.memory import FP32, FP64, Item, in_stage
from ds_hessian.operators import Curvature, OperatorCost
from ds_hessian.operators.kronecker import (
    KINDS,
    Adapter,
    Factors,
    KeptFactors,
    Kind,
    Layer,
    Settings,
    estimate,
    find_layers,
    foreseen_shapes,
    memory_of_factors,
    owners,
)
from ds_hessian.operators.kronecker.layers import named
from ds_hessian.operators.kronecker.planned import STAGE
from ds_hessian.operators.kronecker.spaces import LayerSpace
from ds_hessian.planning import Settings as PlanSettings
from ds_hessian.planning import Share, halves
from ds_hessian.records import HessianKronecker
from ds_hessian.records.kronecker import columns
from ds_hessian.vectors import random_vector

OF_BASIS, OF_PROBES = (5, 0), (3, 3)
"""Vectors in fp64 for each one of the basis, and for each probe, that the share on the diagonal
takes: the basis and its products in K's eigenbasis and three on the way to their sum; then the
first three of these, the probes and their products there, and their entries' products."""

PRODUCTS = "products"
"""The stage of the products with a layer's own block."""

OTHER = "its gradient is not that of one linear layer"


@dataclass(frozen=True, kw_only=True, eq=False)
class Kronecker(Analysis[HessianKronecker]):
    """The arguments of a comparison of Kronecker-factored curvatures with the true one.

    Attributes:
        kinds: Among `kfac`, `ekfac`, `shampoo`, `klshampoo`, `adam` and `optimizer`.
        layers: Names of weights, or a regular expression; None for those of all linear layers.
        basis: Products of each layer that are made from its gradient on.
        probes: Products of each layer with random vectors, at least 2.
        extremes: Products of each layer and kind for the largest eigenvalue of K^-1/2 C K^-1/2; 0
            leaves it out.
        damping: Damping of the solutions, in units of the largest eigenvalue in magnitude, beyond
            the smallest one where that is negative.
        draws: Times that labels are drawn from the model, for the Fisher matrix of a cross entropy;
            0 for the labels of the data, for the empirical one.
        layers_at_once: Layers whose factors are summed in one pass; None for all.
        shapes: Outputs and inputs of each layer.
        found: The layers, and why other weights have none.
        ranks: Ranks that share the factors.
        rank: The rank whose memory is planned; None for the one that owns most.
        adam: What Adam divides by.
        adapter: The optimizer of the job that keeps factors, or a function that reads them
            (`ds_hessian.operators.kronecker.Adapter`), for the kind `optimizer`.
    """

    title = "kronecker"
    summary = "K-FAC, EK-FAC, Shampoo, KL-Shampoo and Adam beside each weight's own Hessian"
    resumes = False
    operator_stage = PRODUCTS

    kinds: Sequence[Kind] = ("kfac", "ekfac", "shampoo", "klshampoo")
    layers: Choice | None = None
    basis: int = Effort.basis
    probes: int = Effort.probes
    extremes: int = Effort.extremes
    damping: float = Effort.damping
    draws: int = 0
    layers_at_once: int | None = None
    shapes: tuple[tuple[int, int], ...] | None = transient(None)
    found: tuple[list[Layer], dict[str, str]] | None = transient(None)
    ranks: int = transient(1)
    rank: int | None = transient(None)
    adam: Tensor | None = transient(None)
    adapter: Adapter | Optimizer | None = transient(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds or self.probes < 2 or self.basis < 1:
            raise ConfigError(
                f"kronecker needs kinds among {', '.join(KINDS)}, basis >= 1 and probes >= 2; "
                f"got kinds = {list(self.kinds)}, basis = {self.basis}, probes = {self.probes}"
            )

        if ("optimizer" in self.kinds) != (self.adapter is not None):
            raise ConfigError(
                'the kind "optimizer" needs an adapter (the optimizer), and an adapter that '
                "kind; give both or none"
            )

    @property
    def effort(self) -> Effort:
        """The products of one layer."""
        return Effort(self.basis, self.probes, self.extremes, self.damping)

    def products(self, config: HessianConfig) -> int:
        """Return the products of all layers."""
        if self.shapes is None:
            raise ConfigError(
                "how many products kronecker takes depends on the model: give --products"
            )
        return len(self.shapes) * self.effort.products(len(self.kinds))

    def share(self, share: Share) -> Share:
        """Return the share of the job that the largest layer is."""
        if not self.shapes:
            return share
        n = max(m * n for m, n in self.shapes)
        return share.within(
            n,
            min(n, share.n_local),
            share.vectors("gradient at the weights", int(self.draws > 0), stage=STAGE),
            share.vectors("Adam's divisor", int("adam" in self.kinds)),
        )

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return the sums of one pass, the factors, and the products of a layer."""
        shapes, tier = self.shapes or (), share.tier
        whose = zip(owners(shapes, self.ranks), shapes, strict=True)
        mine = [shape for owner, shape in whose if self.rank in (None, owner)]
        largest = max((m * n for m, n in mine), default=0)
        squares = max((m * m + n * n for m, n in mine), default=0)
        factors = memory_of_factors(
            shapes, tier, self.kinds, self.layers_at_once, self.ranks, self.rank
        )
        pairs, of_extremes = self.basis + self.probes, FP32 * 2 * self.extremes
        wide = max(a * self.basis + b * self.probes for a, b in (OF_BASIS, OF_PROBES))
        # Vectors one by one, and together in fp32 and in fp64.
        figures = max(
            FP32 * 2 * pairs + FP64 * wide,
            of_extremes + (FP32 + FP64 * 2) * self.extremes,
        )
        products = [
            Item("gradient of a layer, vector and product", tier, FP32 * 4 * largest),
            Item("products of a layer", tier, FP32 * 2 * pairs * largest),
            Item("products for an extreme", tier, of_extremes * largest, ("passes",)),
            Item("figures of a layer", tier, figures * largest, ("figures",)),
            Item("other eigenvectors", tier, FP64 * squares, ("figures",)),
        ]
        return [*factors, *in_stage(PRODUCTS, products)]

    def with_less(self, config: HessianConfig) -> list[PlanSettings]:
        """Return fewer layers in a pass, then fewer products of a layer."""
        at_once = self.layers_at_once or len(self.shapes or ())
        return [*halves("layers_at_once", at_once, 1), *halves("basis", self.basis, 4)]

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """Fill in the layers and their sizes; refuse what has none."""
        found = find_layers(backend, self.layers)
        adam = backend.adam().denominator if "adam" in self.kinds else None
        shapes, ranks = tuple(layer.shape for layer in found[0]), backend.space.world_size
        adapter = self.adapter
        if adapter is not None and not callable(adapter):
            adapter = KeptFactors(adapter, backend.weights())
        return replace(
            self,
            shapes=shapes,
            found=found,
            ranks=ranks,
            rank=backend.space.rank,
            adam=adam,
            adapter=adapter,
        )

    def foreseen(self, backend: Backend) -> Self:
        """Fill in the sizes of the layers, as far as this rank knows them."""
        if self.shapes is not None:
            return self
        space, shapes = backend.space, tuple(foreseen_shapes(backend, self.layers))
        return replace(self, shapes=shapes, ranks=space.world_size, rank=space.rank)

    def run(self, subject: Subject) -> HessianKronecker:
        """Measure. Collective."""
        began, backend = time.perf_counter(), subject.backend
        reduced = backend.space.all_reduces
        assert self.found is not None
        layers, left_out = self.found
        comparisons, spent = dict[str, Comparison](), list[OperatorCost]()
        outputs: str | None = None
        with backend.measuring(subject.objective, subject.passes) as session:
            assert self.adapter is None or callable(self.adapter)
            settings = Settings(
                self.kinds,
                self.layers_at_once,
                self.adam,
                self.adapter,
                self.draws,
                subject.config.outputs,
                named(self.layers),
            )
            factors = estimate(session, backend, layers, settings)
            fitting = {found.layer.name for found in factors}
            left_out = left_out | {x.name: OTHER for x in layers if x.name not in fitting}
            if not factors:
                raise UnsupportedError(f"no weight has Kronecker factors: {left_out}")
            for found in factors:
                compared, operator = self._compare(subject, session, found)
                comparisons[found.layer.name] = compared
                spent.append(operator.cost)
                outputs = operator.outputs
        kinds, total = tuple(self.kinds), OperatorCost.total(spent)
        return HessianKronecker(
            layers=tuple(comparisons),
            kinds=kinds,
            sizes=np.array([f.layer.shape for f in factors]),
            samples=np.array([[f.samples[k] for k in self.kinds] for f in factors]),
            mismatches=np.array([f.mismatch for f in factors]),
            draws=self.draws,
            damping=self.damping,
            ridge=self.effort.ridge,
            left_out=left_out,
            num_matvecs=total.products,
            cost=cost_of(total, backend.space, began, reduced),
            provenance=subject.provenance(total, outputs),
            **columns(comparisons, kinds),
        )

    def _compare(
        self, subject: Subject, session: Session, factors: Factors
    ) -> tuple[Comparison, Curvature]:
        layer, config = factors.layer, subject.config
        inside = Restricted(subject.backend, [layer.name])
        operator = subject.curvature(RestrictedSession(inside, session))

        def draw(number: int) -> Tensor:
            return random_vector(inside.layout, inside.space, config.seed, number, "gaussian")

        space = LayerSpace(inside, layer)
        gradient = space.gather(operator.gradient * operator.scale)
        gradient = None if gradient is None else gradient.double()
        forms = {str(kind): form for kind, form in factors.forms.items()}
        found = compare(
            operator, space, forms, self.kinds, gradient, factors.rounding, draw, self.effort
        )
        return found, operator
