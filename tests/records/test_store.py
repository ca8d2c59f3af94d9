"""Files: an exact round trip, readable JSON, refusal of everything damaged."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hessian.errors import HessianError, ResultError
from ds_hessian.records import HessianSpectrum, SamplingErrors
from ds_hessian.records.safetensors import Writer
from tests.records.makers import COST, language_model_like, semicircle, spectrum_of


@pytest.fixture
def spectrum() -> HessianSpectrum:
    return spectrum_of(language_model_like(1000), m=10, probes=2, noise=1e-3)


def test_load_gives_back_every_bit(tmp_path: Path, spectrum: HessianSpectrum):
    ratios = np.linspace(0.001, 0.1, 20).reshape(2, 10)
    ratios[1, 3] = np.nan
    for index, record in enumerate(
        (
            spectrum,
            dataclasses.replace(spectrum, loss=None, gradient_norm=None),
            dataclasses.replace(spectrum, nonlinearities=ratios),
            dataclasses.replace(spectrum, sampling=SamplingErrors(0.1, 2e-3, 1 / 3, 8)),
            dataclasses.replace(spectrum, cost=dataclasses.replace(COST, peak_memory_bytes=7)),
            spectrum_of(np.zeros(10), m=1),
        )
    ):
        folder = tmp_path / "new" / str(index)
        assert record.save(folder) == folder
        assert HessianSpectrum.load(folder) == record
        assert sorted(p.name for p in folder.iterdir()) == ["spectrum.json", "spectrum.npz"]


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e300))
@settings(max_examples=30, deadline=None)
def test_scalars_survive_json_exactly(tmp_path_factory, loss: float, seconds: float):
    record = dataclasses.replace(
        spectrum_of(semicircle(20), m=2),
        loss=loss,
        cost=dataclasses.replace(COST, seconds_total=seconds),
    )
    folder = tmp_path_factory.mktemp("scalars")
    assert HessianSpectrum.load(record.save(folder)) == record


def test_the_json_is_strict_and_holds_the_headlines(tmp_path: Path, spectrum: HessianSpectrum):
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    spectrum.save(tmp_path)
    content = json.loads((tmp_path / "spectrum.json").read_text(), parse_constant=refuse)
    assert content["eigenvalue_max"]["value"] == spectrum.eigenvalue_max.value
    assert content["trace"]["error"] == spectrum.trace.error
    assert content["provenance"]["layout"] == "ZeRO-3, 2 ranks"
    assert content["diagnostics"]["nonlinearities"]["median"] is None
    assert content["cost_derived"]["gradients_per_product"] == pytest.approx(2.1)
    density = content["density"]
    assert density["width"]["max"] == spectrum.density().width.max()
    assert density["band"] == "95 % over 2 probes"
    cumulative = density["cumulative"]
    bounds = HessianSpectrum.load(tmp_path).cumulative_bounds(cumulative["eigenvalues"])
    assert [cumulative["lower"], cumulative["upper"]] == [end.tolist() for end in bounds]


def test_saving_again_replaces_the_record(tmp_path: Path, spectrum: HessianSpectrum):
    spectrum.save(tmp_path)
    other = dataclasses.replace(spectrum, loss=1.0)
    other.save(tmp_path)
    assert HessianSpectrum.load(tmp_path) == other


def test_a_save_that_fails_leaves_the_old_record_and_no_rubbish(
    tmp_path: Path, spectrum: HessianSpectrum, monkeypatch: pytest.MonkeyPatch
):
    spectrum.save(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        dataclasses.replace(spectrum, loss=1.0).save(tmp_path)
    assert HessianSpectrum.load(tmp_path) == spectrum
    assert sorted(p.name for p in tmp_path.iterdir()) == ["spectrum.json", "spectrum.npz"]


def test_content_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, spectrum: HessianSpectrum, monkeypatch: pytest.MonkeyPatch
):
    flushed, named, fsync, rename = dict[int, int](), list[str](), os.fsync, os.rename

    def seen_fsync(descriptor: int) -> None:
        fsync(descriptor)
        flushed[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def seen_rename(source: Path, target: Path) -> None:
        found = os.stat(source)
        assert flushed.get(found.st_ino) == found.st_size > 0
        rename(source, target)
        named.append(Path(target).name)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    spectrum.save(tmp_path)
    with Writer(tmp_path / "v.safetensors", {"a": (3,)}, {}) as writer:
        writer.append(torch.ones(3))
    digest = json.loads((tmp_path / "spectrum.json").read_text())["arrays"]["sha256"]
    arrays = f"spectrum.{digest[:16]}.npz"  # until the record is committed
    assert named == [arrays, "spectrum.json", "spectrum.npz", "v.safetensors"]


def _edit(folder: Path, **changes: object) -> None:
    path = folder / "spectrum.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_damage_is_named(tmp_path: Path, spectrum: HessianSpectrum):
    def check(message: str) -> None:
        with pytest.raises(ResultError, match=message):
            HessianSpectrum.load(tmp_path)
        spectrum.save(tmp_path)

    check("no spectrum in .*cannot read spectrum.json")
    npz = tmp_path / "spectrum.npz"
    npz.write_bytes(npz.read_bytes()[:-100])
    check(r"spectrum\.npz \(\d+ bytes\) is truncated, changed, or belongs to another spectrum")
    npz.unlink()
    check("cannot read .*spectrum.npz, which spectrum.json names")
    text = (tmp_path / "spectrum.json").read_text()
    (tmp_path / "spectrum.json").write_text(text[: len(text) // 2])
    check("spectrum.json is damaged, it is not JSON")
    (tmp_path / "spectrum.json").write_text("[]")
    check("must hold a JSON object, got list")
    _edit(tmp_path, schema_version=99)
    check("has schema version 99, this ds_hessian reads 1: .*wrote it, 0.1.0")
    _edit(tmp_path, cost={"speed": 1})
    check("does not hold a spectrum")
    _edit(tmp_path, loss="high")
    check("does not hold a spectrum")
    assert HessianSpectrum.load(tmp_path) == spectrum


def test_files_of_two_spectra_do_not_mix(tmp_path: Path, spectrum: HessianSpectrum):
    spectrum.save(tmp_path / "a")
    spectrum_of(semicircle(100), m=10, probes=2).save(tmp_path / "b")
    os.replace(tmp_path / "b" / "spectrum.npz", tmp_path / "a" / "spectrum.npz")
    with pytest.raises(ResultError, match="belongs to another spectrum"):
        HessianSpectrum.load(tmp_path / "a")
    assert issubclass(ResultError, HessianError)
