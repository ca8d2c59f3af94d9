"""The command line as a user calls it: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ds_hessian import __version__
from ds_hessian.cli import main
from ds_hessian.cli.doctor import OPTIONAL
from ds_hessian.config import HessianConfig
from ds_hessian.records import HessianSpectrum
from tests.ranks import run_alone
from tests.records.makers import language_model_like, semicircle, spectrum_of
from tests.tiers import cells

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(sys.executable).with_name("ds-hessian")  # what setup.py installs


def call(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command in this process."""
    command, out, err = ["ds-hessian", *map(str, arguments)], io.StringIO(), io.StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        with mock.patch.object(sys, "argv", command), pytest.raises(SystemExit) as ended:
            main()
    status = ended.value.code
    assert status is None or isinstance(status, int), status
    return subprocess.CompletedProcess(command, status or 0, out.getvalue(), err.getvalue())


def installed(
    *arguments: str | Path, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The installed command in a process of its own."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def forked(
    folder: Path, *arguments: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own that has imported everything."""
    run_alone(_report, folder / "said", arguments, folder=ROOT, environment=variables)
    return subprocess.CompletedProcess(arguments, *json.loads((folder / "said").read_text()))


def _report(path: Path, arguments: tuple[str | Path, ...]) -> None:
    done = call(*arguments)
    path.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))


def at_step(spectrum: HessianSpectrum, step: int, **changes: object) -> HessianSpectrum:
    return dataclasses.replace(
        spectrum, provenance=dataclasses.replace(spectrum.provenance, step=step, **changes)
    )


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Three steps of a run, written in another order than that of the steps."""
    folder = tmp_path / "run"
    for step in (1000, 20, 300):
        values = language_model_like(500) * (1 + step / 1000)
        at_step(spectrum_of(values, m=15, probes=2, noise=1e-3), step).save(folder / f"s{step}")
    return folder


def test_the_table_of_every_step_is_printed_in_order(run_folder: Path) -> None:
    done = call("table", run_folder)
    assert (done.returncode, done.stderr) == (0, "")
    tables = [HessianSpectrum.load(run_folder / f"s{step}").table() for step in (20, 300, 1000)]
    places = [done.stdout.index(table) for table in tables]
    assert places == sorted(places)


def test_pictures_are_drawn_beside_the_figures(run_folder: Path) -> None:
    done = call("plot", run_folder / "s20", "--format", "svg")
    assert (done.returncode, done.stdout.strip()) == (0, str(run_folder / "s20" / "spectrum.svg"))
    assert "<svg" in (run_folder / "s20" / "spectrum.svg").read_text()


def test_a_page_is_made_of_a_run(run_folder: Path, tmp_path: Path) -> None:
    done = call("page", run_folder)
    assert (done.returncode, done.stdout.strip()) == (
        0,
        str(run_folder / f"{run_folder.name}.html"),
    )
    assert "3 steps from 20 to 1,000" in (run_folder / f"{run_folder.name}.html").read_text(
        encoding="utf-8"
    )
    done = call("page", run_folder / "s20", "-o", tmp_path / "new" / "one.html")
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "new" / "one.html"))
    assert "<h1>s20</h1>" in (tmp_path / "new" / "one.html").read_text(encoding="utf-8")


