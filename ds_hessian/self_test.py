"""A self-test of an unmodified script: can the Hessian of this job be trusted?

    deepspeed --module ds_hessian.self_test train.py --its-arguments

runs the script until the first optimizer step after `num_micro_batches` micro-batches have been
seen, runs the tests on these, prints the verdict and ends the job, with exit status 0 if all tests
pass and 1 if not. The script's config may have a `"hessian"` section; it is respected. In a
program, the same is `engine.hessian.self_test(batches)`; `ds_hessian.analyses.self_test` describes
the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_hessian.launch import run_script
from ds_hessian.table import echo

if TYPE_CHECKING:
    from ds_hessian.backends.zero.host import DeepSpeedEngine


def main(arguments: Sequence[str]) -> None:
    """Run a script and test its engine, and end the process.

    Args:
        arguments: `[--local_rank=N] script.py ...`, as the deepspeed launcher gives them.
    """
    run_script("ds_hessian.self_test", arguments, _test_at_a_step)
    sys.exit("the script ended before enough micro-batches were seen for the self-test")


def _test_at_a_step(engine: DeepSpeedEngine) -> None:
    """Test an engine at its first step with enough micro-batches, and end the job there."""
    from ds_hessian.backends.zero import settings_of
    from ds_hessian.config import HessianConfig
    from ds_hessian.hosts import hessian_of
    from ds_hessian.schedule import Capture

    section = HessianConfig.from_deepspeed(settings_of(engine)) or HessianConfig()
    captured = Capture(engine, engine.module, section.num_micro_batches)
    step = engine.step

    def step_and_test(*args: object, **kwargs: object) -> object:
        before = engine.global_steps
        out = step(*args, **kwargs)
        if captured.error is not None:
            raise captured.error
        if captured.full and engine.global_steps != before:
            hessian = getattr(engine, "hessian", None) or hessian_of(engine, section)
            verdict = hessian.use(captured.calls).self_test()
            if hessian.rank == 0:
                echo(verdict.table())
            sys.exit(0 if verdict.passed else 1)
        return out

    engine.step = step_and_test


if __name__ == "__main__":
    main(sys.argv[1:])
