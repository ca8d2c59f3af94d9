"""Building, caching, falling back visibly, and the report."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_hessian
from ds_hessian import hosts, ops
from ds_hessian.errors import ConfigError, KernelError
from ds_hessian.ops import cache, native, toolchain
from tests.tiers import cells

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
from ds_hessian.ops import cache, native
print(cache.obtain(native.plan("cpu"))[1])
"""


@pytest.mark.full
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
    assert len(calls) == len(toolchain.plan_cpu().compiles) + 1  # and the link
    assert sum("just in time in" in line for line in printed) >= 1
    assert not list((tmp_path / "cache").rglob("objects"))


def test_kernels_are_built_when_a_job_is_attached_before_ranks_meet(
    fresh, compiler, monkeypatch, caplog
) -> None:
    """A rank that builds keeps no other one waiting in a collective, and no clock running."""
    events, met = list[str](), hosts.collective

    def meet(*arguments: Any, **named: Any) -> Any:
        events.append("meets" if list(cache.root().glob("cpu-*/*.so")) else "meets unbuilt")
        return met(*arguments, **named)

    monkeypatch.setattr(hosts, "collective", meet)
    with caplog.at_level(logging.INFO, "ds_hessian.ops"):
        ds_hessian.attach(torch.nn.Linear(2, 1))
    assert events and set(events) == {"meets"}
    assert caplog.text.count("building the ds_hessian kernels for cpu") == 1


@pytest.fixture
def compiler(monkeypatch, tmp_path) -> Path:
    """A compiler whose objects hold one word, and an empty cache."""
    made = script(
        tmp_path / "c++",
        f'[ "$1" = --version ] && {{ echo 1; exit; }}\n[ -e {tmp_path}/slow ] && exec sleep 300\n'
        'while [ $# -gt 1 ]; do shift; done; echo object > "$1"',
    )
    monkeypatch.setenv("CXX", made)
    monkeypatch.setenv("DS_HESSIAN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def test_a_build_is_found_again(compiler) -> None:
    plan = toolchain.plan_cpu()
    first, how = cache.obtain(plan)
    assert "just in time in" in how and first.read_text() == "object\n"
    assert cache.obtain(plan) == (first, f"built just in time, cached: {first}")
    assert sorted(x.name for x in first.parent.iterdir()) == [first.name, f"{first.name}.sha256"]


def open_to_all(target: Path) -> None:
    target.chmod(0o777)


def open_folder(target: Path) -> None:
    target.parent.chmod(0o777)


def linked(target: Path) -> None:
    target.rename(target.with_suffix(".else"))
    target.symlink_to(target.with_suffix(".else"))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda target: target.write_text(""),
    "truncated": lambda target: os.truncate(target, 3),
    "changed": lambda target: target.write_text("OBJECT\n"),
    "gone": lambda target: target.unlink(),
    "without a checksum": lambda target: target.with_name(f"{target.name}.sha256").unlink(),
    "with a binary checksum": lambda t: t.with_name(f"{t.name}.sha256").write_bytes(b"\xff\xfe"),
    "open to all": open_to_all,
    "in an open folder": open_folder,
    "a link": linked,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_as_it_was_built_is_built_anew(compiler, damage) -> None:
    """Loading a truncated module is a SIGBUS, at every start."""
    plan = toolchain.plan_cpu()
    target, _ = cache.obtain(plan)
    DAMAGE[damage](target)
    again, how = cache.obtain(plan)
    assert "just in time in" in how
    assert again == target and not target.is_symlink() and target.read_text() == "object\n"
    for path in (target, target.parent):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("what", ["the module", "the folder", "the checksum"])
def test_a_module_of_another_user_is_not_loaded(compiler, what) -> None:
    plan = toolchain.plan_cpu()
    target, _ = cache.obtain(plan)
    theirs = {
        "the module": target,
        "the folder": target.parent,
        "the checksum": target.with_name(f"{target.name}.sha256"),
    }[what]
    os.chown(theirs, 4321, 4321)
    assert "just in time in" in cache.obtain(plan)[1]
    assert target.stat().st_uid == target.parent.stat().st_uid == os.geteuid()


def test_a_folder_that_all_can_exchange_is_refused(compiler) -> None:
    folder = compiler / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(toolchain.BuildError, match="can exchange.*DS_HESSIAN_CACHE_DIR"):
        cache.obtain(toolchain.plan_cpu())
    folder.chmod(0o1777)  # as /tmp
    assert "just in time in" in cache.obtain(toolchain.plan_cpu())[1]


@pytest.mark.parametrize("end", cells(["killed", "stopped"], ["killed"]))
def test_a_build_that_is_killed_or_stopped_keeps_nobody_waiting(compiler, monkeypatch, end) -> None:
    slow = compiler / "slow"
    slow.touch()
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILD_IN_CHILD, str(ROOT)], start_new_session=True
    )
    try:
        plan = toolchain.plan_cpu()
        name = f"cpu-{plan.key}"
        while not list((compiler / "cache").glob(f"{name}.*/objects")):
            assert builder.poll() is None
            time.sleep(0.02)
        slow.unlink()
        if end == "killed":
            builder.kill()
            builder.wait()
        else:
            builder.send_signal(signal.SIGSTOP)
            monkeypatch.setattr(cache, "PATIENCE", 0.2)
        started = time.monotonic()
        assert cache.obtain(plan)[0].read_text() == "object\n"
        assert time.monotonic() - started < 60
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(builder.pid, signal.SIGKILL)
        builder.wait()


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
    assert int(done.stdout) == 14


@pytest.mark.parametrize("demand", ["0", "1"])
def test_an_ahead_of_time_build_is_on_demand(compiler, demand) -> None:
    """`setup.py` with a stand-in for the compiler, and without nvcc."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"]
        + ["--build-lib", str(compiler / "lib"), "--build-temp", str(compiler / "temp")],
        cwd=ROOT,
        env={**os.environ, "DS_HESSIAN_BUILD_OPS": demand, "PATH": "/nowhere", "CUDA_HOME": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    built = [path.name.split(".")[0] for path in (compiler / "lib").rglob("*.so")]
    assert built == (["_native_cpu"] if demand == "1" else [])
    assert ("no CUDA kernels" in done.stderr) == (demand == "1")


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


@pytest.mark.full
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
