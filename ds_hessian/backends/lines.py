"""Functions of straight pieces, such as ReLU and `clamp`, on the pieces where the weights are.

Each piece is a slope times the element, plus a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hessian.backends.bits import Bits, Held, eighths
from ds_hessian.backends.hooks import shown, unseen
from ds_hessian.backends.kinks import argument
from ds_hessian.memory import FP32

Arguments = Sequence[Any]
Keywords = dict[str, Any]
Operands = tuple[Tensor, ...]

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
        with unseen():  # of which a checkpoint might keep what is written over
            made = lines.on(wide, held, True).to(x.dtype)
        return shown(made)

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
