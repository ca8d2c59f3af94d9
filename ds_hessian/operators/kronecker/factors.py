"""Kronecker factors of linear layers, estimated on a job's own micro-batches.

With the inputs a_t and the cotangents c_t of the loss at a layer's outputs, for the T tokens that
are its samples (`ds_hessian.operators.kronecker.samples`), the n terms of the loss, and the
gradients G_i = N c' a of N micro-batches (of all data-parallel ranks):

| kind | K |
|---|---|
| `kfac` | B (x) A with A = sum a a' / T, B = n sum c c' |
| `ekfac` | eigenvectors of K-FAC, eigenvalues n sum (U_B' c a' U_A)^2 |
| `shampoo` | L (x) R / tr L with L = mean G G', R = mean G' G: Shampoo^2 |
| `klshampoo` | the fixed point L = mean G R^-1 G' / n, R = mean G' L^-1 G / m (REKLS) |
| `adam` | diag(sqrt(v) + eps) of the job's own optimizer |
| `optimizer` | L (x) R that the job's own optimizer keeps (`ds_hessian.operators.kronecker.kept`) |

so that K-FAC and EK-FAC are in units of the empirical Fisher matrix of the loss, over its terms,
with the data's own labels. With labels drawn from the model (of a cross entropy) the
cotangent at the logits is `sqrt(omega_t) (p_t - y_t)` for a token of weight omega_t instead, and B,
L and R are plain sums: the Fisher, or Gauss-Newton, matrix. In the first units, those that it takes
until each layer was used, the pass is the gradient itself: `sum_t c_t a_t'` must be the job's
gradient of the weight, up to the one factor that the host's scaling of the loss makes, which is
found so. All other passes form no gradients of the layers' weights, so that one that appears there
is of another use of the weight. A layer with either fault is refused. Both gradients are compared
by their products with random signs (`sums.Seen`).

Cost: two thirds of a gradient for `kfac` and `shampoo`, as much again for `ekfac` and for each of
the `ROUNDS` of `klshampoo`, and a third of one of the first units; with drawn labels each pass once
for every draw, after one gradient and two units that read the loss. Beside a pass, for each token
m^2 + n^2 multiplications and additions for `kfac` (one triangle of each factor), 2 m n for
`shampoo`. Memory on each rank: the sums of the layers of one pass, up to m^2 + n^2 each for `kfac`
and m^2 + n^2 + m n for `shampoo`, 17/32 of the squares where they are large.

Sources: Martens, Grosse, ICML 2015 (K-FAC); George et al., NeurIPS 2018 (EK-FAC); Gupta, Koren,
Singer, ICML 2018, and Morwani et al., arXiv 2406.17748 (Shampoo^2); Lin et al., arXiv 2509.03378
(KL-Shampoo); Emerging-Optimizers (REKLS).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ds_hessian.backends.protocol import Backend, Session
from ds_hessian.errors import ConfigError, NumericsError, UnsupportedError
from ds_hessian.operators.displacement.trials import ROUNDOFF
from ds_hessian.operators.kronecker.forms import Eigenform
from ds_hessian.operators.kronecker.kept import Adapter, Pair, fitting
from ds_hessian.operators.kronecker.labels import Labels
from ds_hessian.operators.kronecker.layers import Layer
from ds_hessian.operators.kronecker.passes import MISMATCH, LayerPasses, summed
from ds_hessian.operators.kronecker.sums import (
    KFAC,
    Count,
    Moments,
    Round,
    Shampoo,
)
from ds_hessian.operators.outputs.losses import size_of
from ds_hessian.ranks import together

Kind = Literal["kfac", "ekfac", "shampoo", "klshampoo", "adam", "optimizer"]
KINDS: tuple[Kind, ...] = get_args(Kind)

ROUNDS = 12
"""Passes of the fixed point of KL-Shampoo, one gradient each. From 64 gradients of three layers the
cosine with the fixed point was 0.90 - 0.997 after 5 and 0.992 - 0.9999 after 12; 4 gradients have
none: 0.66 - 0.94 (tests/plain/test_kronecker.py has the nets)."""

RIDGE = 1e-4
"""What is added to a factor that is inverted, in units of its mean eigenvalue: with fewer samples
than dimensions it is singular."""

TINY = 1e-300
"""Stands for the trace of a weight that no micro-batch uses."""


@dataclass(frozen=True)
class Settings:
    """What to estimate.

    Attributes:
        kinds: The kinds of curvature.
        layers_at_once: Layers whose sums are kept in one pass.
        adam: What Adam divides by, `(n_local,)`, for the kind `adam`.
        adapter: Reads the factors of the optimizer, for the kind `optimizer`.
        draws: Times that labels are drawn from the model; 0 for the labels of the data.
        outputs: The name of the module that returns the outputs, for drawn labels; None to find it.
        required: Whether a layer whose gradient is not that of a linear layer is refused, or left
            out.
        coarse: Whether squares that are too small for fp32 will do, as in a preconditioner.
    """

    kinds: Sequence[Kind] = KINDS
    layers_at_once: int | None = None
    adam: Tensor | None = None
    adapter: Adapter | None = None
    draws: int = 0
    outputs: str | None = None
    required: bool = True
    coarse: bool = False


@dataclass(frozen=True)
class Factors:
    """The curvatures of one layer.

    Attributes:
        layer: The layer.
        forms: `{kind: K}` on the layer's owner; empty elsewhere.
        samples: `{kind: number}` of tokens, micro-batches or optimizer steps behind K.
        terms: Terms of the loss on all micro-batches; the layer's samples where they are not known.
        mismatch: `|sum c a' - gradient| / |gradient|` of the units whose gradients were evaluated,
            from `sums.SKETCH` products.
        rounding: What fp32 rounds of the gradient of the loss in the weight.
    """

    layer: Layer
    forms: Mapping[Kind, Eigenform]
    samples: Mapping[Kind, int]
    terms: int
    mismatch: float
    rounding: float


def estimate(
    session: Session, backend: Backend, layers: Sequence[Layer], settings: Settings
) -> list[Factors]:
    """Estimate the factors of layers, at the session's weights.

    Args:
        session: The open measurement of the whole job.
        backend: The job.
        layers: The layers.
        settings: What to estimate.

    Returns:
        Those of the layers whose gradient is that of a linear layer (see `Factors.mismatch`).

    Raises:
        UnsupportedError: some layer's is not, and all are required.
        NumericsError: squares of a layer's gradients are too small or too large for fp32.
        MeasurementError: a pass or a decomposition failed on some rank.

    Collective.
    """
    size = settings.layers_at_once or len(layers)
    labels = Labels(session, settings.outputs, settings.draws)
    found = list[Factors]()
    for start in range(0, len(layers), size):
        some = layers[start : start + size]
        found += _Estimation(session, backend, some, settings, labels).run()
    return found


class _Estimation(LayerPasses):
    """The curvatures of some layers."""

    def __init__(
        self,
        session: Session,
        backend: Backend,
        layers: Sequence[Layer],
        settings: Settings,
        labels: Labels,
    ) -> None:
        super().__init__(session, backend, layers, labels)
        self.settings, self.kinds = settings, settings.kinds

    def run(self) -> list[Factors]:
        """Make all passes."""
        first, second = self._sums()
        counts = {x.name: Count() for x in self.layers}
        mismatches = self._calibrate(*(() if self.labels.draws else (counts, first, second)))
        self._leave_out(mismatches)
        if self.labels.draws:
            self._pass(counts, first, second)
        self._count(counts)
        self._measure_squares(second)
        forms: dict[str, dict[Kind, Eigenform]] = {x.name: {} for x in self.layers}
        covariances = {x.name: self._parts(x, first) for x in self.layers if first}
        factors = {x.name: self._squares(x, second) for x in self.layers if second}
        del first, second
        with together("decomposing Kronecker factors", device=self.device):
            for x in self._mine():
                for _, flat in covariances.get(x.name, ()):
                    _require_range(x, flat, self.settings.coarse)
                for factor in factors.get(x.name, ()):
                    _require_range(x, factor, self.settings.coarse)
                if x.name in covariances:
                    # One at a time: in fp64 they have four times the memory of their pieces.
                    a, b = (square.triangle(flat) for square, flat in covariances.pop(x.name))
                    forms[x.name]["kfac"] = self._kfac(x, a, b)
                if "shampoo" in self.kinds:
                    forms[x.name]["shampoo"] = self._shampoo(x, *factors[x.name])
        if "ekfac" in self.kinds:
            self._ekfac(forms)
        if "klshampoo" in self.kinds:
            self._klshampoo(forms, factors)
        if "adam" in self.kinds:
            self._diagonals(forms)
        if "optimizer" in self.kinds:
            self._kept(forms)
        return [
            Factors(
                layer,
                {k: forms[layer.name][k] for k in self.kinds if k in forms[layer.name]},
                self._samples(layer),
                self._terms(layer),
                mismatches[layer.name],
                self._rounding_of_gradient(layer),
            )
            for layer in self.layers
        ]

    def _sums(self) -> tuple[dict[str, KFAC], dict[str, Shampoo]]:
        """Return the sums that the kinds begin with."""
        first = bool({"kfac", "ekfac"} & set(self.kinds))
        second = bool({"shampoo", "klshampoo"} & set(self.kinds))
        return (
            {x.name: KFAC(x.shape, self.device) for x in self.layers if first},
            {x.name: Shampoo(x.shape, self.device) for x in self.layers if second},
        )

    def _leave_out(self, mismatches: Mapping[str, float]) -> None:
        wrong = {name: m for name, m in mismatches.items() if not m <= MISMATCH}
        self.layers = [layer for layer in self.layers if layer.name not in wrong]
        if any(map(math.isnan, wrong.values())) and self.settings.required:
            raise _no_numbers(", ".join(name for name, m in wrong.items() if math.isnan(m)))
        if wrong and self.settings.required:
            named = ", ".join(f"{name} ({m:.2f})" for name, m in list(wrong.items())[:8])
            raise UnsupportedError(
                "ds_hessian does not support Kronecker factors of weights whose gradient is not "
                f"that of one linear layer (tied, or used by other code): {named}; the relative "
                f"distance of the sum of c a' to it must be at most {MISMATCH}; leave them out"
            )

    # ---- kinds

    def _samples(self, layer: Layer) -> dict[Kind, int]:
        tokens = self.tokens[layer.name]
        counts: dict[Kind, int] = {
            "kfac": tokens,
            "ekfac": tokens,
            "shampoo": self.batches[layer.name],
            "klshampoo": self.batches[layer.name],
            "adam": int(self.backend.step),
            "optimizer": int(self.backend.step),
        }
        return {kind: counts[kind] for kind in self.kinds}

    def _kfac(self, layer: Layer, a: Tensor, b: Tensor) -> Eigenform:
        scale = self._gain(layer, self._terms(layer)) / max(self.tokens[layer.name], 1)
        return Eigenform.of_factors(b, a, scale)

    def _terms(self, layer: Layer) -> int:
        """Return the terms of the loss; the samples of the layer where they are not known."""
        return self.terms or self.tokens[layer.name]

    def _shampoo(self, layer: Layer, left: Tensor, right: Tensor) -> Eigenform:
        gain, trace = self._gain(layer, self.evaluated[layer.name]), float(left.trace())
        form = Eigenform.of_factors(left, right, gain / max(trace, TINY))
        return replace(form, rounding=math.hypot(ROUNDOFF, self._rounding(layer, trace)))

    def _ekfac(self, forms: Mapping[str, dict[Kind, Eigenform]]) -> None:
        bases = self._bases({x.name: forms[x.name].get("kfac") for x in self.layers})
        sums = {x.name: Moments(x.shape, bases[x.name]) for x in self.layers}
        self._pass(sums)
        for layer in self.layers:
            total = self._owned(layer, sums[layer.name].total).double()
            form = forms[layer.name].get("kfac")
            if form is not None:
                gain = self._gain(layer, self._terms(layer))
                forms[layer.name]["ekfac"] = Eigenform(total * gain, form.left, form.right)

    def _bases(self, forms: Mapping[str, Eigenform | None]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the eigenvectors of the owners' forms on all ranks."""
        found = {}
        for layer in self.layers:
            form, (m, n) = forms[layer.name], layer.shape
            left = self._known(layer, None if form is None else form.left, (m, m))
            right = self._known(layer, None if form is None else form.right, (n, n))
            found[layer.name] = left, right
        return found

    def _klshampoo(
        self, forms: Mapping[str, dict[Kind, Eigenform]], factors: dict[str, list[Tensor]]
    ) -> None:
        """Iterate the fixed point from Shampoo's factors, one pass a round.

        Factors are kept with mean eigenvalue 1; the scale of K is that at which the mean of
        `vec(G)' K^-1 vec(G)` is m n, as it is at the fixed point.
        """
        roots = {x.name: list[Tensor]() for x in self.layers}
        own = {x.name: self._rounding(x, float(factors[x.name][0].trace())) for x in self._mine()}
        for _ in range(ROUNDS):
            with together("inverting Kronecker factors", device=self.device):
                for x in self._mine():
                    roots[x.name] = [_inverse_root(f) for f in factors[x.name]]
            rounds = {}
            for x in self.layers:
                m, n = x.shape
                left, right = roots[x.name] or (None, None)
                known = self._known(x, left, (m, m)), self._known(x, right, (n, n))
                rounds[x.name] = Round(x.shape, known)
            self._pass(rounds)
            for x in self.layers:
                factors[x.name] = self._squares(x, rounds)
        with together("decomposing Kronecker factors", device=self.device):
            for x in self._mine():
                left, right = map(_unit, factors[x.name])
                root = roots[x.name][0]
                spent = float((root * (factors[x.name][0] @ root)).sum()) / x.shape[0]
                scale = self._gain(x, self.evaluated[x.name]) * spent
                form = Eigenform.of_factors(left, right, scale)
                rounding = math.hypot(_rounding_of_roots(form), own[x.name])
                forms[x.name]["klshampoo"] = replace(form, rounding=rounding)

    def _kept(self, forms: Mapping[str, dict[Kind, Eigenform]]) -> None:
        """Read the optimizer's own factors, where several ranks have some their mean."""
        assert self.settings.adapter is not None
        for layer in self.layers:
            with together("reading the optimizer's factors", device=self.device):
                found = _checked(layer, self.settings.adapter(layer.name))
                parts = [torch.zeros(s, s, device=self.device) for s in layer.shape]
                for part, factor in zip(parts, found or (), strict=found is not None):
                    part.fill_diagonal_(1.0) if factor is None else part.copy_(factor)
            (count,) = self.space.reduce(torch.tensor([float(found is not None)]).double()).tolist()
            if not count:
                raise ConfigError(f"the adapter has no factors of {layer.name} on any rank")
            whole = [summed(part, layer, self.space) for part in parts]
            with together("decomposing Kronecker factors", device=self.device):
                if layer.owner == self.space.rank:
                    left, right = (part.double() / count for part in whole)
                    forms[layer.name]["optimizer"] = _of_kept(left, right)

    def _diagonals(self, forms: Mapping[str, dict[Kind, Eigenform]]) -> None:
        assert self.settings.adam is not None
        for layer in self.layers:
            whole = self._whole(layer, self.settings.adam)
            if whole is not None:
                forms[layer.name]["adam"] = Eigenform(whole.double())


