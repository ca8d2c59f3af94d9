"""Argument checks of every kernel: a misuse is a Python error before any native call.

A message says which kernel and argument, what is required, what came and what to do.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ds_hessian.errors import KernelError

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # Dtype of csrc/contracts.h

WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
STORED = (torch.float32, torch.bfloat16)  # the rows of a basis


def refuse(kernel: str, name: str, required: str, came: str, advice: str) -> KernelError:
    """Return the error for one argument."""
    return KernelError(f"ops.{kernel}: {name} must be {required}, but it {came}; {advice}")


def vector(
    kernel: str,
    name: str,
    tensor: object,
    length: int | None = None,
    device: torch.device | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> Tensor:
    """Require a flat contiguous strided tensor of one of `dtypes`, of this length and device."""
    if not isinstance(tensor, Tensor):
        raise refuse(kernel, name, "a tensor", f"is a {type(tensor).__name__}", "pass a tensor")
    if tensor.dtype not in dtypes:
        raise _wrong_dtype(kernel, name, tensor, dtypes)
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise refuse(
            kernel,
            name,
            "flat and contiguous",
            f"has shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            "pass a view(-1), or a contiguous copy that is written back",
        )
    if length is not None and tensor.shape[0] != length:
        raise refuse(
            kernel,
            name,
            f"of length {length}, as the other vectors",
            f"has {tensor.shape[0]} elements",
            "pass vectors of one layout",
        )
    _same_device(kernel, name, tensor, device)
    return tensor


def _wrong_dtype(
    kernel: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]
) -> KernelError:
    required = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    came = str(tensor.dtype).removeprefix("torch.")
    return refuse(kernel, name, required, f"is {came}", "convert it once, outside the kernel")


def _same_device(kernel: str, name: str, tensor: Tensor, device: torch.device | None) -> None:
    if device is not None and tensor.device != device:
        raise refuse(
            kernel,
            name,
            f"on {device}, as the other vectors",
            f"is on {tensor.device}",
            "move it there",
        )


def matrix(
    kernel: str,
    name: str,
    tensor: object,
    columns: int | None = None,
    device: torch.device | None = None,
    dtypes: Sequence[torch.dtype] = STORED,
) -> Tensor:
    """Require a `(rows, columns)` tensor whose rows are contiguous and do not overlap."""
    if not isinstance(tensor, Tensor):
        raise refuse(kernel, name, "a tensor", f"is a {type(tensor).__name__}", "pass a tensor")
    if tensor.dtype not in dtypes:
        raise _wrong_dtype(kernel, name, tensor, dtypes)
    if tensor.dim() != 2:
        raise refuse(
            kernel,
            name,
            "of shape (rows, n)",
            f"has shape {tuple(tensor.shape)}",
            "stack the vectors as rows",
        )
    rows, width = tensor.shape
    if columns is not None and width != columns:
        raise refuse(
            kernel,
            name,
            f"of shape (rows, {columns})",
            f"has shape {tuple(tensor.shape)}",
            "pass vectors of one layout",
        )
    if (width > 1 and tensor.stride(1) != 1) or (rows > 1 and tensor.stride(0) < width):
        raise refuse(
            kernel,
            name,
            "made of contiguous rows",
            f"has strides {tensor.stride()}",
            "store each vector as a row, not as a column",
        )
    _same_device(kernel, name, tensor, device)
    return tensor


def plane(kernel: str, name: str, tensor: object) -> Tensor:
    """Require a tensor of two dims in fp32, of any strides."""
    if not isinstance(tensor, Tensor):
        raise refuse(kernel, name, "a tensor", f"is a {type(tensor).__name__}", "pass a tensor")
    if tensor.dtype != torch.float32:
        raise _wrong_dtype(kernel, name, tensor, (torch.float32,))
    if tensor.dim() != 2:
        came = f"has shape {tuple(tensor.shape)}"
        raise refuse(kernel, name, "of shape (tokens, n)", came, "flatten all dims but the last")
    return tensor


def multiple(kernel: str, name: str, value: object, of: int) -> None:
    """Require a positive multiple of a number."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value % of:
        raise refuse(
            kernel, name, f"a positive multiple of {of}", f"is {value!r}", "round it up to one"
        )


