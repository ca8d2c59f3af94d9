"""The residual R = H - G of the Gauss-Newton matrix, by differences of gradients.

R is the Hessian of `<c, f(w)>`, with the outputs f and the cotangent c of the loss at w held fixed,
beside that of what does not pass the outputs. So it is a difference of gradients like H itself,
with the same estimates of its error; at w the two gradients are the same. What rounding has made of
the cotangents is in both alike: where there is next to none of the loss left, as of data that the
model knows by heart, they are mostly rounding. At the labels of a cross entropy it is taken away
(the cotangents of a token sum to zero); what another rounding of the weights makes of them all is
measured as a part of the error, of the first two vectors.

Memory: the cotangents of all micro-batches, in the dtype of the outputs, and those of the pilot
once more for the first two products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ds_hessian.backends.protocol import Head, Session
from ds_hessian.memory import FP32
from ds_hessian.operators.checks import measurable
from ds_hessian.operators.displacement.schemes import SchemeName
from ds_hessian.operators.finite_difference import FiniteDifferenceHessian
from ds_hessian.operators.outputs.estimates import INDEPENDENT
from ds_hessian.operators.outputs.find import find_outputs, known_outputs
from ds_hessian.operators.outputs.losses import group_of, read_cross_entropy
from ds_hessian.operators.outputs.required import require_function
from ds_hessian.operators.outputs.tap import Silence, Tap
from ds_hessian.operators.protocol import Product

Scaled: TypeAlias = tuple[Tensor, float]
"""Cotangents, and `Session.cotangent_scale` in their pass: NaN in a first one that finds it."""

MEASURED = 2
"""Vectors of which the error of the held cotangents is measured: the second is rich in outliers."""

OF_ROUNDING = 3
"""Gradients of the pilot for each; two more where a part of the loss does not pass the outputs."""


class FixedCotangents:
    """A session whose loss is linear in the outputs: the cotangents are those at the weights.

    Args:
        session: The measurement.
        tap: The outputs.

    Attributes:
        largest: Bytes of the largest cotangents of a micro-batch, in fp32.
        factor: Of what is held in place of them.
    """

    def __init__(self, session: Session, tap: Tap) -> None:
        self._session, self._tap = session, tap
        self.reads = True  # in the first evaluation
        self.largest, self.factor = 0, 1.0
        self._kept: dict[int, Scaled] = {}
        self._new: dict[int, Scaled] = {}
        self._rounding: dict[int, Tensor] | None = None  # in place of them

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def add_gradient(self, out: Tensor, micro_batches: range, factor: float = 1.0) -> None:
        """Add the gradient terms of these units: the first time, those of the loss itself."""
        if micro_batches:
            self.reads = not set(self._tap.calls(micro_batches)) <= self._kept.keys()
            with self._tap.listening(micro_batches, self):
                self._session.add_gradient(out, micro_batches, factor)
            found = self._session.cotangent_scale
            for i, (c, scale) in self._new.items():
                self._kept[i] = c, found if math.isnan(scale) else scale
            self._new.clear()

    def outputs(self, index: int, f: Tensor) -> None:
        """Add nothing."""

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor | None:
        """Return the cotangent of the first evaluation."""
        if index not in self._kept:
            made = _less_rounding(f, c, self._session.head)
            self._new[index] = made, self._session.cotangent_scale
            self.largest = max(self.largest, FP32 * c.numel())
            return made
        if self._rounding is not None:
            return self.factor * self._rounding[index]
        kept, scale = self._kept[index]
        now = self._session.cotangent_scale
        return kept if scale == now else kept * (scale / now)

    @contextmanager
    def holding_rounding(self, out: Tensor, micro_batches: range) -> Iterator[None]:
        """Hold instead what the cotangents of these units are at the present weights less what
        they are at w.

        Args:
            out: `(n_local,)` fp32, to which the gradient that does not pass the outputs is added.
            micro_batches: The units.

        Collective: the gradient of these units.
        """
        here = _Here(self._session)
        with self._tap.listening(micro_batches, here):
            self._session.add_gradient(out, micro_batches)
        self._rounding = {}
        for i, (c, now) in here.cotangents.items():
            kept, scale = self._kept[i]
            self._rounding[i] = c.sub_(kept * (scale / now))
        try:
            yield
        finally:
            self._rounding = None


class _Here(Silence):
    """Keeps the cotangents, and stops them at the outputs."""

    reads = True

    def __init__(self, session: Session) -> None:
        self._session, self.cotangents = session, dict[int, Scaled]()

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        made = _less_rounding(f, c, self._session.head)
        self.cotangents[index] = made, self._session.cotangent_scale
        return super().cotangent(index, f, c)


def _less_rounding(f: Tensor, c: Tensor, head: Head) -> Tensor:
    """Return a copy of the cotangents, those of a cross entropy with less of their rounding."""
    tokens = read_cross_entropy(f, c, group_of(f, head))
    return c.clone() if tokens is None else tokens.less_rounding(c)


class Residual(FiniteDifferenceHessian):
    """R at the session's weights: H of a loss that is linear in the outputs.

    Args:
        fixed: The session.
        displacement, scheme, tolerance: As for H.
    """

    def __init__(
        self,
        fixed: FixedCotangents,
        displacement: float | Literal["auto"],
        scheme: SchemeName,
        tolerance: float | None,
    ) -> None:
        session: Any = fixed
        super().__init__(session, displacement, scheme, tolerance)
        self._fixed = fixed
        self._of_rounding = 0.0  # the relative error of products from the cotangents'

    def state_dict(self) -> dict[str, Any]:
        """Return that of H, and the error of the cotangents."""
        return super().state_dict() | {"of_rounding": self._of_rounding}

    def load_state_dict(self, figures: Mapping[str, Any]) -> None:
        """Continue from it."""
        super().load_state_dict(figures)
        self._of_rounding = figures.get("of_rounding", 0.0)

    def matvec(self, v: Tensor) -> Product:
        """Return `R v` and estimates of its error, those of the held cotangents among them."""
        product = super().matvec(v)
        if product.error is None:
            return product
        if self.cost.products <= MEASURED and product.norm:
            self._of_rounding = max(self._of_rounding, self._rounded(v, product))
        return replace(product, error=math.hypot(product.error, self._of_rounding))

    def _rounded(self, v: Tensor, product: Product) -> float:
        """Return the relative size of the product with what another rounding of each weight makes
        of the pilot's cotangents.
        """
        session, gradients, some = self.session, self._gradients, self._gradients.pilot
        v, length, _ = measurable(v, self.space)
        out, step = gradients.at[1], product.displacement / length
        signs = torch.sign(v, out=gradients.at[-1])
        session.displace(session.masters().abs_().mul_(signs), session.unit_roundoff)
        out.zero_()
        # What does not pass the outputs is the same at both factors.
        passes = [(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)]
        with self._fixed.holding_rounding(out, some):
            passes = passes if self.space.norm(out) else passes[:2]
            out.zero_()
            for self._fixed.factor, sign in passes:
                session.displace(v, sign * step)
                session.add_gradient(out, some)
                out.neg_()
        share = gradients.share
        self.cost.gradient_evaluations += (1 + len(passes)) * share
        unit = self.scale / (len(passes) * product.displacement * share)
        two = share**INDEPENDENT * self.space.norm(out) * unit  # that of w and that of here
        return two / (math.sqrt(2) * product.norm)


def residual(
    session: Session,
    displacement: float | Literal["auto"] = "auto",
    scheme: SchemeName = "central",
    outputs: str | None = None,
    tolerance: float | None = None,
) -> FiniteDifferenceHessian:
    """Return R at the session's weights; the arguments are those of its `Curvature` and `outputs`.

    Raises:
        UnsupportedError: the loss is no function of the outputs alone, or is linear in them and
            nobody has named them.

    Collective: it evaluates the gradient once, and that of the first micro-batch twice more, three
    times where the outputs are to be found.
    """
    session.displace(None, 0.0)
    tap = known_outputs(session, outputs)
    found = tap is None and outputs is None
    if tap is None:
        tap, _ = find_outputs(session, outputs, session.space.zeros())
    require_function(session, tap, found)
    fixed = FixedCotangents(session, tap)
    operator = Residual(fixed, displacement, scheme, tolerance)
    operator.outputs = f"{tap.name}: cotangents held"
    operator.outputs_read = fixed.largest, False
    return operator
