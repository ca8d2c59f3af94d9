"""A tap at the outputs of a model: reads them, adds to them, and may replace their cotangents.

The outputs are those of one module: logits, for a language model; where it returns several tensors
that the loss takes, all their entries in one. A hook on it sees them in every
pass; a hook on its output tensor sees the cotangent, the derivative of the loss in the outputs, and
may return another. Where a model scales or caps what its last module returns, the outputs are what
the loss takes: a mode of torch's functions sees them there. All are there during a pass and gone
after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_hessian.backends import containers
from ds_hessian.backends.hooks import beside, on_cotangents
from ds_hessian.backends.kinks import argument, with_argument
from ds_hessian.errors import UnsupportedError
from ds_hessian.memory import NARROW

SAMPLES = 2**16
"""Entries of the outputs of a micro-batch from which nonlinearity ratios are taken."""


LOSSES = ("cross_entropy", "cross_entropy_loss", "log_softmax")
"""Names of the functions of torch that take logits."""

CONVERSIONS = (Tensor.float, Tensor.to, Tensor.type)
"""The functions of torch by which a loss asks for fp32."""


class Listener(Protocol):
    """What a pass does at the outputs.

    Attributes:
        reads: Whether `cotangent` reads the outputs, of which a copy is kept for it until then.
    """

    reads: bool

    def outputs(self, index: int, f: Tensor) -> Tensor | None:
        """Return what is added to the outputs of a micro-batch, or None.

        Args:
            index: The number of the micro-batch.
            f: The outputs, without their graph.
        """
        ...

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor | None:
        """Return the cotangent that goes on into the model, or None for `c` itself.

        Args:
            index: The number of the micro-batch.
            f: The outputs, without their graph; empty if they are not read.
            c: The cotangent.
        """
        ...


class Silence:
    """A listener that stops the loss at the outputs."""

    reads = False

    def outputs(self, index: int, f: Tensor) -> Tensor | None:
        """Add nothing."""
        return None

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        """Return zero."""
        return torch.zeros_like(c)


def nothing(f: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return nothing to be added to outputs, with which they are others, in fp32 or fp64."""
    return torch.zeros((), dtype=dtype, device=f.device)


class Tap:
    """The outputs of one module.

    Args:
        name: Its name, for messages and records.
        module: The module; None on ranks that do not have it (other stages of a pipeline).
        per_unit: Calls of the module in one unit of the session.
        places: Those of the outputs among the tensors that the module returns (`tensors_of`).

    Attributes:
        others: Modules on this rank that may be other heads, with their names, where nothing but
            the order of calls, or the name of a module inside of another, has shown the outputs;
            None elsewhere.
        narrow: Whether some of the outputs that were seen here are in 16 bits.
        finer: Whether the loss computes in fp64 what is in fp64, also where it asks for fp32, by
            which it means no less than that.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module | None,
        per_unit: int = 1,
        places: Sequence[int] = (0,),
    ) -> None:
        self.name, self.module, self.per_unit, self.places = name, module, per_unit, places
        self.others: Sequence[tuple[str, nn.Module]] | None = None
        self.narrow = self.finer = False

    @property
    def is_here(self) -> bool:
        """Whether this rank has the outputs."""
        return self.module is not None

    def calls(self, units: range) -> range:
        """Return the numbers of the micro-batches of some units."""
        return range(units.start * self.per_unit, units.stop * self.per_unit)

    @contextmanager
    def listening(self, units: range, listener: Listener) -> Iterator[None]:
        """Run a pass of these units with a listener.

        Raises:
            UnsupportedError: the pass called the module more or less than once for each.
        """
        if not self.is_here:
            yield
            return
        calls = _Calls(self.name, self.calls(units), listener, self.places)
        with calls.keeping if self.finer else nullcontext(), self._reporting(calls):
            yield
        self.narrow |= calls.narrow
        calls.require_all()

    @contextmanager
    def _reporting(self, calls: _Calls) -> Iterator[None]:
        """Let passes in the body tell of the outputs."""
        assert self.module is not None
        handle = self.module.register_forward_hook(calls)
        try:
            yield
        finally:
            handle.remove()


class LogitsTap(Tap):
    """The outputs that the one call of a function of `LOSSES` takes."""

    def __init__(self) -> None:
        super().__init__("the logits of the loss", None)

    @property
    def is_here(self) -> bool:
        """Whether this rank has the outputs: all have."""
        return True

    @contextmanager
    def _reporting(self, calls: _Calls) -> Iterator[None]:
        with AtLoss(calls.taken):
            yield


class AtLoss(TorchFunctionMode):
    """A mode that hands the logits of each call of a function of `LOSSES` to a function, but in
    backwards and in compiled code, and the call what that returns, if it does, in their place.
    """

    def __init__(self, taken: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self._taken = taken

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make a call of one of torch's functions."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in LOSSES and not in_backward():
            f = argument(args, kwargs, 0, "input")
            if isinstance(f, Tensor) and f.is_floating_point():
                other = self._taken(f)
                if other is not None:
                    args, kwargs = with_argument(args, kwargs, 0, "input", other)
        return func(*args, **kwargs)


class _Keeping(TorchFunctionMode):
    """A mode in which what is in fp64 is in fp32 already, but in backwards.

    Attributes:
        on: Whether it is: from outputs in fp64 on, until they have their cotangent.
    """

    on = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make a call of one of torch's functions."""
        kwargs = kwargs or {}
        if self.on and func in CONVERSIONS and args[0].dtype == torch.float64:
            given = (*args[1:], *kwargs.values())
            if (func is Tensor.float or torch.float32 in given) and not in_backward():
                return args[0]
        return func(*args, **kwargs)