def coefficients(kernel: str, tensor: object, shape: tuple[int | None, int]) -> Tensor:
    """Require floating-point coefficients of this shape (None: any size), on any device."""
    text = str(tuple("k" if size is None else size for size in shape if size != -1))
    good = isinstance(tensor, Tensor) and tensor.is_floating_point()
    if good:
        assert isinstance(tensor, Tensor)
        wanted = shape[1:] if shape[0] == -1 else shape
        good = tensor.dim() == len(wanted) and all(
            size is None or size == have for size, have in zip(wanted, tensor.shape, strict=True)
        )
    if not good or not isinstance(tensor, Tensor):
        came = (
            f"is {tensor.dtype} of shape {tuple(tensor.shape)}"
            if isinstance(tensor, Tensor)
            else f"is a {type(tensor).__name__}"
        )
        raise refuse(
            kernel,
            "coefficients",
            f"floating-point of shape {text}",
            came,
            "pass one coefficient for each row of the basis",
        )
    return tensor


def owned(kernel: str, count: int, n: int) -> int:
    """Return the length of the owned prefix, which must be within 0 .. n."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= n:
        raise refuse(
            kernel,
            "owned",
            f"an integer within 0 .. {n}, the vectors' length",
            f"is {count!r}",
            "pass the number of coordinates that this rank owns",
        )
    return count


def word(kernel: str, name: str, value: int) -> int:
    """Require a 64-bit unsigned number."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise refuse(
            kernel,
            name,
            "an integer within 0 .. 2^64 - 1",
            f"is {value!r}",
            "reduce it modulo 2^64",
        )
    return value


Named = tuple[str, Tensor]


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first and last + 1 byte that the tensor covers; equal if it covers none."""
    start = tensor.data_ptr()
    if tensor.numel() == 0 or start == 0:
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


Spans = list[tuple[int, int, str]]
"""First and last + 1 byte of tensors that do not overlap, in order, and their names."""


def apart(kernel: str, outputs: Iterable[Named], inputs: Iterable[Named]) -> Spans:
    """Require that no output shares memory with another output or with an input; return the spans
    of the outputs.
    """
    spans = [(*_span(tensor), True, name) for name, tensor in outputs]
    spans += [(*_span(tensor), False, name) for name, tensor in inputs]
    spans = sorted(x for x in spans if x[0] < x[1])
    # Sweeping over the starts: the furthest end so far, of anything and of outputs.
    reach, output_reach = (-1, ""), (-1, "")
    for start, end, is_output, name in spans:
        end_before, before = reach if is_output else output_reach
        if start < end_before:
            raise _shared(kernel, name, before, min(end, end_before) - start)
        reach = max(reach, (end, name))
        if is_output:
            output_reach = max(output_reach, (end, name))
    return [(start, end, name) for start, end, is_output, name in spans if is_output]


def apart_from(kernel: str, name: str, tensor: Tensor, outputs: Spans) -> None:
    """Require that an input shares no memory with any of the outputs."""
    start, end = _span(tensor)
    place = bisect.bisect_left(outputs, (end,))  # outputs before it begin below the end
    if start < end and place and start < outputs[place - 1][1]:
        below, above, before = outputs[place - 1]
        raise _shared(kernel, name, before, min(end, above) - max(start, below))


def _shared(kernel: str, name: str, other: str, shared: int) -> KernelError:
    return refuse(
        kernel,
        name,
        f"apart from {other} in memory",
        f"shares {shared} bytes with it",
        "write to a tensor of its own: reading what was just overwritten is wrong",
    )
