"""What the ranks of tests have imported when they are forked (`ranks.py`)."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress

os.environ.update(
    DS_ACCELERATOR="cpu",
    OMP_NUM_THREADS="1",  # without it Accelerate sets torch's number of threads, for good
    # Megatron compiles small functions at their first use, each for seconds, into a cache in /tmp.
    TORCHDYNAMO_DISABLE="1",
)

import deepspeed  # noqa: E402, F401

import ds_hessian  # noqa: E402, F401

with suppress(ImportError), warnings.catch_warnings(action="ignore"):  # what is not installed
    from megatron.core.models.gpt import gpt_model  # noqa: F401
