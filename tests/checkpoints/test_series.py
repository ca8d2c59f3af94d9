"""Series of checkpoints: what lies in which folder, what is finished, what is measured again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_hessian
from ds_hessian.checkpoints import checkpoint_of
from ds_hessian.records import HessianDecomposition, HessianSpectrum, HessianTrace
from tests.checkpoints import jobs
from tests.checkpoints.test_measure import ARGUMENTS, trained
from tests.cli.test_cli import ROOT, call, refused_in_one_line
from tests.ranks import RankPool
from tests.tiers import cells, needs

pytestmark = needs("datasets")

Ranks = Callable[[int], RankPool]
QUICK = (*ARGUMENTS, "-s", "num_matvecs=2")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A state dict, and data."""
    torch.save(trained().state_dict(), tmp_path / "net_20.pt")
    jobs.write_lines(tmp_path / "rows.jsonl", jobs.rows())
    return tmp_path


def measured(files: Path, *more: str, name: str = "net_20.pt") -> str:
    """What the command says on stderr; it must succeed."""
    command = ("measure", files / name, "--data", files / "rows.jsonl", *QUICK)
    done = call(*command, "-o", files / "run", *more)
    assert done.returncode == 0, done.stderr
    return done.stderr


def measured_in_python(files: Path, analysis: str, **settings: Any) -> Any:
    """The record of the same by `ds_hessian.measure`."""
    kept = {"output_path": files / "run", "config": jobs.QUIET_CONFIG}
    return ds_hessian.measure(
        trained(), files / "rows.jsonl", analysis=analysis, **kept, **settings
    )


@pytest.mark.full
def test_each_operator_has_a_folder_of_its_own(files: Path) -> None:
    measured(files)
    hessian = HessianSpectrum.load(files / "run/step_000020")
    measured(files, "-s", "operator=ggn")
    ggn = HessianSpectrum.load(files / "run/step_000020_ggn")
    assert (hessian.provenance.operator, ggn.provenance.operator) == ("hessian", "ggn")
    assert HessianSpectrum.load(files / "run/step_000020") == hessian
    measured_in_python(files, "trace", step=20, operator="ggn")
    trace = HessianTrace.load(files / "run/step_000020_ggn")
    assert abs(trace.value - ggn.trace.value) <= 4 * (trace.error + ggn.trace.error)


@pytest.mark.full
def test_a_decomposition_is_kept_like_any_other_record(files: Path) -> None:
    said = measured(files, "--analysis", "decomposition", "-s", "progress=true")
    for name in ("Hessian", "Gauss-Newton", "Residual"):
        assert f"{name} spectrum: 2 of 2 products" in said
    found = HessianDecomposition.load(files / "run/step_000020")
    assert abs(found.closure.value) <= 3 * found.closure.error
    assert "done before" in measured(files, "--analysis", "decomposition", "--resume")
    api = measured_in_python(files, "decomposition", step=7, num_matvecs=2)
    hessian = ds_hessian.attach(trained(), None, jobs.QUIET_CONFIG)
    assert hessian.load(HessianDecomposition, files / "run/step_000007") == api


def test_blocks_of_the_model_are_counted_before_the_plan(files: Path) -> None:
    said = measured(files, "--resume", "--analysis", "block_coupling")
    assert "measurement, 3 products" in said and "resume" in said  # of the two layers


