"""An Adam optimizer's estimate of the curvature, read from its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hessian.backends.protocol import AdamState
from ds_hessian.errors import ConfigError
from ds_hessian.optimizer import ADAMS, inside, is_one_of, last_settings
from ds_hessian.vectors import Layout, VectorSpace


class Moments(NamedTuple):
    """What Adam's state says of a run of one tensor, flat, in fp32.

    Attributes:
        denominator: `sqrt(v / (1 - beta2^t)) + eps`.
        last_step: `-lr m / (1 - beta1^t)`, divided by it.
        moved: Whether there was a gradient other than zero.
    """

    denominator: Tensor
    last_step: Tensor
    moved: bool


def moments_of(
    optimizer: Any, tensor: Tensor, group: dict[str, Any], offset: int, numel: int
) -> Moments | None:
    """Return `moments` of a run of a tensor that an optimizer has in a parameter group."""
    state = _state_of(optimizer, tensor, group)
    return moments(state, last_settings(optimizer, group), offset, numel)


def _state_of(optimizer: Any, tensor: Tensor, group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's state of a tensor, empty if it has none.

    DeepSpeed's FusedAdam counts the steps of all tensors of a group in the state of one of them.
    """
    found: Mapping[str, Any] = optimizer.state.get(tensor, {})
    if "step" not in found or float(found["step"]):
        return found
    every = (optimizer.state.get(p, {}) for p in group["params"])
    return {**found, "step": max(float(state.get("step", 0)) for state in every)}


def moments(
    state: Mapping[str, Any], settings: Mapping[str, Any], offset: int, numel: int
) -> Moments | None:
    """Return denominator and last step for a run of one tensor that an optimizer steps.

    Of a tensor that has never had a gradient, and so no state or no step, both moments are zero.

    Args:
        state: The optimizer's state of the tensor.
        settings: Those of the tensor's parameter group at its last step.
        offset: Index of the run's first element in the flattened tensor.
        numel: Length of the run.

    Returns:
        None where the state is not that of an Adam.
    """
    if not {"betas", "eps"} <= settings.keys() or len(settings["betas"]) != 2:
        return None
    if state and not {"exp_avg", "exp_avg_sq"} <= state.keys():
        return None
    step = float(state["step"] if "step" in state else settings["step"]) if state else 0.0
    if not step:
        return Moments(torch.full((numel,), float(settings["eps"])), torch.zeros(numel), False)
    first, second = (
        1 - beta**step if settings.get("bias_correction", True) else 1.0
        for beta in settings["betas"]
    )
    mean, square = (
        state[name].detach().reshape(-1).narrow(0, offset, numel).float()
        for name in ("exp_avg", "max_exp_avg_sq" if settings.get("amsgrad") else "exp_avg_sq")
    )
    denominator = (square / second).sqrt_().add_(settings["eps"])
    moved = bool(square.any())
    last_step = mean.mul(-float(settings["lr"]) / first).div_(denominator)
    return Moments(denominator, last_step, moved)


def collect(
    found: list[Moments | None], layout: Layout, space: VectorSpace, optimizer: object
) -> AdamState:
    """Assemble the state in the coordinates of the space.

    Args:
        found: `moments` of each fragment of the layout, in its order.
        layout: The layout of this rank's vectors.
        space: Their space.
        optimizer: The optimizer, which a message names.

    Raises:
        ConfigError: the optimizer is not Adam, or has not made a step yet.

    Collective: one all-reduce.
    """
    whole = AdamState(space.zeros(), space.zeros())
    for entry, (_, part) in zip(found, layout, strict=True):
        if entry is not None:
            whole.denominator[part], whole.last_step[part] = entry.denominator, entry.last_step
    parts = [part for part in inside(optimizer) if getattr(part, "param_groups", None)]
    others = not all(is_one_of(part, ADAMS) for part in parts)
    missing = float(others or any(entry is None for entry in found))
    # DeepSpeed makes the moments, all zero, before the first step.
    moved = float(any(entry is not None and entry.moved for entry in found))
    figures = space.reduce(torch.tensor([missing, moved], dtype=torch.float64))
    if figures[0] or not figures[1]:
        names = " and ".join(sorted({type(part).__name__ for part in inside(optimizer)}))
        raise ConfigError(
            f"the optimizer {names} has no second moments of Adam to precondition with: use Adam "
            "or AdamW for all trainable parameters (freeze others), and make an optimizer step "
            "first"
        )
    return whole
