"""The line through the weights along which a product displaces them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.operators.checks import measurable
from ds_hessian.operators.displacement.figures import quotient, tangent


class Line:
    """The weights on the line through w along one vector.

    Args:
        session: The measurement.
        v: `(n_local,)` fp32, of any length but zero.
        reach: The norm of the weights: roundings of longer steps are relative to the steps.

    Attributes:
        v: The vector, in units of `unit` (`measurable`).
        length: Its norm.
        unit: 1 but for vectors of extreme length.
        change: `(2,)`, the value of `displace` for the last step between inner nodes.
        sign: The sign of that step.

    The weights at -p are reached from those at p, so that the rounding of their difference, which a
    product is made of, is one and not two, and shows in a second difference (`Session.displace`).

    Raises:
        NumericsError: v is zero or not finite.

    Collective: every method, and the constructor.
    """

    def __init__(self, session: Session, v: Tensor, reach: float) -> None:
        self.session = session
        self.v, self.length, self.unit = measurable(v, session.space)
        self.reach = reach
        self.change, self.sign = torch.zeros(2), 1.0
        self._position: float | None = None  # in units of v; None where it is not known
        self._across = False  # whether it was reached from the opposite one

    def is_at(self, position: float) -> bool:
        """Return whether the weights are `w + position v`."""
        return self._position == position

    def move(self, position: float, inner: bool) -> None:
        """Displace the weights to `w + position v`."""
        if self.is_at(position):
            return
        start = self._position
        opposite = start == -position and 0 < abs(position) * self.length <= self.reach
        self._across = opposite and not self._across
        change = self.session.displace(self.v, position, self._across)
        self._position = position
        if start is not None and inner:
            self.change, self.sign = change, math.copysign(1.0, position - start)

    def lacking(self, h: float, out: Tensor) -> float:
        """Fill `out` with what the steps from w - hv to w + hv lack of v; return its length."""
        out.zero_()
        for sign in (1, -1):
            self.move(sign * h / self.length, inner=False)
            out.add_(self.session.realised(), alpha=-sign * self.length / (2 * h))
        return self.session.space.norm(out.add_(self.v))

    def leave(self, direction: Tensor, h: float) -> float:
        """Displace the weights to `w + h direction` for any vector; return the tangent of the angle
        between it and the realised step, 1 where that is rounding.
        """
        self.move(0.0, inner=False)
        self._position, self._across = None, False
        change = self.session.displace(direction, h)
        space = self.session.space
        along, moved = space.reduce(change).tolist()
        return tangent(quotient(along, math.sqrt(moved) * space.norm(direction), nothing=0.0))
