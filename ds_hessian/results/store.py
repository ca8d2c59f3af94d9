"""Records on disk: `<kind>.json` for people and tools, `<kind>.npz` for the arrays.

The JSON holds every scalar, what follows from the arrays, and the SHA-256 of the NPZ, so that a
truncated file or two files of different records are noticed. Scalars survive exactly (Python
writes the shortest decimal that reads back as the same double).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ds_hessian.errors import HessianError, ResultError
from ds_hessian.results.density import bulk_interval
from ds_hessian.results.estimate import Estimate
from ds_hessian.results.provenance import SCHEMA_VERSION, Cost, Provenance
from ds_hessian.results.spectrum import HessianSpectrum
from ds_hessian.results.sweep import DisplacementSweep

LEVELS = 17
"""Eigenvalues over the bulk at which the JSON tells the cumulative distribution."""

Record = TypeVar("Record", HessianSpectrum, DisplacementSweep)


def save(spectrum: HessianSpectrum, folder: Path) -> Path:
    """See `HessianSpectrum.save`."""
    return _save("spectrum", spectrum, _as_json(spectrum), folder)


def save_sweep(sweep: DisplacementSweep, folder: Path) -> Path:
    """See `DisplacementSweep.save`."""
    content = {
        "schema_version": sweep.provenance.schema_version,
        "n": sweep.n,
        "directions": sweep.directions,
        "loss": sweep.loss,
        "gradient_norm": sweep.gradient_norm,
        "plateaus": {
            name: {"displacement": float(sweep.displacements[sweep.best(name)])}
            | {"curvature": float(sweep.plateau(name))}
            for name in sweep.directions
        },
        "cost": dataclasses.asdict(sweep.cost),
        "provenance": dataclasses.asdict(sweep.provenance),
    }
    return _save("sweep", sweep, content, folder)


def _save(
    kind: str, record: HessianSpectrum | DisplacementSweep, content: dict[str, Any], folder: Path
) -> Path:
    """Write both files, each at once."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **{name: getattr(record, name) for name in record.array_names()})
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    content["arrays"] = {"file": f"{kind}.npz", "sha256": digest}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    parts = {folder / f"{kind}.npz": buffer.getvalue(), folder / f"{kind}.json": text.encode()}
    written: list[Path] = []
    try:
        for target, data in parts.items():
            written.append(target.with_name(f".{target.name}.{os.getpid()}.tmp"))
            write_flushed(written[-1], data)
        for source, target in zip(written, parts, strict=True):
            os.replace(source, target)
    finally:
        for source in written:
            source.unlink(missing_ok=True)
    return folder


def write_flushed(path: Path, data: bytes) -> None:
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
        "density": _density(s),
        "warnings": list(s.warnings),
        "cost": dataclasses.asdict(cost),
        "cost_derived": {
            "gradients_per_product": cost.gradients_per_product,
            "product_time_in_gradients": cost.product_time_in_gradients,
            "lanczos_overhead": cost.lanczos_overhead,
        },
        "provenance": dataclasses.asdict(s.provenance),
    }


def _density(s: HessianSpectrum) -> dict[str, Any]:
    """Kernel widths, and the cumulative distribution with its bounds at levels of the spectrum.

    All of it follows from the arrays: a loaded record gives any other grid, width or confidence.
    """
    density = s.density()
    rows = zip(s.ritz_values, s.reduced_weights, strict=True)
    ends = np.array([bulk_interval(*row) for row in rows])
    values = np.linspace(ends[:, 0].min(), ends[:, 1].max(), LEVELS)
    lower, upper = s.cumulative_bounds(values)
    return {
        "width": _range(density.width),
        "band": f"95 % over {s.num_probes} probes" if s.num_probes > 1 else None,
        "mass": density.mass,
        "cumulative": {
            "confidence": 0.95,
            "eigenvalues": values.tolist(),
            "shares": s.cumulative(values).tolist(),
            "lower": lower.tolist(),
            "upper": upper.tolist(),
        },
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
    return _load(
        "spectrum",
        folder,
        HessianSpectrum.array_names(),
        lambda content, arrays: HessianSpectrum(
            n=content["n"],
            loss=content["loss"],
            gradient_norm=content["gradient_norm"],
            trace=Estimate(**content["trace"]),
            cost=Cost(**content["cost"]),
            provenance=Provenance(**content["provenance"]),
            **arrays,
        ),
    )


def load_sweep(folder: Path) -> DisplacementSweep:
    """See `DisplacementSweep.load`."""
    return _load(
        "sweep",
        folder,
        DisplacementSweep.array_names(),
        lambda content, arrays: DisplacementSweep(
            n=content["n"],
            directions=tuple(content["directions"]),
            loss=content["loss"],
            gradient_norm=content["gradient_norm"],
            cost=Cost(**content["cost"]),
            provenance=Provenance(**content["provenance"]),
            **arrays,
        ),
    )


def _load(
    kind: str,
    folder: Path,
    names: list[str],
    build: Callable[[dict[str, Any], dict[str, Any]], Record],
) -> Record:
    path = folder / f"{kind}.json"
    content = _read_json(path, kind)
    found = content.get("schema_version")
    if found != SCHEMA_VERSION:
        raise ResultError(
            f"{path} has schema version {found}, this ds_hessian reads "
            f"{SCHEMA_VERSION}: load it with the version that wrote it, "
            f"{content.get('provenance', {}).get('ds_hessian_version')}"
        )
    try:
        sha256 = content["arrays"]["sha256"]
        return build(content, _read_arrays(folder / f"{kind}.npz", kind, sha256, names))
    except ResultError:
        raise
    except (KeyError, TypeError, AttributeError, HessianError) as error:
        raise ResultError(f"{folder} does not hold a {kind}: {error}") from error


def _read_json(path: Path, kind: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(
            f"no {kind} in {path.parent}: cannot read {path.name}: {error}"
        ) from error
    except ValueError as error:
        raise ResultError(f"{path} is damaged, it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ResultError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _read_arrays(path: Path, kind: str, sha256: str, names: list[str]) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"cannot read {path}, which {kind}.json names: {error}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ResultError(
            f"{path} ({len(data)} bytes) is truncated, changed, or belongs to another {kind}: "
            f"its SHA-256 is {found[:12]}..., {kind}.json says {sha256[:12]}..."
        )
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in names}
