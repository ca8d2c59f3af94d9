"""Results and products for other tools: SciPy's operators, state dicts, pandas' frames.

with linear_operator(hessian) as operator:
    values, vectors = scipy.sparse.linalg.eigsh(operator, k=3, which="LA")
direction = state_dicts(hessian, pairs.vectors)[0]
frames = data_frames("hessian_out")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ds_hessian.errors import ResultError, UnsupportedError
from ds_hessian.hessian import Hessian
from ds_hessian.records import Estimate, Measured
from ds_hessian.records.fields import Array
from ds_hessian.show.page.run import records_in, step_of

if TYPE_CHECKING:
    import pandas
    from scipy.sparse.linalg import LinearOperator


@contextmanager
def linear_operator(hessian: Hessian, **overrides: object) -> Iterator[LinearOperator]:
    """Give the Hessian of a job of one process to SciPy, as a symmetric operator `(n, n)`.

    Training must not continue inside. A product has the relative error that `Hessian.matvec`
    states, which methods that expect exact products do not know of: tolerances below it are never
    reached. Coordinates are those of `Hessian.random_vector`, in fp32.

    Args:
        hessian: The Hessian, with its micro-batches fixed.
        overrides: As for `Hessian.measuring`.

    Raises:
        UnsupportedError: the job has several ranks, each with a part of a vector.
        ConfigError: as `Hessian.measuring`.
    """
    from scipy.sparse.linalg import LinearOperator

    space = hessian.backend.space
    if space.world_size > 1:
        raise UnsupportedError(
            f"ds_hessian does not support SciPy on {space.world_size} ranks, whose vectors are in "
            "parts; measure in one process, or use the analyses of Hessian"
        )

    def product(vector: Array) -> Array:
        v = torch.from_numpy(np.array(vector, dtype=np.float32).reshape(-1)).to(space.device)
        if not v.any():
            return np.zeros(space.n, dtype=np.float32)
        found: Array = hessian.matvec(v).vector.cpu().numpy()
        return found

    with hessian.measuring(**overrides):
        shape = (space.n, space.n)
        yield LinearOperator(shape, matvec=product, rmatvec=product, dtype=np.float32)


def state_dicts(hessian: Hessian, vectors: Tensor) -> list[dict[str, Tensor]] | None:
    """Return vectors `(k, n_local)`, such as eigenvectors, as k state dicts on rank 0, else None.

    Names and shapes are those of the trainable parameters, so that weights can be moved along one:
    `perturbed(model.state_dict(), direction, 0.1)`.

    Collective.
    """
    found = [hessian.gather(v) for v in vectors]
    return None if hessian.rank else [each for each in found if each is not None]


def perturbed(
    weights: Mapping[str, Tensor], direction: Mapping[str, Tensor], length: float
) -> dict[str, Tensor]:
    """Return a state dict whose weights are moved by `length` times a direction.

    Args:
        weights: A model's state dict.
        direction: `{name: tensor}` of some of its entries, as `state_dicts` returns it.
        length: In the units of the weights, if the direction has length 1.

    Raises:
        ResultError: the direction has a name or a shape that the weights have not.
    """
    moved = {name: value.clone() for name, value in weights.items()}
    for name, part in direction.items():
        if name not in moved or moved[name].shape != part.shape:
            here = tuple(moved[name].shape) if name in moved else "none"
            raise ResultError(
                f"the direction is not of this model: {name} has shape {tuple(part.shape)} there, "
                f"{here} here; take one of the model's own eigenvectors (state_dicts)"
            )
        there = moved[name]
        there += (length * part.double()).to(there.device, there.dtype)
    return moved


def data_frames(folder: str | Path) -> dict[str, pandas.DataFrame]:
    """Return the records of a run as frames of pandas.

    A frame of each kind of record (`"spectrum"`, `"eigenpairs"`, ...) has a row for each step and
    operator, with every number of the record; figures with an error have a twin column
    `..._error`. A frame for each shape of its arrays (`"spectrum P m"`) has a row for each entry.

    Args:
        folder: That of a run, or of one step.

    Raises:
        ResultError: there is no such folder, no record in it, or a broken one.
        ImportError: pandas is not installed.
    """
    import pandas

    folder = Path(folder)
    rows = dict[str, list[dict[str, Any]]]()
    parts = dict[str, list[Any]]()
    records = [record for kind in _kinds(Measured) for record in records_in(folder, kind).values()]
    for record in records:
        known = {"step": step_of(record), "operator": record.provenance.operator}
        rows.setdefault(record.kind, []).append({**known, **_numbers(record)})
        for name, frame in _tables(record).items():
            for place, (column, value) in enumerate(known.items()):
                frame.insert(place, column, value)
            parts.setdefault(name, []).append(frame)
    if not rows:
        raise ResultError(f"no record in {folder}, nor in a folder in it")
    found = {name: pandas.DataFrame(each).sort_values("step") for name, each in rows.items()}
    found |= {name: pandas.concat(each).sort_values("step") for name, each in parts.items()}
    return {name: frame.reset_index(drop=True) for name, frame in found.items()}


def _kinds(base: type[Measured]) -> list[type[Measured]]:
    """Return all classes of records below one, each kind once."""
    found = dict[str, type[Measured]]()
    for kind in base.__subclasses__():
        for each in (kind, *_kinds(kind)):
            if isinstance(getattr(each, "kind", None), str):
                found[each.kind] = each
    return list(found.values())


def _numbers(record: Measured) -> dict[str, float | int]:
    """Return the numbers of a record by name: of its fields, its properties and its cost."""
    names = [field.name for field in fields(record) if field.name not in record.arrays]
    names += [n for n in dir(type(record)) if isinstance(getattr(type(record), n), property)]
    found = dict[str, float | int]()
    for source, name in [*((record, n) for n in names), *((record.cost, n) for n in _COST)]:
        value = getattr(source, name)
        if isinstance(value, Estimate):
            found |= {name: value.value, f"{name}_error": value.error}
        elif isinstance(value, (int, float)):
            found[name] = value
    return found


_COST = ("seconds_total", "products", "gradient_evaluations")


def _tables(record: Measured) -> dict[str, Any]:
    """Return the arrays of a record as frames, those of the same axes in one."""
    import pandas

    columns = dict[tuple[str, ...], dict[str, Array]]()
    for name, axes in record.arrays.items():
        array = getattr(record, name)
        if not axes.named and array.size:
            columns.setdefault(axes.axes, {})[name] = array
    found = {}
    for names, arrays in columns.items():
        shape = next(iter(arrays.values())).shape
        places = {axis: place.ravel() for axis, place in zip(names, np.indices(shape), strict=True)}
        values = {name: array.ravel() for name, array in arrays.items()}
        for name, axis in record.labels.items():
            if (axis,) == names:
                values[name] = np.array(getattr(record, name), dtype=object)
        found[f"{record.kind} {' '.join(names)}"] = pandas.DataFrame(places | values)
    return found
