"""Functions with kinks as compositions of others, whose sides are held (`pieces`)."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds_hessian.backends.kinks import ROUNDINGS, argument, is_plain

Arguments = Sequence[Any]
Keywords = dict[str, Any]


def _reduced(values: Tensor, reduction: str | int) -> Tensor:
    """Return a loss of such elements; torch's functions in C++ have reductions by number."""
    if reduction in ("none", 0):
        return values
    return values.mean() if reduction in ("mean", 1) else values.sum()


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Return losses' arguments in fp32 under autocast, as torch has them."""
    kind = tensors[0].device.type
    narrow = torch.is_autocast_enabled(kind)
    return [t.float() if narrow and t.is_floating_point() else t for t in tensors]


def _l1_loss(
    input: Tensor, target: Tensor, reduction: str | int = "mean", weight: Tensor | None = None
) -> Tensor:
    if weight is None:
        x, y = _wide(input, target)
        return _reduced((x - y).abs(), reduction)
    far = (input - target).abs() * weight
    return far.sum() / weight.sum() if reduction == "mean" else _reduced(far, reduction)


def _smooth_l1_loss(
    input: Tensor, target: Tensor, reduction: str | int = "mean", beta: float = 1.0
) -> Tensor:
    x, y = _wide(input, target)
    far = (x - y).abs()
    if beta == 0:
        return _reduced(far, reduction)
    return _reduced(torch.where(far < beta, far * far / (2 * beta), far - beta / 2), reduction)


def _huber_loss(
    input: Tensor, target: Tensor, reduction: str | int = "mean", delta: float = 1.0
) -> Tensor:
    x, y = _wide(input, target)
    far = (x - y).abs()
    inner, outer = far * far / 2, delta * (far - delta / 2)
    return _reduced(torch.where(far <= delta, inner, outer), reduction)


def _hinge_embedding_loss(
    input: Tensor, target: Tensor, margin: float = 1.0, reduction: str | int = "mean"
) -> Tensor:
    x, y = _wide(input, target)
    other = torch.where(y != 1, (margin - x).clamp_min(0), 0.0)
    return _reduced(other + torch.where(y != -1, x, 0.0), reduction)


def _margin_ranking_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0.0,
    reduction: str | int = "mean",
) -> Tensor:
    a, b, y = _wide(input1, input2, target)
    return _reduced((-y * (a - b) + margin).clamp_min(0), reduction)


def _cosine_embedding_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0.0,
    reduction: str | int = "mean",
) -> Tensor:
    a, b, y = _wide(input1, input2, target)
    tiny = 1e-12  # as in torch
    cosine = (a * b).sum(-1) / (((a * a).sum(-1) + tiny) * ((b * b).sum(-1) + tiny)).sqrt()
    alike = torch.where(y == 1, 1 - cosine, 0.0)
    return _reduced(alike + torch.where(y == -1, (cosine - margin).clamp_min(0), 0.0), reduction)


def _triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str | int = "mean",
) -> Tensor:
    a, b, c = _wide(anchor, positive, negative)
    near = functional.pairwise_distance(a, b, p, eps)
    far = functional.pairwise_distance(a, c, p, eps)
    if swap:
        far = torch.minimum(far, functional.pairwise_distance(b, c, p, eps))
    return _reduced((margin + near - far).clamp_min(0), reduction)


def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    reduction: str | int = "mean",
) -> Tensor:
    (x,) = _wide(input)
    x, y = x.reshape(-1, x.shape[-1]), target.reshape(-1, 1)
    over = functional.relu(margin - x.gather(1, y) + x)
    over = over if p == 1 else over * over
    if weight is not None:
        over = over * weight[y]
    found = over.scatter(1, y, 0.0).sum(1) / x.shape[1]
    return _reduced(found.reshape(target.shape), reduction)


def _aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims = () if dim is None else (dim,)
    ends = input.amin(dims, keepdim), input.amax(dims, keepdim)
    return torch.return_types.aminmax(ends)  # type: ignore[attr-defined]


def _copysign(input: Tensor, other: Tensor | float) -> Tensor:
    sign = torch.as_tensor(other, dtype=input.dtype, device=input.device)
    return torch.where(torch.signbit(sign), -input.abs(), input.abs())


def _heaviside(input: Tensor, values: Tensor) -> Tensor:
    found = torch.where(input == 0, values, (input > 0).to(input.dtype))
    return found.detach()


def _msort(input: Tensor) -> Tensor:
    return input.sort(0).values


