"""Interrupted runs are resumed to the same answer; what is damaged or foreign is refused."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ds_hessian.errors import ConfigError, ResultError
from ds_hessian.krylov import LanczosOptions, Storage
from ds_hessian.records.files import Claim
from ds_hessian.resume import refuse_foreign
from ds_hessian.resume.files import Origin, read_vector, write_json, write_vector
from ds_hessian.resume.generations import Generation, still_whole
from ds_hessian.resume.parts import overlaps, to_json
from ds_hessian.resume.run import SavedRun
from ds_hessian.resume.store import StateStore
from ds_hessian.vectors import Box, Fragment, Layout, VectorSpace
from tests.ranks import RankPool, run_alone
from tests.resume import jobs, kills
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
ROUNDOFF = 2.0**-24


def equal(a: Any, b: Any) -> bool:
    """Bitwise, NaN equal to itself."""
    return repr(a[:-1]) == repr(b[:-1]) and all(
        x[k].tobytes() == y[k].tobytes()
        for x, y in zip(a[: jobs.PROBES], b[: jobs.PROBES], strict=True)
        for k in x
        if isinstance(x[k], np.ndarray)
    )


@pytest.fixture(scope="module")
def whole(ranks: Ranks) -> Any:
    """The spectrum in one go, without a state."""
    return ranks(2).run(jobs.spectrum, None)[0]


@pytest.mark.full
def test_a_job_killed_20_times_ends_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(2).run(jobs.spectrum, None, num_matvecs=jobs.LONG)[0]
    reached, found = kills.until_the_end(tmp_path, "spectrum", 20)
    assert 0 < reached[-1] and len(set(reached)) > 8, reached
    assert equal(found, whole) and found[-1] < whole[-1] == jobs.PROBES * jobs.LONG
    assert list((tmp_path / "state").iterdir()) == []  # a run that has ended leaves nothing


@pytest.mark.full
def test_what_a_killed_job_was_writing_is_removed(ranks: Ranks, tmp_path: Path) -> None:
    """Files of a rank, of vectors and of states, one after another."""
    left = set[str]()
    for number in range(6):
        kills.while_writing(tmp_path, number)
        left |= {
            re.sub("[0-9a-f]{16}|(?<=state.)[0-9]+", "#", path.name)
            for path in tmp_path.rglob("*tmp")
        }
    files = {f".{name}.json.#.tmp" for name in ("layout", "state.#")}
    assert files <= left and len(left) > 3
    found = ranks(1).run(jobs.spectrum, str(tmp_path))[0]
    assert equal(found, ranks(1).run(jobs.spectrum, None)[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        LanczosOptions(storage=Storage(torch.bfloat16, "host")),
        LanczosOptions("window", 4, Storage(torch.float32, "disk")),
        LanczosOptions("none"),
        LanczosOptions("selective", 3),
        LanczosOptions("selective", 3, Storage(torch.bfloat16, "disk")),
    ],
    ids=["bf16 on the host", "window on disk", "none", "selective", "selective, bf16 on disk"],
)
def test_every_basis_is_resumed_to_the_same_bits(
    ranks: Ranks, tmp_path: Path, options: LanczosOptions
) -> None:
    whole = ranks(2).run(jobs.spectrum, None, options=options)[0]
    for stop in (7, 5, 5):  # ends in the first probe, with it and in the second
        assert ranks(2).run(jobs.spectrum, str(tmp_path), stop, options)[0] == "stopped"
    assert equal(ranks(2).run(jobs.spectrum, str(tmp_path), options=options)[0], whole)


def test_a_basis_vector_is_written_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(jobs.spectrum, str(tmp_path), 4)
    (run,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    before = {path.relative_to(run): path.stat().st_mtime_ns for path in run.glob("*/*")}
    ranks(2).run(jobs.spectrum, str(tmp_path), 3)
    after = {path.relative_to(run): path.stat().st_mtime_ns for path in run.glob("*/*")}
    assert before.items() <= after.items()
    assert len(after) == len(before) + 2 * 3  # one for each rank and product


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_vector_is_read_once(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """What its checksum was taken of is what is used: its file may be gone by then."""
    ranks(2).run(jobs.matrix_run, str(tmp_path), 5)
    for found in ranks(world_size).run(jobs.vectors_without_files, str(tmp_path)):
        assert found == [True] * 6  # five products' vectors, and the next one's


@pytest.mark.parametrize(("first", "then"), cells([(2, 3), (3, 1), (1, 2)], [(2, 3), (3, 1)]))
def test_another_number_of_ranks_goes_on_to_rounding(
    ranks: Ranks, tmp_path: Path, first: int, then: int
) -> None:
    whole = ranks(1).run(jobs.matrix_run, str(tmp_path / "whole"), None)[0]
    parts = [(first, 9), (then, 16), (then, None)]
    for (size, stop), begin in zip(parts, (0, 9, 16), strict=True):
        for found in ranks(size).run(jobs.matrix_run, str(tmp_path / "state"), stop):
            assert found[0] == begin
    for ours, theirs in zip(found[1:], whole[1:], strict=True):
        assert np.allclose(ours, theirs, rtol=0, atol=64 * ROUNDOFF * 50)
    assert len([path for path in (tmp_path / "state").iterdir() if path.is_dir()]) == 1


@pytest.mark.full
def test_a_spectrum_goes_on_where_ranks_are_fewer(ranks: Ranks, tmp_path: Path, whole: Any) -> None:
    ranks(2).run(jobs.spectrum, str(tmp_path), 17)
    found = ranks(1).run(jobs.spectrum, str(tmp_path))[0]
    assert found[-1] == jobs.PROBES * jobs.STEPS - 17
    assert all(np.array_equal(found[0][k], whole[0][k], True) for k in ("alphas", "betas"))
    for k in range(1, jobs.PROBES):  # the products' own errors apart: a new summation order
        scale = abs(whole[k]["alphas"]).max()
        assert abs(found[k]["alphas"][0] - whole[k]["alphas"][0]) < 1e-3 * scale


def test_fragments_of_boxes_and_of_whole_parameters_find_each_other() -> None:
    shape = torch.Size([4, 6])
    whole = torch.arange(24.0)
    flat = Layout([Fragment("w", 0, 10, shape), Fragment("w", 10, 14, shape)])
    halves = [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))]
    cut = Layout(
        [Fragment("w", 2, 10, shape, box=halves[0]), Fragment("w", 0, 12, shape, box=halves[1])]
    )
    v = torch.cat([whole[f.index()] for f in cut.fragments])
    out = torch.full((24,), -1.0)
    for here, there in overlaps(flat, cut):
        out[here] = v[there]
    missing = out < 0
    assert torch.equal(out[~missing], whole[~missing]) and missing.nonzero().flatten().tolist() == [
        0,
        1,
    ]


def damage_state(folder: Path) -> None:
    path = jobs.newest(folder)[1]
    assert path is not None
    path.write_bytes(path.read_bytes()[:-30])


def alter_state(folder: Path) -> None:
    path = jobs.newest(folder)[1]
    assert path is not None
    text = path.read_text()
    path.write_text(text.replace('"alphas": [', '"alphas": [1'))


def damage_vector(folder: Path) -> None:
    path = max(folder.glob("*/rank1/p*.safetensors"), key=lambda p: int(p.name[4:].split(".")[0]))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def lose_vector(folder: Path) -> None:
    max(folder.glob("*/rank0/p*.safetensors"), key=lambda p: p.stat().st_mtime_ns).unlink()


def pipe_for_state(folder: Path) -> None:
    path = jobs.newest(folder)[1]
    assert path is not None
    path.unlink()
    os.mkfifo(path)


def device_for_vector(folder: Path) -> None:
    path = max(folder.glob("*/rank0/p*.safetensors"), key=lambda p: p.stat().st_mtime_ns)
    path.unlink()
    path.symlink_to("/dev/zero")


HARM = [damage_state, alter_state, damage_vector, lose_vector, pipe_for_state, device_for_vector]


@pytest.mark.full
@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_state_is_not_read_but_the_one_before(
    ranks: Ranks, tmp_path: Path, whole: Any, harm: Callable[[Path], None]
) -> None:
    ranks(2).run(jobs.spectrum, str(tmp_path), 8)
    harm(tmp_path)
    found = ranks(2).run(jobs.spectrum, str(tmp_path))[0]
    assert equal(found, whole)
    assert found[-1] == jobs.PROBES * jobs.STEPS - 7  # one product again


def exchange_ranks(folder: Path) -> None:
    """The parts of a vector are in each other's place; they are of different sizes."""
    exchange(*(folder.glob(f"*/rank{r}/p0-q4.safetensors") for r in (0, 1)))


