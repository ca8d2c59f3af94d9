"""The kernels of a CPU, and those of CUDA on the emulator, under sanitizers; and that these see.

A sanitizer's runtime must be the first library of a process, so that each run is a pytest of its
own, and its reports go to files, because pytest keeps what a passing test prints.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ds_hessian.ops import cache, toolchain
from tests.ops import emulator, sanitized

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="the emulator switches fibers in x86-64 assembly"
    ),
]

RUNTIMES = {
    # libstdc++, because AddressSanitizer looks for its __cxa_throw before Python has loaded it.
    "asan": ("libasan.so", "libubsan.so", "libstdc++.so"),
    "tsan": ("libtsan.so",),
}
OPTIONS = {
    "asan": {
        # Python keeps memory until it ends, and fibers bring stacks of their own.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    },
    "tsan": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"},
}

FILES = ("basis", "determinism", "launches", "misuse", "probes", "squares", "streaming")
NOT_HERE = "hundred_million or forked or not_lose_small_terms"
"""A sum of 10^8 terms takes minutes here, and a child of a fork has no threads of a sanitizer."""

# Copies of the sources with one defect: a file, what it says, and what the copy says.
OUT_OF_BOUNDS = ("k < kWarps * rows; k += kThreads)", "k <= kWarps * rows; k += kThreads)")
NO_BARRIER = (
    "  __syncthreads();\n  for (int r = threadIdx.x; r < rows; r += kThreads) {",
    "  for (int r = threadIdx.x; r < rows; r += kThreads) {",
)


@dataclass(frozen=True)
class Run:
    """What a pytest under a sanitizer ended with."""

    status: int
    passed: int
    printed: str
    reports: str


def runtimes(kind: str) -> str:
    """For LD_PRELOAD; skips where the compiler has no such libraries."""
    try:
        compiler = toolchain.find_compiler()
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    found = []
    for name in RUNTIMES[kind]:
        command = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(path):  # a compiler that does not find a file prints its name
            pytest.skip(f"{compiler} has no {name}")
        found.append(path)
    return " ".join(found)


def run(kind: str, folder: Path, sources: Path, *arguments: str) -> Run:
    """pytest with kernels that a sanitizer watches; those of CUDA from `sources`."""
    preload, logs = runtimes(kind), folder / "reports"
    # Built here, so that no test of the child waits for a compiler.
    cache.obtain(sanitized.plan_cpu(kind))
    cache.obtain(emulator.plan(kind, folder / "build", sources))
    child = (
        "import functools, pathlib, sys, pytest; from tests.ops import emulator; "
        "emulator.plan = functools.partial(emulator.plan, root=pathlib.Path(sys.argv[1])); "
        "sys.exit(pytest.main(sys.argv[2:]))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    settings = {name: f"{value}:log_path={logs}" for name, value in OPTIONS[kind].items()}
    done = subprocess.run(
        [sys.executable, "-c", child, str(sources), "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**kept, **settings, "DS_HESSIAN_SANITIZER": kind, "LD_PRELOAD": preload},
        capture_output=True,
        text=True,
    )
    printed = done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", printed)
    reports = "\n".join(path.read_text() for path in sorted(folder.glob("reports.*")))
    return Run(done.returncode, int(passed[1]) if passed else 0, printed[-4000:], reports)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_no_sanitizer_finds_anything(kind, tmp_path) -> None:
    tests = [f"tests/ops/test_{name}.py" for name in FILES]
    found = run(kind, tmp_path, toolchain.source_root(), *tests, "-k", f"not ({NOT_HERE})")
    assert not found.reports, found.reports
    assert found.status == 0, found.printed
    assert found.passed > 100, found.printed


@pytest.mark.parametrize(
    ("kind", "defect", "report"),
    [
        ("asan", OUT_OF_BOUNDS, r"AddressSanitizer: use-after-poison[\s\S]*project_kernel"),
        ("tsan", NO_BARRIER, r"ThreadSanitizer: data race[\s\S]*project_kernel"),
    ],
    ids=["a write beyond shared memory", "a missing barrier"],
)
def test_a_sanitizer_sees_a_seeded_defect(kind, defect, report, tmp_path) -> None:
    before, after = defect
    sources = tmp_path / "csrc"
    shutil.copytree(toolchain.source_root(), sources)
    kernels = sources / "cuda" / "basis.cu"
    text = kernels.read_text()
    assert text.count(before) == 1
    kernels.write_text(text.replace(before, after))
    cell = "tests/ops/test_basis.py::test_any_number_of_rows[emulated-dtype0-4]"
    found = run(kind, tmp_path, sources, cell)
    assert re.search(report, found.reports), found.printed + found.reports
    assert found.status != 0
