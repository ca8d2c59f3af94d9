"""The memory plan of a Megatron job is what its ranks need."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.backends.test_memory import SPECTRA, fresh, within_a_tenth
from tests.megatron import memory_jobs
from tests.megatron.job import Job
from tests.ranks import RankPool

__all__ = ["fresh"]  # a fixture


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job(), marks=pytest.mark.full),
        pytest.param(Job(distributed=True), marks=pytest.mark.full),
        pytest.param(Job(distributed=True, dtype="bfloat16"), marks=pytest.mark.full),
    ],
    ids=["DDP", "distributed optimizer", "distributed optimizer bf16"],
)
def test_the_measured_peak_is_within_a_tenth_of_the_plan(
    fresh: Callable[[int], RankPool], job: Job
) -> None:
    cases = SPECTRA[::5]
    for found in fresh(2).run(memory_jobs.measured_and_planned, job, cases):
        within_a_tenth(cases, found)
