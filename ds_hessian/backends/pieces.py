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

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds_hessian.backends.bits import Bits, Held, eighths
from ds_hessian.backends.kinks import argument, is_plain
from ds_hessian.memory import FP32

Arguments = Sequence[Any]
Keywords = dict[str, Any]
Operands = tuple[Tensor, ...]


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


# ---- lines: each piece is a slope times the element, plus a number

Piece = tuple[Callable[[Tensor], Tensor], float, float]
"""Which elements are on it, its slope and its number."""


@dataclass(frozen=True)
class Lines:
    """A function whose pieces are straight.

    Attributes:
        pieces: Those that have a mask.
        slope: The slope of all other elements.
        number: The number that is added to them.
        factor: Whether torch multiplies by the slope, so that 0 times infinity is NaN; else what
            it is given is left out where the slope is 0.
    """

    pieces: tuple[Piece, ...]
    slope: float = 1.0
    number: float = 0.0
    factor: bool = False

    def sides(self, operands: Operands) -> list[Tensor]:
        """Return a mask for each piece that has one."""
        return [on(operands[0]) for on, _, _ in self.pieces]

    def value(self, operands: Operands, held: Sequence[Held]) -> Tensor:
        """Return the function on the pieces that are held."""
        found: Tensor = _Straight.apply(operands[0], self, held)  # type: ignore[no-untyped-call]
        return found

    def on(self, x: Tensor, held: Sequence[Bits], numbers: bool) -> Tensor:
        """Return slopes times `x`, 0 where the slope is 0, whatever `x` is, but for `factor`; and
        the numbers added, if they are asked for.
        """
        if x.numel() < LARGE or not all(bits.stored_as(x) for bits in held):
            return self._on(x, [bits.bytes() for bits in held], held, numbers)
        # By parts, whose masks take little memory, and stay in a processor's cache.
        out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        flat, found = (t.as_strided((t.numel(),), (1,)) for t in (x, out))
        for place, part in enumerate(eighths(x.numel())):
            count = part.stop - part.start
            masks = [bits.part(place, count) for bits in held]
            found[part] = self._on(flat[part], masks, held, numbers)
        return out

    def _on(
        self, x: Tensor, masks: Sequence[Tensor], held: Sequence[Bits], numbers: bool
    ) -> Tensor:
        given = [
            (mask, slope, number)
            for mask, bits, (_, slope, number) in zip(masks, held, self.pieces, strict=True)
            if not bits.none
        ]
        y = self._sloped(x, given)
        if not numbers:
            return y
        if self.number:
            y = y + self.number
        for mask, _, number in given:
            if number != self.number:
                y = y.add(mask.to(y.dtype), alpha=number - self.number)
        return y

    def _sloped(self, x: Tensor, given: Sequence[tuple[Tensor, float, float]]) -> Tensor:
        steep = self.slope == 0
        kept = [mask for mask, slope, _ in given if bool(slope) == steep]
        if steep and not kept:
            return torch.zeros_like(x)
        y, base = x, self.slope or 1.0
        if kept:
            some = functools.reduce(torch.bitwise_or, kept)
            some = some if steep else 1 - some
            some = some.to(x.dtype)
            y = x * some if self.factor else torch.ops.aten.threshold_backward(x, some, 0)
        if base != 1:
            y = y * base
        for mask, slope, _ in given:
            if slope not in (0.0, base):
                y = y * mask.to(y.dtype).mul_(slope / base - 1).add_(1)
        return y.clone() if y is x else y


LARGE = 2**20
"""Elements from which on they are evaluated by parts."""


class _Straight(torch.autograd.Function):
    """A function of straight pieces. Its backward keeps nothing but what is held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lines: Lines, held: Sequence[Bits]) -> Tensor:
        ctx.lines, ctx.held = lines, held
        # In 16 bits a product and a sum are rounded together, as by torch's own kernels.
        wide = x.float() if lines.slope not in (0.0, 1.0) and x.dtype.itemsize < FP32 else x
        return lines.on(wide, held, True).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return ctx.lines.on(gradients[0], ctx.held, False), None, None


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as(x: Tensor, number: float) -> float:
    """Return a number as torch's kernels have it: rounded to the type of `x`."""
    return float(torch.tensor(number, dtype=x.dtype))


def _below(kink: float, slope: float, number: float) -> Piece:
    return (lambda x: x <= _as(x, kink)), slope, number


def _above(kink: float, slope: float, number: float) -> Piece:
    return (lambda x: x >= _as(x, kink)), slope, number


def _relu(args: Arguments, kwargs: Keywords) -> Lines:
    return Lines((_below(0.0, 0.0, 0.0),))


def _leaky(args: Arguments, kwargs: Keywords) -> Lines:
    return Lines((_below(0.0, argument(args, kwargs, 1, "negative_slope", 0.01), 0.0),))


