"""Kronecker factors of linear layers, estimated on a job's own micro-batches.

With the inputs a_t and the cotangents c_t of the loss at a layer's outputs, for T tokens, and the
gradients G_i = N c' a of N micro-batches (of all data-parallel ranks):

| kind | K |
|---|---|
| `kfac` | B (x) A with A = sum a a' / T, B = T sum c c' |
| `ekfac` | eigenvectors of K-FAC, eigenvalues T sum (U_B' c a' U_A)^2 |
| `shampoo` | L (x) R / tr L with L = mean G G', R = mean G' G: Shampoo^2 |
| `klshampoo` | the fixed point L = mean G R^-1 G' / n, R = mean G' L^-1 G / m (REKLS) |
| `adam` | diag(sqrt(v) + eps) of the job's own optimizer |
| `optimizer` | L (x) R that the job's own optimizer keeps (Shampoo, SOAP), by an adapter |

so that K-FAC and EK-FAC are in units of the empirical Fisher matrix of the loss, over tokens, with
the data's own labels. With labels drawn from the model (of a cross entropy) the cotangent at the
logits is `sqrt(omega_t) (p_t - y_t)` for a token of weight omega_t instead, and B, L and R are
plain sums: the Fisher, or Gauss-Newton, matrix. The first pass is the gradient itself:
`sum_t c_t a_t'` must be the job's gradient of the weight, up to the one factor that the host's
scaling of the loss makes, which is found so; a layer whose weight is used in another way is
refused.

Cost: one gradient for `kfac` and `shampoo`, one more for `ekfac` and for each of the `ROUNDS` of
`klshampoo`; with drawn labels each pass once for every draw, and two more gradients. Memory on each
rank: the sums of the layers of one pass, 2 (m^2 + n^2 + m n) each.

Sources: Martens, Grosse, ICML 2015 (K-FAC); George et al., NeurIPS 2018 (EK-FAC); Gupta, Koren,
Singer, ICML 2018, and Morwani et al., arXiv 2406.17748 (Shampoo^2); Lin et al., arXiv 2509.03378
(KL-Shampoo); Emerging-Optimizers (REKLS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.backends.protocol import Backend, Session
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.operators.kronecker.forms import Eigenform
from ds_hessian.operators.kronecker.layers import Layer, Note, listening
from ds_hessian.operators.outputs.reading import Reading
from ds_hessian.ranks import together
from ds_hessian.vectors import VectorSpace, collected

Kind = Literal["kfac", "ekfac", "shampoo", "klshampoo", "adam", "optimizer"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Adapter = Callable[[str], "tuple[Tensor, Tensor] | None"]
"""Takes the name of a weight of m outputs and n inputs; returns factors L `(m, m)` and R `(n, n)`
that the optimizer keeps for it, or None on a rank that has none. Called on every rank."""

ROUNDS = 12
"""Passes of the fixed point of KL-Shampoo, one gradient each. From 64 gradients of three layers the
cosine with the fixed point was 0.90 - 0.997 after 5 and 0.992 - 0.9999 after 12; 4 gradients have
none: 0.66 - 0.94 (tests/plain/test_kronecker.py has the nets)."""

SEEDS = 2**16
"""Distance of the seeds of two draws, those of the micro-batches between them; of 64 bits torch
takes the lower 32 on the CPU."""

RIDGE = 1e-4
"""What is added to a factor that is inverted, in units of its mean eigenvalue: with fewer samples
than dimensions it is singular."""

TINY = 1e-300
"""Stands for the trace of a weight that no micro-batch uses."""

MISMATCH = 0.05
"""Largest relative distance of `sum c a'` to the job's gradient: above what rounding of bf16 passes
makes, below what another use of the weight does."""


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
    """

    kinds: Sequence[Kind] = KINDS
    layers_at_once: int | None = None
    adam: Tensor | None = None
    adapter: Adapter | None = None
    draws: int = 0
    outputs: str | None = None
    required: bool = True


