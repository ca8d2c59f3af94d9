"""How figures are made where nothing is said: in fp32 on the host here, the job's way in its code.

`torch.set_default_dtype` is of the whole process. A script that sets fp64, or the bf16 of its
model, has its own in whatever of it a measurement calls; the measurement's own figures are not
rounded to it. So with the device of `torch.set_default_device`, and of a `with torch.device(...)`
around a call: figures that are said to lie on no device are the host's. So with `numpy.seterr`: a
figure here may underflow to 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

_HOST = torch.device("cpu")


class _Defaults(NamedTuple):
    """The dtype and the device of tensors that are made without one, and numpy's errors."""

    dtype: torch.dtype
    device: torch.device
    errors: Mapping[str, Any]


_OWN = _Defaults(
    torch.float32,
    _HOST,
    {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
)


class _Jobs:
    """The job's defaults, while this package has its own; None where those are in place."""

    defaults: _Defaults | None = None


@contextmanager
def _set(new: _Defaults, old: _Defaults) -> Iterator[None]:
    """Have the new defaults in the body, in place of the old ones."""
    with nullcontext() if new.device == old.device else new.device, np.errstate(**new.errors):
        try:
            torch.set_default_dtype(new.dtype)
            yield
        finally:
            torch.set_default_dtype(old.dtype)


@contextmanager
def own_defaults() -> Iterator[None]:
    """Run code of this package in the body, with fp32 on the host as the default."""
    job = _Defaults(torch.get_default_dtype(), torch.get_default_device(), np.geterr())
    if job == _OWN:
        yield
        return
    before = _Jobs.defaults
    try:
        _Jobs.defaults = job
        with _set(_OWN, job):
            yield
    finally:
        _Jobs.defaults = before


@contextmanager
def defaults_of_job() -> Iterator[None]:
    """Run the job's code in the body, with its defaults."""
    job = _Jobs.defaults
    if job is None:
        yield
        return
    try:
        _Jobs.defaults = None
        with _set(job, _OWN):
            yield
    finally:
        _Jobs.defaults = job
