"""The residual R = H - G of the Gauss-Newton matrix, by differences of gradients.

R is the Hessian of `<c, f(w)>`, with the outputs f and the cotangent c of the loss at w held fixed,
beside that of what does not pass the outputs. So it is a difference of gradients like H itself,
with the same estimates of its error; at w the two gradients are the same.

Memory: the cotangents of all micro-batches, in the dtype of the outputs.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.memory import FP32
from ds_hessian.operators.displacement.schemes import SchemeName
from ds_hessian.operators.finite_difference import FiniteDifferenceHessian
from ds_hessian.operators.outputs.find import find_outputs, known_outputs
from ds_hessian.operators.outputs.required import require_function
from ds_hessian.operators.outputs.tap import Tap


class FixedCotangents:
    """A session whose loss is linear in the outputs: the cotangents are those at the weights.

    Args:
        session: The measurement.
        tap: The outputs.

    Attributes:
        largest: Bytes of the largest cotangents of a micro-batch, in fp32.
    """

    reads = False

    def __init__(self, session: Session, tap: Tap) -> None:
        self._session, self._tap = session, tap
        self.largest = 0
        self._kept: dict[int, tuple[Tensor, float]] = {}  # with the scale of its pass
        self._new: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def add_gradient(self, out: Tensor, micro_batches: range) -> None:
        """Add the gradient terms of these units: the first time, those of the loss itself."""
        if micro_batches:
            with self._tap.listening(micro_batches, self):
                self._session.add_gradient(out, micro_batches)
            scale = self._session.cotangent_scale  # known after a first pass
            self._kept |= {i: (c, scale) for i, c in self._new.items()}
            self._new.clear()

    def outputs(self, index: int, f: Tensor) -> None:
        """Add nothing."""

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor | None:
        """Return the cotangent of the first evaluation."""
        if index not in self._kept:
            self._new[index] = c.clone()
            self.largest = max(self.largest, FP32 * c.numel())
            return None
        kept, scale = self._kept[index]
        now = self._session.cotangent_scale
        return kept if scale == now else kept * (scale / now)


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

    Collective: it evaluates the gradient once, and that of the first micro-batch three times more
    where the outputs are to be found.
    """
    session.displace(None, 0.0)
    tap = known_outputs(session, outputs)
    if tap is None:
        tap, _ = find_outputs(session, outputs, session.space.zeros())
        require_function(session, tap, outputs is None)
    fixed: Any = FixedCotangents(session, tap)
    operator = FiniteDifferenceHessian(fixed, displacement, scheme, tolerance)
    operator.outputs = f"{tap.name}: cotangents held"
    operator.outputs_read = fixed.largest, False
    return operator
