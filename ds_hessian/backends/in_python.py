"""Functions of torch's that a mode need not see, and those in Python, which call others that it is
to see.

While torch calls what it has handed to a mode, the mode is off. Operators that are given functions
(`torch.cond`, `scan`, `map`) call them in a kernel in Python, which has the derivatives of what
these compute; torch's own derivatives of them are traced, and need compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from ds_hessian.backends.hooks import unseen

COMPOSED = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_IN_PYTHON = ("torch.nn.functional", "torch.functional")
"""Functions in Python, and modules of them, in which others are called."""
_DENSE = torch._C.DispatchKey.CompositeExplicitAutograd
"""What torch finds the kernel of an operator by that calls what it is given."""

_DESCRIBING = (
    *("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized"),
)
INERT = {getattr(Tensor, name).__get__ for name in _DESCRIBING}
INERT |= {Tensor.numel, Tensor.dim, Tensor.size, Tensor.stride, Tensor.element_size}
INERT |= {Tensor.is_contiguous, Tensor.is_floating_point, torch.is_floating_point}
INERT |= {torch._C._set_grad_enabled}
"""Functions that neither read nor make values of tensors: most calls of a host's own code."""


def is_composed(func: Any, types: Iterable[type]) -> bool:
    """Return whether a function calls others, with tensors that have no functions of their own."""
    if isinstance(func, HigherOrderOperator):
        return _DENSE in func.py_kernels
    plain = all(kind in (Tensor, nn.Parameter) for kind in types)
    return plain and isinstance(func, FunctionType) and func.__globals__["__name__"] in _IN_PYTHON


def undispatched(func: Any) -> Callable[..., Any]:
    """Return the same function in Python without the line that hands it to a mode, which may be in
    a function of its own (`torch.meshgrid`).
    """
    if isinstance(func, HigherOrderOperator):
        return unseen()(func.py_kernels[_DENSE])
    kinds = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(kinds, lambda *_: False)}
    hands_over = {"handle_torch_function", func.__name__}
    for name in func.__code__.co_names:
        other = names.get(name, func)
        if (
            other is not func
            and is_composed(other, ())
            and hands_over <= {*other.__code__.co_names}
        ):
            names[name] = undispatched(other)
    made = FunctionType(func.__code__, names, None, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made
