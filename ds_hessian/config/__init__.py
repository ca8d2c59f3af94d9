"""The "hessian" section of a DeepSpeed configuration.

A plain pydantic model with the manners of DeepSpeed's own sections (nested, documented, unknown
keys refused), not a subclass of its `DeepSpeedConfigModel`: that one drops every key whose value
is "auto" before validation, which would accept `"num_matvecs": "auto"` in silence, and importing
it selects an accelerator. Nothing here needs DeepSpeed to be importable, let alone initialised.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from ds_hessian.config.messages import (
    SECTION,
    brief,
    leaves_of,
    problems,
    required,
    shown,
    suggestion,
)
from ds_hessian.config.reading import read_deepspeed, text_in, value_of
from ds_hessian.config.sections import (
    EXTRAPOLATED,
    LEAST_DISPLACEMENT,
    OUTPUT_MATRICES,
    BasisConfig,
    FiniteDifferenceConfig,
    OperatorName,
    OutputMatrix,
    ReorthogonalizationConfig,
    Section,
    names_of,
    path_text,
    sequence,
    setting,
)
from ds_hessian.errors import ConfigError

__all__ = [
    "EXTRAPOLATED",
    "LEAST_DISPLACEMENT",
    "OUTPUT_MATRICES",
    "SECTION",
    "BasisConfig",
    "FiniteDifferenceConfig",
    "HessianConfig",
    "OperatorName",
    "OutputMatrix",
    "ReorthogonalizationConfig",
    "describe",
    "leaves",
    "read_deepspeed",
    "schema",
    "text_in",
    "value_of",
]

_WINDOW = ReorthogonalizationConfig.model_fields["window"]
_WINDOWED = ("window", "selective")
"""Modes in which `window` has an effect."""


PATHS = ("basis.folder", "curvature_vectors", "resume")
"""Settings that name a place of the file system."""
OF_RANK_0 = ("output_path", "progress")
"""Settings that rank 0 alone follows."""


class HessianConfig(Section):
    """The settings of a spectrum; see `describe()` for all keys.

    Raises:
        ConfigError: a key is unknown, or a value is of the wrong type, impossible or
            contradictory; one line for each problem.
    """

    enabled: bool = setting(
        True,
        "A section that is present is on; `false` is as if it were absent.",
        "true or false",
    )
    interval: Annotated[int, Field(ge=0)] | Literal["log"] = setting(
        0,
        "Measure a spectrum every so many optimizer steps; `log`: after steps 1, 2, 3, 6, 10, 18, "
        "32, 56, 100, ..., four in each decade; 0: only at `steps` or on request.",
        'an integer, at least 0, or "log"',
    )
    steps: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(sequence)] = setting(
        (),
        "Further optimizer steps after which a spectrum is measured, whatever `interval` and "
        "`start_step` say. Step 0 is measured when `hessian.use(batches)` gives the micro-batches "
        "before training.",
        "a list of integers, at least 0",
    )
    sharpness_interval: int = setting(
        0,
        "Measure the sharpness every so many optimizer steps (with Adam also the preconditioned "
        "one; about five products once warm); 0: only on request.",
        "an integer, at least 0",
        ge=0,
    )
    curvature_interval: int = setting(
        0,
        "Measure the curvature along gradient and update (and `curvature_vectors`) every so many "
        "optimizer steps, that of the Gauss-Newton matrix unless `operator` names another than the "
        "Hessian: by forwards alone, about two gradients; 0: only on request.",
        "an integer, at least 0",
        ge=0,
    )
    curvature_vectors: Annotated[str, BeforeValidator(path_text), Field(min_length=1)] | None = (
        setting(
            None,
            "File of vectors, such as eigenvectors that were saved, along which "
            "`curvature_interval` measures too.",
            "a path that is not empty, or null",
        )
    )
    start_step: int = setting(
        0,
        "First optimizer step at which the intervals may measure.",
        "an integer, at least 0",
        ge=0,
    )
    operator: OperatorName = setting(
        "hessian",
        "The matrix that is measured: the Hessian H; `ggn`, its Gauss-Newton part G, the Fisher "
        "matrix of a cross entropy; `residual`, R = H - G; `fisher`, the empirical Fisher matrix "
        "of tokens.",
    )
    outputs: str | None = setting(
        None,
        "Name of the module that returns the model's outputs (logits), for the operators other "
        "than `hessian`, as `named_modules()` has it: that of the model itself is empty; null to "
        "find it.",
        "the name of a module, or null",
    )
    num_matvecs: int = setting(
        30,
        "Lanczos steps, which is Hessian-vector products, for each probe. More resolve more "
        "outliers.",
        "an integer, at least 1",
        ge=1,
    )
    num_probes: int = setting(
        1,
        "Random start vectors that are averaged; the cost is `num_probes` x `num_matvecs` "
        "products. More tighten the trace and the weights.",
        "an integer, at least 1",
        ge=1,
    )
    probe: Literal["gaussian", "rademacher"] = setting(
        "gaussian", "Distribution of the probes' entries."
    )
    seed: int = setting(
        0,
        "Seed of the probes; the same in every parallel layout.",
        "an integer, at least 0",
        ge=0,
    )
    num_micro_batches: int = setting(
        8,
        "Micro-batches for each data-parallel rank that define the loss whose Hessian is taken. "
        "The slice is fixed for the run, so that spectra of different steps compare.",
        "an integer, at least 1",
        ge=1,
    )
    finite_difference: FiniteDifferenceConfig = Field(
        default_factory=FiniteDifferenceConfig, description="How a product is made from gradients."
    )
    reorthogonalization: ReorthogonalizationConfig = Field(
        default_factory=ReorthogonalizationConfig, description="How the basis is kept orthogonal."
    )
    basis: BasisConfig = Field(
        default_factory=BasisConfig, description="How the Lanczos basis is stored."
    )
    dropout: bool = setting(
        False,
        "Drop as training does, by one fixed set of masks per micro-batch (`true`), or drop "
        "nothing (`false`).",
        "true or false",
    )
    batch_statistics: bool = setting(
        False,
        "Batch normalisation by the statistics of each micro-batch, as in training (`true`), or by "
        "the running ones, as in evaluation (`false`).",
        "true or false",
    )
    parameters: Annotated[str | list[str], BeforeValidator(names_of)] | None = setting(
        None,
        "Measure the block of these parameters alone, P H P: a regular expression that is searched "
        "in their names, or a list of names. Vectors still cover all parameters, zero outside.",
        "a regular expression, a list of names, or null",
    )
    sampling: bool = setting(
        False,
        "Also estimate what other micro-batches would change in extreme eigenvalues and trace; a "
        "product's time for each eigenvalue and each probe.",
        "true or false",
    )
    output_path: Annotated[str, BeforeValidator(path_text)] = setting(
        "hessian_out",
        "Folder for the results, one subfolder for each measured step; rank 0 writes.",
        "a path that is not empty",
        min_length=1,
    )
    resume: Annotated[str, BeforeValidator(path_text), Field(min_length=1)] | None = setting(
        None,
        "Folder, seen by all ranks, in which the state of a spectrum or another analysis is kept "
        "after each product; a job that was killed continues from it. Null keeps none.",
        "a path that is not empty, or null",
    )
    progress: bool = setting(True, "Show progress on rank 0.", "true or false")
    plot: bool = setting(
        True, "Draw a picture of each spectrum, and keep the page of the run.", "true or false"
    )

    def __init__(self, /, **settings: object) -> None:
        try:
            super().__init__(**{key: _plain(value) for key, value in settings.items()})
        except ValidationError as error:
            raise ConfigError("\n".join(problems(error, HessianConfig))) from None

    @property
    def scheduled(self) -> bool:
        """True if anything is measured automatically during training."""
        return any(self.intervals.values())

    def require_scheduled(self, by: str) -> None:
        """Raise if nothing is measured automatically.

        Args:
            by: What measures nothing else, as the message names it.

        Raises:
            ConfigError: names the settings of which one is needed.
        """
        if not self.scheduled:
            raise ConfigError(
                f"{SECTION}.interval, sharpness_interval or curvature_interval must be above 0 for "
                f"{by}, or {SECTION}.steps a list of steps: all are empty"
            )

    @property
    def intervals(self) -> dict[str, int | str | list[int]]:
        """The settings that measure automatically, by name."""
        return {
            "interval": self.interval,
            "sharpness_interval": self.sharpness_interval,
            "curvature_interval": self.curvature_interval,
            "steps": list(self.steps),
        }

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        lines = self.finite_difference.contradictions()
        lines += [
            f"{SECTION}.{name}: {shown(interval)} contradicts {SECTION}.enabled = false, which "
            "measures nothing: remove one of the two"
            for name, interval in self.intervals.items()
            if interval and not self.enabled
        ]
        if self.resume is not None and not self.enabled:
            lines.append(
                f"{SECTION}.resume: has no effect while {SECTION}.enabled is false, which measures "
                "nothing: remove one of the two"
            )
        if self.start_step and not any(
            value for name, value in self.intervals.items() if name != "steps"
        ):
            lines.append(
                f"{SECTION}.start_step: {self.start_step} has no effect while {SECTION}.interval "
                f"and the other intervals are 0 (only on request): set one of them above 0 or "
                "remove start_step"
            )
        if self.sampling and self.reorthogonalization.mode in ("window", "none"):
            lines.append(
                f"{SECTION}.sampling: needs Ritz vectors, for which "
                f'{SECTION}.reorthogonalization.mode = "{self.reorthogonalization.mode}" stores '
                'too little: set "full" or "selective", or leave sampling off'
            )
        found = self.reorthogonalization
        if found.mode not in _WINDOWED and found.window != _WINDOW.default:
            lines.append(
                f"{SECTION}.reorthogonalization.window: {found.window} has no effect in mode "
                f'"{found.mode}": set {" or ".join(map(shown, _WINDOWED))}, or remove window'
            )
        scheme, tolerance = self.finite_difference.scheme, self.finite_difference.tolerance
        if self.operator in OUTPUT_MATRICES and scheme != "central":
            given = f'scheme: "{scheme}"'
            if tolerance is not None:
                given = f'tolerance: {tolerance} (scheme "{scheme}")'
            lines.append(
                f"{SECTION}.finite_difference.{given} has no meaning for {SECTION}.operator = "
                f'"{self.operator}", which takes central differences of the outputs: remove one of '
                "the two"
            )
        if self.basis.folder is not None and self.basis.device != "disk":
            lines.append(
                f"{SECTION}.basis.folder: has no effect while {SECTION}.basis.device is "
                f'"{self.basis.device}": set "disk" or remove folder'
            )
        if lines:
            raise PydanticCustomError("contradiction", "{lines}", {"lines": "\n".join(lines)})
        return self

    @classmethod
    def parse(cls, section: Mapping[str, object]) -> HessianConfig:
        """Return the config of a "hessian" section.

        Raises:
            ConfigError: see the class.
        """
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"{SECTION}: must be an object of settings, got {shown(section)}: write {{}} for "
                "the defaults, or remove the section"
            )
        return cls(**{str(key): value for key, value in section.items()})

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any] | str | Path | None) -> HessianConfig | None:
        """Return the config in what `deepspeed.initialize` takes; None without a "hessian" section.

        Args:
            config: The dictionary, the path of the JSON (or HJSON) file, or its URL-safe base64
                text; None for no configuration at all.

        Raises:
            ConfigError: the file cannot be read, repeats a key, or holds a key that looks like a
                misspelt "hessian" (DeepSpeed itself ignores keys that it does not know); or the
                section is wrong.
        """
        if config is None:
            return None
        settings = config if isinstance(config, Mapping) else read_deepspeed(config)
        if SECTION in settings:
            return cls.parse(settings[SECTION])
        for key in settings:
            name = str(key).lower()
            # No key of DeepSpeed's contains the first letters.
            if SECTION[:4] in name or difflib.SequenceMatcher(None, name, SECTION).ratio() > 0.85:
                raise ConfigError(
                    f"{brief(str(key))}: unknown key of the DeepSpeed configuration; "
                    f'did you mean "{SECTION}"?'
                )
        return None

    def given(self) -> dict[str, object]:
        """Return the settings that all ranks must have alike, by dotted path.

        Folders may have other names on other nodes, and what rank 0 alone does is its own.
        """
        found = {}
        for path in leaves():
            value: Any = self
            for name in path.split("."):
                value = getattr(value, name)
            found[path] = "a path" if path in PATHS and value is not None else value
        return {path: value for path, value in found.items() if path not in OF_RANK_0}

    def with_overrides(self, **overrides: object) -> HessianConfig:
        """Return this config with some settings changed.

        Args:
            **overrides: Top-level keys; keys of a subsection by their own name
                (`displacement=1e-3`); or a subsection as a dictionary, whose other keys stay
                (`finite_difference={"displacement": 1e-3}`). A setting of this config that
                would have no effect with them, and is not among them, is dropped.

        Raises:
            ConfigError: an override is unknown or given twice, or the result is wrong.
        """
        section, given, lines = self.model_dump(), set[str](), list[str]()
        for name, value in _plain(overrides, levels=3).items():
            paths = [path for path in leaves() if path == name or path.endswith(f".{name}")]
            nested = section.get(name)
            if isinstance(nested, dict):
                if not isinstance(value, dict):
                    lines.append(f"{SECTION}.{name}: must be an object, got {shown(value)}")
                    continue
                nested.update(value)
                touched = [f"{name}.{key}" for key in value]
            elif name in section:
                section[name], touched = value, [name]
            elif len(paths) == 1:
                parent, leaf = paths[0].split(".")
                section[parent][leaf], touched = value, paths
            else:
                known = [*section, *(path.split(".")[-1] for path in leaves())]
                near = suggestion(name, known, [*section])
                lines.append(f"{brief(name)}: unknown override{near}")
                continue
            lines += [f"{SECTION}.{p}: overridden twice: keep one" for p in touched if p in given]
            given.update(touched)
        if lines:
            raise ConfigError("\n".join(lines))
        _drop_inert(section, given)
        return self.parse(section)


def _drop_inert(section: dict[str, Any], given: set[str]) -> None:
    """Reset settings without effect, unless they were given in the same call."""
    mode, device = section["reorthogonalization"]["mode"], section["basis"]["device"]
    if mode not in _WINDOWED and "reorthogonalization.window" not in given:
        section["reorthogonalization"]["window"] = _WINDOW.default
    if device != "disk" and "basis.folder" not in given:
        section["basis"]["folder"] = None
    _settle_scheme(section, given)


def _settle_scheme(section: dict[str, Any], given: set[str]) -> None:
    """Let scheme, tolerance and displacement follow whichever of them was given."""
    found, outputs = section["finite_difference"], section["operator"] in OUTPUT_MATRICES
    mine = {name for name in found if f"finite_difference.{name}" in given}
    if "tolerance" not in mine:
        fixed = "displacement" in mine and found["displacement"] != "auto"
        other = "scheme" in mine and found["scheme"] != "auto"
        if fixed or other or (outputs and "scheme" not in mine):
            found["tolerance"] = None
    elif found["tolerance"] is not None and "displacement" not in mine:
        found["displacement"] = "auto"
    if "scheme" not in mine:
        if found["tolerance"] is not None:
            found["scheme"] = "auto"
        elif outputs or found["scheme"] == "auto":
            found["scheme"] = "central"


def describe() -> str:
    """Return a markdown table of all keys: what each accepts, its default and its meaning."""
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for path, field in leaves().items():
        default = json.dumps(field.default)
        rows.append(f"| `{path}` | {required(field)} | `{default}` | {field.description} |")
    return "\n".join(rows) + "\n"


def schema() -> dict[str, Any]:
    """Return the JSON schema of a DeepSpeed configuration with its "hessian" section, for editors.

    Keys of DeepSpeed's own are left to DeepSpeed.
    """
    section = HessianConfig.model_json_schema(
        ref_template=f"#/properties/{SECTION}/$defs/{{model}}"
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed configuration of ds_hessian",
        "type": "object",
        "properties": {SECTION: section},
    }


def leaves() -> dict[str, FieldInfo]:
    """Return {dotted path below the section: field}, in order of definition."""
    return leaves_of(HessianConfig)


def _plain(value: Any, levels: int = 2) -> Any:
    """Return a value as JSON has it, which strict pydantic asks for: mappings and sections as
    dictionaries; numbers and arrays of numpy and torch, and ranges, as Python's own.

    Deeper than so many levels no setting is, and the value stays as it is, to be refused.
    """
    with suppress(Exception):  # of a tensor without values: it is refused as it is
        value = value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, Mapping) and levels:
        return {str(key): _plain(entry, levels - 1) for key, entry in value.items()}
    if isinstance(value, list | tuple | range) and levels:
        return [_plain(entry, levels - 1) for entry in value]
    return value
