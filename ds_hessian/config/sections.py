"""The subsections of the "hessian" section, and what its settings are declared with."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ds_hessian.config.messages import SECTION

OperatorName = Literal["hessian", "ggn", "residual", "fisher"]
"""The matrices that can be measured."""
OutputMatrix = Literal["ggn", "fisher"]
"""Those that are made of the model's outputs, and have differences of their own."""
OUTPUT_MATRICES = get_args(OutputMatrix)


def setting(default: object, description: str, requires: str = "", **constraints: Any) -> Any:
    """Return a documented field; `requires` says in words what its type and constraints accept."""
    extra: dict[str, Any] = {"requires": requires}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def path_text(value: object) -> object:
    """Return a path as the text that strict pydantic asks for."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def names_of(value: object) -> object:
    """Return a tuple of names as the list that strict pydantic asks for."""
    return list(value) if isinstance(value, tuple) else value


def sequence(value: object) -> object:
    """Return a list as the tuple that strict pydantic asks for."""
    return tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """A section whose keys are known and whose values are of their types, and stay."""

    # strict: "30" is not 30, true is not 1; an integer still passes as a float.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


LEAST_DISPLACEMENT = 2.0**-126
"""The least normal number of fp32, in which weights are displaced."""

EXTRAPOLATED = 1e-3
"""Below such a tolerance products may have to be differences of fourth order: bars of central ones
in fp32 are 1e-4 to 1e-3 of the largest eigenvalue (docs/numerics.md)."""


class FiniteDifferenceConfig(Section):
    """Settings of the finite differences that make a product `H v` from gradients."""

    scheme: Literal["central", "forward", "fourth_order", "auto"] = setting(
        "central",
        "Difference formula: central differences, two gradients a product; forward, one, for rough "
        "figures; fourth order, four, for the most exact ones in fp32; `auto`, implied by a "
        "`tolerance`, the cheapest of the three that reaches it, product by product.",
    )
    tolerance: Annotated[float, Field(gt=0, lt=1)] | None = setting(
        None,
        "Accuracy wanted of eigenvalues, as far as products limit it, relative to the largest in "
        "magnitude: products whose error is known to allow it take one gradient, the others two "
        "(below 1e-3 also four). Null takes `scheme` for all.",
        "a number between 0 and 1, or null",
    )
    displacement: (
        Literal["auto"] | Annotated[float, Field(ge=LEAST_DISPLACEMENT, allow_inf_nan=False)]
    ) = setting(
        "auto",
        "Length h of the step in parameter space to either side. With `auto` it is chosen for each "
        "product from its measured truncation and rounding errors.",
        '"auto" or a finite number, 2^-126 (1.2e-38) at least',
    )
    precision: Literal["auto", "model", "fp32"] = setting(
        "auto",
        "Arithmetic of the gradients: that of the model, as it trains; `fp32`, on fp32 copies of "
        "the master weights with autocast and TF32 off; or `auto`, that is `fp32` for a model in "
        "16 bits where the host can and the memory allows, and `model` otherwise.",
    )

    kinks: Literal["held", "crossed"] = setting(
        "held",
        "Kinks of the model and its loss (ReLU, max pooling, ...): each element stays on the side "
        "on which it is at the weights (`held`), so that products are of the smooth piece of the "
        "loss, which is the Hessian there; or passes them (`crossed`), so that products are of the "
        "function itself, and differ by the kinks that are passed.",
    )

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, settings: Any) -> Any:
        """Complete a tolerance by the scheme that it needs."""
        if isinstance(settings, dict) and settings.get("tolerance") is not None:
            return {"scheme": "auto", **settings}
        return settings

    @property
    def formula(self) -> Literal["central", "forward", "fourth_order"]:
        """The difference formula of trials, and of products that no tolerance shortens."""
        return "central" if self.scheme == "auto" else self.scheme

    @property
    def largest_formula(self) -> Literal["central", "forward", "fourth_order"]:
        """The formula of the most gradients that products may take."""
        tight = self.tolerance is not None and self.tolerance < EXTRAPOLATED
        return "fourth_order" if tight else self.formula

    def contradictions(self) -> list[str]:
        """Return a line for each setting that excludes another one."""
        path, lines = f"{SECTION}.finite_difference", list[str]()
        if self.tolerance is not None and self.scheme != "auto":
            lines.append(
                f'{path}.tolerance: {self.tolerance} contradicts {path}.scheme = "{self.scheme}": '
                'set "auto", or remove one of the two'
            )
        if self.tolerance is None and self.scheme == "auto":
            lines.append(f'{path}.scheme: "auto" needs {path}.tolerance: set it, or "central"')
        if self.tolerance is not None and self.displacement != "auto":
            lines.append(
                f"{path}.tolerance: {self.tolerance} contradicts {path}.displacement = "
                f"{self.displacement}: a tolerance chooses the displacement, remove one of the two"
            )
        return lines


class ReorthogonalizationConfig(Section):
    """Settings of Lanczos' reorthogonalisation."""

    mode: Literal["full", "selective", "window", "none"] = setting(
        "full",
        "The vectors to which each step is made orthogonal: the whole basis (no ghosts of "
        "outliers); the last two vectors and converged Ritz vectors (no ghosts either, and the "
        "basis is rarely read); the last `window` vectors, or the last two (ghosts, but no basis "
        "to store: for densities).",
    )
    window: int = setting(
        10,
        "Vectors kept in mode `window`; converged Ritz vectors kept in mode `selective`.",
        "an integer, at least 2",
        ge=2,
    )


class BasisConfig(Section):
    """Storage of the Lanczos basis, `num_matvecs` vectors."""

    dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "Storage type of the basis; `bf16` halves it, and its rounding is in the error bars.",
    )
    device: Literal["accelerator", "host", "disk"] = setting(
        "accelerator",
        "Memory of the basis: that of the parameters; (pinned) host memory; or a nameless file in "
        "`folder`, which vanishes with the process. In mode `none` a spectrum stores no basis, but "
        "other analyses do.",
    )
    folder: Annotated[str, BeforeValidator(path_text), Field(min_length=1)] | None = setting(
        None,
        "Folder of the basis on `disk`; null for the system's temporary folder.",
        "a path that is not empty, or null",
    )
