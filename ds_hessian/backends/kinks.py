"""Kinks of the model and its loss: where the gradient, or its slope, jumps.

A function such as ReLU or max pooling is smooth but for some lines, and where values of a
micro-batch lie on both sides of one, displacements of the weights take some of them across. A
difference formula of whatever order then has an error of first order in the displacement, which
cannot be told from second differences that smooth parts make (docs/numerics.md). So it is looked up
here which functions are called that have kinks, and whether values lie on both sides.

A guard such as `clamp(min=1e-6)` of what is always larger has no kink within reach and counts as
smooth. What is not called as a function of torch's (TorchScript, kernels of one's own) is not seen;
then third differences and the asymmetry of Lanczos' matrix are the witnesses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Bounds = Callable[[Sequence[Any], dict[str, Any]], Sequence[Any]]
Condition = Callable[[Sequence[Any], dict[str, Any]], bool]


def _at(*kinks: float) -> Bounds:
    return lambda args, kwargs: kinks


def _given(*arguments: tuple[int, str, float | None], both: bool = False) -> Bounds:
    """Return what reads kinks from a call's arguments.

    Args:
        arguments: Position, name and default of each.
        both: Whether there is a kink at minus the argument too.
    """

    def bounds(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
        found = [argument(args, kwargs, index, name, of) for index, name, of in arguments]
        kinks = [value for value in found if value is not None]
        return [*kinks, *(-value for value in kinks)] if both else kinks

    return bounds


ELEMENTWISE: dict[str, Bounds] = {
    **dict.fromkeys(("relu", "leaky_relu", "elu", "celu", "selu", "prelu", "rrelu"), _at(0.0)),
    **dict.fromkeys(("abs", "absolute"), _at(0.0)),
    "relu6": _at(0.0, 6.0),
    **dict.fromkeys(("hardswish", "hardsigmoid"), _at(-3.0, 3.0)),
    "hardtanh": _given((1, "min_val", -1.0), (2, "max_val", 1.0)),
    **dict.fromkeys(("clamp", "clip"), _given((1, "min", None), (2, "max", None))),
    "clamp_min": _given((1, "min", None)),
    "clamp_max": _given((1, "max", None)),
    "threshold": _given((1, "threshold", None)),
    **dict.fromkeys(("softshrink", "hardshrink"), _given((1, "lambd", 0.5), both=True)),
}
"""Functions of each element, and the values at which they have kinks."""

OF_DIFFERENCES: dict[str, Bounds] = {
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin", "l1_loss"), _at(0.0)),
    **dict.fromkeys(("max", "min"), _at(0.0)),  # of two tensors
    "huber_loss": _given((3, "delta", 1.0), both=True),
    "smooth_l1_loss": _given((5, "beta", 1.0), both=True),
}
"""Functions of the difference of two tensors."""

ROUNDINGS = ("floor", "ceil", "round", "trunc", "fix")
INTEGERS = ("byte", "char", "short", "int", "long")
"""Functions that round to integers, and those that make tensors of integers."""

ALWAYS = {
    *(f"{kind}{n}d" for kind in ("max_pool", "adaptive_max_pool") for n in (1, 2, 3)),
    *(f"{kind}{n}d_with_indices" for kind in ("max_pool", "adaptive_max_pool") for n in (1, 2, 3)),
    *("hinge_embedding_loss", "margin_ranking_loss", "multi_margin_loss"),
    *("multilabel_margin_loss", "triplet_margin_loss", "cosine_embedding_loss"),
    *("rnn_relu", "rnn_relu_cell"),
    *(f"fractional_max_pool{n}d{rest}" for n in (2, 3) for rest in ("", "_with_indices")),
    *(*ROUNDINGS, "frac", "remainder", "fmod", "__mod__"),
    *("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"),
    *("quantile", "nanquantile", "renorm"),
    *INTEGERS,
}
"""Functions that have kinks, or jumps, among any values."""

_EXTREMES = ("amax", "amin", "max", "min")
_ROUGH = (0, 1, math.inf, -math.inf)


def _has_order(index: int, name: str, usual: Any = 2) -> Condition:
    """Return what tells norms with kinks, those of order 1 and infinity."""
    return lambda args, kwargs: argument(args, kwargs, index, name, usual) in _ROUGH


def _has_extremes(index: int, name: str) -> Condition:
    return lambda args, kwargs: argument(args, kwargs, index, name) in _EXTREMES


def _moves(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the places at which an image is read depend on weights."""
    return bool(argument(args, kwargs, 1, "grid").requires_grad)