def exchange_vectors(folder: Path) -> None:
    """Two vectors of one rank, of the same size."""
    exchange(*(folder.glob(f"*/rank1/p0-q{i}.safetensors") for i in (4, 5)))


def exchange(first: Iterator[Path], second: Iterator[Path]) -> None:
    (a,), (b,) = first, second
    texts = a.read_bytes(), b.read_bytes()
    b.write_bytes(texts[0]), a.write_bytes(texts[1])


def damage_an_old_vector(folder: Path) -> None:
    (path,) = folder.glob("*/rank1/p0-q4.safetensors")
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    "harm", cells([exchange_ranks, exchange_vectors, damage_an_old_vector], [])
)
def test_an_older_vector_that_is_damaged_costs_the_products_since(
    ranks: Ranks,
    tmp_path: Path,
    whole: Any,
    harm: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Vector q4 is named from the fourth product on: the third generation is the newest whole."""
    ranks(2).run(jobs.spectrum, str(tmp_path), 8)
    harm(tmp_path)
    found = ranks(2).run(jobs.spectrum, str(tmp_path))[0]
    assert equal(found, whole)
    assert found[-1] == jobs.PROBES * jobs.STEPS - 3
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_another_is_named(tmp_path: Path) -> None:
    origins = [Origin("run-1", rank, "q0", "ab") for rank in (0, 1)]
    for origin in origins:
        write_vector(tmp_path / f"{origin.rank}", torch.ones(3), origin)
    read_vector(tmp_path / "1", origins[1], 3)
    with pytest.raises(ResultError, match=r"vector q0 of rank 1 in run-1, not vector q0 of rank 0"):
        read_vector(tmp_path / "1", origins[0], 3)
    with pytest.raises(ResultError, match="in another layout"):
        read_vector(tmp_path / "1", dataclasses.replace(origins[1], layout="cd"), 3)
    with pytest.raises(ResultError, match=r"shape \(3,\), not \(4,\)"):
        read_vector(tmp_path / "1", origins[1], 4)


def test_no_bit_of_a_file_can_flip_unnoticed(tmp_path: Path) -> None:
    """Neither of the header nor of the vector, whatever it makes of lengths, names and shapes."""
    origin, path = Origin("run-1", 0, "q0", "ab"), tmp_path / "vector"
    v = torch.arange(1.0, 5.0)
    write_vector(path, v, origin)
    whole = path.read_bytes()
    for place in range(8 * len(whole)):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            assert torch.equal(read_vector(path, origin, 4), v), place  # padding of the header
        except ResultError:
            continue
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ResultError):
            read_vector(path, origin, 4)


def test_another_job_is_refused_the_folder_of_a_run(ranks: Ranks, tmp_path: Path) -> None:
    """It names the first, which keeps its state; and may take over when that has ended."""
    assert set(ranks(2).run(jobs.keep_open, str(tmp_path))) == {"open"}
    for found in ranks(1).run(jobs.spectrum, str(tmp_path)):
        assert re.match(r"ConfigError: .* is in use by process \d+ on .*, since", found), found
    assert set(ranks(2).run(jobs.keep_open, None)) == {"closed"}
    assert not isinstance(ranks(1).run(jobs.spectrum, str(tmp_path))[0], str)


def test_no_state_names_a_vector_that_a_rank_could_not_write(ranks: Ranks, tmp_path: Path) -> None:
    for error, states in ranks(2).run(jobs.unwritten, str(tmp_path)):
        assert "rank 1: OSError: no space left" in error and states == 0


def test_vectors_of_the_state_before_are_kept() -> None:
    """Of a state that is damaged its vectors may be, and another run's may have the same names."""
    needs = [("run", "a"), ("run", "b"), ("other", "b")]
    kept = [Generation(k, run, frozenset([v])) for k, (run, v) in enumerate(needs)]
    assert still_whole(kept) == kept[1:]


@pytest.mark.full
def test_no_rank_lists_what_other_ranks_write(ranks: Ranks, tmp_path: Path) -> None:
    """With the state resumed, a save lists the rank's own folder; a start reads each layout once
    among all ranks."""
    ranks(2).run(jobs.spectrum, str(tmp_path), 3)
    for listed, _ in ranks(2).run(jobs.listed, str(tmp_path), 3):
        assert all(re.fullmatch(r"|run-[0-9a-f]+/rank\d", name) for name in listed), listed
    layouts = [read for _, read in ranks(3).run(jobs.listed, str(tmp_path), 2)]
    assert sorted(sum(layouts, [])) == ["rank0", "rank1"]


def test_without_a_whole_generation_it_is_refused_on_every_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2).run(jobs.spectrum, str(tmp_path), 5)
    for path in tmp_path.glob("*/rank1/*q1.*"):
        path.write_bytes(path.read_bytes()[:-4])
    for found in ranks(2).run(jobs.spectrum, str(tmp_path)):
        assert found.startswith("ConfigError") and "truncated or damaged" in found
        assert "rank 1:" in found and "remove the folder" in found


