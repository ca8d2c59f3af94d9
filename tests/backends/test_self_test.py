"""The self-test passes on healthy jobs and names what is wrong with others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.backends import jobs
from tests.backends.test_stages import BF16, zero
from tests.ranks import RankPool, free_port
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
ROOT = Path(__file__).resolve().parents[2]

CASES: dict[str, tuple[nn.Module | None, dict[str, Any], dict[str, Any], set[str]]] = {
    "fp32": (None, zero(3), {}, set()),
    "bf16": (None, {**zero(2), **BF16}, {"precision": "model"}, set()),
    "bf16 in fp32": (None, {**zero(2), **BF16}, {}, set()),
    "a step too small for bf16": (
        None,
        {**zero(3), **BF16},
        {"displacement": 1e-4, "precision": "model"},
        {"fidelity", "nonlinearity"},
    ),
    "not a function": (jobs.Restless(), zero(1), {}, {"determinism"}),
}


QUICK = ("bf16", "not a function")


@pytest.mark.parametrize("name", cells(CASES, QUICK))
def test_the_verdict_names_what_is_wrong(ranks: Ranks, name: str) -> None:
    module, config, overrides, wrong = CASES[name]
    first, second = ranks(2).run(jobs.self_tests, module, config, overrides)
    failed = {check.name for check in first.checks if not check.passed}
    # But for the fingerprint of each rank's own micro-batches, the verdict is the same.
    assert repr(replace(first, provenance=None)) == repr(replace(second, provenance=None))
    assert wrong <= failed if wrong else not failed, first.table()
    assert first.passed == (not wrong)
    assert ("precision" in " ".join(first.suggestions)) == (
        name in ("bf16", "a step too small for bf16")
    )


@pytest.mark.full
def test_the_command_tests_an_unmodified_script(tmp_path: Path, built: None) -> None:
    command = [
        str(Path(sys.executable).with_name("ds-hessian")),  # it runs deepspeed --module
        *("self-test", "--ranks", "2", "--port", str(free_port()), "examples/train_gpt.py"),
        *("--width", "16", "--layers", "1", "--context", "16"),
        *("--deepspeed", "--deepspeed_config", "examples/ds_config.json"),
    ]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Hessian self-test: all is well" in done.stdout
    assert "step   10" not in done.stderr
