"""benchmarks/gpu.sh: what fails there is said, and its commands run on a CPU."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, **environment: str) -> tuple[int, list[str]]:
    """Its exit status, and the lines of parts."""
    done = subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh", folder / "out"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    return done.returncode, (folder / "out" / "parts.md").read_text().splitlines()[2:]


def python(folder: Path, says: str) -> str:
    """A stand-in for Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_tests_that_skip_themselves_are_a_failure(tmp_path) -> None:
    """As they do where torch sees no GPU."""
    status, (line, *_) = run(tmp_path, PYTHON=python(tmp_path, "echo 99 skipped"), PARTS="^tests$")
    assert status == 1
    assert line.endswith('| printed no "[1-9][0-9]* passed" |')


@pytest.mark.full
def test_a_part_that_fails_is_quoted(tmp_path) -> None:
    stand_in = python(tmp_path, "echo no nvcc; exit 3")
    status, (line, *_) = run(tmp_path, PYTHON=stand_in, PARTS="^build$")
    assert status == 1
    assert line.endswith("| failed (3) |")
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "### build: failed (3)\n\n```\nno nvcc\n```" in summary


@pytest.mark.full
def test_a_part_is_stopped_when_the_time_of_all_is_over_and_others_are_not_begun(tmp_path) -> None:
    stand_in = python(tmp_path, 'case "$*" in *ops.report*) exec sleep 60 ;; esac')
    status, lines = run(tmp_path, PYTHON=stand_in, PARTS="^(build|tests)$", LIMIT="1")
    assert status == 2
    assert lines[0].endswith("| stopped after 1 s |")
    assert lines[1].endswith("| not run: no time is left |")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_its_commands_run_on_a_cpu(tmp_path) -> None:
    status, lines = run(tmp_path, DEVICE="cpu")
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert status == 0, summary
    names = ("build", "tests", "kernels", "zero3_fp32", "zero3_bf16", "zero3_fp32_passes")
    assert [line.split()[1] for line in lines if line.endswith("| done |")][:6] == list(names)
    assert summary.count("| ds_hessian, ZeRO-3") == 3
