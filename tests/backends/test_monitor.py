"""Spectra in DeepSpeed's monitor, read back from what TensorBoard, CSV and W&B have on disk."""

from __future__ import annotations

import csv
import importlib.util
import json
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_hessian.records import HessianSpectrum
from ds_hessian.show.monitor import figures_of
from tests.backends import jobs
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
WITH_BARS = ("eigenvalue_max", "eigenvalue_min", "trace", "mean_eigenvalue")


def expected(spectra: dict[int, HessianSpectrum]) -> dict[str, dict[int, float]]:
    """`{figure: {step: value}}`, and that the bars are among them."""
    names = figures_of(spectra[2])
    assert {f"{name}_error" for name in WITH_BARS} < names.keys()
    found = {step: figures_of(s) for step, s in spectra.items()}
    return {
        name: {step: figures[name] for step, figures in found.items() if name in figures}
        for name in names  # further eigenvalues are there where they have converged
    }


@pytest.mark.full
def test_tensorboard_and_csv_have_every_figure_at_its_step_with_its_bar(
    ranks: Ranks, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra: dev)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tools = {
        name: {"enabled": True, "output_path": f"{tmp_path}/{name}", "job_name": "job"}
        for name in ("tensorboard", "csv_monitor")
    }
    spectra = ranks(2).run(jobs.monitored, str(tmp_path / "out"), tools)[0]
    assert list(spectra) == [2, 4]
    for name, values in expected(spectra).items():
        path = tmp_path / "csv_monitor" / "job" / f"Train_Hessian_{name}.csv"
        with path.open() as file:
            header, *rows = csv.reader(file)
        assert header == ["step", name]
        assert {int(step): float(value) for step, value in rows} == values
    board = EventAccumulator(str(tmp_path / "tensorboard" / "job")).Reload()
    for name, values in expected(spectra).items():
        found = {event.step: event.value for event in board.Scalars(f"Train/Hessian/{name}")}
        assert found == pytest.approx(values, rel=1e-6)  # TensorBoard keeps fp32
    for event in board.Histograms("Train/Hessian/eigenvalues"):
        assert event.histogram_value.num == pytest.approx(spectra[event.step].n, rel=1e-6)
    pictures = board.Images("Train/Hessian/spectrum")
    assert [picture.step for picture in pictures] == [2, 4]
    assert all(picture.encoded_image_string.startswith(b"\x89PNG") for picture in pictures)


def records(path: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log format after a header of 7 bytes."""
    data, parts = path.read_bytes(), b""
    assert data[:4] == b":W&B"
    at = 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of a block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # not written to the end yet
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """What the only offline run in a folder has logged, by step.

    `wandb.finish()` returns before the process that writes the file has written its last block, so
    this waits for the record that ends a run.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (log,) = folder.glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while True:
        content = [Record.FromString(raw) for raw in records(log)]
        kinds = [record.WhichOneof("record_type") for record in content]
        if "exit" in kinds:
            break
        assert time.monotonic() < deadline, f"{log} has no end, but {kinds}"
        time.sleep(0.05)
    rows: list[dict[str, Any]] = []
    for record, kind in zip(content, kinds, strict=True):
        if kind == "history":
            rows.append({})
            for item in record.history.item:
                *outer, name = item.nested_key or [item.key]
                place = rows[-1]
                for key in outer:
                    place = place.setdefault(key, {})
                place[name] = json.loads(item.value_json)
    return rows


def comet_content(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, list[int]]]:
    """What the only offline experiment in a folder has: `{name: {step: value}}`, `{kind: steps}`.

    The second are its histograms and pictures.
    """
    (archive,) = folder.glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        messages = [json.loads(line) for line in file.read("messages.json").splitlines()]
    logged: dict[str, dict[int, float]] = {}
    for message in messages:
        if message["type"] == "metric_msg":
            metric = message["payload"]["metric"]
            logged.setdefault(metric["metricName"], {})[metric["step"]] = metric["metricValue"]
    files: dict[str, list[int]] = {}
    for payload in (m["payload"] for m in messages if m["type"] == "file_upload"):
        if payload["upload_type"] in ("histogram3d", "visualization"):
            steps = files.setdefault(payload["upload_type"], [])
            steps.append(payload["additional_params"]["step"])
    return logged, files


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed (extra: monitors)"
)
def test_wandb_offline_has_every_figure_over_the_optimizer_step(tmp_path: Path) -> None:
    pool = RankPool(2)  # of its own: W&B keeps a run for the process
    try:
        tools = {"wandb": {"enabled": True, "project": "hessians"}}
        spectra = pool.run(jobs.monitored, str(tmp_path / "out"), tools, str(tmp_path))[0]
    finally:
        pool.close()
    rows = wandb_rows(tmp_path / "wandb")
    found = {row["Train/Hessian/step"]: row for row in rows if "Train/Hessian/step" in row}
    assert list(found) == [2, 4]
    for name, values in expected(spectra).items():
        assert {step: row[f"Train/Hessian/{name}"] for step, row in found.items()} == values
    # DeepSpeed's own figures, which count samples, are all there too.
    assert sum("Train/Samples/lr" in row for row in rows) == 5
    for step, row in found.items():
        histogram = row["Train/Hessian/eigenvalues"]
        assert sum(histogram["values"]) == pytest.approx(spectra[step].n, rel=1e-6)
    pictures = "wandb/offline-run-*/files/media/images/Train/Hessian/spectrum_*.png"
    assert len(list(tmp_path.glob(pictures))) == 2


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("comet_ml") is None,
    reason="comet_ml is not installed (extra: monitors)",
)
def test_comet_offline_has_every_figure_at_its_step(tmp_path: Path) -> None:
    pool = RankPool(2)  # of its own: Comet keeps an experiment for the process
    try:
        tools = {"comet": {"enabled": True, "online": False, "samples_log_interval": 100}}
        spectra = pool.run(jobs.monitored, str(tmp_path / "out"), tools, str(tmp_path))[0]
    finally:
        pool.close()
    logged, files = comet_content(tmp_path)
    for name, values in expected(spectra).items():
        assert logged[f"Train/Hessian/{name}"] == pytest.approx(values, rel=1e-12)
    assert files == {"histogram3d": [2, 4], "visualization": [2, 4]}