@dataclass(frozen=True)
class Factors:
    """The curvatures of one layer.

    Attributes:
        layer: The layer.
        forms: `{kind: K}` on the layer's owner; empty elsewhere.
        samples: `{kind: number}` of tokens, micro-batches or optimizer steps behind K.
        gradient: `(m, n)` the gradient of the loss in the weight, fp64; None but on the owner.
        mismatch: `|sum c a' - gradient| / |gradient|`.
    """

    layer: Layer
    forms: Mapping[Kind, Eigenform]
    samples: Mapping[Kind, int]
    gradient: Tensor | None
    mismatch: float


class _Sums:
    """Sums over tokens and micro-batches of one layer on this rank."""

    def __init__(self, shape: tuple[int, int], device: torch.device, second: bool) -> None:
        m, n = shape
        self.gradient = torch.zeros(m, n, device=device)  # of this micro-batch, then of all
        self.total = torch.zeros(m, n, device=device)
        sizes = [(n, n), (m, m)] + [(m, m), (n, n)] * second
        self.squares = [torch.zeros(s, device=device) for s in sizes]
        self.tokens = self.batches = self._before = 0

    def note(self, a: Tensor, c: Tensor) -> None:
        """Add the tokens of a call."""
        self.squares[0].addmm_(a.T, a)
        self.squares[1].addmm_(c.T, c)
        self.gradient.addmm_(c.T, a)
        self.tokens += len(a)

    def close(self) -> None:
        """End a micro-batch."""
        self.batches += self.tokens > self._before
        self._before = self.tokens
        if len(self.squares) > 2:
            self.squares[2].addmm_(self.gradient, self.gradient.T)
            self.squares[3].addmm_(self.gradient.T, self.gradient)
        self.total += self.gradient
        self.gradient.zero_()


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
        MeasurementError: a pass or a decomposition failed on some rank.

    Collective.
    """
    size = settings.layers_at_once or len(layers)
    labels = _Labels(session, settings.outputs, settings.draws)
    found = list[Factors]()
    for start in range(0, len(layers), size):
        some = layers[start : start + size]
        found += _Estimation(session, backend, some, settings, labels).run()
    return found


class _Labels:
    """The labels of the passes: the data's own, or drawn from the model.

    Raises:
        UnsupportedError: labels are to be drawn, and the loss is no cross entropy.

    Collective: the constructor.
    """

    def __init__(self, session: Session, outputs: str | None, draws: int) -> None:
        self.draws, self._seed = draws, 0
        if not draws:
            return
        self._reading = Reading(session, outputs)
        if self._reading.kind != "cross entropy":
            raise UnsupportedError(
                "ds_hessian does not support labels drawn from the model where the loss is no "
                f"cross entropy ({self._reading.words}); take the labels of the data, draws = 0"
            )

    @contextmanager
    def drawn(self, unit: int, number: int) -> Iterator[None]:
        """Let a pass of a unit run with drawn labels, the same ones for the same numbers."""
        self._seed = SEEDS * number
        with self._reading.tap.listening(range(unit, unit + 1), self):
            yield

    def outputs(self, index: int, f: Tensor) -> None:
        """Add nothing to the outputs."""

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        """Return that of drawn labels."""
        found = self._reading.tokens[index].sampled(f, self._seed + index)
        return found.to(c.dtype)


class _Estimation:
    """The passes of some layers."""

    def __init__(
        self,
        session: Session,
        backend: Backend,
        layers: Sequence[Layer],
        settings: Settings,
        labels: _Labels,
    ) -> None:
        self.session, self.backend, self.layers = session, backend, list(layers)
        self.labels = labels
        self.settings, self.kinds, self.space = settings, settings.kinds, session.space
        self.device = self.space.device
        self.scales: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self.batches: dict[str, int] = {}

    def run(self) -> list[Factors]:
        """Make all passes."""
        shampoo = "shampoo" in self.kinds or "klshampoo" in self.kinds
        sums = {x.name: _Sums(x.shape, self.device, shampoo) for x in self.layers}
        gradient = self._data_pass(sums)
        gradients = {x.name: self._gradient(x, gradient) for x in self.layers}
        del gradient
        mismatches = {x.name: self._calibrate(x, sums, gradients[x.name]) for x in self.layers}
        self._leave_out(mismatches)
        if self.labels.draws:
            sums = {x.name: _Sums(x.shape, self.device, shampoo) for x in self.layers}
            self._pass(_noting(sums), sums)
            self.tokens = {name: count * self.labels.draws for name, count in self.tokens.items()}
        forms: dict[str, dict[Kind, Eigenform]] = {x.name: {} for x in self.layers}
        factors: dict[str, Sequence[Tensor]] = {
            x.name: [self._owned(x, s) for s in sums[x.name].squares] for x in self.layers
        }
        del sums
        with together("decomposing Kronecker factors", device=self.device):
            for layer in self._mine():
                forms[layer.name] = self._forms(layer, factors[layer.name])
        if "ekfac" in self.kinds:
            self._ekfac(forms)
        if "klshampoo" in self.kinds:
            self._klshampoo(forms, {name: f[2:] for name, f in factors.items()})
        if "adam" in self.kinds:
            self._diagonals(forms)
        if "optimizer" in self.kinds:
            self._kept(forms)
        return [
            Factors(
                layer,
                {k: forms[layer.name][k] for k in self.kinds if k in forms[layer.name]},
                self._samples(layer),
                gradients[layer.name],
                mismatches[layer.name],
            )
            for layer in self.layers
        ]

    # ---- passes and transport

    def _pass(self, note: Note, sums: Mapping[str, _Sums] | Mapping[str, _Round]) -> None:
        """Evaluate each unit with hooks on the layers, with the labels that the factors are of."""
        if not self.labels.draws:
            self._evaluate(note, sums)
        for number in range(self.labels.draws):
            self._evaluate(note, sums, number)

    def _data_pass(self, sums: Mapping[str, _Sums]) -> Tensor:
        """Return the gradient, which the hooks see."""
        gradient = self._evaluate(_noting(sums), sums)
        assert self.session.gradient_scale is not None
        return gradient.mul_(self.session.gradient_scale)

    def _evaluate(
        self,
        note: Note,
        sums: Mapping[str, _Sums] | Mapping[str, _Round],
        number: int | None = None,
    ) -> Tensor:
        session, gradient = self.session, self.space.zeros()
        session.displace(None, 0.0)
        for i in range(session.num_micro_batches):
            labels = nullcontext() if number is None else self.labels.drawn(i, number)
            # Labels first: hooks on a tensor run in their order, and a layer may be the outputs.
            with labels, listening(self.layers, note):
                session.add_gradient(gradient, range(i, i + 1))
            for s in sums.values():
                s.close()
        return gradient

    def _mine(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.owner == self.space.rank]

    def _gradient(self, layer: Layer, gradient: Tensor) -> Tensor | None:
        """Return the gradient of a layer's weight on its owner, `(m, n)` fp64."""
        shape = next(s for n, s in self.backend.parameters if n == layer.name)
        layout, space = self.backend.layout, self.backend.space
        whole = collected(layout, space, gradient, layer.name, shape, layer.owner)
        return layer.oriented(whole).double() if space.rank == layer.owner else None

    def _owned(self, layer: Layer, part: Tensor) -> Tensor:
        """Return the sum over all ranks, complete on the owner, in fp64 there."""
        if not layer.counts:
            part.zero_()
        return _summed(part, layer, self.space)

    def _known(self, layer: Layer, part: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return the owner's tensor on every rank, fp32."""
        whole = torch.empty(shape, device=self.device)
        if part is not None:
            whole.copy_(part)
        if self.space.distributed:
            dist.broadcast(whole, src=layer.owner, group=self.space.group)
        return whole

    # ---- the factor of the host's scaling

    def _calibrate(self, layer: Layer, sums: Mapping[str, _Sums], gradient: Tensor | None) -> float:
        """Find the factor from what hooks saw to the gradient of the loss; return the mismatch."""
        own = sums[layer.name]
        counts = torch.tensor([own.tokens, own.batches], dtype=torch.float64) * layer.counts
        self.tokens[layer.name], self.batches[layer.name] = map(int, self.space.reduce(counts))
        total = self._owned(layer, sums[layer.name].total)
        figures = torch.zeros(2, dtype=torch.float64)
        if gradient is not None:
            square = float((total * total).sum())
            scale = float((total * gradient).sum()) / square if square else 0.0
            size = float(gradient.norm())
            distance = float((scale * total - gradient).norm())
            figures[:] = torch.tensor([scale, distance / size if size else 0.0])
        scale, mismatch = self.space.reduce(figures).tolist()
        self.scales[layer.name] = scale
        return mismatch

    def _leave_out(self, mismatches: Mapping[str, float]) -> None:
        wrong = {name: m for name, m in mismatches.items() if not m <= MISMATCH}
        self.layers = [layer for layer in self.layers if layer.name not in wrong]
        if wrong and self.settings.required:
            named = ", ".join(f"{name} ({m:.2f})" for name, m in list(wrong.items())[:8])
            raise UnsupportedError(
                "ds_hessian does not support Kronecker factors of weights whose gradient is not "
                f"that of one linear layer (tied, or used by other code): {named}; the relative "
                f"distance of the sum of c a' to it must be at most {MISMATCH}; leave them out"
            )

    # ---- kinds

    def _gain(self, layer: Layer, count: int) -> float:
        """Return the factor from sums of squares of `count` terms to a mean of the loss'."""
        scale, draws = self.scales[layer.name], self.labels.draws
        return scale / draws if draws else count * scale**2

    def _samples(self, layer: Layer) -> dict[Kind, int]:
        tokens = self.tokens[layer.name]
        counts: dict[Kind, int] = {
            "kfac": tokens,
            "ekfac": tokens,
            "shampoo": self.batches[layer.name] * max(self.labels.draws, 1),
            "klshampoo": self.batches[layer.name] * max(self.labels.draws, 1),
            "adam": int(self.backend.step),
            "optimizer": int(self.backend.step),
        }
        return {kind: counts[kind] for kind in self.kinds}

    def _forms(self, layer: Layer, factors: Sequence[Tensor]) -> dict[Kind, Eigenform]:
        a, b, *others = factors
        tokens = self.tokens[layer.name]
        found: dict[Kind, Eigenform] = {
            "kfac": Eigenform.of_factors(b * self._gain(layer, tokens), a / max(tokens, 1))
        }
        if others:
            gain = self._gain(layer, self.batches[layer.name])
            left, right = (gain * x for x in others)
            found["shampoo"] = Eigenform.of_factors(left, right / max(float(left.trace()), TINY))
        return found

    def _ekfac(self, forms: Mapping[str, dict[Kind, Eigenform]]) -> None:
        bases = self._bases({x.name: forms[x.name].get("kfac") for x in self.layers})
        sums = {x.name: torch.zeros(x.shape, device=self.device) for x in self.layers}

        def note(layer: Layer, a: Tensor, c: Tensor) -> None:
            left, right = bases[layer.name]
            sums[layer.name].addmm_((c @ left).square_().T, (a @ right).square_())

        self._pass(note, {})
        for layer in self.layers:
            total = self._owned(layer, sums[layer.name])
            form = forms[layer.name].get("kfac")
            if form is not None:
                gain = self._gain(layer, self.tokens[layer.name])
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
        self, forms: Mapping[str, dict[Kind, Eigenform]], factors: dict[str, Sequence[Tensor]]
    ) -> None:
        """Iterate the fixed point from Shampoo's factors, one pass a round.

        Factors are kept with mean eigenvalue 1; the scale of K is that at which the mean of
        `vec(G)' K^-1 vec(G)` is m n, as it is at the fixed point.
        """
        inverses = {x.name: list[Tensor]() for x in self.layers}
        for _ in range(ROUNDS):
            with together("inverting Kronecker factors", device=self.device):
                for x in self._mine():
                    inverses[x.name] = [_inverse(f) for f in factors[x.name]]
            rounds = {}
            for x in self.layers:
                m, n = x.shape
                left, right = inverses[x.name] or (None, None)
                known = self._known(x, left, (m, m)), self._known(x, right, (n, n))
                rounds[x.name] = _Round(x.shape, known)
            self._pass(_noting(rounds), rounds)
            for x in self.layers:
                factors[x.name] = [self._owned(x, part) for part in rounds[x.name].squares]
        with together("decomposing Kronecker factors", device=self.device):
            for x in self._mine():
                left, right = map(_unit, factors[x.name])
                spent = float((inverses[x.name][0] * factors[x.name][0]).sum()) / x.shape[0]
                scale = self._gain(x, self.batches[x.name]) * spent
                forms[x.name]["klshampoo"] = Eigenform.of_factors(left, right, scale)

    def _kept(self, forms: Mapping[str, dict[Kind, Eigenform]]) -> None:
        """Read the optimizer's own factors, where several ranks have some their mean."""
        assert self.settings.adapter is not None
        for layer in self.layers:
            with together("reading the optimizer's factors", device=self.device):
                found = _checked(layer, self.settings.adapter(layer.name))
                parts = [torch.zeros(s, s, device=self.device) for s in layer.shape]
                for part, factor in zip(parts, found or (), strict=found is not None):
                    part.copy_(factor)
            (count,) = self.space.reduce(torch.tensor([float(found is not None)]).double()).tolist()
            if not count:
                raise ConfigError(f"the adapter has no factors of {layer.name} on any rank")
            whole = [_summed(part, layer, self.space) for part in parts]
            with together("decomposing Kronecker factors", device=self.device):
                if layer.owner == self.space.rank:
                    left, right = (part / count for part in whole)
                    forms[layer.name]["optimizer"] = Eigenform.of_factors(left, right)

    def _diagonals(self, forms: Mapping[str, dict[Kind, Eigenform]]) -> None:
        assert self.settings.adam is not None
        for layer in self.layers:
            whole = self._gradient(layer, self.settings.adam)
            if whole is not None:
                forms[layer.name]["adam"] = Eigenform(whole)


