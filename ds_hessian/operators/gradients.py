"""The gradients of which products are differences, and what their differences show.

Those at w are kept, of all micro-batches and of a pilot, a few of them; one more for each point of
the formula, into which a pilot's trial is evaluated, and then the rest of the micro-batches, if it
is accepted. Memory: see `ds_hessian.operators.finite_difference`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian import ops
from ds_hessian.backends.protocol import Session
from ds_hessian.errors import NumericsError
from ds_hessian.operators.checks import is_lost, kinks_crossed, measurable, require_finite
from ds_hessian.operators.clock import add_gradient
from ds_hessian.operators.displacement.belief import SATURATING
from ds_hessian.operators.displacement.figures import distance, quotient, removed_square, tangent
from ds_hessian.operators.displacement.line import Line
from ds_hessian.operators.displacement.loudness import NEARER
from ds_hessian.operators.displacement.schemes import Scheme
from ds_hessian.operators.displacement.steps import DECADE
from ds_hessian.operators.displacement.trials import Trial
from ds_hessian.operators.protocol import OperatorCost, Product

PILOT = 8
"""The pilot has one in PILOT micro-batches, rounded up."""

SCALED = 1.3
"""Factor of a loss whose gradient rounds otherwise: no number of few bits, which leave some as they
are."""


def pilot_of(count: int) -> int:
    """Return the number of the pilot's micro-batches, of so many."""
    return math.ceil(count / PILOT)


