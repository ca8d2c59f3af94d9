"""Records on disk: `<kind>.json` for people and tools, `<kind>.npz` for the arrays.

A record is a frozen dataclass; its fields say what is stored and how it is read back. The JSON
holds every scalar, what follows from the arrays, and the SHA-256 of the NPZ, so that a truncated
file or two files of different records are noticed. Scalars survive exactly (Python writes the
shortest decimal that reads back as the same double). Sharded vectors are not in these files, only
their number; `HessianEngine.save` writes them beside.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from ds_hessian.errors import HessianError, ResultError
from ds_hessian.records.density import bulk_interval
from ds_hessian.records.provenance import SCHEMA_VERSION
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.records.sweep import DisplacementSweep

LEVELS = 17
"""Eigenvalues over the bulk at which the JSON tells the cumulative distribution."""

R = TypeVar("R")


def kind_of(record: type[Any]) -> str:
    """`HessianOffBlockShare` -> `off_block_share`: the name of its files."""
    name = re.sub("^(Hessian|Displacement)", "", record.__name__)
    return re.sub("(?<!^)(?=[A-Z])", "_", name).lower()


def sharded(record: Any) -> list[str]:
    """Names of the fields that are vectors `(k, n_local)`."""
    return [f.name for f in dataclasses.fields(record) if torch.is_tensor(getattr(record, f.name))]


def save(record: Any, folder: Path) -> Path:
    """Write both files of a record, each at once; returns the folder.

    Raises:
        OSError: the folder cannot be written.
    """
    kind, (content, arrays) = kind_of(type(record)), _split(record)
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    content = {
        "schema_version": record.provenance.schema_version,
        **content,
        **_derived(record),
        "arrays": {"file": f"{kind}.npz", "sha256": digest},
    }
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


def _split(record: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields as JSON values, and arrays by the name of their field."""
    content: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            arrays[field.name] = value
        elif isinstance(value, Tensor):
            content[field.name] = len(value)
        elif isinstance(value, Mapping):
            content[field.name], arrays[field.name] = list(value), np.stack([*value.values()])
        else:
            content[field.name] = _plain(value)
    return content, arrays


def _plain(value: Any) -> Any:
    """A JSON value; numbers that JSON lacks as text, which `float` reads."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def write_flushed(path: Path, data: bytes) -> None:
    """Write and flush to the disk: the rename must not overtake the content."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _derived(record: Any) -> dict[str, Any]:
    """What follows from the fields, for whoever reads the JSON."""
    if isinstance(record, DisplacementSweep):
        return {
            "plateaus": {
                name: {"displacement": float(record.displacements[record.best(name)])}
                | {"curvature": float(record.plateau(name))}
                for name in record.directions
            }
        }
    if not isinstance(record, HessianSpectrum):
        return {}
    s, cost = record, record.cost
    return {
        "num_probes": s.num_probes,
        "num_matvecs": s.num_matvecs,
        "eigenvalue_max": dataclasses.asdict(s.eigenvalue_max),
        "eigenvalue_min": dataclasses.asdict(s.eigenvalue_min),
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
        "cost_derived": {
            "gradients_per_product": cost.gradients_per_product,
            "product_time_in_gradients": cost.product_time_in_gradients,
            "lanczos_overhead": cost.lanczos_overhead,
        },
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


def load(record: type[R], folder: Path) -> R:
    """The record that `save` wrote, bit for bit; vectors as `(k, 0)`.

    Raises:
        ResultError: files are missing, damaged, or of another schema.
    """
    kind = kind_of(record)
    path = folder / f"{kind}.json"
    content = _read_json(path, kind)
    found = content.get("schema_version")
    try:
        if found != SCHEMA_VERSION:
            raise ResultError(
                f"{path} has schema version {found}, this ds_hessian reads "
                f"{SCHEMA_VERSION}: load it with the version that wrote it, "
                f"{content.get('provenance', {}).get('ds_hessian_version')}"
            )
        arrays = _read_arrays(folder / f"{kind}.npz", kind, content["arrays"]["sha256"])
        return record(**_fields(record, content, arrays))
    except ResultError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, BadZipFile, HessianError) as error:
        raise ResultError(f"{folder} does not hold a {kind}: {error!r}") from error


def _fields(
    record: type[Any], content: Mapping[str, Any], arrays: Mapping[str, Any]
) -> dict[str, Any]:
    hints, values = get_type_hints(record), dict[str, Any]()
    for field in dataclasses.fields(record):
        name, hint = field.name, hints[field.name]
        if get_origin(hint) is np.ndarray:
            values[name] = arrays[name]
        elif hint is Tensor:
            values[name] = torch.zeros(content[name], 0)
        elif get_origin(hint) is Mapping:
            values[name] = dict(zip(content[name], arrays[name], strict=True))
        elif name in content or field.default is dataclasses.MISSING:
            values[name] = _value(hint, content[name])
    return values


def _value(hint: Any, stored: Any) -> Any:
    """A value of this type from its JSON value."""
    options = [option for option in get_args(hint) if option is not type(None)]
    if get_origin(hint) is tuple:
        kinds = options[:1] * len(stored) if options[-1] is Ellipsis else options
        return tuple(_value(kind, entry) for kind, entry in zip(kinds, stored, strict=True))
    if type(None) in get_args(hint):
        return None if stored is None else _value(options[0], stored)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint(**_fields(hint, stored, {}))
    return float(stored) if hint is float else stored


def _read_json(path: Path, kind: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except ResultError as error:
        raise ResultError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise ResultError(
            f"no {kind} in {path.parent}: cannot read {path.name}: {error}"
        ) from error
    except ValueError as error:
        raise ResultError(f"{path} is damaged, it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ResultError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _refuse_constant(text: str) -> None:
    raise ResultError(f"it holds {text}, which no record does")


def _read_arrays(path: Path, kind: str, sha256: str) -> dict[str, Any]:
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
        return dict(arrays)