FOREIGN = {
    "optimizer steps (0 there, 1 here)": {"step": 1},
    "norm of the weights": {"scale": 1.001},
    "micro-batches": {"first_batch": 1},
    "settings: seed (0 there, 4 here)": {"seed": 4},
    "settings: finite_difference: displacement": {"finite_difference": {"displacement": 0.1}},
}


@pytest.mark.parametrize("what", cells(FOREIGN, list(FOREIGN)[:2]))
def test_the_state_of_another_measurement_is_refused(
    ranks: Ranks, tmp_path: Path, what: str
) -> None:
    ranks(2).run(jobs.spectrum, str(tmp_path), 2)
    for found in ranks(2).run(jobs.spectrum, str(tmp_path), **FOREIGN[what]):
        assert found.startswith("ConfigError") and what in found
    assert jobs.newest(tmp_path)[0] == 2  # and still there


def test_another_model_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(jobs.matrix_run, str(tmp_path), 3)
    for found in ranks(2).run(jobs.spectrum, str(tmp_path)):
        assert found.startswith("ConfigError") and "another model" in found


def test_loss_and_gradient_may_differ_by_rounding_only() -> None:
    state = {"loss": 2.0, "norm of the gradient": 1.0, "norm of the weights": 7.0, "parameters": {}}
    refuse_foreign(state, {**state, "loss": 2.0 * (1 + 2.0**-13)}, ROUNDOFF)
    for name in ("loss", "norm of the gradient", "norm of the weights"):
        with pytest.raises(ConfigError, match=name):
            refuse_foreign(state, {**state, name: state[name] * (1 + 2.0**-11)}, ROUNDOFF)
    with pytest.raises(ConfigError, match=r"parameters: w \(None there"):
        refuse_foreign(state, {**state, "parameters": {"w": [3]}}, ROUNDOFF)


