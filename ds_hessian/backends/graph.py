"""What is in the graph of a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def dtypes_of(output: Tensor) -> set[torch.dtype]:
    """Return the dtypes of the values of which a tensor was made, as far as gradients pass them.

    Neither constants are among them nor what a forward has computed beside it, such as metrics.
    """
    waiting: list[Any] = [output.grad_fn]
    seen, found = {None, output.grad_fn}, set[torch.dtype]()
    while waiting:
        node = waiting.pop()
        if node is not None:
            found |= {value.dtype for value in node._input_metadata}
            before = {each for each, _ in node.next_functions} - seen
            seen |= before
            waiting += before
    return found
