"""The line through the weights along which a product displaces them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.operators.checks import length_of


class Line:
    """The weights on the line through w along one vector.

    Args:
        session: The measurement.
        v: `(n_local,)` fp32, of any length but zero.

    Attributes:
        v: The vector.
        length: Its norm.
        change: `(2,)`, the value of `displace` for the last step between inner nodes.
        sign: The sign of that step.

    Raises:
        NumericsError: v is zero or not finite.

    Collective: every method, and the constructor.
    """

    def __init__(self, session: Session, v: Tensor) -> None:
        self.session, self.v, self.length = session, v, length_of(v, session.space)
        self.change, self.sign = torch.zeros(2), 1.0
        self._position: float | None = None  # in units of v; None where it is not known

    def is_at(self, position: float) -> bool:
        """Return whether the weights are `w + position v`."""
        return self._position == position

    def move(self, position: float, inner: bool) -> None:
        """Displace the weights to `w + position v`."""
        if self.is_at(position):
            return
        change, start = self.session.displace(self.v, position), self._position
        self._position = position
        if start is not None and inner:
            self.change, self.sign = change, math.copysign(1.0, position - start)
