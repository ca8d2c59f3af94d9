"""Whether a backward that somebody has written is the derivative of its forward.

Differences of gradients are products with the Hessian only where gradients are those of the loss. A
`torch.autograd.Function` may have any backward: one that turns gradients round, for adversarial
domains, or an estimate of a router's. With some cotangent c, a direction u of its inputs and
J = df/dx, `<c, J u>` and `<J'c, u>` are one number; the first is taken from values,

    <c, f(x + h u) - f(x - h u)> / 2h,

and the second from the backward itself, as it is run. u is along J'c, where both are as large as
can be. Two steps tell whether the values have a slope there at all; where they do not, and where
other ranks have a part in the function, nothing is said of it.

Nor is every comparison in a forward the side of a kink: an algorithm that finds its values by
comparing, such as a bisection, stands still where its comparisons are held. Whether a function has
its slope with them, values tell alike; of one that cannot be called beside the model, none is held.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hessian.backends.hooks import unheard, unseen
from ds_hessian.backends.in_python import undispatched
from ds_hessian.backends.state import HOSTS, package_of, place, tensors_in
from ds_hessian.errors import UnsupportedError

T = TypeVar("T")

PART = 0.25
"""Slopes that are further apart, as parts of the larger one, are no rounding of each other."""


def is_known(function: object) -> bool:
    """Return whether a function or hook is torch's, a host's or of this package."""
    return package_of(function) in (*HOSTS, "ds_hessian", "torch")


class Kept(enum.IntEnum):
    """What is held of what a written function decides."""

    ALL = 0
    CHOICES = 1
    NONE = 2


class _Unknown(Exception):
    """Nothing can be said of a function."""


class _CallsModule(_Unknown):
    """A function calls a module."""


class _Failed(Exception):
    """A function has raised, given these arguments."""

    def __init__(self, error: Exception, args: Sequence[Any]) -> None:
        super().__init__(error)
        self.error, self.given = error, args


_grad = undispatched(torch.autograd.grad)
"""It, with a mode that sees what backwards call."""


class _Alone(TorchFunctionMode):
    """Functions are called as they are; none may run a backward that gives parameters gradients."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.autograd.backward, Tensor.backward):
            raise _Unknown
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class _Beside(TorchDispatchMode):
    """Nothing may be written that was there before, and no other rank may have a part.

    Args:
        known: Tensors that may be written.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._made = {place(t) for t in known}

    def tell_made(self, tensor: Tensor) -> None:
        """Let a tensor that was made out of sight be written."""
        self._made.add(place(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "prims"):  # what else calls inside is not seen
            raise _Unknown
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                if any(place(t) not in self._made for t in tensors_in([value])):
                    raise _Unknown
        given = {place(t) for t in tensors_in((*args, *kwargs.values()))}
        made = func(*args, **kwargs)
        self._made |= {place(t) for t in tensors_in([made])} - given
        return made


def _as_it_is(saved: Tensor) -> Tensor:
    """Be a hook of saved tensors in place of those that offload or count what a forward saves."""
    return saved


def _refuse_module(*_: Any) -> None:
    """Stop before a module's hooks run, as where activations are recomputed."""
    raise _CallsModule


def is_derivative(
    call: Callable[..., Any],
    args: Sequence[Any],
    gradients: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
) -> bool | None:
    """Return whether gradients of a function's arguments are those of its values; None where that
    cannot be told.

    Args:
        call: Calls the function; each call must draw the same random numbers.
        args: Its arguments, none of which is changed.
        gradients: What its backward has made, for each tensor among them.
        cotangents: Of what, for each value that it returns.
    """

    def ask() -> bool | None:
        found = _is_derivative(call, args, gradients, cotangents)
        if found is not False:
            return found
        # It may add a term that no value has: little, beside those of larger cotangents.
        return _is_derivative(call, args, *_backward(call, args))

    try:
        return _answer(ask, call, args, None)
    except _CallsModule:
        return None


