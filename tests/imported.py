"""What the ranks of tests have imported when they are forked (`ranks.py`)."""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from contextlib import suppress

os.environ.update(
    DS_ACCELERATOR="cpu",
    OMP_NUM_THREADS="1",  # without it Accelerate sets torch's number of threads, for good
    # Megatron compiles small functions at their first use, each for seconds, into a cache in /tmp.
    TORCHDYNAMO_DISABLE="1",
)

IMPORTED = """
    deepspeed ds_hessian.checkpoints ds_hessian.hosts ds_hessian.schedule ds_hessian.show.page
    ds_hessian.backends.zero ds_hessian.backends.plain ds_hessian.backends.megatron
    ds_hessian.integrations.transformers ds_hessian.megatron
    megatron.core.models.gpt.gpt_model
"""

for name in IMPORTED.split():
    with suppress(ImportError), warnings.catch_warnings(action="ignore"):  # what is not installed
        importlib.import_module(name)

gc.freeze()  # DeepSpeed collects garbage for each engine: not through all of this
