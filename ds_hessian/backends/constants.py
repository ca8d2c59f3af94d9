"""Constants of the gradient: values that depend on the weights, and through which none goes.

What a model detaches, computes under `torch.no_grad()`, or turns into a Python number (`item`) is a
constant of its gradient: the other side of a contrastive pair, what straight-through rounding adds,
a weight of the loss made of gradients. A double backward has it as a constant too, so the Hessian
is that of the loss in which it has its value at the weights. Each is recorded where it meets what
has a gradient, in the first forward of a micro-batch, and is put in its place in all others.

The i-th meeting in a forward is the i-th that was recorded, or the next one of the same line. Where
a backward recomputes activations, a constant is recognised by the value that it would have had in
the forward.

Memory: a copy of what is recorded, but one for all micro-batches where it is the same.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ds_hessian.backends.choices import SAME, Line, fingerprint, line_of_call
from ds_hessian.backends.hooks import unseen
from ds_hessian.backends.kinks import IF, INTEGERS, ROUNDINGS
from ds_hessian.backends.pieces import COMPARISONS
from ds_hessian.backends.state import HOSTS, package_of, tensors_in
from ds_hessian.errors import MeasurementError, UnsupportedError

_LEAVE = {"item", "tolist", "numpy", "__array__", "equal", "allclose", "is_nonzero"}
_LEAVE |= {"__float__", "__int__", "__bool__", "__complex__"}
_FRESH = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")
"""Functions whose results have nothing of their tensors' values, beside those named `..._like`."""

_WITH_ADDEND = ("addmm", "addbmm", "baddbmm", "addmv", "addr")
"""Functions that add beta times their first argument to a product of two others."""

_OF_FIRST = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
"""Functions whose results have the values of their first argument; another is an example."""

_STAIRS = {*ROUNDINGS, "sign", "sgn", "heaviside", "bernoulli"}
"""Functions whose derivative is 0, so that a written backward with another one is no derivative."""

_LEVELS = 3
"""Values that numbers made of a comparison have, or of two, at most; of more comparisons they have
more, but far fewer than there are numbers."""


