"""Kronecker factors as the metric of a preconditioned system.

D is EK-FAC on the weights of linear layers. On all other coordinates it is a diagonal: the mean
square of the gradients of single units, times the terms of the loss in a unit, which is the
diagonal of the empirical Fisher matrix over terms as long as these are independent.

Cost of one application: a gather to each layer's owner and back, two matrix products on either
side. Memory: the diagonal, and one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_hessian.backends.protocol import Backend, Session
from ds_hessian.backends.restricted import Restricted
from ds_hessian.errors import NumericsError
from ds_hessian.operators.kronecker.factors import Factors, Settings, estimate
from ds_hessian.operators.kronecker.layers import Layer
from ds_hessian.operators.kronecker.spaces import LayerSpace
from ds_hessian.ranks import together


class KroneckerMetric:
    """The metric D of a job at the session's weights.

    Args:
        session: The open measurement.
        backend: The job.
        layers: Its linear layers (`find_layers`), of which those with factors are taken.

    Attributes:
        layers: Names of the weights with factors.
        least: The smallest eigenvalue of D, on all ranks.

    Collective: the constructor, which makes three passes, and all methods.
    """

    def __init__(self, session: Session, backend: Backend, layers: Sequence[Layer]) -> None:
        settings = Settings(("ekfac",), required=False, coarse=True)
        self._factors = estimate(session, backend, layers, settings)
        self.layers = tuple(f.layer.name for f in self._factors)
        self._spaces = [
            LayerSpace(Restricted(backend, [f.layer.name]), f.layer) for f in self._factors
        ]
        self.space = session.space
        self._diagonal = _squares(session, self._factors)
        self.least = self._least()

    def inverse_root(self, shift: float) -> Callable[[Tensor], Tensor]:
        """Return (D + shift)^-1/2 as a function of vectors `(n_local,)`.

        Raises:
            NumericsError: D + shift is not positive.
        """
        self._require_positive(shift)
        diagonal = (self._diagonal + shift).rsqrt()

        def apply(v: Tensor) -> Tensor:
            out = v * diagonal
            for factors, space in zip(self._factors, self._spaces, strict=True):
                x = space.gather(space.restricted.select(v))
                with together("applying Kronecker factors", device=self.space.device):
                    if x is not None:
                        form = factors.forms["ekfac"]
                        x = form.apply(x.to(form.values), lambda e: (e + shift).rsqrt())
                y = space.scatter(x)
                for part, (_, own) in zip(space.restricted.parts, space.layout, strict=True):
                    out[part] = y[own]
            return out

        return apply

    def _require_positive(self, shift: float) -> None:
        if not self.least + shift > 0:
            raise NumericsError(
                "EK-FAC + damping must be positive everywhere; EK-FAC's smallest eigenvalue is "
                f"{self.least:.3e}, the damping {shift}: raise the damping"
            )

    def _least(self) -> float:
        """Return the smallest eigenvalue of D: of factors, and of the diagonal elsewhere."""
        uncovered = torch.ones_like(self._diagonal, dtype=torch.bool)
        for space in self._spaces:
            for part in space.restricted.parts:
                uncovered[part] = False
        owned = self.space.n_owned
        values = [f.forms["ekfac"].values.flatten() for f in self._mine()]
        values.append(self._diagonal[:owned][uncovered[:owned]])
        mine = [float(v.min()) for v in values if v.numel()]
        return float(self.space.of_all_ranks(min(mine, default=math.inf)).min())

    def _mine(self) -> list[Factors]:
        return [f for f in self._factors if f.forms]


def _squares(session: Session, factors: Sequence[Factors]) -> Tensor:
    """Return the mean square of the units' gradients, times the loss' terms in a unit.

    Those of layers with factors are not needed, but a layer may give none to its bias without them
    (`LinearWithFrozenWeight` of Megatron).
    """
    total, gradient, units = session.space.zeros(), session.space.zeros(), session.num_micro_batches
    for i in range(units):
        gradient.zero_()
        session.add_gradient(gradient, range(i, i + 1))
        total += gradient.square()
    assert session.gradient_scale is not None
    terms = max((f.terms for f in factors), default=units) / units
    # The gradient of a unit is `units` times its term.
    return total.mul_(terms * units * session.gradient_scale**2)