def kept_slope(
    call: Callable[..., Any],
    held: Callable[[], Callable[..., Any]],
    args: Sequence[Any],
    compares: bool,
) -> Kept | None:
    """Return what may be held of what a function has decided at its arguments, so that it has its
    slope; None where it has no slope there that would tell.

    Of a function that calls modules, and compares nothing beside them, all is held: it only runs
    them, to recompute them later. Of another that cannot be called, sides of kinks are not: where
    they are crossed, they are in the errors of products, and where values stand still with them,
    nothing is.

    Args:
        call: Calls the function; each call must draw the same random numbers.
        held: Returns what calls it the same way: its first call decides, and all others decide
            alike.
        args: Its arguments, none of which is changed. Without gradients, as where activations are
            recomputed, nothing says which of them have any: all are moved.
        compares: Whether it has compared outside of modules.
    """

    def ask() -> Kept | None:
        here = [_wide(a) if isinstance(a, Tensor) else a for a in args]
        given, x = _moving(here)
        h, draws = _step({t.dtype for t in x}), _draws(x)

        def keeps(x: Sequence[Tensor], u: Sequence[Tensor]) -> bool | None:
            decide = held()
            middle = _called_at([t.clone() for t in x], decide, here, given)
            rounding = 4 * h**3 * _length(_real(middle))
            for step in (h, h / 8):
                free = _at_sides(call, here, given, x, u, step)
                kept = _over(_at_sides(decide, here, given, x, u, step), 2 * step)
                slope = _over(free, 2 * step)
                apart, size = _length(_apart(slope, kept)), max(_length(slope), _length(kept))
                if size <= rounding / step:
                    return None
                # Slopes of both sides differ by twice what a kink within h of x makes here.
                bent = [_over((s, middle), at) for s, at in zip(free, (step, -step), strict=True)]
                least = max(step * _length(slope), rounding / step)
                if apart > max(_length(_apart(*bent)), least):
                    return False
                if apart <= max(PART * size, least):
                    break
            return True

        # What is found by comparing may not answer to what cancels in a sum, nor to what all share,
        # nor where all numbers are alike.
        around = [_around(t, draws) for t in x]
        found = {keeps(x, around), keeps(x, [_near(t) for t in x])}
        if False not in found:
            away = [t + PART * torch.tanh(_around(t, draws)) for t in x]
            found.add(keeps(away, around))
        if False in found:
            return Kept.NONE
        return Kept.ALL if True in found else None

    otherwise: Kept | None = Kept.CHOICES
    try:
        return _answer(ask, call, args, otherwise)
    except _CallsModule:
        return Kept.CHOICES if compares else Kept.ALL


def _answer(ask: Callable[[], T], call: Callable[..., Any], args: Sequence[Any], otherwise: T) -> T:
    """Return the answer to a question for which a function is called beside the model, or another
    one where it cannot be called so.

    Raises:
        _CallsModule: it calls a module.
    """
    hooks = register_module_forward_pre_hook(_refuse_module)
    try:
        with unheard(), _Alone(), saved_tensors_hooks(_as_it_is, _as_it_is):
            return ask()
    except _CallsModule:
        raise
    except _Failed as failed:
        # Memory may be too little for several calls, or it cannot be called beside the model, or
        # at other values.
        if isinstance(failed.error, torch.OutOfMemoryError):
            return otherwise
        if _fails(call, args) or _fails(call, failed.given):
            return otherwise
        raise failed.error from None
    except Exception:  # as of tensors that are complex, or a backward that cannot be called alone
        return otherwise
    finally:
        hooks.remove()


