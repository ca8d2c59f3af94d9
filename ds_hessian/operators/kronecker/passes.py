"""Passes with hooks on linear layers, and what brings their sums to units of the loss.

Sums are those of `ds_hessian.operators.kronecker.sums`, completed over ranks on a layer's owner.
How a host scales the terms of its gradient is read off its gradient of the weight: it is the factor
of what the hooks have seen, `sum c a'`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.backends.protocol import Backend, Session
from ds_hessian.operators.displacement.trials import ROUNDOFF
from ds_hessian.operators.kronecker.labels import Labels
from ds_hessian.operators.kronecker.layers import Layer, listening
from ds_hessian.operators.kronecker.samples import Samples, Terms
from ds_hessian.operators.kronecker.sums import (
    KFAC,
    SKETCH,
    Accumulator,
    Count,
    Gradients,
    Seen,
    Shampoo,
    Square,
)
from ds_hessian.vectors import VectorSpace, collected, placed

MISMATCH = 0.05
"""Largest relative distance of `sum c a'` to the job's gradient: above what rounding of bf16 passes
makes, below what another use of the weight does."""


class LayerPasses:
    """The passes of some layers.

    Args:
        session: The open measurement of the whole job.
        backend: The job.
        layers: The layers.
        labels: The labels of which the sums are.
    """

    def __init__(
        self, session: Session, backend: Backend, layers: Sequence[Layer], labels: Labels
    ) -> None:
        self.session, self.backend, self.layers = session, backend, list(layers)
        self.labels, self.space = labels, session.space
        self.device = self.space.device
        self.scales: dict[str, float] = {}
        self.cotangent_scale = 0.0  # in whose units all sums are
        self.terms = 0  # of the loss, where labels are the data's
        self.tokens: dict[str, int] = {}  # that are samples
        self.batches: dict[str, int] = {}
        self.evaluated: dict[str, int] = {}  # micro-batches, also those without its tokens
        self.rounded: dict[str, tuple[float, float]] = {}  # of gradients, of so many micro-batches
        self.squares: dict[str, float] = {}  # of what is rounded of each, as Shampoo's trace is

    # ---- passes and transport

    def _pass(self, *sums: Mapping[str, Accumulator]) -> None:
        """Evaluate each unit with hooks on the layers, with the labels that the factors are of."""
        spared = {x.name for x in self.layers}
        self.session.displace(None, 0.0)
        for number in range(self.labels.draws) if self.labels.draws else (None,):
            for unit in range(self.session.num_micro_batches):
                self._evaluate(unit, sums, spared, None, number)

    def _evaluate(
        self,
        unit: int,
        sums: Sequence[Mapping[str, Accumulator]],
        spared: Collection[str],
        gradient: Tensor | None,
        number: int | None = None,
        terms: Terms | None = None,
    ) -> None:
        """Add what the hooks see of a unit to all sums, and its gradient, without those of the
        spared layers' weights, to `gradient`, if that is wanted; and count its terms.

        Of `Seen`, only calls are told that are in the gradient.
        """
        every = {x.name: [each[x.name] for each in sums if each] for x in self.layers}
        samples = Samples()
        latest = dict[str, int]()  # backward of each layer's micro-batch that is open
        sequences = {x.name: x.sequence for x in self.layers}

        def close(name: str) -> None:
            ranks = sequences[name]
            for each in every[name]:
                if ranks is not None:
                    each.join(ranks)
                each.close()

        def note(layer: Layer, a: Tensor, c: Tensor, counts: bool) -> None:
            backward = self.session.backward
            if latest.setdefault(layer.name, backward) != backward:
                close(layer.name)
                latest[layer.name] = backward
            told = samples.among(backward, c)
            if told is not None:
                a, c = a[told], c[told]
            factor = self._relative() if number is None else self.labels.unit
            c = c if factor == 1 else c * factor
            for each in every[layer.name]:
                if counts or not isinstance(each, Seen):
                    each.note(a, c)

        labels = nullcontext() if number is None else self.labels.drawn(unit, number)
        counting = nullcontext() if terms is None else terms.listening()
        # Labels first: hooks on a tensor run in their order, and a layer may be the outputs.
        with labels, counting, listening(self.layers, note, spared):
            self.session.add_gradient(gradient, range(unit, unit + 1))
        for name, sequence in sequences.items():
            if name in latest or sequence is not None:  # whose other ranks may have seen it
                close(name)

    def _relative(self) -> float:
        """Return the factor that brings a unit's cotangents to the units of the first one's.

        Where the host scales each unit by itself it is known in all backwards.
        """
        scale = self.session.cotangent_scale
        if math.isnan(scale):  # of the first backward of a session whose scale is one
            return 1.0
        self.cotangent_scale = self.cotangent_scale or scale
        return scale / self.cotangent_scale

    def _mine(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.owner == self.space.rank]

    def _whole(self, layer: Layer, gradient: Tensor) -> Tensor | None:
        """Return the part of a vector that is a layer's weight on its owner, `(m, n)` fp32."""
        layout, space = self.backend.layout, self.backend.space
        whole = collected(layout, space, gradient, *self._stored(layer), layer.owner)
        return layer.oriented(whole) if space.rank == layer.owner else None

    def _stored(self, layer: Layer) -> tuple[str, torch.Size]:
        """Return the name of a layer's weight, and the shape in which it is stored."""
        return next((n, s) for n, s in self.backend.parameters if n == layer.name)

    def _owned(self, layer: Layer, part: Tensor) -> Tensor:
        """Return the sum over all ranks, complete on the owner; nothing elsewhere."""
        if not layer.counts:
            part.zero_()
        return summed(part, layer, self.space)

    def _parts(
        self, layer: Layer, sums: Mapping[str, KFAC | Gradients]
    ) -> list[tuple[Square, Tensor]]:
        """Return the sums of squares of a layer over all ranks, in pieces, on its owner; nothing
        elsewhere.
        """
        parts = [(square, self._owned(layer, square.flat)) for square in sums[layer.name].squares]
        return parts if layer.owner == self.space.rank else []

    def _squares(self, layer: Layer, sums: Mapping[str, KFAC | Gradients]) -> list[Tensor]:
        """Return the sums of squares of a layer over all ranks on its owner; nothing elsewhere."""
        return [square.whole(flat) for square, flat in self._parts(layer, sums)]

    def _known(self, layer: Layer, part: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return the owner's tensor on every rank, fp32."""
        whole = torch.empty(shape, device=self.device)
        if part is not None:
            whole.copy_(part)
        if self.space.distributed:
            dist.broadcast(whole, src=layer.owner, group=self.space.group)
        return whole

    # ---- the factor of the host's scaling

    def _calibrate(self, *sums: Mapping[str, Accumulator]) -> dict[str, float]:
        """Find the factors from what hooks saw to the gradient of the loss; return the mismatches.

        With the data's labels. Gradients of weights are evaluated until each layer was in one, in
        one unit for a model whose layers are all used there; a weight that is used in another way
        too has a gradient in the others as well. Of all units only where there are sums.
        """
        session, gradient = self.session, self.space.zeros()
        terms = Terms(session, self.backend.parameters) if any(sums) else None
        seen = {x.name: Seen(x.shape, self.device) for x in self.layers}
        known = set[str]()
        session.displace(None, 0.0)
        for unit in range(session.num_micro_batches):
            if len(known) == len(seen) and session.gradient_scale is not None and not any(sums):
                break
            self._evaluate(unit, [seen, *sums], known, gradient, terms=terms)
            known |= self._known_ones(seen) if len(known) < len(seen) else set()
        assert session.gradient_scale is not None
        if terms is not None:
            mine = torch.tensor([terms.count], dtype=torch.float64)
            self.terms = round(float(self.space.reduce(mine)[0]))
        gradient.mul_(session.gradient_scale)
        self.cotangent_scale = self.cotangent_scale or session.cotangent_scale
        self._measure(seen)
        return self._fit(seen, gradient)

    def _measure(self, seen: Mapping[str, Seen]) -> None:
        """Find what fp32 rounds of the gradients that were seen, in units of the sums."""
        mine = [(float(seen[x.name].lengths), seen[x.name].batches / x.parts) for x in self.layers]
        counts = torch.tensor([[x.counts] for x in self.layers])
        found = self.space.reduce((torch.tensor(mine, dtype=torch.float64) * counts).flatten())
        for x, (length, batches) in zip(self.layers, found.view(-1, 2).tolist(), strict=True):
            self.rounded[x.name] = ROUNDOFF * length, batches

    def _measure_squares(self, sums: Mapping[str, Shampoo]) -> None:
        """Find the squares of what fp32 rounds of each micro-batch's gradient, in their sum."""
        if sums:
            mine = [float(sums[x.name].lengths) * x.counts for x in self.layers]
            found = self.space.reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
            squares = zip(self.layers, found, strict=True)
            self.squares = {x.name: ROUNDOFF**2 * square for x, square in squares}

    def _known_ones(self, seen: Mapping[str, Seen]) -> set[str]:
        """Return the names of layers of which some rank has seen something."""
        mine = [float(x.counts and bool(seen[x.name].sketch.any())) for x in self.layers]
        found = self.space.reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
        return {x.name for x, count in zip(self.layers, found, strict=True) if count}

    def _fit(self, seen: Mapping[str, Seen], gradient: Tensor) -> dict[str, float]:
        """Find the factors of all layers; return the mismatches."""
        figures = torch.zeros(len(self.layers), 2, dtype=torch.float64)
        for row, layer in zip(figures, self.layers, strict=True):
            mine = seen[layer.name]
            whole = placed(self.backend.layout, self.backend.space, gradient, *self._stored(layer))
            both = torch.stack([mine.sketch * layer.counts, layer.oriented(whole) @ mine.signs])
            found = summed(both, layer, self.space)
            if layer.owner == self.space.rank:
                row[:] = torch.tensor(self._figures(layer, *found.double()))
        known = self.space.reduce(figures.flatten()).view(-1, 2).tolist()
        for layer, (scale, _) in zip(self.layers, known, strict=True):
            self.scales[layer.name] = scale
        return {x.name: mismatch for x, (_, mismatch) in zip(self.layers, known, strict=True)}

    def _figures(self, layer: Layer, total: Tensor, known: Tensor) -> tuple[float, float]:
        """Return the factor of a layer and the mismatch, beyond the rounding of both sums, from
        the products of `sum c a'` and of the gradient with random signs.

        Where the terms cancel, as at a minimum, nothing else is left of these, and the factor is
        what the host says of its scaling.
        """
        assert self.session.gradient_scale is not None
        host = self.session.gradient_scale * self.cotangent_scale
        square = float((total * total).sum())
        scale = float((total * known).sum()) / square if square else 0.0
        least = abs(host) * self.rounded[layer.name][0] * math.sqrt(SKETCH) / MISMATCH
        size = float(known.norm())
        if size < least:
            scale, size = host, least
        distance = float((scale * total - known).norm())
        return scale, distance / size if size else float(square > 0)

    def _count(self, counts: Mapping[str, Count]) -> None:
        """Add up samples and micro-batches of all ranks."""
        evaluated = self.session.num_micro_batches * self.session.head.per_unit
        evaluated *= max(self.labels.draws, 1)
        mine = list[list[float]]()
        for x in self.layers:
            seen, share = counts[x.name], x.counts / x.parts
            mine.append([seen.tokens * x.counts, seen.batches * share, evaluated * share])
        found = self.space.reduce(torch.tensor(mine, dtype=torch.float64).flatten()).view(-1, 3)
        for x, figures in zip(self.layers, found.tolist(), strict=True):
            self.tokens[x.name], self.batches[x.name], self.evaluated[x.name] = map(round, figures)

    def _gain(self, layer: Layer, count: int) -> float:
        """Return the factor from sums of squares of `count` terms to a mean of the loss'.

        Drawn labels put cotangents in units of the gradient's terms at the outputs.
        """
        scale, labels = self.scales[layer.name], self.labels
        if not labels.draws:
            return count * scale**2
        assert self.session.gradient_scale is not None
        terms = self.session.gradient_scale * labels.draws * labels.copies
        return (scale / self.cotangent_scale) ** 2 / terms

    # ---- rounding

    def _rounding_of_gradient(self, layer: Layer) -> float:
        """Return that of all micro-batches, of which some were seen."""
        rounded, batches = self.rounded[layer.name]
        every = self.evaluated[layer.name] / max(self.labels.draws, 1)
        return abs(self.scales[layer.name]) * rounded * every / max(batches, 1.0)

    def _rounding(self, layer: Layer, trace: float) -> float:
        """Return that of sums of squares of gradients, whose tokens may cancel."""
        return 2 * math.sqrt(self.squares[layer.name] / trace) if trace > 0 else 0.0


def summed(part: Tensor, layer: Layer, space: VectorSpace) -> Tensor:
    """Return the sum over all ranks on the layer's owner; nothing elsewhere."""
    if space.distributed:
        dist.reduce(part, dst=layer.owner, group=space.group)
    return part if layer.owner == space.rank else part[:0]
