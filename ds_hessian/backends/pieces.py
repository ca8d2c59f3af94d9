"""Functions with kinks as the smooth functions that they are around the weights.

Where the sides of a function's kinks are held as they were at the weights, it is smooth: ReLU is
the identity of some elements and 0 of the others, the maximum of a window one element of it. The
Hessian of this piece of the loss is that at the weights, which a double backward computes. At a
kink itself, the slope is torch's.

`found` recognises a call. Functions that are made of others are called as these
(`ds_hessian.backends.compositions`). Comparisons are held by themselves, and with them whatever is
chosen by them (`torch.where(x > 0, ...)`, `x * (x > 0)`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds_hessian.backends.bits import Bits, Held
from ds_hessian.backends.kinks import argument, is_plain
from ds_hessian.backends.lines import LINES, Arguments, Keywords, Operands


@dataclass(frozen=True)
class Kinked:
    """A call of a function with kinks.

    Attributes:
        name: The function's name, without underscores.
        operands: The tensors that it is a function of.
        sides: From the operands to masks, or indices, that say on which piece each element is.
        value: From operands and what is held of the sides to the smooth function's value.
        most: A number above all indices.
        in_place: Whether the first operand is to be overwritten.
        counted: Whether the sides are those of elements, of which it is counted how many change.
        indices: Whether the indices are returned as well.
        alone: Whether each element has its value whatever the others are.
        out: The tensor that is to have the value; None for a new one.
    """

    name: str
    operands: Operands
    sides: Callable[[Operands], list[Tensor]]
    value: Callable[[Operands, Sequence[Held]], Tensor]
    most: int = 0
    in_place: bool = False
    counted: bool = True
    indices: bool = False
    alone: bool = False
    out: Tensor | None = None


# ---- pieces that are bent, or have several operands

Value = Callable[[Operands, Sequence[Tensor]], Tensor]
"""From operands and masks to the value."""


def _bent(alpha: float, rate: float, scale: float) -> Value:
    """Return ELU's value: `alpha (exp(rate x) - 1)` below 0; all of it times `scale`."""

    def value(operands: Operands, masks: Sequence[Tensor]) -> Tensor:
        (x,), (low,) = operands, masks
        # The exponential only where it is used: elsewhere it may be infinite.
        below = alpha * torch.expm1(rate * x.masked_fill(~low, 0.0))
        return scale * torch.where(low, below, x)

    return value


def _low(operands: Operands) -> list[Tensor]:
    return [operands[0] <= 0]


def _prelu(operands: Operands, masks: Sequence[Tensor]) -> Tensor:
    x, weight = operands
    if weight.numel() > 1 and x.dim() > 1:
        weight = weight.view(1, -1, *(1,) * (x.dim() - 2))
    return torch.where(masks[0], weight * x, x)


def _softplus(x: Tensor, args: Arguments, kwargs: Keywords) -> Any:
    beta = argument(args, kwargs, 1, "beta", 1.0)
    threshold = argument(args, kwargs, 2, "threshold", 20.0)
    if math.exp(-threshold) < torch.finfo(torch.float32).eps:
        return None  # it has no kink beyond rounding

    def value(operands: Operands, masks: Sequence[Tensor]) -> Tensor:
        (x,), (straight,) = operands, masks
        curved = functional.softplus(x.masked_fill(straight, 0.0), beta, math.inf)
        return torch.where(straight, x, curved)

    return (x,), lambda operands: [operands[0] * beta > threshold], value


def _larger(operands: Operands) -> list[Tensor]:
    return [operands[0] < operands[1], operands[0] == operands[1]]


def _smaller(operands: Operands) -> list[Tensor]:
    return [operands[0] > operands[1], operands[0] == operands[1]]


def _one_of_two(operands: Operands, masks: Sequence[Tensor]) -> Tensor:
    """Return the second where the first mask says so; the mean of both where they were equal."""
    a, b = operands
    found = torch.where(masks[0], b, a)
    return found if masks[1] is None else torch.where(masks[1], a / 2 + b / 2, found)


def _between(least: bool, most: bool) -> tuple[Callable[[Operands], list[Tensor]], Value]:
    """Return sides and value of clamping between tensors."""

    def sides(operands: Operands) -> list[Tensor]:
        x, *bounds = operands
        found = [x < bounds[0]] if least else []
        return [*found, x > bounds[-1]] if most else found

    def value(operands: Operands, masks: Sequence[Tensor]) -> Tensor:
        x, *bounds = operands
        for mask, bound in zip(masks, bounds, strict=True):
            x = x if mask is None else torch.where(mask, bound, x)
        return x

    return sides, value


