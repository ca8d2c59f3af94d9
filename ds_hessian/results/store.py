"""A spectrum on disk: `spectrum.json` for people and tools, `spectrum.npz` for the arrays.

The JSON holds every scalar, what follows from the arrays, and the SHA-256 of the NPZ, so that a
truncated file or two files of different spectra are noticed. Scalars survive exactly (Python
writes the shortest decimal that reads back as the same double).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from ds_hessian.errors import HessianError, ResultError
from ds_hessian.results.estimate import Estimate
from ds_hessian.results.provenance import SCHEMA_VERSION, Cost, Provenance
from ds_hessian.results.spectrum import HessianSpectrum

JSON_NAME = "spectrum.json"
NPZ_NAME = "spectrum.npz"


def save(spectrum: HessianSpectrum, folder: Path) -> Path:
    """See `HessianSpectrum.save`."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **{name: getattr(spectrum, name) for name in spectrum.array_names()})
    content = _as_json(spectrum)
    content["arrays"] = {"file": NPZ_NAME, "sha256": hashlib.sha256(buffer.getvalue()).hexdigest()}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    parts = {folder / NPZ_NAME: buffer.getvalue(), folder / JSON_NAME: text.encode()}
    written: list[Path] = []
    try:
        for target, data in parts.items():
            written.append(target.with_name(f".{target.name}.{os.getpid()}.tmp"))
            _write(written[-1], data)
        for source, target in zip(written, parts, strict=True):
            os.replace(source, target)
    finally:
        for source in written:
            source.unlink(missing_ok=True)
    return folder


def _write(path: Path, data: bytes) -> None:
    """Write and flush to the disk: the rename must not overtake the content."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _as_json(spectrum: HessianSpectrum) -> dict[str, Any]:
    s, cost = spectrum, spectrum.cost
    return {
        "schema_version": s.provenance.schema_version,
        "n": s.n,
        "num_probes": s.num_probes,
        "num_matvecs": s.num_matvecs,
        "loss": s.loss,
        "gradient_norm": s.gradient_norm,
        "eigenvalue_max": dataclasses.asdict(s.eigenvalue_max),
        "eigenvalue_min": dataclasses.asdict(s.eigenvalue_min),
        "trace": dataclasses.asdict(s.trace),
        "mean_eigenvalue": dataclasses.asdict(s.mean_eigenvalue),
        "outliers": [dataclasses.asdict(outlier) for outlier in s.outlier_eigenvalues()],
        "diagnostics": {
            "product_errors": _range(s.product_errors),
            "displacements": _range(s.displacements),
            "nonlinearities": _range(s.nonlinearities),
            "fidelities": _range(s.fidelities),
            "asymmetry": float(s.asymmetries.max()),
        },
        "cost": dataclasses.asdict(cost),
        "cost_derived": {
            "gradients_per_product": cost.gradients_per_product,
            "product_time_in_gradients": cost.product_time_in_gradients,
            "lanczos_overhead": cost.lanczos_overhead,
        },
        "provenance": dataclasses.asdict(s.provenance),
    }


def _range(array: np.ndarray[Any, Any]) -> dict[str, float | None]:
    """Smallest, median and largest of what was measured; null where nothing was."""
    known = array[~np.isnan(array)]
    if not len(known):
        return {"min": None, "median": None, "max": None}
    figures = {"min": known.min(), "median": np.median(known), "max": known.max()}
    return {key: float(value) if math.isfinite(value) else None for key, value in figures.items()}


def load(folder: Path) -> HessianSpectrum:
    """See `HessianSpectrum.load`."""
    content = _read_json(folder / JSON_NAME)
    found = content.get("schema_version")
    if found != SCHEMA_VERSION:
        raise ResultError(
            f"{folder / JSON_NAME} has schema version {found}, this ds_hessian reads "
            f"{SCHEMA_VERSION}: load it with the version that wrote it, "
            f"{content.get('provenance', {}).get('ds_hessian_version')}"
        )
    try:
        arrays = _read_arrays(folder / NPZ_NAME, content["arrays"]["sha256"])
        return HessianSpectrum(
            n=content["n"],
            loss=content["loss"],
            gradient_norm=content["gradient_norm"],
            trace=Estimate(**content["trace"]),
            cost=Cost(**content["cost"]),
            provenance=Provenance(**content["provenance"]),
            **arrays,
        )
    except ResultError:
        raise
    except (KeyError, TypeError, AttributeError, HessianError) as error:
        raise ResultError(f"{folder} does not hold a spectrum: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(
            f"no spectrum in {path.parent}: cannot read {path.name}: {error}"
        ) from error
    except ValueError as error:
        raise ResultError(f"{path} is damaged, it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ResultError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _read_arrays(path: Path, sha256: str) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"cannot read {path}, which {JSON_NAME} names: {error}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ResultError(
            f"{path} ({len(data)} bytes) is truncated, changed, or belongs to another spectrum: "
            f"its SHA-256 is {found[:12]}..., {JSON_NAME} says {sha256[:12]}..."
        )
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in HessianSpectrum.array_names()}