class _Calls:
    """The forward hook of one pass, or what is told of its losses' logits.

    Attributes:
        keeping: The mode of the pass, where the loss computes in fp64.
    """

    def __init__(
        self, name: str, micro_batches: range, listener: Listener, places: Sequence[int]
    ) -> None:
        self.name, self.micro_batches, self.listener = name, micro_batches, listener
        self.places, self.count, self.narrow = places, 0, False
        self.keeping = _Keeping()

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:
        tensors = tensors_of(output)
        if len(tensors) <= max(self.places):
            raise UnsupportedError(
                f"the output of {self.name!r} is no floating-point tensor, nor has one: name the "
                "module that returns the logits, outputs=..."
            )
        parts = [tensors[place] for place in self.places]
        if len(parts) == 1 and not parts[0].ndim:
            raise UnsupportedError(
                f"the output of {self.name!r} is a single number, a loss: name the module that "
                "returns what it is of, outputs=..."
            )
        if any(part.is_nested for part in parts):
            raise UnsupportedError(
                f"ds_hessian does not support outputs ({self.name!r}) that are nested tensors: let "
                'the model return their values(), or use operator "hessian"'
            )
        f = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        other = self.taken(f, parts)
        if len(parts) == 1:
            return None if other is None else with_tensors(output, {self.places[0]: other})
        return with_tensors(output, dict(zip(self.places, _apart(f, other, parts), strict=True)))

    def taken(self, f: Tensor, parts: Sequence[Tensor] = ()) -> Tensor | None:
        """Tell the listener of outputs, and hook their cotangent; return others to go on with.

        Args:
            f: The outputs.
            parts: The tensors that they are made of: of several they are a copy, in the widest
                dtype of all.
        """
        self.narrow |= any(part.dtype in NARROW for part in parts or (f,))
        if in_backward():
            raise UnsupportedError(
                f"ds_hessian does not support outputs ({self.name!r}) that are computed again in "
                "the backward: leave the layer of the outputs out of activation checkpointing"
            )
        if self.count == len(self.micro_batches):
            raise UnsupportedError(
                f"ds_hessian does not support a module {self.name!r} that is called more than once "
                "for a micro-batch as the outputs of a Gauss-Newton operator: several heads, or a "
                "head that is shared, have no single Gauss-Newton matrix; one that returns all "
                'that the loss takes in one call has, outputs=...; or use operator "hessian"'
            )
        index = self.micro_batches[self.count]
        self.count += 1
        added = beside(self.listener.outputs)(index, f.detach())
        if added is not None:
            wide = f.to(torch.promote_types(added.dtype, torch.float32))
            self.keeping.on = wide.dtype == torch.float64
            f = wide.add_(added) if len(parts) > 1 or wide is not f else wide + added
        if f.requires_grad:
            # The loss may write into f.
            seen = f.detach().clone() if self.listener.reads else f.new_empty(0)
            f.register_hook(on_cotangents(partial(self._cotangent, index, seen)))
        elif torch.is_grad_enabled():
            raise UnsupportedError(
                f"ds_hessian does not support outputs ({self.name!r}) without a graph in a "
                "gradient's forward: leave their layer out of activation checkpointing"
            )
        return None if added is None else f

    def _cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor | None:
        self.keeping.on = False
        return self.listener.cotangent(index, f, c)

    def require_all(self) -> None:
        """Raise if some micro-batch had no call."""
        if self.count < len(self.micro_batches):
            raise UnsupportedError(
                f"the forward did not call {self.name!r}, which was to return the outputs: a fused "
                "linear cross entropy never has them, so that a Gauss-Newton operator cannot be "
                "measured; switch the fusion off, or name another module, outputs=..."
            )


def in_backward() -> bool:
    """Return whether this thread runs a backward, as activation checkpointing's second forward."""
    return int(torch._C._current_graph_task_id()) != -1


def tensors_of(output: Any) -> list[Tensor]:
    """Return the floating-point tensors that a module returned, alone or in containers, those of
    the outermost one first.
    """
    outermost = output if isinstance(output, (tuple, list)) else ()
    found = [*(x for x in outermost if isinstance(x, Tensor)), *containers.tensors_of(output)]
    return list({id(x): x for x in found if x.is_floating_point()}.values())


def is_named(output: Any) -> bool:
    """Return whether a module returned tensors by their names (a mapping, a `ModelOutput`, a
    dataclass), in which none is first.
    """
    return isinstance(output, Mapping) or dataclasses.is_dataclass(output)


def tensor_of(output: Any) -> Tensor | None:
    """Return the first of these; None for those that have names."""
    return None if is_named(output) else next(iter(tensors_of(output)), None)


def with_tensors(output: Any, others: Mapping[int, Tensor]) -> Any:
    """Return what a module returned with others of its `tensors_of`, by their places."""
    left = enumerate(tensors_of(output))
    new = {id(x): others[place] for place, x in left if place in others}
    return containers.mapped(output, lambda x: new.get(id(x), x))


def _apart(f: Tensor, other: Tensor | None, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of which outputs were made, out of these or of others in their place."""
    found = (f if other is None else other).split([part.numel() for part in parts])
    shaped = [x.view(part.shape) for x, part in zip(found, parts, strict=True)]
    if other is not None:
        return shaped
    return [x.to(part.dtype) for x, part in zip(shaped, parts, strict=True)]


def sample(x: Tensor) -> Tensor:
    """Return entries at equal distances, as many as `SAMPLES` at least."""
    flat = x.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)]


def sampled(count: int) -> int:
    """Return how many of so many entries are in a `sample`."""
    return -(-count // max(1, count // SAMPLES))