def _checked(layer: Layer, found: Pair | None) -> Pair | None:
    """Return an adapter's factors as those of a layer's outputs and inputs."""
    if found is None:
        return None
    fit, sizes, wanted = fitting(found, layer.shape[::-1] if layer.transposed else layer.shape)
    if not fit:
        raise ConfigError(
            f"the adapter's factors of {layer.name} must have shapes {wanted}, got {sizes}"
        )
    if not all(bool(factor.isfinite().all()) for factor in found if factor is not None):
        raise NumericsError(f"the adapter's factors of {layer.name} must be finite, some are not")
    return found[::-1] if layer.transposed else found


def _no_numbers(names: str) -> NumericsError:
    return NumericsError(
        f"inputs and gradients of {names} must be numbers, some are NaN: leave these layers out"
    )


def _of_kept(left: Tensor, right: Tensor) -> Eigenform:
    """Return K of an optimizer's factors; where it has none its basis is the parameters' own."""
    form = Eigenform.of_factors(left, right)
    first, second = (torch.equal(f, torch.eye(len(f)).to(f)) for f in (left, right))
    return replace(form, left=None if first else form.left, right=None if second else form.right)


def _require_range(layer: Layer, squares: Tensor, coarse: bool) -> None:
    """Raise where sums of squares are too large for fp32 or, unless they may be coarse, so small
    that it has fewer digits of them.
    """
    size = size_of(squares)
    if math.isnan(size):
        raise _no_numbers(layer.name)
    if not math.isfinite(size) or (not coarse and 0 < size < torch.finfo(torch.float32).tiny):
        raise NumericsError(
            f"the squares of inputs and gradients of {layer.name} must be within fp32 (1.2e-38 to "
            f"3.4e38), got {size:.0e}: multiply the loss by a constant for this measurement, or "
            "leave the layer out"
        )


def _unit(factor: Tensor) -> Tensor:
    """Return a factor scaled to mean eigenvalue 1; zero stays zero."""
    mean = float(factor.trace()) / len(factor)
    return factor / mean if mean > 0 else factor


def _rounding_of_roots(form: Eigenform) -> float:
    """Return the rounding of a K of factors that are sums with each other's inverse roots."""
    total = float(form.values.sum())
    sides = [len(v) * v.sum(1) / total for v in (form.values, form.values.T)] if total else []
    return ROUNDOFF / (RIDGE + min((float(side.min()) for side in sides), default=1.0))


def _inverse_root(factor: Tensor) -> Tensor:
    """Return S with `S S'` the inverse of a factor of mean eigenvalue 1, with a ridge."""
    values, vectors = torch.linalg.eigh(_unit(factor))
    return vectors * (values.clamp(min=0) + RIDGE).rsqrt()
