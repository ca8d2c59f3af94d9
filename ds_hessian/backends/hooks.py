"""How a measurement's hooks run: beside the model, whose functions and choices they are none of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from ds_hessian.defaults import own_defaults

P = ParamSpec("P")
R = TypeVar("R")


class _Trials:
    """Whether a backward runs that is made for its size alone, or for a derivative in a forward;
    threads of autograd see it, too.
    """

    running = False


@contextmanager
def unheard() -> Iterator[None]:
    """Run backwards that hooks of cotangents (`on_cotangents`) do not hear."""
    before, _Trials.running = _Trials.running, True
    try:
        yield
    finally:
        _Trials.running = before


@contextmanager
def unseen() -> Iterator[None]:
    """Compute beside the model, whose modes see nothing of it: those of selective checkpointing
    count what a forward calls, and what recomputation calls has to be the same.
    """
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _disable_current_modes():
        yield


def shown(made: Tensor) -> Tensor:
    """Return a tensor that was made `unseen`, and that the model may write into: modes that follow
    where it writes are told.
    """
    for mode in _get_current_dispatch_mode_stack():
        if (tell := getattr(mode, "tell_made", None)) is not None:
            tell(made)
    return made


def beside(function: Callable[P, R]) -> Callable[P, R]:
    """Make a hook of a measurement run beside the model: what it computes is no choice of it.

    It is a function of this package, whatever it calls: `functools.partial` names another one.
    """

    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with own_defaults(), torch._C.DisableTorchFunction(), unseen():
            return function(*args, **kwargs)

    return called


def on_cotangents(function: Callable[P, R]) -> Callable[P, R | None]:
    """Make a hook of a tensor's cotangent run beside the model, but in `unheard` backwards."""
    inner = beside(function)

    def called(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return None if _Trials.running else inner(*args, **kwargs)

    return called


def hooks_of(parameter: Tensor) -> list[tuple[dict[Any, Any], Any, Any]]:
    """Return the hooks of a parameter's gradient, each with where it is and its key there."""
    found = []
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks: dict[Any, Any] = getattr(parameter, name, None) or {}
        found += [(hooks, key, hook) for key, hook in hooks.items()]
    return found


def nothing(_: Tensor) -> None:
    """Be a hook that does nothing."""
