"""Which calls a mode sees: also those of functions with a written backward
(`torch.autograd.Function`), which torch hands to none, and none of a host's that only move tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
)

T = TypeVar("T")
_CALLED: Any = torch.autograd.function._SingleLevelFunction
"""The class whose `apply` each function's own ends in, also one that was bound before the body."""

Call = Callable[[Callable[..., Any], tuple[Any, ...]], Any]
"""Makes a call, given what calls the function, and the arguments."""


@contextmanager
def applying(mode: TorchFunctionMode, call: Call) -> Iterator[None]:
    """Let `call` make the calls of such functions in the body, wherever the mode is on."""

    def apply(cls: Any, *args: Any) -> Any:
        found = super(_CALLED, cls).apply
        if any(each is mode for each in _get_current_function_mode_stack()):
            return call(found, args)
        return found(*args)

    before = _CALLED.__dict__.get("apply")
    _CALLED.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del _CALLED.apply
        else:
            _CALLED.apply = before


def outside(mode: TorchFunctionMode, call: Callable[..., T]) -> Callable[..., T]:
    """Return a function that leaves a mode, where that is the innermost one, for its own calls of
    torch: a host's that moves tensors, and computes nothing of the model.
    """

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> T:
        if _get_current_function_mode() is not mode:
            return call(*args, **kwargs)
        mode.__exit__(None, None, None)
        try:
            return call(*args, **kwargs)
        finally:
            mode.__enter__()

    return called