def test_random_states_are_those_of_the_beginning(ranks: Ranks, tmp_path: Path) -> None:
    assert all(ranks(2).run(jobs.random_states, str(tmp_path)))


def test_a_state_without_an_entry_is_damaged(tmp_path: Path) -> None:
    """Its checksum may be right: it was changed by hand, or is of another version."""
    generation = {"format": 2, "generation": 1, "run": "run-0", "world_size": 1, "vectors": []}
    for missing, text in [("run", "no entry 'run'"), ("format", "no entry 'format'")]:
        content = {name: value for name, value in generation.items() if name != missing}
        write_json(tmp_path / missing / "state.1.json", {**content, "figures": {}})
        with pytest.raises(ConfigError, match=text):
            alone(tmp_path / missing)
    write_json(tmp_path / "figures" / "state.1.json", {**generation, "figures": {"entries": []}})
    layout = {"run": "run-0", "rank": 0, "fragments": to_json(Layout([])), "notes": {}}
    write_json(tmp_path / "figures" / "run-0" / "rank0" / "layout.json", layout)
    with pytest.raises(ResultError, match="no entry 'seconds'"):
        SavedRun(tmp_path / "figures", Layout([]), VectorSpace(0, 0, torch.device("cpu")))


def test_a_state_that_cannot_be_removed_does_not_lose_the_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = alone(tmp_path)
    store.save({}, {})
    with patch("ds_hessian.resume.store.remove_all", side_effect=PermissionError("not yours")):
        store.clear()
    assert "cannot be removed (not yours): remove the folder" in caplog.text


def test_claims_of_one_process_are_one(tmp_path: Path) -> None:
    """The end of one of them does not let other processes in."""
    first, second = Claim(tmp_path), Claim(tmp_path / ".")
    first.release()
    with pytest.raises(AssertionError, match="is in use by process"):
        run_alone(Claim, tmp_path, folder=tmp_path, environment={})
    second.release()
    run_alone(Claim, tmp_path, folder=tmp_path, environment={})


def alone(folder: Path) -> StateStore:
    return StateStore(folder, Layout([]), VectorSpace(0, 0, torch.device("cpu")), {})
