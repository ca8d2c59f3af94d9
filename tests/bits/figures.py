"""Records as flat lists of exact figures."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

Figures = dict[str, str]

SHOWN = 40  # values of an array; of larger ones the first, and a hash of all
OTHER_EACH_TIME = {
    "seconds_total",
    "seconds_per_product",
    "seconds_per_gradient",
    "peak_memory_bytes",
    "versions",
    "ds_hessian_version",
    "created",
}


def figures(value: Any, hessian: Any, name: str = "") -> Figures:
    """`{path: exact bits as text}` of a record; of sharded vectors, as rank 0 gathers them.

    Collective.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        found: Figures = {}
        for key, entry in value.items():
            if key not in OTHER_EACH_TIME:
                found |= figures(entry, hessian, f"{name}.{key}" if name else str(key))
        return found
    if isinstance(value, (list, tuple)):
        return figures(dict(enumerate(value)), hessian, name)
    if torch.is_tensor(value):
        if value.numel() == 0:
            return {name: "no vectors"}
        if value.dim() == 2:
            return figures(list(value), hessian, name)
        return {
            f"{name}[{key}]": _array(whole.numpy())
            for key, whole in (hessian.gather(value) or {}).items()
        }
    return {name: _array(value) if isinstance(value, np.ndarray) else _scalar(value)}


def _scalar(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{float(value).hex()} = {float(value)!r}"
    return repr(value.item() if isinstance(value, np.generic) else value)


def _array(array: np.ndarray[Any, Any]) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    shown = " ".join(
        value.hex() if isinstance(value, float) else str(value)
        for value in array.reshape(-1)[:SHOWN].tolist()
    )
    return f"{array.dtype} {array.shape} {digest}: {shown}"