def _summed(part: Tensor, layer: Layer, space: VectorSpace) -> Tensor:
    """Return the sum over all ranks on the layer's owner, fp64; nothing elsewhere."""
    if space.distributed:
        dist.reduce(part, dst=layer.owner, group=space.group)
    return part.double() if layer.owner == space.rank else part[:0]


def _checked(layer: Layer, found: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    sizes = None if found is None else [tuple(factor.shape) for factor in found]
    if sizes is not None and sizes != [(s, s) for s in layer.shape]:
        raise ConfigError(
            f"the adapter's factors of {layer.name} must have shapes "
            f"{[(s, s) for s in layer.shape]}, got {sizes}"
        )
    return found


class _Round:
    """The sums of one round of KL-Shampoo: G R^-1 G' / n and G' L^-1 G / m over micro-batches."""

    def __init__(self, shape: tuple[int, int], inverses: tuple[Tensor, Tensor]) -> None:
        self.left, self.right = inverses
        self.gradient = torch.zeros(shape, device=self.left.device)
        self.squares = [torch.zeros_like(self.left), torch.zeros_like(self.right)]

    def note(self, a: Tensor, c: Tensor) -> None:
        """Add the tokens of a call."""
        self.gradient.addmm_(c.T, a)

    def close(self) -> None:
        """End a micro-batch."""
        g = self.gradient
        self.squares[0].addmm_(g @ self.right, g.T, alpha=1 / g.shape[1])
        self.squares[1].addmm_(g.T @ self.left, g, alpha=1 / g.shape[0])
        g.zero_()


def _noting(sums: Mapping[str, _Sums] | Mapping[str, _Round]) -> Note:
    def note(layer: Layer, a: Tensor, c: Tensor) -> None:
        sums[layer.name].note(a, c)

    return note


def _unit(factor: Tensor) -> Tensor:
    """Return a factor scaled to mean eigenvalue 1; zero stays zero."""
    mean = float(factor.trace()) / len(factor)
    return factor / mean if mean > 0 else factor


def _inverse(factor: Tensor) -> Tensor:
    """Return the inverse of a factor of mean eigenvalue 1, with a ridge."""
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return torch.linalg.inv(_unit(factor) + RIDGE * eye)