def _curved(name: str, args: Arguments, kwargs: Keywords) -> Any:
    """Return operands, sides and value of a function of this kind; None if it is none."""
    x = argument(args, kwargs, 0, "input")
    if name == "elu":
        alpha = argument(args, kwargs, 1, "alpha", 1.0)
        return (x,), _low, _bent(alpha, 1.0, 1.0)
    if name == "celu":
        alpha = argument(args, kwargs, 1, "alpha", 1.0)
        return (x,), _low, _bent(alpha, 1 / alpha, 1.0)
    if name == "selu":
        return (x,), _low, _bent(_SELU[0], 1.0, _SELU[1])
    if name == "softplus":
        return _softplus(x, args, kwargs)
    if name == "prelu":
        return (x, argument(args, kwargs, 1, "weight")), _low, _prelu
    if name in _OF_TWO:
        other = argument(args, kwargs, 1, "other")
        if isinstance(x, Tensor) and isinstance(other, Tensor):
            return (x, other), _OF_TWO[name], _one_of_two
    if name in ("clamp", "clip", "clamp_min", "clamp_max"):
        return _clamped_by(name, x, args, kwargs)
    return None


def _clamped_by(name: str, x: Tensor, args: Arguments, kwargs: Keywords) -> Any:
    least = None if name == "clamp_max" else argument(args, kwargs, 1, "min")
    most = argument(args, kwargs, 1 if name == "clamp_max" else 2, "max")
    bounds = [bound for bound in (least, most) if bound is not None]
    if not bounds or not all(isinstance(bound, Tensor) for bound in bounds):
        return None
    return (x, *bounds), *_between(least is not None, most is not None)


_SELU = (1.6732632423543772848170429916717, 1.0507009873554804934193349852946)
"""Alpha and scale (Klambauer, Unterthiner, Mayr and Hochreiter, 2017)."""

_OF_TWO = {"maximum": _larger, "fmax": _larger, "max": _larger}
_OF_TWO |= {"minimum": _smaller, "fmin": _smaller, "min": _smaller}

CURVED = {
    "elu",
    "celu",
    "selu",
    "prelu",
    "softplus",
    *_OF_TWO,
    "clamp",
    "clip",
    "clamp_min",
    "clamp_max",
}


def _by_masks(value: Value) -> Callable[[Operands, Sequence[Held]], Tensor]:
    def given(operands: Operands, held: Sequence[Held]) -> Tensor:
        first, *others = [bits for bits in held if isinstance(bits, Bits)]
        masks: list[Any] = [first.mask(), *(None if b.none else b.mask() for b in others)]
        return value(operands, masks)

    return given


# ---- comparisons

COMPARISONS = {"gt", "lt", "ge", "le", "eq", "ne"}
COMPARISONS |= {"greater", "less", "greater_equal", "less_equal", "not_equal"}
COMPARISONS |= {"logical_and", "logical_or", "logical_xor", "logical_not"}
COMPARISONS |= {"isclose", "signbit", "bool"}
"""Functions whose values are booleans."""


def _comparison(
    func: Callable[..., Tensor], name: str, args: Arguments, kwargs: Keywords, in_place: bool
) -> Any:
    """Return operands, sides and value; in place, of the type of what is overwritten."""
    operands = tuple(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
    compare = getattr(Tensor, name) if in_place else func

    def sides(operands: Operands) -> list[Tensor]:
        left = iter(operands)
        given = [next(left) if isinstance(t, Tensor) else t for t in args]
        named = {k: next(left) if isinstance(t, Tensor) else t for k, t in kwargs.items()}
        return [compare(*given, **named)]

    def value(operands: Operands, masks: Sequence[Tensor]) -> Tensor:
        return masks[0].to(operands[0].dtype) if in_place else masks[0]

    return operands, sides, value


# ---- extremes of many elements

EXTREMES: dict[str, Callable[..., Tensor]] = {
    **{"amax": torch.amax, "amin": torch.amin, "max": torch.amax, "min": torch.amin},
    **{"median": torch.median, "nanmedian": torch.nanmedian},
}


def _extreme(name: str, args: Arguments, kwargs: Keywords) -> Any:
    """Return operands, sides and value: a mean over the elements that are the extreme."""
    x = argument(args, kwargs, 0, "input")
    along, keep = argument(args, kwargs, 1, "dim", ()), argument(args, kwargs, 2, "keepdim", False)
    if name not in ("amax", "amin"):
        if len(args) > 1 or kwargs.keys() - {"input"}:
            return None  # along a dim: a choice, which has indices
        along, keep = (), False
    dims = (along,) if isinstance(along, int) else tuple(along) or tuple(range(x.dim()))

    def sides(operands: Operands) -> list[Tensor]:
        (x,) = operands
        if "median" in name:
            return [x == EXTREMES[name](x)]
        return [x == EXTREMES[name](x, dims, True)]

    def value(operands: Operands, masks: Sequence[Tensor]) -> Tensor:
        (x,), (at,) = operands, masks
        return x.masked_fill(~at, 0.0).sum(dims, keep) / at.sum(dims, keep)

    return (x,), sides, value


# ---- pooling

POOLS = {
    **{f"max_pool{n}d": n for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": n for n in (1, 2, 3)},
}


def _pool(name: str, dims: int, args: Arguments, kwargs: Keywords) -> Kinked:
    """Return a call of max pooling, which gathers the elements that were the largest."""
    x: Tensor = argument(args, kwargs, 0, "input")
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "return_indices")}
    given = [x, *args[1:]]
    shown = bool(kwargs.get("return_indices", False)) or name.endswith("_with_indices")
    plain = name.removesuffix("_with_indices")
    last = 6 if plain.startswith("max") else 2  # the position of `return_indices` in functional's
    if len(given) > last:
        last = last if plain.startswith("adaptive") else 6
        shown |= bool(given[last])
        given = given[:last]

    def sides(operands: Operands) -> list[Tensor]:
        function: Any = getattr(functional, plain)
        _, indices = function(operands[0], *given[1:], **rest, return_indices=True)
        return [indices]

    def value(operands: Operands, held: Sequence[Held]) -> Tensor:
        (x,), (indices,) = operands, held
        assert isinstance(indices, Tensor)
        y = x.flatten(-dims).gather(-1, indices.long().flatten(-dims)).view(indices.shape)
        last = torch.channels_last if dims == 2 else torch.channels_last_3d
        if x.dim() == dims + 2 and dims > 1 and not x.is_contiguous():
            return y.contiguous(memory_format=last) if x.is_contiguous(memory_format=last) else y
        return y

    most = math.prod(x.shape[-dims:])
    return Kinked(plain, (x,), sides, value, most, indices=shown)


