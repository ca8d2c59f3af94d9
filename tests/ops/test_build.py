"""Building, caching, falling back visibly, and the report."""

from __future__ import annotations

import logging
import os
import runpy
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_hessian import ops
from ds_hessian.errors import ConfigError, KernelError
from ds_hessian.ops import native, toolchain

ROOT = Path(__file__).resolve().parents[2]


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


@pytest.fixture
def fresh(monkeypatch, tmp_path) -> Path:
    """A process that has not chosen yet, with an empty cache and no module built ahead of time."""
    monkeypatch.setattr(native, "_known", {})
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("DS_HESSIAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_HESSIAN_OPS", "auto")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(toolchain, "find_pybind11", lambda: "include")
    return tmp_path


def failing_compiler(directory: Path) -> str:
    """Knows its version and nothing else."""
    return script(
        directory / "broken-c++",
        'case "$1" in --version) echo broken 1.0;; '
        '*) echo "kernel.cpp:7: error: flux capacitor missing" >&2; exit 3;; esac',
    )


def test_a_failed_build_shows_the_compilers_message_and_falls_back(
    fresh, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("CXX", failing_compiler(fresh))
    a = torch.ones(10)
    with caplog.at_level(logging.WARNING, "ds_hessian.ops.native"):
        assert ops.dots([(a, a)], 10)[0] == 10
        assert ops.dots([(a, a)], 10)[0] == 10
    assert len(caplog.records) == 1
    assert "running the slower torch twins" in caplog.text
    assert "error: flux capacitor missing" in caplog.text
    report = ops.report()
    assert report["cpu"].name == "torch"
    assert "flux capacitor missing" in str(report)


def test_a_failed_build_is_an_error_where_native_is_demanded(fresh, monkeypatch) -> None:
    monkeypatch.setenv("CXX", failing_compiler(fresh))
    monkeypatch.setenv("DS_HESSIAN_OPS", "native")
    a = torch.ones(10)
    with pytest.raises(KernelError, match="(?s)DS_HESSIAN_OPS=native.*DS_HESSIAN_OPS=auto.*flux"):
        ops.dots([(a, a)], 10)
    assert ops.report()["cpu"].name == "none"


def test_a_machine_without_compiler_says_so(fresh, monkeypatch, caplog) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING, "ds_hessian.ops.native"):
        assert native.find("cpu").name == "torch"
    assert "no C++ compiler" in caplog.text


def test_other_ranks_do_not_repeat_the_warning(fresh, monkeypatch, caplog) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("RANK", "3")
    with caplog.at_level(logging.WARNING, "ds_hessian.ops.native"):
        assert native.find("cpu").name == "torch"
    assert not caplog.records


def test_devices_without_kernels_run_the_twins(fresh) -> None:
    assert native.find("xpu").name == "torch"
    assert "no compiled kernels for xpu" in native.find("xpu").reason


def test_the_torch_setting_and_unknown_settings(fresh, monkeypatch) -> None:
    monkeypatch.setenv("DS_HESSIAN_OPS", "torch")
    assert native.find("cpu").reason == "chosen by DS_HESSIAN_OPS=torch"
    monkeypatch.setenv("DS_HESSIAN_OPS", "fast")
    with pytest.raises(ConfigError, match="one of auto, native, torch; it is 'fast'"):
        native.find("cpu")
    with pytest.raises(ConfigError, match="this is 'fast'"), ops.implementation("fast"):
        pass


def test_the_key_of_a_build_holds_compiler_flags_and_sources(monkeypatch, tmp_path) -> None:
    before = toolchain.plan_cpu().key
    assert before == toolchain.plan_cpu().key
    monkeypatch.setenv("DS_HESSIAN_MARCH", "x86-64-v3")
    flags = toolchain.plan_cpu().key
    sources = tmp_path / "csrc"
    shutil.copytree(toolchain.source_root(), sources)
    with (sources / "contracts.h").open("a") as header:
        header.write("// another\n")
    monkeypatch.setattr(toolchain, "source_root", lambda: sources)
    assert len({before, flags, toolchain.plan_cpu().key}) == 3