def _fails(call: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether a function raises again, so that it was no failure of the moment."""
    try:
        with _Beside([]), torch.enable_grad():
            call(*(a.detach() if isinstance(a, Tensor) else a for a in args))
    except Exception:
        return True
    return False


def _called(call: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """Return what a function returns, one by one."""
    try:
        made = call(*args)
    except _Unknown:
        raise
    except Exception as error:
        raise _Failed(error, args) from error
    return list(made) if isinstance(made, tuple) else [made]


class Comparing:
    """Whether a function that is called in the body of a `with` compares outside of modules.

    Attributes:
        found: Whether it has.
    """

    def __init__(self) -> None:
        self.found, self._depth = False, 0

    def note(self) -> None:
        """Note a comparison."""
        self.found |= self._depth == 0

    def __enter__(self) -> Comparing:
        self._hooks = (
            register_module_forward_pre_hook(lambda *_: self._move(1)),
            register_module_forward_hook(lambda *_: self._move(-1), always_call=True),
        )
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _move(self, by: int) -> None:
        self._depth += by


def node_of(made: Any, function: object) -> Any:
    """Return the node of the graph at which a written function's backward is; None without one."""
    nodes = (t.grad_fn for t in tensors_in((made,)))
    return next((n for n in nodes if getattr(n, "_forward_cls", None) is function), None)


def _backward(
    call: Callable[..., Any], args: Sequence[Any]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return gradients and cotangents, as `is_derivative` takes them, of cotangents of size 1."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    x = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    trained = [t for t in x if t.requires_grad]
    with _Beside(x), torch.enable_grad():
        views = iter([t.view_as(t) for t in x])
        made = _called(call, [next(views) if isinstance(a, Tensor) else a for a in args])
        draws = _draws(tensors_in(made))
        moves = [isinstance(y, Tensor) and y.requires_grad for y in made]
        cotangents = [_normal(y, draws) if m else None for y, m in zip(made, moves, strict=True)]
        pairs = [(y, c) for y, c in zip(made, cotangents, strict=True) if c is not None]
        found = iter(
            _grad([y for y, _ in pairs], trained, [c for _, c in pairs], allow_unused=True)
        )
    return [next(found) if t.requires_grad else None for t in x], cotangents


def _is_derivative(
    call: Callable[..., Any],
    args: Sequence[Any],
    gradients: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
) -> bool | None:
    tensors = [a for a in args if isinstance(a, Tensor)]
    if len(tensors) != len(gradients) or any(
        t is not None and t.is_complex() for t in (*tensors, *cotangents)
    ):
        return None
    given, x = _moving(args)
    pairs = list(zip(tensors, gradients, strict=True))
    b = [torch.zeros_like(t) if g is None else g for t, g in pairs if t.requires_grad]
    draws = _draws(x)
    u = _as_long([g if g.any() else _normal(g, draws) for g in b], x)
    claimed = _inner(b, u)
    h = _step({t.dtype for t in (*x, *cotangents) if t is not None})
    slopes = [
        _slope(cotangents, _over(_at_sides(call, args, given, x, u, step), 2 * step))
        for step in (h, h / 4)
    ]
    largest = max(abs(slopes[1]), abs(claimed))
    if largest == 0 or not abs(slopes[0] - slopes[1]) <= PART / 2 * largest:
        return None
    return any(abs(slope - claimed) <= PART * largest for slope in slopes)


def _moving(args: Sequence[Any]) -> tuple[list[bool], list[Tensor]]:
    """Return which arguments a function has a derivative by, and these, detached."""
    given = [isinstance(a, Tensor) and a.requires_grad for a in args]
    return given, [a.detach() for a, g in zip(args, given, strict=True) if g]


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32, or what is more, that requires gradients if it is to be moved."""
    if not tensor.is_floating_point():
        return tensor
    found = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    return found.requires_grad_(tensor.requires_grad or not torch.is_grad_enabled())


def _as_long(along: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """Return directions, each as long as those parts of x that it moves most, or 1 for each number
    if these are 0.
    """

    def length(d: Tensor, t: Tensor) -> Tensor:
        weighted = torch.where(d != 0, d * t, 0.0).abs().sum() / d.norm()
        return weighted if weighted != 0 else weighted + math.sqrt(d.numel())

    return [d * (length(d, t) / d.norm()) for d, t in zip(along, x, strict=True)]


def _around(x: Tensor, draws: Mapping[torch.device, torch.Generator]) -> Tensor:
    """Return a random direction in which each number moves by parts of itself, or, where all are 0,
    of 1.
    """
    size = _near(x).abs()
    return _normal(x, draws) * (size if size.any() else torch.ones_like(x))


def _near(x: Tensor) -> Tensor:
    """Return a tensor, with 0 for what is infinite or next to it, as masks have it."""
    return torch.where(x.abs() < torch.finfo(x.dtype).max / 4, x, 0.0)


def _step(kinds: Iterable[torch.dtype]) -> float:
    """Return the step of a central difference, in units of what it moves."""
    return float(max(torch.finfo(kind).eps for kind in kinds) ** (1 / 3))


def _at_sides(
    call: Callable[..., Any],
    args: Sequence[Any],
    given: Sequence[bool],
    x: Sequence[Tensor],
    u: Sequence[Tensor],
    h: float,
) -> tuple[list[Any], list[Any]]:
    """Return `f(x + h u)` and `f(x - h u)`, by calls in the place of a model's."""
    above, below = (
        _called_at([t + side * d for t, d in zip(x, u, strict=True)], call, args, given)
        for side in (h, -h)
    )
    return above, below


def _over(values: tuple[Sequence[Any], Sequence[Any]], step: float) -> list[Tensor | None]:
    """Return the differences of two values of a function over a step, 0 where both are infinite;
    None of what is no real number.
    """
    pairs = zip(*map(_real, values), strict=True)
    return [
        None if a is None or b is None else torch.where(a == b, 0.0, a - b) / step for a, b in pairs
    ]


def _real(values: Sequence[Any]) -> list[Tensor | None]:
    """Return those of a function's values that are tensors of real numbers; None for others."""
    real = [isinstance(v, Tensor) and v.is_floating_point() for v in values]
    return [v.detach() if r else None for v, r in zip(values, real, strict=True)]


def _called_at(
    x: Sequence[Tensor], call: Callable[..., Any], args: Sequence[Any], given: Sequence[bool]
) -> list[Any]:
    """Return what a function returns at other values, which it may write into."""
    with _Beside(x), torch.enable_grad():
        tensors = iter([t.requires_grad_().view_as(t) for t in x])
        return _called(call, [next(tensors) if g else a for a, g in zip(args, given, strict=True)])


def _slope(cotangents: Sequence[Tensor | None], differences: Sequence[Tensor | None]) -> float:
    pairs = zip(cotangents, differences, strict=True)
    found = [(c, d) for c, d in pairs if c is not None and d is not None]
    return _inner(*zip(*found, strict=True)) if found else 0.0


def _apart(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> list[Tensor | None]:
    pairs = zip(a, b, strict=True)
    return [None if x is None or y is None else x - y for x, y in pairs]


def _length(parts: Sequence[Tensor | None]) -> float:
    """Return the length of what is finite."""
    found = [torch.nan_to_num(p, 0.0, 0.0, 0.0) for p in parts if p is not None]
    return math.sqrt(_inner(found, found))


def _draws(tensors: Iterable[Tensor]) -> dict[torch.device, torch.Generator]:
    return {t.device: torch.Generator(t.device).manual_seed(0) for t in tensors}


def _normal(like: Tensor, draws: Mapping[torch.device, torch.Generator]) -> Tensor:
    device = like.device
    return torch.randn(like.shape, generator=draws[device], device=device).to(like.dtype)


def _inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    pairs = zip(a, b, strict=True)
    return sum(float((p.detach() * q.detach()).sum(dtype=torch.float64)) for p, q in pairs)


def unchanging(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Make a hook of a gradient, or of a module's backward, refuse to return another gradient.

    Args:
        hook: Called with the gradient, or with a module and its gradients; those of hosts are
            returned as they are.
    """
    if is_known(hook):
        return hook

    @functools.wraps(hook)
    def called(*args: Any) -> Any:
        made = hook(*args)
        given = args if isinstance(args[0], Tensor) else args[1]
        if made is not None:
            with torch._C.DisableTorchFunction(), unseen():
                same = all(map(_is_same, tensors_in([given]), tensors_in([made])))
            if not same:
                raise UnsupportedError(
                    "ds_hessian does not support a hook that changes gradients within the model "
                    f"({getattr(hook, '__qualname__', hook)}): they are not those of the loss "
                    "then, which has no Hessian; measure without it"
                )
        return made

    return called


def _is_same(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape:
        return False
    rounding = math.sqrt(torch.finfo(a.dtype).eps)
    a, b = a.double(), b.double()
    return not (a - b).norm() > rounding * a.norm()  # also of gradients that are not finite