# ---- places in a table

PLACES = {"bucketize": ("input", "boundaries"), "searchsorted": ("sorted_sequence", "input")}


def _place(func: Any, name: str, args: Arguments, kwargs: Keywords) -> Kinked | None:
    """Return a call of a function that returns between which boundaries each element is."""
    names = PLACES[name]
    given = [argument(args, kwargs, index, of) for index, of in enumerate(names)]
    at = names.index("input")
    table, x = given[1 - at], given[at]
    if not (isinstance(x, Tensor) and isinstance(table, Tensor)):
        return None
    rest = {k: v for k, v in kwargs.items() if k not in names}

    def sides(operands: Operands) -> list[Tensor]:
        pair = [table, *operands] if at else [*operands, table]
        return [func(*pair, *args[2:], **rest)]

    def value(operands: Operands, held: Sequence[Held]) -> Tensor:
        (places,) = held
        assert isinstance(places, Tensor)
        return places.to(torch.int32 if rest.get("out_int32") else torch.int64)

    return Kinked(name, (x,), sides, value, table.shape[-1] + 1)


# ---- all of them

NAMES = {*LINES, *CURVED, *COMPARISONS, *EXTREMES, *PLACES}
NAMES |= {*POOLS, *(f"{name}_with_indices" for name in POOLS)}


def found(func: Any, args: Arguments, kwargs: Keywords) -> Kinked | None:
    """Return what a call of a function of `NAMES` is; None where it cannot be held."""
    given: str = func.__name__
    name = given.strip("_")
    in_place = (given.endswith("_") and not given.endswith("__")) or bool(
        kwargs.get("inplace", False)
    )
    x = argument(args, kwargs, 0, "input")
    kwargs = dict(kwargs)
    out = kwargs.pop("out", None)
    if out is not None and name not in COMPARISONS:
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    kinked = _found(func, name, x, args, kwargs, in_place)
    if kinked is None or not any(t.is_floating_point() for t in kinked.operands):
        return None
    if not all(is_plain(t) or not t.is_floating_point() for t in kinked.operands):
        return None
    return replace(kinked, out=out)


def _found(
    func: Any, name: str, x: Any, args: Arguments, kwargs: Keywords, in_place: bool
) -> Kinked | None:
    if name in COMPARISONS:
        if not isinstance(x, Tensor):
            return None
        operands, sides, value = _comparison(func, name, args, kwargs, in_place)
        return Kinked(name, operands, sides, _by_masks(value), in_place=in_place)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    if name in PLACES:
        return _place(func, name, args, kwargs)
    if name.removesuffix("_with_indices") in POOLS:
        return _pool(name, POOLS[name.removesuffix("_with_indices")], args, kwargs)
    if name in LINES:
        in_place |= bool(_inplace_by_position(func, name, args))
        lines = LINES[name](args, kwargs)
        if lines is not None:
            return Kinked(name, (x,), lines.sides, lines.value, in_place=in_place, alone=True)
    if name in CURVED:
        in_place |= bool(_inplace_by_position(func, name, args))
        made = _curved(name, args, kwargs)
        if made is not None:
            operands, sides, value = made
            return Kinked(name, operands, sides, _by_masks(value), in_place=in_place)
    if name in EXTREMES and x.dim():
        made = _extreme(name, args, kwargs)
        if made is not None:
            operands, sides, value = made
            return Kinked(name, operands, sides, _by_masks(value), counted=False)
    return None


_INPLACE = {"relu": 1, "selu": 1, "relu6": 1, "elu": 2, "celu": 2, "leaky_relu": 2}
_INPLACE |= {"hardtanh": 3, "hardsigmoid": 1, "threshold": 3, "rrelu": 4}
"""The position of the argument `inplace` of functional's."""


def _inplace_by_position(func: Any, name: str, args: Arguments) -> bool:
    at = _INPLACE.get(name)
    return at is not None and len(args) > at and args[at] is True
