"""Whether a backward that somebody has written is the derivative of its forward.

Differences of gradients are products with the Hessian only where gradients are those of the loss. A
`torch.autograd.Function` may have any backward: one that turns gradients round, for adversarial
domains, or an estimate of a router's. With some cotangent c, a direction u of its inputs and
J = df/dx, `<c, J u>` and `<J'c, u>` are one number; the first is taken from values,

    <c, f(x + h u) - f(x - h u)> / 2h,

and the second from the backward itself, as it is run. u is along J'c, where both are as large as
can be. Two steps tell whether the values have a slope there at all; where they do not, and where
other ranks have a part in the function, nothing is said of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hessian.backends.hooks import unheard, unseen
from ds_hessian.backends.in_python import undispatched
from ds_hessian.backends.state import HOSTS, package_of, place, tensors_in
from ds_hessian.errors import UnsupportedError

PART = 0.25
"""Slopes that are further apart, as parts of the larger one, are no rounding of each other."""


def is_known(function: object) -> bool:
    """Return whether a function or hook is torch's, a host's or of this package."""
    return package_of(function) in (*HOSTS, "ds_hessian", "torch")


class _Unknown(Exception):
    """Nothing can be said of a function."""


class _Failed(Exception):
    """A function has raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


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
    raise _Unknown


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
    hooks = register_module_forward_pre_hook(_refuse_module)
    try:
        with unheard(), _Alone(), saved_tensors_hooks(_as_it_is, _as_it_is):
            found = _is_derivative(call, args, gradients, cotangents)
            if found is not False:
                return found
            # It may add a term that no value has: little, beside those of larger cotangents.
            return _is_derivative(call, args, *_backward(call, args))
    except _Failed as failed:
        if _fails(call, args):  # as what cannot be called beside the model
            return None
        raise failed.error from None
    except Exception:  # as of tensors that are complex, or a backward that cannot be called alone
        return None
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
        raise _Failed(error) from error
    return list(made) if isinstance(made, tuple) else [made]


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
        draws = {t.device: torch.Generator(t.device).manual_seed(0) for t in tensors_in(made)}
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
    given = [isinstance(a, Tensor) and a.requires_grad for a in args]
    pairs = list(zip(tensors, gradients, strict=True))
    x = [t.detach() for t, _ in pairs if t.requires_grad]
    b = [torch.zeros_like(t) if g is None else g for t, g in pairs if t.requires_grad]
    draws = {t.device: torch.Generator(t.device).manual_seed(0) for t in x}
    along = [g if g.any() else _normal(g, draws) for g in b]
    u = [d * (t.norm() / d.norm()) for d, t in zip(along, x, strict=True)]
    claimed = _inner(b, u)
    kinds = {t.dtype for t in (*x, *cotangents) if t is not None}
    h = max(torch.finfo(kind).eps for kind in kinds) ** (1 / 3)
    slopes = [_slope(call, args, given, x, u, cotangents, step) for step in (h, h / 4)]
    largest = max(abs(slopes[1]), abs(claimed))
    if largest == 0 or not abs(slopes[0] - slopes[1]) <= PART / 2 * largest:
        return None
    return any(abs(slope - claimed) <= PART * largest for slope in slopes)


def _slope(
    call: Callable[..., Any],
    args: Sequence[Any],
    given: Sequence[bool],
    x: Sequence[Tensor],
    u: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    h: float,
) -> float:
    """Return `<c, f(x + h u) - f(x - h u)> / 2h`, by calls in the place of a model's."""
    total = 0.0
    for side in (h, -h):
        moved = [t + side * d for t, d in zip(x, u, strict=True)]
        with _Beside(moved), torch.enable_grad():
            tensors = iter([t.requires_grad_().view_as(t) for t in moved])
            moving = [next(tensors) if g else a for a, g in zip(args, given, strict=True)]
            pairs = zip(cotangents, _called(call, moving), strict=True)
        found = [(c, y) for c, y in pairs if c is not None]
        total += _inner(*zip(*found, strict=True)) / (2 * side) if found else 0.0
    return total


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
