"""The self-test, which tells whether this job's Hessian can be trusted.

What is tested, with two random vectors u and v:

* determinism: the gradient at the same weights twice, the difference as a share of its norm;
* symmetry: `u'Hv = v'Hu`, as far as the products' own error estimates allow;
* linearity: `H(u + v) = Hu + Hv`, likewise;
* restore: weights and random states are the same bits after it all;
* fidelity: how far the realised displacement of the stored weights is from v's direction;
* noise, nonlinearity and error of the product.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ds_hessian.analyses.base import Analysis
from ds_hessian.analyses.measurement import Measurement, Subject
from ds_hessian.config import FiniteDifferenceConfig, HessianConfig
from ds_hessian.memory import Item
from ds_hessian.operators import Product
from ds_hessian.planning import Share
from ds_hessian.planning.basis import GRAM_SCHMIDT
from ds_hessian.records.advice import wide_passes
from ds_hessian.records.verdict import Check
from ds_hessian.records.verdict import SelfTest as Verdict
from ds_hessian.vectors import random_vector

SLACK = 3.0
"""Error estimates are within this factor of the truth."""

ROUNDING = 30.0
"""Rounding errors of a gradient were 3 - 23 times u |g| (u: unit roundoff)."""

LARGEST_ERROR = 0.1
LARGEST_ANGLE = 0.14  # sine: a cosine of 0.99
LARGEST_NONLINEARITY = 0.3


@dataclass(frozen=True, kw_only=True, eq=False)
class SelfTest(Analysis[Verdict]):
    """The self-test; it has no arguments."""

    title = "self_test"
    summary = "whether this job's Hessian can be trusted, and what to set if not"
    resumes = False

    def products(self, config: HessianConfig) -> int:
        """Return three: `Hu`, `Hv` and `H(u + v)`."""
        return 3

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return the vectors, the products, and a second gradient."""
        return [
            share.vectors("vectors, their products and a gradient", 6),
            share.vectors("differences", 3, GRAM_SCHMIDT),
        ]

    def run(self, subject: Subject) -> Verdict:
        """Test. Collective."""
        modules, space = subject.backend.modules, subject.backend.space
        before = _fingerprint(modules)
        with subject.open() as (run, _):
            found = _evaluate(run)
        changed = space.reduce(torch.tensor([_fingerprint(modules) != before]).double())
        checks = _checks(found, run.session.unit_roundoff, float(changed[0]))
        error = float("nan") if found.hv.error is None else found.hv.error
        narrow = run.session.unit_roundoff > 2.0**-24  # passes in 16 bits
        widen = ""
        if narrow and "fp32" in subject.backend.precisions:
            widen = wide_passes(subject.choice.why)
        settings = subject.config.finite_difference
        suggestions = _suggestions(checks, settings, widen, error)
        return Verdict(checks, error, found.hv.displacement, suggestions, run.provenance())


@dataclass(frozen=True)
class _Evaluated:
    """The products of u, v and u + v, and the figures that the checks need.

    Attributes:
        hu: `Hu`.
        hv: `Hv`.
        hw: `H(u + v)`.
        dots: `|g - g|^2` (unscaled) of two evaluations of the gradient, `|H(u + v) - Hu - Hv|^2`,
            `u'Hv` and `v'Hu`.
        gradient: `|g|`, unscaled.
    """

    hu: Product
    hv: Product
    hw: Product
    dots: list[float]
    gradient: float


def _evaluate(run: Measurement) -> _Evaluated:
    session, operator = run.session, run.curvature
    space = session.space
    u, v = (random_vector(session.layout, space, 0, probe) for probe in (0, 1))
    again = space.zeros()
    session.displace(None, 0.0)
    session.add_gradient(again, range(session.num_micro_batches))
    hu, hv, hw = (operator.matvec(vector) for vector in (u, v, u + v))
    repeated = again - operator.gradient
    curved = hw.vector - hu.vector - hv.vector
    squares = space.dots([(repeated, repeated), (curved, curved), (u, hv.vector), (v, hu.vector)])
    return _Evaluated(hu, hv, hw, squares.tolist(), operator.gradient_norm / operator.scale)


def _checks(found: _Evaluated, roundoff: float, changed: float) -> tuple[Check, ...]:
    hv, length = found.hv, 2**0.5  # of u + v, nearly
    repeated, curved, uhv, vhu = found.dots
    errors = [abs(p.error or 0.0) * p.norm for p in (found.hu, hv)]
    errors.append(abs(found.hw.error or 0.0) * found.hw.norm * length)
    return (
        Check(
            "determinism",
            repeated**0.5 / found.gradient if found.gradient > 0 else 0.0,
            min(ROUNDING * roundoff, 1e-2),
            "the same weights give different gradients: use deterministic kernels, and no data "
            "or randomness from outside torch, numpy and python's random",
        ),
        Check(
            "symmetry",
            abs(uhv - vhu),
            SLACK * (errors[0] + errors[1]),
            "u'Hv and v'Hu differ by more than the products' errors: the loss is not one smooth "
            "function of the weights",
        ),
        Check(
            "linearity",
            curved**0.5,
            SLACK * sum(errors),
            "H(u + v) differs from Hu + Hv by more than the products' errors: look for kinks in "
            "the loss (routing, clamping, quantisation)",
        ),
        Check(
            "restore",
            changed,
            0.0,
            "weights or random states of some rank changed: please report this as a bug",
        ),
        Check(
            "fidelity",
            max(0.0, 1.0 - hv.fidelity**2) ** 0.5,
            LARGEST_ANGLE,
            "rounding of the weights swallows the step: use a larger displacement, or fp32",
        ),
        Check(
            "nonlinearity",
            float("nan") if hv.nonlinearity is None else hv.nonlinearity,
            LARGEST_NONLINEARITY,
            "the step leaves the region where the gradient is linear: use a smaller displacement",
        ),
        Check(
            "error",
            float("nan") if hv.error is None else hv.error,
            LARGEST_ERROR,
            "products are poor; eigenvalues come with error bars that say how poor",
        ),
    )


def _suggestions(
    checks: Sequence[Check], config: FiniteDifferenceConfig, widen: str, error: float
) -> tuple[str, ...]:
    failed = {check.name for check in checks if not check.passed}
    texts = []
    if config.displacement != "auto" and failed & {"fidelity", "nonlinearity", "error"}:
        texts.append('"displacement": "auto" chooses h for each product')
    if "determinism" not in failed and widen and (failed & {"fidelity", "error"} or error > 1e-2):
        texts.append(
            f"use {widen}, which computes on fp32 copies of the masters; the error of a product "
            f"is now {error:.0e}"
        )
    if "determinism" in failed:
        texts.append("torch.use_deterministic_algorithms(True) finds the operation")
    return tuple(texts)


def _fingerprint(modules: Sequence[nn.Module]) -> str:
    """Return a hash of the weights that this rank stores and of its random states."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((random.getstate(), np.random.get_state())).encode())
    tensors: list[Tensor] = [torch.get_rng_state()]
    for module in modules:
        tensors += [getattr(p, "ds_tensor", p).data for p in module.parameters()]
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
