"""Measurements of checkpoints, without a training job: `ds_hessian.measure`.

    spectrum = ds_hessian.measure("gpt2-folder", "corpus.jsonl")
    spectrum = ds_hessian.measure(module, batches, loss_fn)

A checkpoint (`sources`) gives its weights (`weights`, `zero_files`), which are loaded into a module
(`models`); a file of text or tokens gives micro-batches (`text`); `measuring` puts them together.
No optimizer state is read or made.
"""

from ds_hessian.checkpoints.measuring import Loading, measure, opened
from ds_hessian.checkpoints.sources import Checkpoint, checkpoint_of, series_of
from ds_hessian.checkpoints.text import Sequences, read_micro_batches

__all__ = [
    "Checkpoint",
    "Loading",
    "Sequences",
    "checkpoint_of",
    "measure",
    "opened",
    "read_micro_batches",
    "series_of",
]
