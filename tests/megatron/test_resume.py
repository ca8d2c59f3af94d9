"""Measurements of Megatron jobs that were killed, on the same layout and on another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.megatron import resume_jobs
from tests.megatron.job import Job
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.full
def test_masks_of_a_killed_spectrum_are_drawn_from_megatrons_generators_as_they_were(
    megatron_ranks: Ranks, tmp_path: Path
) -> None:
    """It was refused, with another loss, in a process that has drawn from them since."""
    job, ranks = Job(dropout=0.3), megatron_ranks(1)
    (message,) = ranks.run(resume_jobs.killed, job, str(tmp_path), dropout=True)
    assert "on purpose" in message
    ((whole, found, kept),) = ranks.run(resume_jobs.resumed, job, str(tmp_path), dropout=True)
    assert (whole == found).all() and kept


LAYOUTS: dict[str, dict[str, Any]] = {
    "the same": {"distributed": True, "overlap": True},
    "TP": {"tp": 2, "sequence_parallel": True},
    "PP": {"pp": 2},
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_killed_spectrum_goes_on_in_another_layout(
    megatron_ranks: Ranks, tmp_path: Path, name: str
) -> None:
    first, ranks = Job(**LAYOUTS["the same"]), megatron_ranks(2)
    assert all("on purpose" in x for x in ranks.run(resume_jobs.killed, first, str(tmp_path)))
    for whole, found, kept in ranks.run(resume_jobs.resumed, Job(**LAYOUTS[name]), str(tmp_path)):
        assert kept
        if name == "the same":
            assert (whole == found).all()
        assert np.abs(whole - found).max() < 1e-3 * np.abs(whole).max()
