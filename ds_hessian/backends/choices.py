"""What was decided at the weights, to be decided so elsewhere: choices, and the sides of kinks.

A router of experts chooses by `topk`; ReLU by its input's sign. `Decisions`
(`ds_hessian.backends.decisions`) records each one in the first forward of a micro-batch, which is
at the weights, and takes it again in all others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hessian.backends.bits import Bits, Held, held_of
from ds_hessian.backends.kinks import argument
from ds_hessian.backends.pieces import Kinked
from ds_hessian.errors import MeasurementError

DIMS = {"topk": 2, "kthvalue": 2, "sort": 1, "argsort": 1, "max": 1, "min": 1}
DIMS |= {"argmax": 1, "argmin": 1, "multinomial": 9}
DIMS |= {"median": 1, "nanmedian": 1, "mode": 1, "cummax": 1, "cummin": 1}
"""Functions that return indices, and the position of their argument `dim` (beyond all others for
`multinomial`, which has none and chooses along the last)."""
SETS = ("topk", "multinomial")
"""Those whose indices are a set: another order of them is no other choice."""
ORDERS = ("sort", "argsort")
"""Those that return a whole permutation."""
EXTREMES = ("max", "min", "kthvalue", "median", "nanmedian", "mode", "cummax", "cummin")
"""Those that are called for a value, as to shift logits, as often as for a choice: not counted."""
INDICES = ("argsort", "argmax", "argmin", "multinomial")
"""Those that return nothing but indices."""

SAMPLED = 2**16
"""Elements of a tensor by which it is told from others: of a larger one, each so-manieth."""

SAME = 1e-2
"""Relative difference of the inputs of a choice and of its recomputation, which run on the same
bits; other than by kernels whose sums have no fixed order, in bf16 at most."""

_TORCH = str(Path(torch.__file__).parent)
BETWEEN = tuple(
    str(Path(__file__).parent / f"{name}.py")
    for name in (
        *("function", "decisions", "choices"),
        *("pieces", "compositions", "constants", "applied"),
    )
)
"""Files of this package that lie between a line of the model and what is decided for it."""

Line = tuple[tuple[str, int], ...]
"""Files and lines of the model's code that called, and that called that."""


class PieceError(MeasurementError):
    """The model calls functions with kinks differently often off the weights: their sides cannot be
    held, and kinks are to be crossed.
    """


@dataclass(frozen=True, eq=False)
class Choice:
    """A choice made at the weights.

    Attributes:
        name: The function that chose.
        shape: The shape of its input.
        dim: The dimension along which it chose; None for the whole tensor.
        indices: What it chose.
        line: The line of the model's code that called it, and the one that called that.
    """

    name: str
    shape: torch.Size
    dim: int | None
    indices: Tensor
    line: Line

    @property
    def number(self) -> int:
        """The number of choices that are independent of each other: one for each token."""
        if self.name in EXTREMES:
            return 0
        if self.dim is not None and self.name in SETS + ORDERS:
            return self.indices.numel() // max(self.indices.shape[self.dim], 1)
        return self.indices.numel()

    def changes(self, would: Tensor) -> Tensor:
        """Return how many of the choices differ from what would be chosen now."""
        held = self.indices.long()
        if self.name in EXTREMES:
            return torch.zeros((), device=held.device)
        if self.dim is None or self.name not in SETS + ORDERS:
            return (held != would).sum()
        if self.name in SETS:
            held, would = held.sort(self.dim).values, would.sort(self.dim).values
        return (held != would).any(self.dim).sum()

    def result(self, x: Tensor) -> Any:
        """Return what the function returns for `x` where the indices are these."""
        indices = self.indices.long()
        if self.name in INDICES or self.dim is None:
            return indices
        where = indices if indices.dim() == x.dim() else indices.unsqueeze(self.dim)
        values = x.gather(self.dim, where).view(indices.shape)
        return getattr(torch.return_types, self.name)((values, indices))


