"""Weights of a checkpoint, `{name: tensor}`, and how they are loaded into a module.

Pickled files are read by `torch.load(weights_only=True)`, which executes nothing in them.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ds_hessian.checkpoints import zero_files
from ds_hessian.checkpoints.sources import Checkpoint, reading, require_whole
from ds_hessian.errors import ResultError

Weights = dict[str, Tensor]

NESTED = ("model", "module", "state_dict", "model_state_dict")
"""Keys below which training scripts usually save a state dict."""

WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before each name."""


def weights_of(checkpoint: Checkpoint) -> Weights:
    """Return the weights of a checkpoint that is no folder of transformers, on the CPU.

    Raises:
        ResultError: a file is missing, damaged, or of another form.
    """
    with reading(checkpoint.path), warnings.catch_warnings(action="ignore"):
        require_whole(_files(checkpoint.folder))
        try:
            if checkpoint.kind == "universal":
                return zero_files.universal_weights(checkpoint.folder)
            if checkpoint.kind == "zero":
                return zero_files.zero_weights(checkpoint.folder)
            return _state_dict(checkpoint.folder)
        except pickle.UnpicklingError as error:
            # torch advises to unpickle it all the same, before it says what is in the way.
            reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
            raise ResultError(
                f"{checkpoint.path} holds more than tensors, and is not unpickled, which could "
                f"execute anything: save a state dict. torch says: {reason[:300]}"
            ) from error


def _files(folder: Path) -> list[Path]:
    """Return the files of weights of DeepSpeed's checkpoints, or that of a state dict."""
    if folder.is_file():
        return [folder]
    every = (*folder.glob("*.pt"), *folder.glob("zero/*/*.pt"))
    return [path for path in every if not path.is_dir()]


def _state_dict(path: Path) -> Weights:
    if path.suffix == ".safetensors":
        return load_file(path)
    found: Any = torch.load(path, map_location="cpu", weights_only=True)
    for key in NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise ResultError(
            f"{path} is no state dict: expected {{name: tensor}}, alone or as the value of one of "
            f"{', '.join(NESTED)}"
        )
    return dict(found)


def require_finite(module: nn.Module, source: Path) -> None:
    """Refuse weights of a training that has diverged.

    Raises:
        ResultError: a parameter has entries that are NaN or infinite.
    """
    for name, p in module.named_parameters():
        if not torch.isfinite(p).all():
            raise ResultError(f"{source} has weights that are NaN or infinite, in {name}")


def load_into(module: nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    """Load weights into a module whose parameters and buffers they must be.

    A name of a tied parameter may be missing if another name of it is there.

    Args:
        module: The module, without wrappers.
        weights: Its state dict.
        source: Where they are from, for messages.

    Raises:
        ResultError: a name is missing or unknown, a shape is another, or integers (quantized
            weights) or complex numbers are in the place of real ones.
    """
    here = module.state_dict(keep_vars=True)
    while weights and weights.keys().isdisjoint(here):
        shared = (p for p in WRAPPERS if all(name.startswith(p) for name in weights))
        prefix = next(shared, None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    loaded = {id(here[name]) for name in weights if name in here}
    missing = [name for name, value in here.items() if id(value) not in loaded]
    unknown = [name for name in weights if name not in here]
    if missing or unknown:
        texts = [
            f"{what} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" * (len(names) > 3))
            for what, names in (("lacks", missing), ("has also", unknown))
            if names
        ]
        raise ResultError(f"{source} is not of this model: it {' and '.join(texts)}")
    first = dict[int, str]()
    with torch.no_grad():
        for name, value in weights.items():
            tied = first.setdefault(id(here[name]), name)
            if tied != name and not torch.equal(value, weights[tied]):
                raise ResultError(
                    f"{source} has different weights under {tied} and {name}, which are tied in "
                    "this model: leave one out"
                )
            if value.shape != here[name].shape:
                raise ResultError(
                    f"{source} is not of this model: {name} has shape {tuple(value.shape)} there, "
                    f"{tuple(here[name].shape)} here"
                )
            if _kind(value) != _kind(here[name]):
                raise ResultError(
                    f"{source} is not of this model: {name} has {value.dtype} there, "
                    f"{here[name].dtype} here, of another kind of numbers"
                )
            here[name].copy_(value)


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()