def test_what_is_finished_is_neither_loaded_nor_measured_again(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it was asked for: what changes no figure does not count."""
    measured(files)
    record = HessianSpectrum.load(files / "run/step_000020")

    def loaded() -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(jobs, "net", loaded)
    elsewhere = os.path.relpath(files / "run", ROOT)
    for more in ((), ("-s", "progress=true"), ("-s", "seed=0"), ("-o", elsewhere)):
        assert "done before" in measured(files, "--resume", *more)
    assert HessianSpectrum.load(files / "run/step_000020") == record


def another_model(files: Path) -> tuple[str, ...]:
    return ("--model", "tests.checkpoints.jobs:Net")


def another_setting(files: Path) -> tuple[str, ...]:
    return ("-s", "seed=1")


def other_data(files: Path) -> tuple[str, ...]:
    jobs.write_lines(files / "rows.jsonl", jobs.rows(9))
    return ()


def another_tokenizer(files: Path) -> tuple[str, ...]:
    (files / "tokenizer").mkdir()
    return ("--tokenizer", str(files / "tokenizer"))


def another_checkpoint_of_the_same_name(files: Path) -> tuple[str, ...]:
    """With an older time: a copy that kept it."""
    path = files / "net_20.pt"
    time = path.stat().st_mtime_ns
    torch.save(jobs.Net().state_dict(), path)
    os.utime(path, ns=(time - 10**9, time - 10**9))
    return ()


def a_record_that_is_gone(files: Path) -> tuple[str, ...]:
    (files / "run/step_000020/spectrum.json").unlink()
    return ()


def a_record_of_somebody_else(files: Path) -> tuple[str, ...]:
    found = ds_hessian.measure(
        jobs.Net(), files / "rows.jsonl", config=jobs.QUIET_CONFIG, num_matvecs=2
    )
    found.save(files / "run/step_000020")
    return ()


def a_note_that_is_torn(files: Path) -> tuple[str, ...]:
    path = files / "run/step_000020/spectrum.source.json"
    path.write_bytes(path.read_bytes()[:50])
    return ()


def a_note_of_another_form(files: Path) -> tuple[str, ...]:
    path = files / "run/step_000020/spectrum.source.json"
    path.write_text(json.dumps({"source": [1], "record": 3}))
    return ()


CHANGES = [
    another_model,
    another_setting,
    other_data,
    another_tokenizer,
    another_checkpoint_of_the_same_name,
    a_record_that_is_gone,
    a_record_of_somebody_else,
    a_note_that_is_torn,
    a_note_of_another_form,
]


@pytest.mark.parametrize(
    "change", cells(CHANGES, [another_model]), ids=lambda change: change.__name__
)
def test_what_differs_is_measured_again(
    files: Path, change: Callable[[Path], tuple[str, ...]]
) -> None:
    measured(files)
    more = change(files)
    assert "done before" not in measured(files, "--resume", *more)
    assert "done before" in measured(files, "--resume", *more)


@pytest.mark.full
def test_the_record_of_another_checkpoint_is_not_replaced(files: Path) -> None:
    """Two runs have a checkpoint of the same step, or names say no step."""
    measured(files)
    record = HessianSpectrum.load(files / "run/step_000020")
    torch.save(jobs.Net().state_dict(), files / "other_20.pt")
    command = ("measure", files / "other_20.pt", "--data", files / "rows.jsonl", *QUICK)
    for more in ((), ("--resume",), ("--plan",), ("--analysis", "trace")):
        done = call(*command, "-o", files / "run", *more)
        refused_in_one_line(done, "step_000020 holds the spectrum of .*net_20.pt: name another")
    assert HessianSpectrum.load(files / "run/step_000020") == record
    measured(files, "--analysis", "trace")
    assert "done before" in measured(files, "--resume")
    shutil.rmtree(files / "run/step_000020")
    measured(files, name="other_20.pt")


@pytest.mark.full
def test_a_series_that_has_grown_may_move_its_places(files: Path) -> None:
    """Names without numbers: what was second is third, and is measured again."""
    for name in ("a.pt", "b.pt", "c.pt"):
        torch.save(jobs.Net().state_dict(), files / name)

    def series(*names: str) -> str:
        paths = [files / name for name in names]
        command = ("measure", *paths, "--data", files / "rows.jsonl", *QUICK, "--resume")
        done = call(*command, "-o", files / "run")
        assert done.returncode == 0, done.stderr
        return done.stderr

    series("a.pt", "c.pt")
    said = series("a.pt", "b.pt", "c.pt")
    assert said.count("done before") == 1 and "a.pt (1 of 3): done before" in said
    assert "memory per rank" in said  # of the first that is measured
    assert series("a.pt", "b.pt", "c.pt").count("done before") == 3
    sources = [
        json.loads((files / f"run/step_{i:06d}/spectrum.source.json").read_text())["source"]
        for i in range(3)
    ]
    assert [Path(s["checkpoint"]).name for s in sources] == ["a.pt", "b.pt", "c.pt"]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.Net, "forward", None)
    command = ("measure", files / "net_20.pt", "--data", files / "rows.jsonl", *QUICK)
    for folder in (files / "net_20.pt", files / "net_20.pt" / "run"):
        refused_in_one_line(call(*command, "-o", folder), "net_20.pt is a file, or read-only")


def test_a_checkpoint_of_a_diverged_training_is_refused(files: Path) -> None:
    weights = trained().state_dict()
    weights["up.weight"][0, 0] = float("nan")
    torch.save(weights, files / "nan_9.pt")
    done = call("measure", files / "nan_9.pt", "--data", files / "rows.jsonl", *QUICK)
    refused_in_one_line(done, "nan_9.pt has weights that are NaN or infinite, in up.weight")


def test_a_folder_of_other_files_is_no_checkpoint(files: Path) -> None:
    (files / "lay").mkdir()
    (files / "lay" / "x_model_states.pt").write_bytes(b"")
    done = call("measure", files / "lay", "--data", files / "rows.jsonl", *QUICK)
    refused_in_one_line(done, "lay is no checkpoint: it has neither")


def test_the_step_is_found_behind_a_link_and_a_dot(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = files / "engine" / "global_step30"
    tag.mkdir(parents=True)
    torch.save({"module": trained().state_dict()}, tag / "mp_rank_00_model_states.pt")
    (files / "last").symlink_to(tag)
    monkeypatch.chdir(tag)
    for path in (".", tag, files / "last"):
        assert checkpoint_of(path).step == 30


@pytest.mark.full
def test_a_run_has_its_page(files: Path) -> None:
    said = measured(files, "--analysis", "decomposition", "-s", "plot=true")
    assert "no page of" not in said and not (files / "run/run.html").exists()
    assert (files / "run/step_000020/decomposition.png").exists()
    measured(files, "-s", "plot=true")
    assert "step 20" in (files / "run/run.html").read_text(encoding="utf-8")


def test_other_losses_of_transformers_are_their_own(tmp_path: Path) -> None:
    """Only where the next token is predicted, the mean is over all tokens."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForMaskedLM(
        BertConfig(vocab_size=20, intermediate_size=8, max_position_embeddings=16, **sizes)
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(30 if p.ndim > 1 else 1)  # else both losses are nearly log 20
    rows: list[Any] = [{"input_ids": [1, 2, 3]}, {"input_ids": [5, 6, 7, 8, 9, 10, 11, 12]}]
    data = jobs.write_lines(tmp_path / "ids.jsonl", rows)
    one = ds_hessian.checkpoints.Sequences(micro_batch_size=1)
    found = ds_hessian.measure(model, data, sequences=one, config=jobs.QUIET_CONFIG, num_matvecs=2)
    ids = [torch.tensor([row["input_ids"]]) for row in rows]
    with torch.no_grad():
        losses = [float(model(input_ids=each, labels=each).loss) for each in ids]
    assert losses[0] != pytest.approx(losses[1], rel=1e-2)
    assert found.loss == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_an_engine_is_freed_where_its_measurement_fails(ranks: Ranks, files: Path) -> None:
    paths = str(files / "net_20.pt"), str(files / "rows.jsonl")
    for destroyed, said in ranks(2).run(jobs.failing_measurement, *paths):
        assert destroyed == 1 and "not today" in said