def _rrelu(args: Arguments, kwargs: Keywords) -> Lines | None:
    if argument(args, kwargs, 3, "training", False):  # draws numbers
        return None
    least, most = (argument(args, kwargs, i, n, d) for i, n, d in _RRELU)
    return Lines((_below(0.0, (least + most) / 2, 0.0),))


_RRELU = ((1, "lower", 1 / 8), (2, "upper", 1 / 3))


def _relu6(args: Arguments, kwargs: Keywords) -> Lines:
    return Lines((_below(0.0, 0.0, 0.0), _above(6.0, 0.0, 6.0)))


def _hardtanh(args: Arguments, kwargs: Keywords) -> Lines | None:
    least = argument(args, kwargs, 1, "min_val", -1.0)
    most = argument(args, kwargs, 2, "max_val", 1.0)
    return Lines((_below(least, 0.0, least), _above(most, 0.0, most))) if least < most else None


def _hardsigmoid(args: Arguments, kwargs: Keywords) -> Lines:
    return Lines((_below(-3.0, 0.0, 0.0), _above(3.0, 0.0, 1.0)), 1 / 6, 0.5)


def _threshold(args: Arguments, kwargs: Keywords) -> Lines:
    least = argument(args, kwargs, 1, "threshold")

    def low(x: Tensor) -> Tensor:
        x = x.float() if x.dtype.itemsize < FP32 else x  # as torch compares them
        return x <= _as(x, least)

    return Lines(((low, 0.0, argument(args, kwargs, 2, "value")),))


def _softshrink(args: Arguments, kwargs: Keywords) -> Lines:
    least = argument(args, kwargs, 1, "lambd", 0.5)
    above: Piece = (lambda x: x > _as(x, least)), 1.0, -least
    below: Piece = (lambda x: x < -_as(x, least)), 1.0, least
    return Lines((above, below), 0.0)


def _hardshrink(args: Arguments, kwargs: Keywords) -> Lines:
    least = argument(args, kwargs, 1, "lambd", 0.5)
    return Lines(((lambda x: x.abs() > _as(x, least), 1.0, 0.0),), 0.0)


def _abs(args: Arguments, kwargs: Keywords) -> Lines:
    return Lines(((lambda x: x < 0, -1.0, 0.0), (lambda x: x == 0, 0.0, 0.0)), factor=True)


def _sign(args: Arguments, kwargs: Keywords) -> Lines:
    return Lines(((lambda x: x > 0, 0.0, 1.0), (lambda x: x < 0, 0.0, -1.0)), 0.0)


def _clamped(least: Any, most: Any) -> Lines | None:
    given = [bound for bound in (least, most) if bound is not None]
    if not all(map(_number, given)) or (len(given) == 2 and not least <= most):
        return None
    pieces = list[Piece]()
    if least is not None:
        pieces.append((lambda x: x < _as(x, least), 0.0, float(least)))
    if most is not None:
        pieces.append((lambda x: x > _as(x, most), 0.0, float(most)))
    return Lines(tuple(pieces))


def _clamp(args: Arguments, kwargs: Keywords) -> Lines | None:
    return _clamped(argument(args, kwargs, 1, "min"), argument(args, kwargs, 2, "max"))


def _clamp_min(args: Arguments, kwargs: Keywords) -> Lines | None:
    return _clamped(argument(args, kwargs, 1, "min"), None)


def _clamp_max(args: Arguments, kwargs: Keywords) -> Lines | None:
    return _clamped(None, argument(args, kwargs, 1, "max"))


LINES: dict[str, Callable[[Arguments, Keywords], Lines | None]] = {
    **{"relu": _relu, "leaky_relu": _leaky, "rrelu": _rrelu, "relu6": _relu6},
    **{"hardtanh": _hardtanh, "hardsigmoid": _hardsigmoid, "threshold": _threshold},
    **{"softshrink": _softshrink, "hardshrink": _hardshrink, "abs": _abs, "absolute": _abs},
    **{"sign": _sign, "sgn": _sign},
    **{"clamp": _clamp, "clip": _clamp, "clamp_min": _clamp_min, "clamp_max": _clamp_max},
}
"""From a call's arguments to its pieces; None for arguments with which it has others."""

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
            x = torch.where(mask, bound, x)
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
    if not (isinstance(x, Tensor) and isinstance(table, Tensor)) or kwargs.get("out") is not None:
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
    if "out" in kwargs and kwargs["out"] is not None:
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    kinked = _found(func, name, x, args, kwargs, in_place)
    if kinked is None or not any(t.is_floating_point() for t in kinked.operands):
        return None
    if not all(is_plain(t) or not t.is_floating_point() for t in kinked.operands):
        return None
    return kinked


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
