"""The Hessian as an operator: central differences of the gradient, with step control.

    H v = (g(w + h v) - g(w - h v)) / 2h

Cost of a product: two gradients over all micro-batches; with the automatic displacement also three
instead of two writes of the weights, and two gradients of one micro-batch for every trial that is
not accepted (an accepted one is part of the product); rarely, two more, where the finished
product turns out to be far from its best h. Three small all-reduces, and one more per trial. Memory
per rank: 2 `n_local` fp32 for the two gradients, 2 more for those at w (the whole slice's and the
pilot micro-batch's), and the product.

Source: the paper's equation (1), with the step of `ds_hessian.operators.step_control`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ds_hessian import ops
from ds_hessian.backends.protocol import ShardBackend
from ds_hessian.errors import NumericsError
from ds_hessian.operators.protocol import Product
from ds_hessian.operators.step_control import TRUNCATION, Assessment, StepController, Trial


@dataclass
class OperatorCost:
    """What an operator has spent so far. Seconds are wall-clock, on this rank.

    Attributes:
        gradient_seconds: One gradient over all micro-batches (measured at w).
        product_seconds: All products, trials included.
        products: Their number.
        gradient_evaluations: Gradients spent in products, in units of the full slice.
        trials: Pilot evaluations that were not accepted.
    """

    gradient_seconds: float = 0.0
    product_seconds: float = 0.0
    products: int = 0
    gradient_evaluations: float = 0.0
    trials: int = 0


class FiniteDifferenceHessian:
    """H at the backend's weights, over its micro-batches; use inside `backend.measuring()`.

    Args:
        backend: The shards.
        displacement: `"auto"`, or h itself: the length of the step in parameter space.

    Raises:
        NumericsError: the gradient at the weights is not finite.

    Collective: the constructor evaluates the gradient once.
    """

    def __init__(
        self, backend: ShardBackend, displacement: float | Literal["auto"] = "auto"
    ) -> None:
        self.backend = backend
        self.space = backend.space
        self.displacement = displacement
        self.cost = OperatorCost()
        self.gradient = self.space.zeros()
        self._plus, self._minus = self.space.zeros(), self.space.zeros()
        self._rest = range(1, backend.num_micro_batches)
        self._controller, self._pilot = self._start()
        assert backend.gradient_scale is not None
        self.scale = backend.gradient_scale

    def _start(self) -> tuple[StepController | None, Tensor]:
        """Evaluate the gradient at w, which also fixes the scale of the loss."""
        backend, started = self.backend, time.perf_counter()
        backend.displace(None, 0.0)
        backend.add_gradient(self.gradient, range(1))
        pilot = self.gradient.clone()
        backend.add_gradient(self.gradient, self._rest)
        squares = self.space.dots([(pilot, pilot), (self.gradient, self.gradient)])
        self.cost.gradient_seconds = time.perf_counter() - started
        if not torch.isfinite(squares).all():
            raise NumericsError(
                "the gradient at the current weights is not finite, so there is no Hessian: look "
                "at the loss on these micro-batches"
            )
        if self.displacement != "auto":
            return None, pilot
        controller = StepController(
            backend.unit_roundoff,
            backend.weight_norm(),
            math.sqrt(float(squares[0])),
            backend.num_micro_batches,
        )
        return controller, pilot

    @property
    def gradient_norm(self) -> float:
        """|g(w)| of the loss, over all ranks."""
        return self.space.norm(self.gradient) * self.scale

    def matvec(self, v: Tensor) -> Product:
        """`H v`; see `Product`. `v` `(n_local,)` fp32, of any length but zero.

        Raises:
            NumericsError: v is zero or not finite, or the product is not finite.
        """
        started = time.perf_counter()
        length = self.space.norm(v)
        if not (math.isfinite(length) and length > 0):
            raise NumericsError(f"a product needs a finite vector other than zero; |v| = {length}")
        if self._controller is None:
            h, trials = float(self.displacement), 0
            change = self._evaluate(v, h / length)
        else:
            h, trials, change = self._evaluate_auto(v, length)
        product, better = self._finish(v, length, h, trials, change)
        if better is not None:
            change = self._evaluate(v, better / length)
            product, _ = self._finish(v, length, better, trials, change)
            self.cost.gradient_evaluations += 2
        self.cost.products += 1
        self.cost.trials += trials
        self.cost.gradient_evaluations += 2 + 2 * trials / self.backend.num_micro_batches
        self.cost.product_seconds += time.perf_counter() - started
        return product

    def _evaluate(self, v: Tensor, step: float) -> Tensor:
        backend = self.backend
        backend.displace(v, step)
        backend.add_gradient(self._plus.zero_(), range(backend.num_micro_batches))
        change = backend.displace(v, -step)
        backend.add_gradient(self._minus.zero_(), range(backend.num_micro_batches))
        return change

    def _evaluate_auto(self, v: Tensor, length: float) -> tuple[float, int, Tensor]:
        """Trials on the first micro-batch until one is accepted, which the product then finishes.

        Returns h, the number of trials thrown away, and the partials of the last displacement.
        """
        assert self._controller is not None
        backend, trials = self.backend, list[Trial]()
        h = self._controller.propose()
        while True:
            backend.displace(v, h / length)
            backend.add_gradient(self._plus.zero_(), range(1))
            change = backend.displace(v, -h / length)
            backend.add_gradient(self._minus.zero_(), range(1))
            squares = ops.curvature_ratio(self._plus, self._minus, self._pilot, self.space.n_owned)
            d2, s2, along, moved2 = self.space.reduce(torch.cat([squares, change])).tolist()
            rho = h * _sine(along, moved2, length)
            trials.append(Trial(h, math.sqrt(d2), math.sqrt(s2), rho))
            advice = self._controller.advise(trials)
            if advice.accept:
                break
            h = advice.h
        if self._rest:
            backend.add_gradient(self._minus, self._rest)
            backend.displace(v, h / length)
            backend.add_gradient(self._plus, self._rest)
        return h, len(trials) - 1, change

    def _finish(
        self, v: Tensor, length: float, h: float, trials: int, change: Tensor
    ) -> tuple[Product, float | None]:
        """The product from the two gradients, and the h at which to repeat it, if any."""
        scale = self.scale
        # The gradients are sums; dividing them by 2h / (scale |v|) gives H v at v's own length.
        partials = ops.difference(
            self._plus,
            self._minus,
            h / (scale * length),
            v,
            None,
            self.gradient,
            self.space.n_owned,
        )
        sums = self.space.reduce(torch.cat([partials, change])).tolist()
        product2, second2, along, moved2 = sums[2], sums[3], sums[5], sums[6]
        if not (math.isfinite(product2) and math.isfinite(second2)):
            raise NumericsError(
                f"the product at displacement {h:.3e} is not finite: the loss is not finite there; "
                'use a smaller displacement, or "auto"'
            )
        norm = math.sqrt(product2) / length
        mean = 1.0 / self.backend.num_micro_batches
        sine = _sine(along, moved2, length)
        full = Trial(h, 2 * h * norm / scale * mean, math.sqrt(second2) * mean, h * sine)
        assessed = self._assess(full)
        fidelity = math.copysign(math.sqrt(1 - sine**2), -along)
        vector, self._plus = self._plus, torch.empty_like(self._plus)
        product = Product(
            vector=vector,
            norm=norm,
            displacement=h,
            nonlinearity=assessed.nonlinearity,
            noise=assessed.noise,
            fidelity=fidelity,
            error=assessed.error,
            trials=trials,
        )
        return product, assessed.better

    def _assess(self, full: Trial) -> Assessment:
        if self._controller is not None:
            return self._controller.assess(full)
        return Assessment(full.ratio, None, TRUNCATION * full.ratio**2)


def _sine(along: float, moved2: float, length: float) -> float:
    """Sine of the angle between the realised displacement and v, from `<change, v>`, `|change|^2`.

    1 where nothing moved.
    """
    if moved2 <= 0:
        return 1.0
    return math.sqrt(max(0.0, 1.0 - along * along / (moved2 * length * length)))