BUILD_IN_CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from ds_hessian.ops import native
print(native.built(native.plan("cpu"))[1])
"""


def test_ranks_that_start_at_once_build_once(tmp_path) -> None:
    """Three processes, one empty cache; the compiler is a stand-in that counts its calls."""
    compiler = script(
        tmp_path / "c++",
        'case "$1" in --version) echo counting 1.0; exit;; esac\n'
        f'echo "$@" >> {tmp_path}/calls\nsleep 0.2\n'
        'while [ $# -gt 1 ]; do shift; done; echo object > "$1"',
    )
    environment = {
        **os.environ,
        "CXX": compiler,
        "DS_HESSIAN_CACHE_DIR": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    child = [sys.executable, "-c", BUILD_IN_CHILD, str(ROOT)]
    ranks = [
        subprocess.Popen(child, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(toolchain.CPU_SOURCES) + 2  # the bindings, and the link
    assert sum("just in time in" in line for line in printed) >= 1
    assert not list((tmp_path / "cache").rglob("build-*"))


@pytest.mark.parametrize("ninja", [True, False], ids=["ninja", "without ninja"])
def test_a_build_works_with_and_without_ninja(tmp_path, monkeypatch, ninja) -> None:
    if not ninja:
        monkeypatch.setattr(toolchain, "_find_ninja", lambda: None)
    compiler = script(
        tmp_path / "c++",
        '[ "$1" = --version ] && { echo 1; exit; }\n'
        'while [ $# -gt 1 ]; do shift; done; echo object > "$1"',
    )
    monkeypatch.setenv("CXX", compiler)
    built = toolchain.build(toolchain.plan_cpu(), tmp_path / "a build", jobs=2)
    assert built.read_text() == "object\n"


@pytest.mark.full
def test_cuda_sources_compile_for_sm_80_and_sm_90(tmp_path) -> None:
    try:
        toolchain.find_nvcc()
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    built = toolchain.build(toolchain.plan_cuda(["8.0", "9.0"]), tmp_path, jobs=2)
    child = "import _native_cuda as m; print(len([x for x in dir(m) if x[0] != '_']))"
    done = subprocess.run(
        [sys.executable, "-c", child],
        env={**os.environ, "PYTHONPATH": str(built.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 15


def test_an_ahead_of_time_build_is_on_demand(monkeypatch) -> None:
    hook = runpy.run_path(str(ROOT / "ds_hessian" / "ops" / "build_ext.py"))["setup_arguments"]
    monkeypatch.setenv("DS_HESSIAN_BUILD_OPS", "0")
    assert set(hook()) == {"cmdclass"}
    monkeypatch.setenv("DS_HESSIAN_BUILD_OPS", "1")
    names = [extension.name for extension in hook()["ext_modules"]]
    assert names[0] == "ds_hessian.ops._native_cpu"


def test_importing_ops_imports_no_host_and_builds_nothing(tmp_path) -> None:
    child = (
        "import sys, ds_hessian.ops; "
        "assert not {'deepspeed', 'setuptools', 'pybind11'} & set(sys.modules)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DS_HESSIAN_CACHE_DIR": str(tmp_path / "cache"),
    }
    subprocess.run([sys.executable, "-c", child], env=environment, check=True)
    assert not (tmp_path / "cache").exists()


def test_the_report_prints(monkeypatch) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ds_hessian.ops"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_HESSIAN_OPS": "torch"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cpu   torch   chosen by DS_HESSIAN_OPS=torch" in done.stdout
    with pytest.raises(KeyError):
        ops.report()["abacus"]


def test_deepspeed_sees_the_builder() -> None:
    pytest.importorskip("deepspeed")
    from ds_hessian.ops.builder import deepspeed_builder

    builder = deepspeed_builder("cpu")
    assert builder.name == "ds_hessian_cpu"
    assert all(Path(source).is_file() for source in builder.sources())
    if native.find("cpu").module is not None:
        assert builder.is_compatible()
        assert builder.load() is native.find("cpu").module