@dataclass(frozen=True, eq=False)
class Sides:
    """The sides of kinks on which the elements of a call are at the weights.

    Attributes:
        name: The function that has the kinks.
        shape: The shape of its first operand.
        line: As of a choice.
        held: The sides; None where they cannot be held: the function is then called as it is.
        dtype: The type of what the function returns.
        constant: Whether no gradient goes through the call: it may be of what does not depend on
            weights, and made in some passes only.
    """

    name: str
    shape: torch.Size
    line: Line
    held: Sequence[Held] | None = None
    dtype: torch.dtype | None = None
    constant: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes that are held."""
        return sum(part.nbytes for part in self.held or ())

    def value(self, kinked: Kinked) -> Any:
        """Return what the function returns on these sides."""
        assert self.held is not None
        operands = kinked.operands
        if self.dtype is not None:  # autocast may have another type than the operands'
            operands = tuple(t.to(self.dtype) if t.is_floating_point() else t for t in operands)
        with torch.autocast(operands[0].device.type, enabled=False):
            value = kinked.value(operands, self.held)
        if kinked.in_place:
            return kinked.operands[0].copy_(value)
        if kinked.out is not None:
            return kinked.out.resize_(value.shape).copy_(value)
        if kinked.indices:
            (indices,) = self.held
            assert isinstance(indices, Tensor)
            return value, indices.long()
        return value

    @torch.no_grad()
    def tally(self, kinked: Kinked) -> Tensor:
        """Return `(2,)` fp64: the number of elements whose sides are held, and of those that would
        be on another side now.
        """
        assert self.held is not None
        device = kinked.operands[0].device
        count = torch.zeros(2, dtype=torch.float64, device=device)
        if not kinked.counted:
            return count
        moved: Tensor | None = None
        for part, now in zip(self.held, kinked.sides(kinked.operands), strict=True):
            found = part.differs(now) if isinstance(part, Bits) else part != now
            moved = found if moved is None else moved | found
        if moved is not None:
            count[0] = moved.numel()
            count[1] = torch.count_nonzero(moved)
        # What has no gradient and never moves is a constant, and no kink.
        return count * (count[1] > 0) if self.constant else count


@torch.no_grad()
def sides_of(kinked: Kinked, line: Line, some: Tensor, real: Tensor) -> Sides | None:
    """Return the sides of a call at the weights; None where the function is not what it is held to
    be.

    Args:
        kinked: The call.
        line: Where it was called.
        some: Its first operand, or some elements of it.
        real: What the function has returned of that.
    """
    alone: dict[str, Any] = {"in_place": False, "indices": False, "out": None}
    tried = replace(kinked, operands=(some, *kinked.operands[1:]), **alone)
    dtype = real.dtype if real.is_floating_point() else None
    if all(t.dtype == dtype or not t.is_floating_point() for t in kinked.operands):
        dtype = None
    made = _made(tried, line, dtype)
    again = made.value(tried)
    if again.dtype != real.dtype or again.shape != real.shape:
        return None
    if real.is_floating_point():
        near, wide = torch.finfo(real.dtype).eps * 8, torch.promote_types(real.dtype, torch.float32)
        alike = torch.allclose(again.to(wide), real.to(wide), rtol=near, atol=near, equal_nan=True)
    else:
        alike = torch.equal(again, real)
    if not alike:
        return None
    return _made(kinked, line, dtype) if kinked.alone else made


def _made(kinked: Kinked, line: Line, dtype: torch.dtype | None) -> Sides:
    held = [held_of(part, kinked.most) for part in kinked.sides(kinked.operands)]
    return Sides(kinked.name, kinked.operands[0].shape, line, held, dtype)


def chooses(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the call chooses by values that depend on weights."""
    x = argument(args, kwargs, 0, "input")
    if not (isinstance(x, Tensor) and x.is_floating_point() and x.dim()) or "out" in kwargs:
        return False
    along = argument(args, kwargs, DIMS[name], "dim")
    return name not in _BY_DIM or (isinstance(along, int) and not isinstance(along, bool))


_BY_DIM = ("max", "min", "median", "nanmedian")
"""Functions that return indices only where they are given a dim."""


def dim_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the dimension along which a call chooses; None for the whole tensor."""
    along = argument(args, kwargs, DIMS[name], "dim")
    if name in ("argmax", "argmin"):
        return None if along is None else int(along)
    return -1 if along is None or isinstance(along, bool) else int(along)


def indices_of(name: str, result: Any) -> Tensor:
    """Return the indices in what a function that chooses has returned."""
    indices: Tensor = result if name in INDICES else result[1]
    return indices.detach()


def line_of_call() -> Line:
    """Return files and lines of the two innermost frames that are neither torch's nor
    this package's.
    """
    found, frame = list[tuple[str, int]](), sys._getframe(1)
    while frame.f_back is not None and len(found) < 2:
        frame = frame.f_back
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH) and file not in BETWEEN:
            found.append((file, frame.f_lineno))
    return tuple(found)


def called(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return a call by its function and the arguments that are no tensors: `x > 0` and `x > 1` have
    the same inputs.
    """
    given = [*enumerate(args), *sorted(kwargs.items())]
    return f"{name}{[(k, v) for k, v in given if not isinstance(v, Tensor)]}"


def fingerprint(*tensors: Tensor) -> Tensor:
    """Return `(2,)` fp64 that tells the inputs of decisions apart, and `a > b` from `b > a`."""
    total = torch.zeros(2, dtype=torch.float64, device=tensors[0].device)
    for number, x in enumerate(tensors, 1):
        flat = x.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // SAMPLED)]
        flat = flat.double().nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)
        ramp = torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64, device=flat.device)
        total = total + number * torch.stack([flat @ flat, flat @ ramp])
    return total
