"""What runs on the ranks: operators of the outputs on engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import ds_hessian
from ds_hessian.config import FiniteDifferenceConfig, OperatorName
from ds_hessian.operators import GaussNewton, curvature
from tests.backends.jobs import FEW, QUIET, TOTAL, full_weights, make_engine, my_batches
from tests.nets import TinyGPT, forward_hooks


class Capped(TinyGPT):
    """Caps what its head returns."""

    def logits(self, tokens: Tensor) -> Tensor:
        """At most 1.5."""
        return 1.5 * torch.tanh(super().logits(tokens) / 1.5)


def products(
    config: dict[str, Any], precision: str = "model", count: int = 3, capped: bool = False
) -> Any:
    """(weights, for each vector (v, {operator: (product, error, norm)}, |G + R - H|), outputs).

    The vectors are a random one and powers of G.
    """
    torch.manual_seed(0)
    net = Capped if capped else TinyGPT
    engine = make_engine(net(dropout=0.1), hessian=QUIET, **config)
    hessian = engine.hessian.use(my_batches(FEW))
    space = hessian.backend.space
    v, rows = hessian.random_vector(seed=5), []
    with hessian.measuring(precision=precision) as opened:
        settings, session = FiniteDifferenceConfig(), opened.session
        found = {name: curvature(session, settings, name) for name in get_args(OperatorName)}
        for _ in range(count):
            made = {name: operator.matvec(v) for name, operator in found.items()}
            gap = space.norm(made["ggn"].vector + made["residual"].vector - made["hessian"].vector)
            figures = {
                name: (hessian.gather(p.vector), p.error, p.norm) for name, p in made.items()
            }
            rows.append((hessian.gather(v), figures, gap))
            v = made["ggn"].vector / space.norm(made["ggn"].vector)
    out = full_weights(engine), rows, found["ggn"].outputs
    engine.destroy()
    return out


class Smoothed(TinyGPT):
    """Has label smoothing, and takes logits in fp64 on those ranks alone that are named, if any
    are.
    """

    takes: Sequence[int] | None = None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        logits = self.logits(tokens).flatten(0, 1)
        if self.takes is not None and dist.get_rank() not in self.takes:
            if logits.dtype == torch.float64:
                raise TypeError("on purpose")
        return functional.cross_entropy(logits, targets.flatten(), label_smoothing=0.1)


def smoothed(config: dict[str, Any], takes: Sequence[int] | None) -> Any:
    """(weights, v, G v, its error, outputs, the dtype of the outputs that the loss took)."""
    torch.manual_seed(0)
    net = Smoothed(dropout=0.1)
    net.takes = takes
    engine = make_engine(net, hessian=QUIET, **config)
    hessian = engine.hessian.use(my_batches(FEW))
    with hessian.measuring() as opened:
        g = GaussNewton(opened.session)
        v = hessian.random_vector(seed=5)
        product = g.matvec(v)
    vectors = hessian.gather(v), hessian.gather(product.vector)
    found = *vectors, product.error, g.outputs, str(g._differences.passes.dtype)
    out = full_weights(engine), *found
    engine.destroy()
    return out


def spectra(config: dict[str, Any], operators: Sequence[OperatorName], total: int = TOTAL) -> Any:
    """Lanczos coefficients of each operator in the same session's weights."""
    torch.manual_seed(0)
    engine = make_engine(TinyGPT(dropout=0.1), hessian=QUIET, **config)
    hessian = engine.hessian.use(my_batches(total))
    found = [hessian.spectrum(operator=name, num_matvecs=6) for name in operators]
    engine.destroy()
    return [(s.alphas[0], s.betas[0]) for s in found]


class Restless(TinyGPT):
    """Calls its head twice on rank 1."""

    def logits(self, tokens: Tensor) -> Tensor:
        """The last call's."""
        logits = super().logits(tokens)
        if dist.get_rank() == 1:
            logits = logits + 0 * self.head(torch.zeros(1, self.embed.embedding_dim))
        return logits


def twice_on_one_rank() -> tuple[str, int]:
    """The message, and the number of hooks that are left."""
    torch.manual_seed(0)
    engine = make_engine(Restless(dropout=0.0), hessian=QUIET, zero_optimization={"stage": 1})
    before = forward_hooks(engine.module)
    message = "no error"
    try:
        engine.hessian.use(my_batches()).spectrum(operator="ggn", outputs="head", num_matvecs=2)
    except ds_hessian.HessianError as error:
        message = f"{type(error).__name__}: {error}"
    left = forward_hooks(engine.module) - before
    engine.destroy()
    return message, left