def _to_integers(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    types = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.dtype)]
    return any(not t.is_floating_point and not t.is_complex for t in types)


IF: dict[str, Condition] = {
    **{"to": _to_integers, "type": _to_integers},
    "cdist": _has_order(2, "p"),
    "pdist": _has_order(1, "p"),
    "dist": _has_order(2, "p"),
    "norm": _has_order(1, "p"),
    **{f"linalg_{kind}norm": _has_order(1, "ord") for kind in ("", "matrix_", "vector_")},
    **{"scatter_reduce": _has_extremes(4, "reduce"), "index_reduce": _has_extremes(4, "reduce")},
    **{"segment_reduce": _has_extremes(1, "reduce"), "grid_sampler": _moves},
    "div": lambda args, kwargs: kwargs.get("rounding_mode") is not None,
    "divide": lambda args, kwargs: kwargs.get("rounding_mode") is not None,
    # Of max, whose number torch's own function is given.
    "embedding_bag": lambda args, kwargs: argument(args, kwargs, 4, "mode") in (2, "max"),
}
"""Functions that have kinks among any values with some arguments, and with which."""

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

ANY = {*ALWAYS, *IF}
NAMES = {*ELEMENTWISE, *OF_DIFFERENCES, *ANY}


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor is one of real numbers, stored as such."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype in REAL
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
    )


def argument(
    args: Sequence[Any], kwargs: dict[str, Any], index: int, name: str, default: Any = None
) -> Any:
    """Return an argument of a call by its position or its name."""
    return args[index] if len(args) > index else kwargs.get(name, default)


def with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, value: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another one in that place."""
    if len(args) > index:
        return (*args[:index], value, *args[index + 1 :]), kwargs
    return args, {**kwargs, name: value}


def kinked(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Return whether values lie on both sides of a kink of a function, a boolean scalar.

    None where the function has none, or what it is called with does not depend on weights.

    Args:
        name: The function's name, without underscores.
        args: Its positional arguments.
        kwargs: The others.
    """
    x, other = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "other")
    other = kwargs.get("target", other)
    transformed = torch._C._are_functorch_transforms_active()
    among = (*args, *kwargs.values()) if name in ANY or transformed else (x, other)
    depends = [t for t in among if isinstance(t, Tensor) and _unwrapped(t).requires_grad]
    if not (depends and torch.is_grad_enabled()):
        return None
    if name in IF and not IF[name](args, kwargs):
        return None
    with torch.no_grad():
        if name in ANY or transformed:
            return torch.ones((), dtype=torch.bool, device=depends[0].device)
        if name in ELEMENTWISE:
            return _between(x, ELEMENTWISE[name](args, kwargs))
        if isinstance(x, Tensor) and isinstance(other, Tensor):
            return _between(x - other, OF_DIFFERENCES[name](args, kwargs))
    return None


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor in those of `torch.func`'s transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _between(values: Tensor, kinks: Sequence[Any]) -> Tensor | None:
    """Return whether a kink, a number or a tensor of them, lies between values."""
    # The absolute value of complex numbers is smooth, but at 0.
    if values.dtype not in REAL or values.layout != torch.strided or values.is_nested:
        return None
    found = None
    for kink in kinks if values.numel() else ():
        apart, at = (values - kink, 0.0) if isinstance(kink, Tensor) else (values, kink)
        least, largest = apart.aminmax()
        crossed = (least <= at) & (largest > at)
        found = crossed if found is None else found | crossed
    return found
