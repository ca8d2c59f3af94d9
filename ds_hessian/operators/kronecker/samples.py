"""Which tokens are samples of a layer's factors, and how many terms the loss has.

K-FAC takes each token for an example of its own, in which `a a'` and `c c'` are independent. One on
whose output of the layer the loss does not depend is none, whatever its input: padding that
attention masks and, behind the last attention, a position without a label. Its c is exactly zero in
every layout. But where the terms of c cancel, as in the query of the first token, whose softmax is
of one key, it is zero in one layout and what rounding leaves in another: so a token is no sample
either where c is within the rounding of what layers nearer to the loss have shown of this token.

The empirical Fisher matrix is a mean over the terms of the loss, of which a mean over labels has as
many as positions with a label, and a classifier of sequences as many as sequences: the tokens with
a cotangent in the layer that is nearest to the loss. Other layers may have more samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hessian.backends.hooks import beside, on_cotangents
from ds_hessian.backends.protocol import Session
from ds_hessian.backends.weights import module_weights

ENTRIES = 64
"""Entries of a token's cotangent that tell its size."""

ROUNDED = 2.0**-16
"""Cotangents that are no larger than this, in units of those of the same token nearer to the loss,
are rounding: a few roundings of fp32 and as many as cancel. Units are those of all tokens."""


class Samples:
    """The samples of layers in the backwards of one unit, which come from the loss on."""

    def __init__(self) -> None:
        self._backward: int | None = None
        self._sizes = dict[int, Tensor]()  # the largest entries so far, by the number of tokens

    def among(self, backward: int, c: Tensor) -> Tensor | None:
        """Return which tokens of a layer are samples, `(T,)`; None for all of them.

        Args:
            backward: The number of the backward, which is of one micro-batch.
            c: The cotangents at the layer's outputs, `(T, m)`.
        """
        if backward != self._backward:
            self._backward = backward
            self._sizes.clear()
        size = _sizes(c)
        before = self._sizes.get(len(c))
        if before is None:
            lost = size == 0
        else:
            units = size.sum() / before.sum()
            lost = size <= (before * (ROUNDED * units)).nan_to_num_(0.0)  # where there was none
            size = torch.maximum(size, before)
        self._sizes[len(c)] = size
        return ~lost if bool(lost.any()) else None


class Terms:
    """The terms of the loss on this rank.

    Args:
        session: The measurement.
        parameters: Names and shapes of the job's.

    Attributes:
        count: The terms so far; 0 where the host does not know which rank has the outputs.
    """

    def __init__(self, session: Session, parameters: Sequence[tuple[str, torch.Size]]) -> None:
        head, self.session = session.head, session
        if head.name is not None:
            self._modules = [] if head.module is None else [head.module]
        else:
            roots = head.modules
            self._modules = [w.module for root in roots for w in module_weights(root, parameters)]
        self._share = 1.0 if head.group is None else 1.0 / head.group.size()
        self._backward: int | None = None
        self._nearest: nn.Module | None = None
        self.count = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count those of a unit, whose pass is made in the body."""
        self._backward = None
        with ExitStack() as stack:
            for module in self._modules:
                stack.callback(module.register_forward_hook(beside(self._hook)).remove)
            yield

    def _hook(self, module: nn.Module, args: object, output: Any) -> None:
        y = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(y, Tensor) and y.ndim and torch.is_grad_enabled() and y.requires_grad:
            y.register_hook(partial(self._told, module))

    def _told(self, module: nn.Module, c: Tensor) -> None:
        if module is self._nearest or self.session.backward != self._backward:
            on_cotangents(self._note)(module, c)

    def _note(self, module: nn.Module, c: Tensor) -> None:
        backward = self.session.backward
        if backward != self._backward:
            self._backward, self._nearest = backward, module
        if module is self._nearest:
            told = _sizes(c.reshape(-1, c.shape[-1])) != 0
            self.count += self._share * int(told.sum())


def _sizes(c: Tensor) -> Tensor:
    """Return the largest of the first entries of each row, in absolute value; of all entries where
    these are zero.
    """
    size = c[:, :ENTRIES].abs().amax(1)
    none = size == 0
    if bool(none.any()):
        size[none] = c[none].abs().amax(1)
    return size
