"""Every analysis that is interrupted ends as if it had not been, from a journal of its products."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import RankPool
from tests.resume import jobs, kills
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
InOneGo = Callable[[str, int], list[Any]]

NOISE = 1e-4
"""Relative, of a product in fp32: another rounding of its vector gives another noise."""


def equal(a: Any, b: Any) -> bool:
    """Bitwise, but for the number of products replayed."""
    (first, steps, _), (second, others, _) = a, b
    return (
        steps == others
        and first.keys() == second.keys()
        and all(same(first[name], second[name]) for name in first)
    )


def same(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return torch.equal(x, y)
    return x.tobytes() == y.tobytes() if isinstance(x, np.ndarray) else bool(x == y)


@pytest.fixture(scope="module")
def in_one_go(ranks: Ranks) -> InOneGo:
    """Of an analysis on so many ranks: what each found without interruption, made once."""
    return functools.cache(lambda kind, size: ranks(size).run(jobs.analysis, kind, None))


@pytest.mark.parametrize("kind", cells(jobs.ANALYSES, ()))
def test_on_the_same_layout_it_ends_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, in_one_go: InOneGo, kind: str
) -> None:
    whole = in_one_go(kind, 2)
    for stop in (1, 5, 7):
        assert ranks(2).run(jobs.analysis, kind, str(tmp_path), stop)[0] == "stopped"
    found = ranks(2).run(jobs.analysis, kind, str(tmp_path))
    for mine, other in zip(found, whole, strict=True):
        assert equal(mine, other) and mine[2] == 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("kind", cells(["eigenpairs", "XTrace", "MINRES"], ["eigenpairs"]))
def test_a_killed_job_ends_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, in_one_go: InOneGo, kind: str
) -> None:
    whole = in_one_go(kind, 2)[0]
    reached, found = kills.until_the_end(tmp_path, kind, 4)
    assert reached[-1] > 1, reached
    assert equal(found, whole) and found[2] == reached[-1]
    assert list((tmp_path / "state").iterdir()) == []


LAYOUTS = [(kind, 2, 3) for kind in jobs.ANALYSES] + [("eigenpairs", 3, 1), ("XTrace", 1, 2)]


@pytest.mark.parametrize(("kind", "first", "then"), cells(LAYOUTS, []))
def test_on_another_number_of_ranks_it_ends_the_same_to_rounding(
    ranks: Ranks, tmp_path: Path, in_one_go: InOneGo, kind: str, first: int, then: int
) -> None:
    whole = in_one_go(kind, first)[0][0]
    for world_size, stop in ((first, 5), (then, 8)):
        assert ranks(world_size).run(jobs.analysis, kind, str(tmp_path), stop)[0] == "stopped"
    found, _, replayed = ranks(then).run(jobs.analysis, kind, str(tmp_path))[0]
    assert replayed == 8  # five of them on the first layout, and written anew on the second
    for name in ("values", "vectors", "samples", "x", "residuals"):
        if name in whole:
            a, b = np.asarray(whole[name]), np.asarray(found[name])
            # A residual |Hy - value y| has the noise of the product Hy, which is |value| long.
            long = whole["values"] if name == "residuals" and "values" in whole else a
            assert abs(a - b).max() <= NOISE * max(abs(np.asarray(long)).max(), 1.0), name


def test_a_vector_that_differs_is_not_replayed(
    ranks: Ranks, tmp_path: Path, in_one_go: InOneGo
) -> None:
    """Only the first product's vector must be the same: later ones are made anew."""
    whole = in_one_go("MINRES", 1)[0]
    assert ranks(1).run(jobs.analysis, "MINRES", str(tmp_path), 6)[0] == "stopped"
    (path,) = [path for path in tmp_path.glob("state.*.json") if jobs.newest(tmp_path)[1] == path]
    jobs.rewrite(path, lambda content: content["figures"]["entries"][3].update(sketch=[1.0] * 5))
    found = ranks(1).run(jobs.analysis, "MINRES", str(tmp_path))[0]
    assert found[2] == 3
    assert abs(found[0]["x"] - whole[0]["x"]).max() < NOISE


def test_reductions_of_every_part_of_an_interrupted_run_are_counted(
    ranks: Ranks, tmp_path: Path
) -> None:
    def reductions(folder: Path, *stops: int) -> int:
        for stop in stops:
            ranks(1).run(jobs.analysis, "Hutchinson", str(folder), stop)
        _, path = jobs.newest(folder)
        assert path is not None
        return int(json.loads(path.read_text())["content"]["figures"]["all_reduces"])

    assert reductions(tmp_path / "interrupted", 2, 4) >= reductions(tmp_path / "in one go", 4)


@pytest.mark.parametrize("share", cells([0.1, 0.5], [0.5]))
def test_a_replayed_product_is_as_wrong_as_its_vector_is_off(
    ranks: Ranks, tmp_path: Path, share: float
) -> None:
    job = jobs.replay_of_a_vector_off_by
    kept, replayed, error = ranks(2).run(job, share, str(tmp_path))[0]
    assert replayed == 2
    # The distance is known from four random vectors.
    assert 0.3 < math.sqrt(error**2 - kept**2) / (share * kept) < 2


def test_a_product_of_a_vector_that_is_further_off_than_its_error_is_made_anew(
    ranks: Ranks, tmp_path: Path
) -> None:
    kept, replayed, error = ranks(2).run(jobs.replay_of_a_vector_off_by, 8.0, str(tmp_path))[0]
    assert replayed == 1 and error < 3 * kept


FOREIGN = {
    "call: k (1 there, 2 here)": {"call": {"k": 2}},
    "its first product is of another vector": {"seed": 1},
    "norm of the weights": {"scale": 1.001},
}


@pytest.mark.parametrize("what", cells(FOREIGN, list(FOREIGN)[:1]))
def test_a_foreign_state_is_refused(ranks: Ranks, tmp_path: Path, what: str) -> None:
    mine: dict[str, Any] = {"call": {"k": 1}}
    ranks(2).run(jobs.analysis, "eigenpairs", str(tmp_path), 2, **mine)
    for found in ranks(2).run(
        jobs.analysis, "eigenpairs", str(tmp_path), **{**mine, **FOREIGN[what]}
    ):
        assert found.startswith("ConfigError") and what in found
    assert jobs.newest(tmp_path)[0] == 2  # and still there


@pytest.mark.full
def test_a_damaged_product_is_made_again(ranks: Ranks, tmp_path: Path, in_one_go: InOneGo) -> None:
    whole = in_one_go("Hutchinson", 2)[0]
    ranks(2).run(jobs.analysis, "Hutchinson", str(tmp_path), 6)
    (path,) = tmp_path.glob("*/rank1/product6.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    found = ranks(2).run(jobs.analysis, "Hutchinson", str(tmp_path))[0]
    assert equal(found, whole) and found[2] == 5


@pytest.mark.full
def test_a_state_with_a_damaged_product_gives_way_to_the_one_before(
    ranks: Ranks, tmp_path: Path, in_one_go: InOneGo
) -> None:
    whole = in_one_go("Hutchinson", 2)[0]
    ranks(2).run(jobs.analysis, "Hutchinson", str(tmp_path), 6)
    for path in tmp_path.glob("*/rank0/product2.safetensors"):
        path.write_bytes(path.read_bytes()[:-4])
    found = ranks(2).run(jobs.analysis, "Hutchinson", str(tmp_path))[0]
    assert equal(found, whole) and found[2] == 1
