"""The cost of a result, and what it was measured on."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from ds_hessian.config import OperatorName
from ds_hessian.optimizer import Optimizer

SCHEMA_VERSION = 1
"""Version of the stored form; raised with every change that an older reader would misread."""


def passes_in_words(precision: str, why: str) -> str:
    """Return how the passes ran and why; nothing where the settings have named it."""
    mode = "in fp32" if precision == "fp32" else "as training runs them"
    return f"{mode}: {why}" if why else ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a measurement on this rank; seconds are wall-clock time.

    Attributes:
        seconds_total: The whole measurement.
        seconds_per_product: Mean of all products, trials included.
        seconds_per_gradient: One gradient over the same micro-batches, taken at the weights in the
            same run: the base that the other figures compare with.
        products: Hessian-vector products.
        gradient_evaluations: Gradients spent in products, in units of the whole slice of
            micro-batches; a trial counts for the one micro-batch that it needs.
        trials: Pilot evaluations that were thrown away.
        one_sided: Products that were one-sided differences, as a tolerance allowed.
        extrapolated: Products that were differences of fourth order, as a tolerance asked.
        beyond_tolerance: Products whose error was larger than the tolerance allows.
        all_reduces: All-reduces of the vector space (those of the gradients are not counted).
        peak_memory_bytes: Peak over the training baseline; None if it was not measured.
    """

    seconds_total: float
    seconds_per_product: float
    seconds_per_gradient: float
    products: int
    gradient_evaluations: float
    trials: int
    all_reduces: int
    peak_memory_bytes: int | None = None
    one_sided: int = 0
    extrapolated: int = 0
    beyond_tolerance: int = 0

    @property
    def gradients_per_product(self) -> float:
        """The gradient evaluations for each product, as counted."""
        return self.gradient_evaluations / max(self.products, 1)

    @property
    def product_time_in_gradients(self) -> float | None:
        """The seconds of a product over those of a gradient; None if no gradient was timed."""
        if self.seconds_per_gradient <= 0:
            return None
        return self.seconds_per_product / self.seconds_per_gradient

    @property
    def lanczos_overhead(self) -> float | None:
        """The time outside of the products and the base gradient, as a share of the products'."""
        products = self.products * self.seconds_per_product
        if products <= 0:
            return None
        return (self.seconds_total - products - self.seconds_per_gradient) / products


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The model, the data and the settings of a measurement: enough to repeat it.

    Attributes:
        step: Optimizer steps made before the measurement.
        seed: Seed of the probes.
        probe: Distribution of the probes.
        displacement: The setting; the values used are in the record's `displacements`.
        scheme: Finite-difference formula.
        tolerance: The accuracy wanted of eigenvalues, relative to the largest; None where products
            were as exact as the formula lets them be.
        precision: Arithmetic of the gradients: `"model"` or `"fp32"`.
        precision_reason: Why it was chosen; empty where the settings name it, or the model is not
            in 16 bits.
        dropout: Whether training's dropout was on, with fixed masks.
        batch_statistics: Whether layers normalised by statistics of the micro-batch.
        held_choices: Discrete choices of the model (of experts for a token, by a router) that were
            held as they are at the weights, all ranks'; 0 where it makes none.
        flipped_choices: How many of them would have been others at the displacement of a product,
            on average.
        kinks: What became of kinks of the loss (ReLU, max pooling, ...): `"held"`, each element on
            the side on which it is at the weights, or `"crossed"`; empty where it has none near.
        kinks_reason: Why they were crossed; empty where the settings say so.
        held_sides: Elements that were held on their sides of kinks, all ranks'.
        crossed_sides: How many of them would have been on another side at the displacement of a
            product, on average.
        parameters: Names of the parameters whose block was measured; empty for all.
        num_micro_batches: Micro-batches of each data-parallel rank.
        layout: How the model was split, for people: "ZeRO-3, 2 ranks".
        world_size: Number of ranks.
        model_dtype: Type of the weights.
        data_fingerprint: Hash of the micro-batches.
        operator: The matrix that was measured.
        outputs: The module of the model's outputs and the loss in them, for the operators of these.
        versions: Versions of python, torch, deepspeed and other packages.
        optimizer: The job's optimizer; None where it is not known.
        ds_hessian_version: Version of this package.
        created: When the record was made, ISO 8601, UTC.
        schema_version: Version of the stored form.
    """

    step: int
    seed: int
    probe: str
    displacement: float | Literal["auto"]
    scheme: str
    precision: str
    tolerance: float | None = None
    precision_reason: str = ""
    dropout: bool = False
    parameters: tuple[str, ...] = ()
    batch_statistics: bool = False
    held_choices: int = 0
    flipped_choices: float = 0.0
    kinks: str = ""
    kinks_reason: str = ""
    held_sides: int = 0
    crossed_sides: float = 0.0
    num_micro_batches: int
    layout: str
    world_size: int
    model_dtype: str
    data_fingerprint: str
    operator: OperatorName = "hessian"
    outputs: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    ds_hessian_version: str
    optimizer: Optimizer | None = None
    created: str = field(default_factory=_now)
    schema_version: int = SCHEMA_VERSION

    @property
    def arithmetic(self) -> str:
        """The type of the weights, and that of the passes where it is another, in words."""
        wide = self.precision == "fp32" and self.model_dtype != "float32"
        return f"{self.model_dtype}, passes in fp32" if wide else self.model_dtype

    @property
    def passes(self) -> str:
        """How the passes ran and why, in words; empty where the settings name it."""
        return passes_in_words(self.precision, self.precision_reason)