class Gradients:
    """The gradients at the weights, and at the points of a formula along a line through them.

    Args:
        session: The measurement.

    Attributes:
        at_w: The gradient at w, summed over all micro-batches; `pilot_at_w` over the pilot's.
        at: The gradient at each point, over the micro-batches evaluated there so far.
        all, pilot, rest: The micro-batches; those of the pilot, and the others.
        scale: `Session.gradient_scale`, of sums over all micro-batches.
        weight_norm: The norm of the weights.
        of_weights: That of their rounding in the passes.
        scheme: The formula, whose differences are between `points`.
        cost: What was evaluated so far, and how long a gradient takes.
        decided: `Session.choices` of the last product, of all ranks.

    Raises:
        NumericsError: the gradient at the weights is not finite.

    Collective: every method that evaluates or reduces, and the constructor, which evaluates the
    gradient at w.
    """

    scheme: Scheme
    points: Sequence[int]

    def __init__(self, session: Session) -> None:
        self.session, self.space, self.cost = session, session.space, OperatorCost()
        count = session.num_micro_batches
        self.all, self.pilot = range(count), range(pilot_of(count))
        self.rest = range(len(self.pilot), count)
        self.at = dict[int, Tensor]()
        self._warm, self._timed = False, (0.0, 0)  # seconds and micro-batches of evaluations
        self._removed = 0.0  # `Trial.removed` of the last product
        self.decided = [0.0] * 4
        self.at_w, self.pilot_at_w = self._start()
        assert session.gradient_scale is not None
        self.scale = session.gradient_scale
        self.weight_norm = session.weight_norm()
        self.of_weights = session.unit_roundoff * self.weight_norm
        self.cost.kinks_crossed = kinks_crossed(session)

    def _start(self) -> tuple[Tensor, Tensor]:
        """Return the gradients at w of all micro-batches and of the pilot; set the loss's scale."""
        session = self.session
        session.displace(None, 0.0)
        gradient = self.space.zeros()
        self.add(gradient, self.pilot)
        pilot = gradient.clone()
        self.add(gradient, self.rest)
        require_finite(gradient, self.space)
        return gradient, pilot

    def take(self, scheme: Scheme) -> None:
        """Evaluate at the points of this formula from now on."""
        self.scheme = scheme
        self.points = [node for a, b, _ in scheme.differences for node in (a, b)]
        for node in {*scheme.nodes, -1} - {*self.at}:
            self.at[node] = self.space.zeros()

    def take_all(self) -> None:
        """Have all micro-batches for the pilot from now on."""
        self.pilot, self.rest, self.pilot_at_w = self.all, range(0), self.at_w

    @property
    def norm(self) -> float:
        """The norm |g(w)| of the gradient of the loss, over all ranks."""
        return self.space.norm(self.at_w) * self.scale

    @property
    def share(self) -> float:
        """The pilot's share of the micro-batches."""
        return len(self.pilot) / len(self.all)

    # ---- evaluations

    def restart(self) -> None:
        """Begin with no micro-batch at all points."""
        for gradient in self.at.values():
            gradient.zero_()

    def evaluate(self, line: Line, h: float, micro_batches: range, points: Sequence[int]) -> None:
        """Add these micro-batches' gradients at all points, beginning at the current one."""
        if not micro_batches:
            return
        step = h / line.length
        if line.is_at(points[-1] * step):
            pairs = [points[i : i + 2] for i in range(0, len(points), 2)]
            points = [*pairs[-1][::-1], *(node for pair in pairs[:-1] for node in pair)]
        for node in points:
            line.move(node * step, inner=abs(node) <= 1)
            if node:
                self.add(self.at[node], micro_batches)
        evaluated = sum(node != 0 for node in points)
        self.cost.gradient_evaluations += evaluated * len(micro_batches) / len(self.all)

    def add(self, out: Tensor, micro_batches: range) -> None:
        """Add the gradients of these micro-batches to `out`, and time them.

        The clock disregards the first evaluation, once there is another: kernels are built or tuned
        in it, just in time.
        """
        if not micro_batches:
            return
        seconds = add_gradient(self.session, out, micro_batches)
        evaluated = len(micro_batches)
        if self._warm:
            self._timed = self._timed[0] + seconds, self._timed[1] + evaluated
        else:
            self._warm = True
        total, count = self._timed if self._timed[1] else (seconds, evaluated)
        self.cost.gradient_seconds = total / count * len(self.all)

    def slope_of_lacking(self, line: Line, h: float) -> tuple[float, float]:
        """Return |Hd| of the pilot, where d is the unit vector along what the steps from w - hv to
        w + hv lack of v, and the share of v that they lack; in the memory of the gradients.
        """
        lacking, gradient = self.at[-1], self.at[1]
        length = line.lacking(h, lacking)
        if not length:
            return 0.0, 0.0
        step = h
        while True:
            off = line.leave(lacking, step / length)
            (lost,) = self.space.of_rank_0(off >= 1 and step < self.weight_norm)
            if not lost:
                break
            step *= DECADE
        self.add(gradient.zero_(), self.pilot)
        self.cost.gradient_evaluations += self.share
        slope = self.space.norm(gradient.sub_(self.pilot_at_w)) * self.scale / (self.share * step)
        return slope if math.isfinite(slope) else math.inf, length / line.length

    def rounding(self, node: int, trial: Trial) -> float:
        """Return N of the pilot's gradients in 16 bits, in units of the slice's: by those at the
        present weights, which are at this point of the trial, and those of a scaled loss. Where the
        trial saturates, its noise is to that at w as the gradients are.
        """
        gradient, other = self.at[node], self.space.zeros()
        self.session.add_gradient(other, self.pilot, SCALED)
        self.cost.gradient_evaluations += self.share
        other.sub_(gradient)
        squares = self.space.dots([(x, x) for x in (other, gradient, self.pilot_at_w)])
        apart, here, there = squares.sqrt().tolist()
        alike = trial.nonlinearity <= SATURATING or there >= here
        return apart * (1.0 if alike else there / here) * self.scale / (2 * self.share)

    # ---- trials

    def trial(
        self, line: Line, h: float, earlier: tuple[Trial, Tensor] | None
    ) -> tuple[Trial, Tensor]:
        """Return the trial of the pilot at displacement h, compared with an earlier one, and its
        product.
        """
        inner = (self.at[1], self.at[-1], self.pilot_at_w)
        ratio = ops.curvature_ratio(*inner, self.space.n_owned)
        sums = self.space.reduce(torch.cat([ratio, line.change.to(ratio.device)]))
        d2, s2, along, moved = sums.tolist()
        product, removed = self.pilot_product(h)
        pairs = [(product, product)]
        pairs += [(product, earlier[1])] if earlier is not None else []
        pairs += [(removed, removed)] if removed is not None else []
        square, *dots = self.space.dots(pairs).tolist()
        size = math.sqrt(square) if math.isfinite(square) else math.inf
        cosine = line.sign * quotient(along, math.sqrt(moved) * line.length, nothing=0.0)
        trial = Trial(
            h,
            size,
            nonlinearity=quotient(math.sqrt(s2), math.sqrt(d2)),
            change=math.inf if earlier is None else distance(size, earlier[0].size, dots[0]),
            since=None if earlier is None else earlier[0].h,
            off=math.inf if is_lost(size, cosine, h, self.of_weights) else tangent(cosine),
            removed=quotient(math.sqrt(dots[-1]), size) if removed is not None else 0.0,
            second=math.sqrt(s2) * self.scale * len(self.all) / (2 * h * len(self.pilot)),
        )
        return trial, product

    def pilot_product(self, h: float) -> tuple[Tensor, Tensor | None]:
        """Return the pilot's product, and what extrapolation took from its inner difference."""
        scale = self.scale * len(self.all) / len(self.pilot)
        parts = list[Tensor]()
        for a, b, _ in self.scheme.differences:
            base = self.at[b] if b else self.pilot_at_w
            parts.append(torch.sub(self.at[a], base).mul_(scale / ((a - b) * h)))
        inner, *outer = parts
        if not outer:
            return inner, None
        (_, _, weight), *others = self.scheme.differences
        total = inner * weight
        for part, (_, _, other) in zip(outer, others, strict=True):
            total.add_(part, alpha=other)
        return total, inner.sub_(total)

    def third_of_pilot(self, line: Line, h: float) -> float:
        """Return `Trial.third` of the last trial, at h; it takes the memory of a product."""
        third = self.space.zeros()
        self._add_at(third, line, 2 * h, self.pilot)
        third.add_(self.at[1], alpha=-3).add_(self.pilot_at_w, alpha=3).sub_(self.at[-1])
        return self._third_difference(third, h, self.pilot)

    def third_of_slice(self, line: Line, product: Product) -> float:
        """Return that of a product which has been assembled, in the memory of its gradient."""
        third = self._off_parabola(line, product, 2.0)
        return self._third_difference(third, product.displacement, self.all)

    def nearer(self, line: Line, product: Product) -> float:
        """Return how far the gradient of all micro-batches at w + chv is from the parabola through
        those of such a product, over the square root of 2
        (`ds_hessian.operators.displacement.loudness`), in the same memory.
        """
        apart = self._off_parabola(line, product, NEARER)
        norm = self.space.norm(apart) * self.scale / math.sqrt(2)
        return norm if math.isfinite(norm) else math.inf

    def _off_parabola(self, line: Line, product: Product, c: float) -> Tensor:
        """Return the gradient at w + chv less the parabola through those of a product, of all
        micro-batches; where c is 2, it is the third difference.
        """
        apart, h = self.at[1].zero_(), product.displacement
        self._add_at(apart, line, c * h, self.all)
        # g(w + hv) is g(w - hv) + 2h Hv.
        apart.add_(product.vector, alpha=-(c + c * c) * h / (self.scale * line.length))
        return apart.add_(self.at_w, alpha=c * c - 1).sub_(self.at[-1], alpha=c * c)

    def _add_at(self, out: Tensor, line: Line, h: float, micro_batches: range) -> None:
        """Add the gradient at w + hv to `out`, beside the points of the formula."""
        line.move(h / line.length, inner=False)
        self.add(out, micro_batches)
        self.cost.gradient_evaluations += len(micro_batches) / len(self.all)

    def _third_difference(self, third: Tensor, h: float, micro_batches: range) -> float:
        """Return `Trial.third` from the sum of gradients of these micro-batches."""
        unit = self.scale * len(self.all) / (6 * h * len(micro_batches))
        norm = self.space.norm(third) * unit
        return norm if math.isfinite(norm) else math.inf

    # ---- products

    def product(self, line: Line, h: float, scheme: Scheme) -> Product:
        """Return the product by a formula whose gradients have been evaluated at h, without
        estimates of its error; it takes the memory of one of them.

        Raises:
            NumericsError: it is not finite.
        """
        owned, length = self.space.n_owned, line.length
        sums = {"along": line.change[:1], "moved": line.change[1:]}
        (inner, _, weight), *outer = scheme.differences
        for a, b, part in scheme.differences:
            base, middle = (self.at[b], self.at_w) if b else (self.at_w, None)
            # The gradients are sums; this gives the weighted part of H v at v's own length.
            half = (a - b) * h / (2 * part * self.scale * length)
            partials = ops.difference(self.at[a], base, half, middle, owned)
            if a == inner:
                sums["inner"], sums["second"] = partials.split(1)
        vector = self.at[inner]
        self.at[inner] = torch.empty_like(vector)
        others = [self.at[a] for a, _, _ in outer]
        sums["removed"] = removed_square(vector, others, weight, owned)
        for other in others:
            vector.add_(other)
        sums["square"] = ops.dots([(vector, vector)], owned) if outer else sums["inner"]
        decided = self.session.choices(self.all).to(vector.device).split(1)
        sums |= {f"decided {i}": part for i, part in enumerate(decided)}
        figures = self._reduce(sums)
        self.decided = [figures[f"decided {i}"] for i in range(len(decided))]
        square, second = figures["square"], figures["second"]
        self._removed = quotient(
            math.sqrt(max(figures["removed"], 0.0)), math.sqrt(max(square, 0.0))
        )
        if not (math.isfinite(square) and math.isfinite(second)):
            raise NumericsError(
                f"the product at displacement {h:.3e} is not finite: the loss is not finite there; "
                "use a smaller displacement"
            )
        first = 2 * h * math.sqrt(figures["inner"]) / (weight * self.scale * length)
        moved = math.sqrt(figures["moved"]) * length
        ratio = quotient(math.sqrt(second), first)
        return Product(
            vector=vector,
            norm=math.sqrt(square) / length,
            displacement=h,
            nonlinearity=None if scheme.one_sided or math.isinf(ratio) else ratio,
            noise=None,
            fidelity=line.sign * quotient(figures["along"], moved, nothing=0.0),
            error=None,
            trials=0,
        )

    def outcome(self, product: Product) -> Trial:
        """Return the figures of the last product as a trial of the whole slice."""
        bent = math.nan if product.nonlinearity is None else product.nonlinearity
        return Trial(product.displacement, product.norm, bent, removed=self._removed)

    def forms(self, v: Tensor, h: float, micro_batches: range | None = None) -> NDArray[np.float64]:
        """Return `v'H_i v / v'v` for micro-batch i of all ranks, `(G,)`, from slopes along v.

        Cost: two gradients over all micro-batches; two small all-reduces. The gradients are in the
        memory of a product's.

        Raises:
            NumericsError: v is zero or not finite, or a slope is not finite.
        """
        session, space, every = self.session, self.space, micro_batches or self.all
        v, length, _ = measurable(v, space)
        gradient, slopes = self.at[-1], list[Tensor]()
        for sign in (1.0, -1.0):
            session.displace(v, sign * h / length, across=sign < 0)
            for i in every:
                gradient.zero_()
                session.add_gradient(gradient, range(i, i + 1))
                slopes.append(sign * ops.dots([(gradient, v)], space.n_owned))
        found = space.reduce(torch.cat(slopes)).numpy().reshape(2, len(every)).sum(0)
        if not np.isfinite(found).all():
            raise NumericsError(
                f"a slope at displacement {h:.3e} is not finite: the loss is not finite there; use "
                "a smaller displacement"
            )
        return np.asarray(len(self.all) * self.scale / (2 * h * length) * found)

    def _reduce(self, partials: Mapping[str, Tensor]) -> dict[str, float]:
        """Sum this rank's named partial sums over all ranks, in one all-reduce."""
        sums = self.space.reduce(torch.cat([part.reshape(1) for part in partials.values()]))
        return dict(zip(partials, sums.tolist(), strict=True))
