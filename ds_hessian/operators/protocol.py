"""Linear operators: the interface of a Hessian to Krylov methods and analyses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.vectors import VectorSpace

COVERAGE = 3.0
"""Estimated errors of products and rounding count this many times in error bars: they are 0.3 to 3
times the truth (docs/numerics.md), and errors by truncation do not add up at random."""


@dataclass(frozen=True)
class Product:
    """One product `H v`, with estimates of its error.

    Attributes:
        vector: `H v`, `(n_local,)` fp32, in units of loss per squared parameter times those of v.
        norm: `|H v| / |v|`, over all ranks; of a product in 16 bits that is zero, what their
            rounding may hide.
        displacement: The length h of the step in parameter space to either side (not relative).
        nonlinearity: `|g(w+h) + g(w-h) - 2 g(w)| / |g(w+h) - g(w-h)|`; None where the latter is
            zero, and with forward differences, which have no g(w-h).
        noise: The part of `error` that comes from rounding; None if it was not measured.
        fidelity: Cosine between the realised displacement of the stored weights and v.
        error: Estimated relative error of `vector`; None if it cannot be estimated.
        trials: Displacements that were tried on the pilot and not used.
    """

    vector: Tensor
    norm: float
    displacement: float
    nonlinearity: float | None
    noise: float | None
    fidelity: float
    error: float | None
    trials: int


@dataclass(frozen=True)
class Form:
    """The curvature along a vector.

    Attributes:
        value: `v'Cv / v'v`, in loss per squared parameter.
        error: An estimate of its error.
        displacement: The length h of the step in parameter space to either side.
    """

    value: float
    error: float
    displacement: float


@dataclass
class OperatorCost:
    """The cost of an operator so far. Seconds are wall-clock, on this rank.

    Attributes:
        gradient_seconds: One gradient over all micro-batches, without what the first builds.
        product_seconds: All products, trials included.
        products: The number of products.
        gradient_evaluations: Gradients evaluated in products, in units of all micro-batches.
        trials: Pilot evaluations that were not accepted.
        choices: Discrete choices of the model (the experts of a token) that are held, all ranks'.
        flips: How many of them would have been others at the products' displacements: the sum over
            products.
        sides: Elements that are held on their sides of kinks, all ranks'.
        crossed: How many of them would have been on another side: the sum over products.
        kinks_crossed: Why displacements crossed kinks of the loss, empty where the settings say so;
            None if there were none, or all were held.
        one_sided: Products that a tolerance allowed to be one-sided differences.
        extrapolated: Products that a tolerance asked to be differences of fourth order.
        beyond_tolerance: Products whose error is larger than the tolerance allows.
    """

    gradient_seconds: float = 0.0
    product_seconds: float = 0.0
    products: int = 0
    gradient_evaluations: float = 0.0
    trials: int = 0
    choices: int = 0
    flips: float = 0.0
    sides: int = 0
    crossed: float = 0.0
    kinks_crossed: str | None = None
    one_sided: int = 0
    extrapolated: int = 0
    beyond_tolerance: int = 0

    def decided(self, figures: Sequence[float]) -> None:
        """Add what was held in a product: `Session.choices` of all ranks."""
        choices, flips, sides, crossed = figures
        self.choices, self.sides = int(choices), int(sides)
        self.flips += flips
        self.crossed += crossed

    @classmethod
    def total(cls, costs: Sequence[OperatorCost]) -> OperatorCost:
        """Return the cost of several operators of one job, which share its gradient and choices."""
        crossings = (c.kinks_crossed for c in costs if c.kinks_crossed is not None)
        return cls(
            gradient_seconds=sum(c.gradient_seconds for c in costs) / max(len(costs), 1),
            product_seconds=sum(c.product_seconds for c in costs),
            products=sum(c.products for c in costs),
            gradient_evaluations=sum(c.gradient_evaluations for c in costs),
            trials=sum(c.trials for c in costs),
            choices=max((c.choices for c in costs), default=0),
            flips=sum(c.flips for c in costs),
            sides=max((c.sides for c in costs), default=0),
            crossed=sum(c.crossed for c in costs),
            kinks_crossed=next(crossings, None),
            one_sided=sum(c.one_sided for c in costs),
            extrapolated=sum(c.extrapolated for c in costs),
            beyond_tolerance=sum(c.beyond_tolerance for c in costs),
        )


class LinearOperator(Protocol):
    """A symmetric linear operator on a sharded vector space."""

    space: VectorSpace

    def matvec(self, v: Tensor) -> Product:
        """Return the product with `v` `(n_local,)` of any nonzero length.

        Collective: every rank calls it with its shard of the same vector.
        """
        ...


@runtime_checkable
class Watched(Protocol):
    """An operator that makes better products where those so far are found to be poor."""

    def contradicted(self) -> None:
        """Learn that products were less symmetric than their estimated errors allow.

        Collective.
        """
        ...


@runtime_checkable
class Taught(Protocol):
    """An operator that begins with what an earlier one of the same run has learnt."""

    def lessons(self) -> dict[str, Any] | None:
        """Return what it has learnt, as JSON values; None for nothing."""
        ...

    def begin(self, lessons: dict[str, Any]) -> None:
        """Begin with the `lessons` of an operator at other weights of the run."""
        ...


class Curvature(LinearOperator, Protocol):
    """The curvature C of a job's loss at its weights, in one session, by finite differences.

    Attributes:
        scale: The session's `gradient_scale`.
    """

    scale: float

    @property
    def session(self) -> Session:
        """The measurement to which it belongs."""
        ...

    @property
    def gradient(self) -> Tensor:
        """The gradient of the loss at the weights, divided by `scale`, `(n_local,)` fp32."""
        ...

    @property
    def cost(self) -> OperatorCost:
        """The cost of its products so far."""
        ...

    @property
    def outputs(self) -> str | None:
        """The model's outputs and how the loss in them is known, in words; None for the Hessian,
        which does not depend on them.
        """
        ...

    @property
    def outputs_read(self) -> tuple[int, bool]:
        """Bytes of the largest outputs of a micro-batch on this rank, in fp32, 0 for the Hessian;
        and whether the loss in them is known.
        """
        ...

    @property
    def gradient_norm(self) -> float:
        """The norm of the gradient of the loss. Collective."""
        ...

    def product_at(self, v: Tensor, h: float) -> Product:
        """Return the product with `v` `(n_local,)` at displacement h, without trials or estimates
        of its error.

        Raises:
            NumericsError: v is zero or not finite, or the product is not finite.

        Collective.
        """
        ...

    def forms(self, v: Tensor, h: float, micro_batches: range | None = None) -> NDArray[np.float64]:
        """Return `v'C_i v / v'v` for micro-batch i of all ranks, `(G,)`; the mean is that of C.

        A micro-batch counts as G times its part in the mean loss.

        Args:
            v: `(n_local,)` fp32, of any length but zero.
            h: The displacement.
            micro_batches: Some of them; None for all.

        Raises:
            NumericsError: v is zero or not finite, or a form is not finite.

        Collective.
        """
        ...

    def along(self, v: Tensor) -> Form:
        """Return the curvature along `v` `(n_local,)` in the cheapest way, with its error.

        Raises:
            NumericsError: v is zero or not finite, or the form is not finite.

        Collective.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON values, what the next product needs beside weights and micro-batches."""
        ...

    def load_state_dict(self, figures: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of an operator of the same curvature."""
        ...
