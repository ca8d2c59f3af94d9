"""The dtype of tensors that are made without one: fp32 here, the job's own in the job's code.

`torch.set_default_dtype` is of the whole process. A script that sets fp64, or the bf16 of its
model, has its own in whatever of it a measurement calls; the measurement's own figures are not
rounded to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Jobs:
    """The job's default dtype, while this package has its own; None where that is the job's too."""

    dtype: torch.dtype | None = None


@contextmanager
def own_dtype() -> Iterator[None]:
    """Run code of this package in the body, with fp32 as the default dtype."""
    job = torch.get_default_dtype()
    if job == torch.float32:
        yield
        return
    before = _Jobs.dtype
    try:
        _Jobs.dtype = job
        torch.set_default_dtype(torch.float32)
        yield
    finally:
        torch.set_default_dtype(job)
        _Jobs.dtype = before


@contextmanager
def dtype_of_job() -> Iterator[None]:
    """Run the job's code in the body, with its default dtype."""
    if _Jobs.dtype is None:
        yield
        return
    job = _Jobs.dtype
    try:
        _Jobs.dtype = None
        torch.set_default_dtype(job)
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        _Jobs.dtype = job
