"""Whether a backward that somebody has written is the derivative of its forward.

Differences of gradients are products with the Hessian only where gradients are those of the loss. A
`torch.autograd.Function` may have any backward: one that turns gradients round, for adversarial
domains, or an estimate of a router's. With some cotangent c, a direction u of its inputs and
J = df/dx, `<c, J u>` and `<J'c, u>` are one number; the first is taken from values,

    <c, f(x + h u) - f(x - h u)> / 2h,

and the second from the backward. u is along J'c, where both are as large as can be. Two steps tell
whether the values have a slope there at all; where they do not, and where other ranks have a part
in the function, nothing is said of it.
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

from ds_hessian.backends.hooks import unseen
from ds_hessian.backends.in_python import undispatched
from ds_hessian.backends.state import HOSTS, place, tensors_in
from ds_hessian.errors import UnsupportedError

PART = 0.25
"""Slopes that are further apart, as parts of the larger one, are no rounding of each other."""


_grad = undispatched(torch.autograd.grad)
"""It, with a mode that sees what backwards call."""


def is_known(function: object) -> bool:
    """Return whether a function, op or hook is torch's, a host's or of this package."""
    module = str(getattr(function, "__module__", "")).split(".")
    if module[:2] == ["torch", "_ops"]:  # by the namespace: others are custom ops
        return module[2:] in ([], ["aten"], ["prims"])
    return module[0] in (*HOSTS, "ds_hessian", "torch")


class _Unknown(Exception):
    """Nothing can be said of a function."""


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
        if "c10d" in func.namespace:
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


def is_derivative(apply: Callable[..., Any], args: Sequence[Any]) -> bool | None:
    """Return whether the backward of a function is the derivative of its forward, at these
    arguments; None where that cannot be told.

    Args:
        apply: Calls the function; each call must draw the same random numbers.
        args: Its arguments, none of which is changed.
    """
    calls = register_module_forward_pre_hook(_refuse_module)
    try:
        with _Alone(), saved_tensors_hooks(_as_it_is, _as_it_is):
            return _is_derivative(apply, args)
    except Exception:  # as of a function that cannot be called twice: it was no call of the model's
        return None
    finally:
        calls.remove()


def _is_derivative(apply: Callable[..., Any], args: Sequence[Any]) -> bool | None:
    given = [isinstance(a, Tensor) and a.requires_grad for a in args]
    x = [a.detach().clone().requires_grad_() for a, g in zip(args, given, strict=True) if g]
    with _Beside(x), torch.enable_grad():
        made = _outputs(apply, args, given, [each.view_as(each) for each in x])
        made = [each for each in made if each.requires_grad]
        # A generator of its own: the model's draw what they would have.
        draws = {t.device: torch.Generator(t.device).manual_seed(0) for t in (*x, *made)}
        c = [_normal(y, draws) for y in made]
        found = _grad(made, x, c, allow_unused=True)
    b = [torch.zeros_like(t) if g is None else g for t, g in zip(x, found, strict=True)]
    along = [g if g.any() else _normal(g, draws) for g in b]
    u = [d * (t.detach().norm() / d.norm()) for d, t in zip(along, x, strict=True)]
    claimed = _inner(b, u)
    h = max(torch.finfo(t.dtype).eps for t in (*x, *made)) ** (1 / 3)
    slopes = []
    for step in (h, h / 4):
        ends = []
        for side in (step, -step):
            with torch.no_grad():
                moved = [t.detach() + side * d for t, d in zip(x, u, strict=True)]
            with _Beside(moved), torch.enable_grad():
                moved = [t.requires_grad_().view_as(t) for t in moved]
                ends.append(_outputs(apply, args, given, moved))
        ends = [[y for y in end if y.requires_grad] for end in ends]
        slopes.append((_inner(c, ends[0]) - _inner(c, ends[1])) / (2 * step))
    largest = max(abs(slopes[1]), abs(claimed))
    if not abs(slopes[0] - slopes[1]) <= PART / 2 * largest:
        return None
    return any(abs(slope - claimed) <= PART * largest for slope in slopes)


def _outputs(
    apply: Callable[..., Any], args: Sequence[Any], given: Sequence[bool], x: Sequence[Tensor]
) -> list[Tensor]:
    tensors = iter(x)
    made = apply(*(next(tensors) if g else a for a, g in zip(args, given, strict=True)))
    return list(tensors_in((made,)))


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