def leaves(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of a function makes numbers, arrays or integers of tensors."""
    return name in _LEAVE or name in INTEGERS or (name in ("to", "type") and IF[name](args, kwargs))


class Constants:
    """The constants of the gradients of one measurement.

    Attributes:
        read: The number of calls without a graph that have used, and not only detached, what
            requires gradients.
    """

    def __init__(self) -> None:
        self.read = 0
        self._recorded: dict[Hashable, list[tuple[Line, Tensor]]] = {}
        self._known: dict[tuple[torch.Size, torch.dtype, float], list[Tensor]] = {}
        self._derived = weakref.WeakValueDictionary[int, Tensor]()
        # What constants of the present run would be, and are.
        self._replaced: list[tuple[Tensor, Tensor]] = []
        self._made, self._first = 0, False
        self._key: Hashable = None
        self._comparing = set[type | None]()  # functions that compare in their forward
        self._forwards = list[type]()  # of functions, in which the present call is made

    def begin(self) -> None:
        """Begin a run of forwards and backwards."""
        self._replaced.clear()

    def at(self, key: Hashable, first: bool) -> None:
        """Begin the forward of a micro-batch."""
        self._key, self._first, self._made = key, first, 0
        self._derived.clear()

    def of(self, key: Hashable) -> bool:
        """Return whether a micro-batch has constants, as far as it has been evaluated."""
        return bool(self._recorded.get(key))

    @property
    def following(self) -> bool:
        """Whether values of the present micro-batch are to be followed."""
        return self._key is not None and (self._first or bool(self._recorded))

    @contextmanager
    def forward_of(self, function: Any) -> Iterator[None]:
        """Call a `torch.autograd.Function` in the body: its forward need not have a context."""
        self._forwards.append(function)
        try:
            yield
        finally:
            self._forwards.pop()

    def _function(self) -> type | None:
        """Return the `torch.autograd.Function` in which the present call is made, in its forward or
        backward; None outside of any.
        """
        return self._forwards[-1] if self._forwards else _function_of_call()

    def held(
        self,
        name: str,
        given: tuple[Any, dict[str, Any]],
        written: Sequence[Tensor],
        leaving: bool,
        back: bool,
    ) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a call, with constants as they are at the weights.

        Args:
            name: The function's name.
            given: Its arguments.
            written: Those into which it writes.
            leaving: Whether it `leaves`.
            back: Whether it is called in a backward, to recompute activations.
        """
        tensors = list(tensors_in(_read(name, *given)))
        if self._first and self._comparing and not back:
            with unseen():
                for t in tensors:
                    self._require_slope(t)
        if name.strip("_") in _STAIRS and not (torch.is_grad_enabled() or back):
            if any(t.requires_grad or self._is_derived(t) for t in tensors):
                _refuse_stairs(self._function())
        if leaving:
            here = [t for t in tensors if t.requires_grad or self._is_derived(t)]
            here = [t for t in here if _is_real(t)]
        elif torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            here = [t for t in tensors if self._is_derived(t)]
        else:
            return given
        # Whatever graph the forward of a `torch.autograd.Function` makes, as where activations are
        # to be recomputed, is given up.
        if not here or (not leaving and not back and self._function() is not None):
            return given
        with unseen():
            values = {id(t): self.value(t.detach(), back) for t in here}
        for t in written:
            if id(t) in values:
                with torch.no_grad():
                    t.copy_(values.pop(id(t)))
        args, kwargs = given
        return _replaced(args, values), {k: _replaced(v, values) for k, v in kwargs.items()}

    def begin_graph(self, tensor: Tensor) -> None:
        """Give a tensor that is about to be a leaf of the graph its value at the weights."""
        if self._is_derived(tensor) and self._function() is None:
            with unseen():
                tensor.data = self.value(tensor.detach(), False)

    def note(
        self,
        name: str,
        given: Iterable[Any],
        written: Iterable[Tensor],
        made: Any,
        detaches: bool = False,
    ) -> None:
        """Note what a call has made of values that depend on the weights, without a graph."""
        if name in _FRESH or name.endswith("_like"):
            return
        compares = name.strip("_") in COMPARISONS and not torch.is_grad_enabled()
        found = [t for t in (*tensors_in((made,)), *written) if not t.requires_grad and _is_real(t)]
        if not (found or compares):
            return
        given = tuple(given)[:1] if name in _OF_FIRST else given
        tensors = list(tensors_in(given))
        if not (detaches or torch.is_grad_enabled()):
            self.read += any(t.requires_grad for t in tensors)
        if any(t.requires_grad or self._is_derived(t) for t in tensors):
            if compares:
                self._comparing.add(self._function())
            for t in found:
                self._derived[id(t)] = t
                if t._base is not None and not t._base.requires_grad:
                    self._derived[id(t._base)] = t._base

    def _require_slope(self, tensor: Tensor) -> None:
        """Refuse what a written function has made of comparisons alone."""
        made_by = tensor.grad_fn
        if not isinstance(made_by, BackwardCFunction):
            return
        function = getattr(made_by, "_forward_cls", None)
        if function in self._comparing and self._derived.get(id(tensor)) is not tensor:
            if len(tensor.detach().unique()) <= max(_LEVELS, tensor.numel() // 2):
                _refuse_stairs(function)

    def _is_derived(self, tensor: Tensor) -> bool:
        return not tensor.requires_grad and self._derived.get(id(tensor)) is tensor

    def value(self, now: Tensor, back: bool) -> Tensor:
        """Return a copy, which the model may write into, of a constant that would be `now`.

        Args:
            now: What it would be.
            back: Whether it is wanted in a backward, to recompute activations.
        """
        if back:
            return self._recomputed(now)
        recorded, line = self._recorded.setdefault(self._key, []), line_of_call()
        if self._first:
            recorded.append((line, self._shared(now)))
        # What the model has kept since the first forward stops nothing any more: it is left out.
        for number in range(self._made, len(recorded)):
            where, found = recorded[number]
            if (where, found.shape, found.is_complex()) == (line, now.shape, now.is_complex()):
                self._made = number + 1
                self._replaced.append((fingerprint(now), found))
                # At outputs to which something is added a loss in 16 bits is one in fp32.
                return found.to(now.dtype, copy=True)
        raise MeasurementError(
            "the model stops gradients differently often off the weights: at value number "
            f"{self._made + 1}, of shape {tuple(now.shape)}; its control flow must not depend on "
            "them"
        )

    def _recomputed(self, now: Tensor) -> Tensor:
        """Return the constant of a forward of this run that would have been the same."""
        like = [pair for pair in self._replaced if pair[1].shape == now.shape]
        if like:
            here = fingerprint(now)
            far = torch.stack([there - here for there, _ in like]).norm(dim=1)
            nearest = int(far.argmin())
            if far[nearest] <= SAME * here.norm():
                return like[nearest][1].clone()
        raise UnsupportedError(
            "ds_hessian does not support a model that stops gradients in activations that are "
            "recomputed without a graph in the forward (use_reentrant=True): it is not seen there; "
            "recompute them with use_reentrant=False, or, in Megatron, leave them out of what is "
            "recomputed"
        )

    def _shared(self, value: Tensor) -> Tensor:
        """Return a copy of a value, or an equal one that is known."""
        kind = value.shape, value.dtype, float(value.abs().sum().double())
        for other in self._known.setdefault(kind, []):
            if torch.equal(other, value):
                return other
        self._known[kind].append(value.clone())
        return self._known[kind][-1]


def _function_of_call() -> type | None:
    """Return the `torch.autograd.Function` whose context a caller of the present call has."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        for name in names[:2]:  # the second of a class method
            context = frame.f_locals.get(name)
            if isinstance(context, BackwardCFunction):
                found: type | None = getattr(context, "_forward_cls", None)
                return found
        frame = frame.f_back
    return None


def _read(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that a call reads: with beta = 0 no addend, as Megatron's attention
    gives a buffer that others have written into.
    """
    if name.strip("_") in _WITH_ADDEND and kwargs.get("beta") == 0:
        kwargs = {key: value for key, value in kwargs.items() if key != "input"}
        args = args[len(args) > 2 :]
    return (*args, *kwargs.values())


def refuse_lost(args: tuple[Any, ...]) -> None:
    """Raise where a `torch.autograd.Function`, such as a reentrant checkpoint, has used weights
    that are not among its arguments, and no argument requires gradients: it has no backward.
    """
    if torch.is_grad_enabled() and not any(t.requires_grad for t in tensors_in(args)):
        raise UnsupportedError(
            "ds_hessian does not support weights that training leaves as they are because "
            "activations are recomputed from inputs of which none requires gradients "
            "(use_reentrant=True, Megatron's only way), as those of adapters after a frozen "
            "embedding: let the embedding's output require gradients, or do not recompute"
        )


def refuse_solves() -> None:
    """Raise where a hook of the model's takes a derivative in a backward: the gradient that it
    solves for is that of a loss in which the constants of the forward move, as a fixed point does.
    """
    if _function_of_call() is None:
        raise UnsupportedError(
            "ds_hessian does not support a hook that solves for another gradient in the backward "
            "(torch.autograd.grad in register_hook, as deep equilibrium models do) where the "
            "forward stops gradients: it is not the gradient of the loss with these values held; "
            "write forward and backward as one torch.autograd.Function, which is measured"
        )


def _refuse_stairs(function: type | None) -> None:
    """Raise where a function that somebody has written rounds or compares in its forward; torch's
    and the hosts' own recompute activations.
    """
    if function is not None and package_of(function) not in ("torch", *HOSTS):
        raise UnsupportedError(
            "ds_hessian does not support a torch.autograd.Function that rounds, or only compares, "
            f"in its forward ({function.__name__}): its backward is not the derivative of it, so "
            "that differences of gradients are no Hessian; write y + (stairs - y).detach(), with y "
            "the function whose derivative the backward is (x itself where it hands on), which is "
            "measured as a double backward has it"
        )


def _is_real(tensor: Tensor) -> bool:
    """Return whether a tensor is one of real or complex numbers, stored as such."""
    kind = tensor.is_floating_point() or tensor.is_complex()
    return kind and tensor.layout == torch.strided and not tensor.is_nested


def _replaced(value: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return values.get(id(value), value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, values) for each in value)
    return value
