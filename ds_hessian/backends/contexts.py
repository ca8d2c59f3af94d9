"""Contexts of torch in which nothing can be measured."""

from __future__ import annotations

import torch

from ds_hessian.errors import UnsupportedError


def refuse_context(device: torch.device) -> None:
    """Raise where the caller has changed how torch computes, for all that it calls.

    Raises:
        UnsupportedError: names the context.
    """
    if torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "ds_hessian does not support a call inside of torch.inference_mode(), in which no "
            "gradient can be taken; call it outside, or inside of torch.no_grad()"
        )
    if any(torch.is_autocast_enabled(kind) for kind in {device.type, "cpu"}):
        raise UnsupportedError(
            "ds_hessian does not support a call inside of torch.autocast, which would round its "
            "own sums too; call it outside, and put autocast where training has it: in the model, "
            "in loss_fn or in the engine's configuration"
        )