def _norm(
    input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    far = x.abs()
    dims = tuple(range(x.dim())) if dim is None else dim
    if p == 1:
        return far.sum(dims, keepdim)
    return far.amax(dims, keepdim) if p > 0 else far.amin(dims, keepdim)


def _vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    return _norm(x, ord, dim, keepdim, dtype)


def _hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    x = input.clone() if inplace else input
    found = x * functional.hardsigmoid(x)
    return input.copy_(found) if inplace else found


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call one of torch's functions as it is, without a gradient."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return function(*args, **kwargs)


def _rounded(name: str) -> Callable[..., Tensor]:
    """Return a function whose value is a constant of the gradient (`constants`)."""
    return lambda input, **how: _plainly(getattr(torch, name), input, **how)


def _remainder(name: str) -> Callable[..., Tensor]:
    def function(input: Tensor, other: Tensor | float) -> Tensor:
        whole = (input - _plainly(getattr(torch, name), input, other)) / other
        return input - torch.round(whole) * other

    return function


def _frac(input: Tensor) -> Tensor:
    return input - torch.trunc(input)


def _divided(input: Tensor, other: Tensor | float, *, rounding_mode: str) -> Tensor:
    return _plainly(torch.div, input, other, rounding_mode=rounding_mode)


def _straight_through(input: Tensor, rounded: Tensor, within: Tensor) -> Tensor:
    """Return `rounded`, with the gradient of the elements of `input` that are within bounds."""
    kept = torch.where(within.to(input.dtype) > 0, input, 0.0)
    return kept + (rounded - kept).detach()


def _quantized(
    input: Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> Tensor:
    bounds = quant_min, quant_max
    if isinstance(scale, Tensor):
        on = torch.ones(1, dtype=torch.int64, device=input.device)
        call = torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        found = _plainly(call, input, scale, zero_point, on, *bounds)
    else:
        call = torch.ops.aten.fake_quantize_per_tensor_affine_cachemask
        found = _plainly(call, input, scale, zero_point, *bounds)
    return _straight_through(input, *found)


def _quantized_by_channel(input: Tensor, *how: Any) -> Tensor:
    call = torch.ops.aten.fake_quantize_per_channel_affine_cachemask
    return _straight_through(input, *_plainly(call, input, *how))


def _observed(input: Tensor, *how: Any, **rest: Any) -> Tensor:
    """Observe and quantize."""
    return _straight_through(
        input, *_plainly(torch._fused_moving_avg_obs_fq_helper, input, *how, **rest)
    )


EXPANDED: dict[str, Callable[..., Any]] = {
    "fused_moving_avg_obs_fake_quant": _observed,
    **{name: _rounded(name) for name in ROUNDINGS},
    **{"remainder": _remainder("remainder"), "mod": _remainder("remainder")},
    **{"fmod": _remainder("fmod"), "frac": _frac, "div": _divided, "divide": _divided},
    "fake_quantize_per_tensor_affine": _quantized,
    "fake_quantize_per_channel_affine": _quantized_by_channel,
    **{"l1_loss": _l1_loss, "smooth_l1_loss": _smooth_l1_loss, "huber_loss": _huber_loss},
    "hinge_embedding_loss": _hinge_embedding_loss,
    "margin_ranking_loss": _margin_ranking_loss,
    "cosine_embedding_loss": _cosine_embedding_loss,
    "triplet_margin_loss": _triplet_margin_loss,
    "multi_margin_loss": _multi_margin_loss,
    **{"aminmax": _aminmax, "norm": _norm, "linalg_vector_norm": _vector_norm},
    **{"hardswish": _hardswish, "copysign": _copysign, "msort": _msort},
    "heaviside": _heaviside,
}
"""Functions by others, whose sides are held."""

_LEGACY = ("size_average", "reduce", "out")
"""Arguments with which a function is not expanded, unless they are None."""
_OPTIONAL = (*_LEGACY, "weight")
"""Arguments that are left out where they are None."""


def whole(func: Any, kwargs: Keywords) -> Keywords:
    """Return the keywords with which a function was called.

    torch's `l1_loss` hands itself to a mode without its `weight`, and the loss would be another
    one; it is found where it was given.
    """
    if func is not functional.l1_loss:
        return kwargs
    frame = sys._getframe(1)
    while frame.f_code is not functional.l1_loss.__code__:
        if frame.f_back is None:
            return kwargs
        frame = frame.f_back
    return {**kwargs, "weight": frame.f_locals["weight"]}


def expanded(name: str, args: Arguments, kwargs: Keywords) -> Callable[[], Any] | None:
    """Return a call of the function by others; None where it has to be called as it is."""
    in_place = name.endswith("_") and not name.endswith("__")
    name = name.strip("_")
    made = None if in_place else EXPANDED.get(name)
    x = argument(args, kwargs, 0, "input")
    first = (
        x
        if isinstance(x, Tensor)
        else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
    )
    if made is None or first is None or not is_plain(first):
        return None
    if name in ("norm", "linalg_vector_norm"):
        order = argument(args, kwargs, 1, "p" if name == "norm" else "ord", 2)
        if order not in (1, math.inf, -math.inf):
            return None
    kept = {k: v for k, v in kwargs.items() if k not in _OPTIONAL or v is not None}
    if not kept.keys() & set(_LEGACY):
        try:
            inspect.signature(made).bind(*args, **kept)
        except TypeError:
            return None
        return lambda: made(*args, **kept)
    return None