def test_a_page_without_plotly_is_refused_in_one_line(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ["plotly", *(name for name in sys.modules if name.startswith("plotly."))]:
        monkeypatch.setitem(sys.modules, name, None)
    refused_in_one_line(call("page", run_folder), "plotly")


def test_a_comparison_shows_each_spectrum_with_its_bars(run_folder: Path, tmp_path: Path) -> None:
    other = spectrum_of(semicircle(400), m=15)
    at_step(other, 20, data_fingerprint="ffff").save(tmp_path / "other")
    done = call("compare", run_folder, tmp_path / "other", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    expected = {str(run_folder / f"s{step}"): step for step in (20, 300, 1000)}
    expected[str(tmp_path / "other")] = 20
    assert [line.split()[0] for line in lines[1:5]] == list(expected)
    for line, (folder, step) in zip(lines[1:5], expected.items(), strict=True):
        s = HessianSpectrum.load(folder)
        figures = [str(step), "2.7", str(s.eigenvalue_max), str(s.eigenvalue_min), str(s.trace)]
        found = re.split(r"\s{2,}", line)[1:6]
        assert found == figures
    assert "not the same function, they differ in number of parameters, data finger" in lines[5]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_the_doctor_says_what_runs_here() -> None:
    done = installed("doctor", "--config", "examples/ds_config.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"^  (\S.*?)  +(.*)$", done.stdout, re.MULTILINE))
    assert found["ds_hessian"] == __version__
    assert found["torch"].startswith("2.") and found["deepspeed"][0].isdigit()
    assert found["cpu"].startswith(("native:", "torch:"))
    assert found["fp32"] == "trains; a gradient repeats bit for bit"
    config = HessianConfig.from_deepspeed(ROOT / "examples/ds_config.json")
    assert config is not None
    assert f"every {config.interval} steps" in found["hessian section"]
    assert done.stdout.splitlines()[-1] == "verdict: all is well"


def test_the_doctor_looks_for_every_package_of_the_extras() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    users = {re.split("[<>=]", name)[0] for e in ("megatron", "hf", "frames") for name in extras[e]}
    assert users <= set(OPTIONAL)


def test_the_doctor_fails_where_kernels_are_demanded_and_cannot_be_had(tmp_path: Path) -> None:
    no_compiler = {"PATH": str(tmp_path), "DS_HESSIAN_CACHE_DIR": str(tmp_path / "cache")}
    done = forked(tmp_path, "doctor", DS_HESSIAN_OPS="native", CXX="", **no_compiler)
    assert done.returncode == 1, done.stdout
    assert done.stdout.splitlines()[-1] == "verdict: in the way: cpu"


def test_the_doctor_tells_of_a_deepspeed_that_is_not_there_or_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", None)
    done = call("doctor", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(r"deepspeed +WILL NOT WORK: .* does not start: ModuleNotFound", done.stdout)
    assert re.search(r"fp32 +a gradient repeats bit for bit", done.stdout)
    assert done.stdout.splitlines()[-1] == "verdict: in the way: deepspeed"


def test_the_doctor_names_a_lock_that_a_killed_build_has_left(tmp_path: Path) -> None:
    """On which every start of DeepSpeed hangs; not the lock of a build that is running."""
    folders = [tmp_path / "py311_cpu" / name for name in ("deepspeed_shm_comm", "async_io")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    left, building = (folder / "lock" for folder in folders)
    with building.open():
        done = forked(tmp_path, "doctor", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 1, done.stdout
    assert "deepspeed_shm_comm        WILL NOT WORK: DeepSpeed hangs here" in done.stdout
    assert f"rm {left}" in done.stdout and str(building) not in done.stdout
    assert done.stdout.splitlines()[-1] == "verdict: in the way: deepspeed_shm_comm"


# ---- broken input


def _edit(folder: Path, **changes: object) -> None:
    path = folder / "spectrum.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def missing(folder: Path) -> str:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return "no such folder"


def empty(folder: Path) -> str:
    for path in folder.iterdir():
        path.unlink()
    return "no spectrum in|nothing to show of"


def truncated(folder: Path) -> str:
    npz = folder / "spectrum.npz"
    npz.write_bytes(npz.read_bytes()[:-100])
    return r"spectrum.npz \(\d+ bytes\) is truncated"


def of_another_version(folder: Path) -> str:
    _edit(folder, schema_version=99)
    return "has schema version 99, this ds_hessian reads 1"


def with_nan_in_the_json(folder: Path) -> str:
    _edit(folder, loss=float("nan"))
    return "is damaged: it holds NaN"


def with_nan_in_the_arrays(folder: Path) -> str:
    """With a checksum that fits, as a writer without our checks would leave it."""
    with np.load(folder / "spectrum.npz") as arrays:
        content = dict(arrays)
    content["alphas"][0, 0] = np.nan
    np.savez(folder / "spectrum.npz", **content)
    digest = hashlib.sha256((folder / "spectrum.npz").read_bytes()).hexdigest()
    _edit(folder, arrays={"file": "spectrum.npz", "sha256": digest})
    return "alphas must be finite"


def not_a_zip(folder: Path) -> str:
    (folder / "spectrum.npz").write_bytes(b"hello")
    _edit(folder, arrays={"sha256": hashlib.sha256(b"hello").hexdigest()})
    return "does not hold a spectrum"


BREAKAGES = (
    missing,
    empty,
    truncated,
    of_another_version,
    with_nan_in_the_json,
    with_nan_in_the_arrays,
    not_a_zip,
)


def refused_in_one_line(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("ds-hessian: ")
    assert re.search(message, done.stderr)


COMMANDS = ("table", "report", "plot", "page", "compare")
QUICK = [(breakage, "table") for breakage in BREAKAGES] + [(truncated, c) for c in COMMANDS]


@pytest.mark.parametrize(
    ("breakage", "command"),
    cells(product(BREAKAGES, COMMANDS), QUICK),
    ids=lambda each: getattr(each, "__name__", each),
)
def test_broken_results_are_refused_in_one_line(
    run_folder: Path, command: str, breakage: Callable[[Path], str]
) -> None:
    message = breakage(run_folder / "s20")
    folders = [run_folder / "s20"] + [run_folder / "s300"] * (command == "compare")
    refused_in_one_line(call(command, *folders), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere"], "no such folder: nowhere"),
        (["table", "measure"], "no such folder: measure"),
        (["compare", "nowhere", "-o", "picture.bmp"], "must end in .png, .svg or .pdf"),
        (["page", "nowhere", "-o", "s20/spectrum.json"], "must end in .html or .htm, got s20/sp"),
        (["doctor", "--config", "nowhere.json"], "no such file: nowhere.json"),
        (["self-test", "nowhere.py", "--steps", "3"], "no such script: nowhere.py"),
        (["self-test", "--port", "65536", "nowhere.py"], "65536 is not in the range 1<=x<=65535"),
        (["survey"], "No such command 'survey'"),
        ([], "Missing command"),
    ],
    ids=["report", "table", "compare", "page", "doctor", "self-test", "port", "unknown", "none"],
)
def test_wrong_calls_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("RANK", "3")  # as in a container of a job
    refused_in_one_line(call(*arguments, cwd=tmp_path), message)


def test_a_self_test_without_deepspeed_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "train.py").touch()
    refused_in_one_line(call("self-test", tmp_path / "train.py"), "which is not installed")


@pytest.mark.parametrize("arguments", [["schema"], ["--help"], ["plan", "--ranks", "x"]])
def test_what_needs_no_torch_does_not_wait_for_it(arguments: list[str]) -> None:
    code = (
        "import sys, contextlib; from ds_hessian.cli import main\n"
        f"sys.argv[1:] = {arguments}\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "assert 'torch' not in sys.modules, 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_one_spectrum_is_nothing_to_compare(run_folder: Path) -> None:
    refused_in_one_line(call("compare", run_folder / "s20"), "at least two spectra, got .*s20")


@pytest.mark.parametrize("ranks", ["two", "-1", ""])
def test_an_environment_without_a_number_of_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    done = call("measure", tmp_path, "--data", tmp_path, "--ranks", "2", cwd=tmp_path)
    refused_in_one_line(done, f"WORLD_SIZE = '{ranks}', which is no number of ranks")
