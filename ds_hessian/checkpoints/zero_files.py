"""Weights in checkpoints of DeepSpeed: shards of ZeRO, universal ones, those without ZeRO.

The fp32 masters are taken where there are any, and put together by DeepSpeed's own reader
(deepspeed/utils/zero_to_fp32.py), but with the safe unpickler of torch: the shards contain, beside
tensors, the few classes of DeepSpeed that are allowed here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hessian.errors import ResultError

FORCE_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Makes torch.load take weights_only=True whatever its caller says (torch/serialization.py)."""


def zero_weights(folder: Path) -> dict[str, Tensor]:
    """Return the whole weights of a checkpoint of an engine.

    Args:
        folder: The folder of one tag, with `*_model_states.pt`.

    Raises:
        ResultError: it is one of model parallelism, or a shard is missing.
    """
    models = sorted(folder.glob("*mp_rank_*_model_states.pt"))
    _refuse_parallel(folder, {path.name.partition("mp_rank_")[2][:2] for path in models})
    experts = any(folder.glob("*expert_*_model_states.pt"))
    if any(folder.glob("*_optim_states.pt")) and not experts:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with _safely():
            found = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), folder.name)
        return dict(found)
    if experts or any(path.name.startswith("zero_pp_rank_") for path in models):
        raise ResultError(
            f"{folder} has parts of the weights in several files (experts, or ZeRO-3 without its "
            "*_optim_states.pt): convert it with deepspeed.checkpoint.ds_to_universal first"
        )
    with _safely():
        state = torch.load(models[0], map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(state, Mapping) or not isinstance(state.get("module"), Mapping):
        raise ResultError(f"{models[0]} has no weights under 'module'")
    return {name: value for name, value in state["module"].items() if isinstance(value, Tensor)}


def universal_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a universal checkpoint: `zero/<name>/fp32.pt`, and the buffers.

    Args:
        folder: The folder with `zero` in it.

    Raises:
        ResultError: a file has another form.
    """
    state = _model_state(folder)
    shapes = {
        name: shape for group in state.get("param_shapes") or () for name, shape in group.items()
    }
    found = dict[str, Tensor]()
    for path in sorted((folder / "zero").glob("*/fp32.pt")):
        name = path.parent.name
        part: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        value = part.get("param") if isinstance(part, Mapping) else part
        if not isinstance(value, Tensor):
            raise ResultError(f"{path} holds no parameter")
        found[name] = value.reshape(shapes.get(name, value.shape))  # from ZeRO-3 it is flat
    for name, master in (state.get("shared_params") or {}).items():
        if master in found:  # a tied copy, which the converter takes from the rounded weights
            found.pop(name, None)
    module = state.get("module") or {}
    names = [name for name in state.get("buffer_names") or () if name in module]
    found |= {name: module[name] for name in names}
    if not found:
        raise ResultError(f"{folder} holds no zero/<parameter>/fp32.pt")
    return found


def _model_state(folder: Path) -> Mapping[str, Any]:
    """Return what the first rank's `*_model_states.pt` holds beside the weights; {} without one."""
    for path in sorted(folder.glob("*_model_states.pt")):
        with _safely():
            state: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return state if isinstance(state, Mapping) else {}
    return {}


def _refuse_parallel(folder: Path, model_ranks: set[str]) -> None:
    if len(model_ranks) > 1:
        raise ResultError(
            f"{folder} is split over {len(model_ranks)} ranks of model parallelism: convert it "
            "with deepspeed.checkpoint.ds_to_universal first"
        )


@contextmanager
def _safely() -> Iterator[None]:
    """Run the body with torch's safe unpickler, and DeepSpeed's prints kept back."""
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    stages = dict(ZeroStageEnum.__members__)

    def member(kind: object, name: str) -> object:
        """Stand for `getattr`, by which Python up to 3.11.3 pickles members of an enumeration."""
        if kind is not ZeroStageEnum or name not in stages:
            raise ResultError(
                f"a file of the checkpoint asks for the attribute {name!r} of {kind}, which no "
                "weights need: it is not read"
            )
        return stages[name]

    allowed = [
        loss_scaler.LossScaler,
        loss_scaler.DynamicLossScaler,
        ZeroStageEnum,
        fragment_address,
        (member, "builtins.getattr"),
    ]
    before = os.environ.get(FORCE_SAFE)
    os.environ[FORCE_SAFE] = "1"
    quiet = StringIO()
    try:
        with torch.serialization.safe_globals(allowed):
            with redirect_stdout(quiet), redirect_stderr(quiet):
                yield
    finally:
        os.environ.pop(FORCE_SAFE)
        if before is not None:
            os.environ[FORCE_SAFE] = before
