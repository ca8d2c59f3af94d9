"""Is this job's Hessian to be trusted? A self-test, from code or for an unmodified script.

    verdict = engine.hessian.self_test(batches)                        # in a program
    deepspeed --module ds_hessian.self_test train.py --its-arguments   # from the command line

The second runs the script until the first optimizer step after `num_micro_batches` micro-batches
have been seen, tests on these, prints the verdict and ends the job, with exit status 0 if all is
well and 1 if not. The script's config may have a `"hessian"` section; it is respected.

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
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ds_hessian.records.verdict import Check, SelfTest

if TYPE_CHECKING:
    from ds_hessian.engine import HessianEngine

SLACK = 3.0
"""Error estimates are within this factor of the truth."""

ROUNDING = 30.0
"""Rounding errors of a gradient were 3 - 23 times u |g| (u: unit roundoff)."""

LARGEST_ERROR = 0.1
LARGEST_ANGLE = 0.14  # sine: a cosine of 0.99
LARGEST_NONLINEARITY = 0.3


def self_test(hessian: HessianEngine, **overrides: Any) -> SelfTest:
    """See `HessianEngine.self_test`."""
    before = _fingerprint(hessian.modules)
    with hessian.measuring(**overrides) as operator:
        u, v = (hessian.random_vector(seed=0, probe=probe) for probe in (0, 1))
        again = hessian.backend.space.zeros()
        operator.session.displace(None, 0.0)
        operator.session.add_gradient(again, range(operator.session.num_micro_batches))
        hu, hv, hw = (operator.matvec(vector) for vector in (u, v, u + v))
        space = hessian.backend.space
        repeated = again - operator.gradient
        curved = hw.vector - hu.vector - hv.vector
        squares = space.dots(
            [(repeated, repeated), (curved, curved), (u, hv.vector), (v, hu.vector)]
        ).tolist()
    changed = space.reduce(torch.tensor([_fingerprint(hessian.modules) != before]).double())
    length = 2**0.5  # of u + v, nearly
    errors = [abs(p.error or 0.0) * p.norm for p in (hu, hv)]
    errors.append(abs(hw.error or 0.0) * hw.norm * length)
    gradient = operator.gradient_norm / operator.scale
    checks = (
        Check(
            "determinism",
            squares[0] ** 0.5 / gradient if gradient > 0 else 0.0,
            min(ROUNDING * operator.session.unit_roundoff, 1e-2),
            "the same weights give different gradients: use deterministic kernels, and no data "
            "or randomness from outside torch, numpy and python's random",
        ),
        Check(
            "symmetry",
            abs(squares[2] - squares[3]),
            SLACK * (errors[0] + errors[1]),
            "u'Hv and v'Hu differ by more than the products' errors: the loss is not one smooth "
            "function of the weights",
        ),
        Check(
            "linearity",
            squares[1] ** 0.5,
            SLACK * sum(errors),
            "H(u + v) differs from Hu + Hv by more than the products' errors: look for kinks in "
            "the loss (routing, clamping, quantisation)",
        ),
        Check(
            "restore",
            float(changed[0]),
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
    error = float("nan") if hv.error is None else hv.error
    config = hessian.config.with_overrides(**overrides).finite_difference
    narrow = operator.session.unit_roundoff > 2.0**-24  # passes in 16 bits
    widen = narrow and "fp32" in hessian.backend.precisions
    return SelfTest(checks, error, hv.displacement, _suggestions(checks, config, widen, error))


def _suggestions(
    checks: Sequence[Check], config: Any, widen: bool, error: float
) -> tuple[str, ...]:
    failed = {check.name for check in checks if not check.passed}
    texts = []
    if config.displacement != "auto" and failed & {"fidelity", "nonlinearity", "error"}:
        texts.append('"displacement": "auto" chooses h for each product')
    if "determinism" not in failed and widen and (failed & {"fidelity", "error"} or error > 1e-2):
        texts.append(
            f'"precision": "fp32" computes on fp32 copies of the masters; the error of a product '
            f"is now {error:.0e}"
        )
    if "determinism" in failed:
        texts.append("torch.use_deterministic_algorithms(True) finds the operation")
    return tuple(texts)


def _fingerprint(modules: Sequence[Any]) -> str:
    """A hash of the weights that this rank stores and of its random states."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((random.getstate(), np.random.get_state())).encode())
    tensors: list[Tensor] = [torch.get_rng_state()]
    for module in modules:
        tensors += [getattr(p, "ds_tensor", p).data for p in module.parameters()]
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---- the command line


def main(arguments: Sequence[str]) -> None:
    """Run a script and test its engine; ends the process.

    Args:
        arguments: `[--local_rank=N] script.py ...`, as the deepspeed launcher gives them.
    """
    from ds_hessian.launch import run_script

    run_script("ds_hessian.self_test", arguments, _test_at_a_step)
    sys.exit("the script ended before enough micro-batches were seen for the self-test")


def _test_at_a_step(engine: Any) -> None:
    """Have an engine tested at its first step with enough micro-batches, which ends the job."""
    from ds_hessian.backends.zero import settings_of
    from ds_hessian.config import HessianConfig
    from ds_hessian.engine import HessianEngine
    from ds_hessian.schedule import Capture

    section = HessianConfig.from_deepspeed(settings_of(engine)) or HessianConfig()
    captured = Capture(engine, section.num_micro_batches)
    step = engine.step

    def step_and_test(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        out = step(*args, **kwargs)
        if captured.full and engine.global_steps != before:
            hessian = getattr(engine, "hessian", None) or HessianEngine(engine, section)
            verdict = hessian.use(captured.calls).self_test()
            if hessian.rank == 0:
                print(verdict.table(), flush=True)
            sys.exit(0 if verdict.passed else 1)
        return out

    engine.step = step_and_test


if __name__ == "__main__":
    main(sys.argv[1:])
