"""Whether the tests see defects: each is put into a copy of the tree, where its tests run.

    python -m tests.mutants --list                 # what there is; fails where a defect is stale
    python -m tests.mutants --part krylov --jobs 2

A defect is caught if a test fails or hangs. The exit status is 1 if one survives or is stale.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.mutants.defects import PARTS, Defect

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("ds_hessian", "csrc", "tests", "docs", "examples", "benchmarks")
SOURCES = ("*.py", "*.cpp", "*.h", "*.cu", "*.cuh")
FAILED, PASSED = int(pytest.ExitCode.TESTS_FAILED), int(pytest.ExitCode.OK)
NONE = int(pytest.ExitCode.NO_TESTS_COLLECTED)

CAUGHT, HANGS, SURVIVED, UNKNOWN = "caught", "caught (hangs)", "SURVIVED", "NO VERDICT"


def sources(root: Path) -> list[Path]:
    """The files of the product."""
    folders = (root / "ds_hessian", root / "csrc")
    return [path for folder in folders for kind in SOURCES for path in folder.rglob(kind)]


def place_of(defect: Defect, texts: dict[Path, str]) -> Path | str:
    """The one file that has the defect's text, once; or what is wrong."""
    found = [path for path, text in texts.items() for _ in range(text.count(defect.old))]
    return found[0] if len(found) == 1 else f"stale: its text stands in {len(found)} places"


def missing_tests(defect: Defect, root: Path) -> list[str]:
    """Files and folders of tests that are not there."""
    files = [test.partition("::")[0] for test in defect.tests]
    return [name for name in files if not (root / "tests" / name).exists()]


@contextmanager
def copy_with(defect: Defect, place: Path) -> Iterator[Path]:
    """A copy of the tree that has the defect."""
    with tempfile.TemporaryDirectory(prefix="ds_hessian_mutant") as folder:
        copy = Path(folder)
        for name in COPIED:
            ignore = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy(path, copy)
        built = Path(".cache", "tests")  # by tests/conftest.py
        for name in ("torch_extensions", "kernels"):
            (copy / built).mkdir(parents=True, exist_ok=True)
            if (ROOT / built / name).exists() and (name != "kernels" or place.suffix == ".py"):
                (copy / built / name).symlink_to(ROOT / built / name)
        mutated = copy / place.relative_to(ROOT)
        mutated.write_text(mutated.read_text().replace(defect.old, defect.new))
        yield copy


def verdict(defect: Defect, place: Path) -> tuple[str, str]:
    """What its tests say, and the selection that says it; in a process of its own."""
    with copy_with(defect, place) as copy:
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[:] = [str(copy), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]  # that of the tree
        for selection in defect.tests:
            options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", f"tests/{selection}"]
            status = int(pytest.main(options))
            if status == NONE:  # not of the quick tier
                status = int(pytest.main([*options, "--all"]))
            if status == FAILED:
                return CAUGHT, selection
            if status != PASSED:
                return UNKNOWN, selection
    return SURVIVED, ""


class Running:
    """One defect whose tests run.

    Args:
        part: See `PARTS`.
        defect: The defect.
        place: Its file.
    """

    def __init__(self, part: str, defect: Defect, place: Path) -> None:
        self.part, self.defect, self.began = part, defect, time.monotonic()
        context = multiprocessing.get_context("fork")  # what is imported is there already
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_report, args=(theirs, defect, place))
        self._process.start()
        theirs.close()

    def result(self, limit: float) -> str | None:
        """The verdict, printed; None while there is none."""
        seconds = time.monotonic() - self.began
        answer: tuple[str, str, float, str] = (UNKNOWN, "", 0.0, "the process died")
        if self._pipe.poll():
            try:
                answer = self._pipe.recv()
            except EOFError:
                pass
        elif seconds > limit:
            os.killpg(self._process.pid or 0, signal.SIGKILL)
            answer = (HANGS, "", 0.0, "")
        else:
            return None
        self._process.join()
        result, by, spent, output = answer
        cost = f"{seconds:.0f} s, {spent:.0f} s of processor time"
        print(f"{self.part:<10} {result:<15} {self.defect.story}  [{by}; {cost}]", flush=True)
        if result == UNKNOWN:
            print(output[-3000:], flush=True)
        return result


def _report(pipe: Connection, defect: Defect, place: Path) -> None:
    os.setsid()
    with tempfile.TemporaryFile() as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        result, by = verdict(defect, place)
        sys.stdout.flush()
        output.seek(0)
        text = output.read().decode(errors="replace")
    failed = re.search(r"^FAILED tests/(.*?)( - |$)", text, re.MULTILINE)
    spent = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        spent += usage.ru_utime + usage.ru_stime
    pipe.send((result, failed[1] if failed else by, spent, text))


def run(defects: Sequence[tuple[str, Defect, Path]], jobs: int, limit: float) -> list[str]:
    """The verdicts, in the order of the defects."""
    waiting, running = list(enumerate(defects)), dict[int, Running]()
    results = [""] * len(defects)
    while waiting or running:
        while waiting and len(running) < jobs:
            number, each = waiting.pop(0)
            running[number] = Running(*each)
        time.sleep(0.2)
        for number, one in list(running.items()):
            found = one.result(limit)
            if found is not None:
                results[number] = found
                del running[number]
    return results


def prepare() -> None:
    """Import what takes long and is not under test, before the processes of the defects."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in ("torch", "scipy.linalg", "scipy.special", "deepspeed", "pydantic", "click"):
        importlib.import_module(name)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part")
    parser.add_argument("--only", default="", metavar="TEXT", help="defects whose story has it")
    parser.add_argument("--jobs", type=int, default=1, help="defects at a time")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds before a test hangs")
    parser.add_argument("--list", action="store_true", help="find the places, and run nothing")
    given = parser.parse_args()
    texts = {path: path.read_text() for path in sources(ROOT)}
    chosen = [
        (part, defect, place_of(defect, texts))
        for part in given.part or PARTS
        for defect in PARTS[part]
        if given.only in defect.story
    ]
    good: list[tuple[str, Defect, Path]] = []
    stale = 0
    for part, defect, place in chosen:
        lost = missing_tests(defect, ROOT)
        if isinstance(place, str) or lost:
            stale += 1
            print(f"{part:<10} {place} {lost or ''}  {defect.old!r}")
            continue
        good.append((part, defect, place))
        if given.list:
            print(f"{part:<10} {place.relative_to(ROOT)}: {defect.story}")
    if given.list:
        print(f"{len(good)} defects, {stale} stale")
        return int(stale > 0)
    prepare()
    results = run(good, given.jobs, given.limit)
    print("\npart        caught  survived")
    for part in dict.fromkeys(part for part, _, _ in good):
        mine = [r for (p, _, _), r in zip(good, results, strict=True) if p == part]
        caught = sum(r in (CAUGHT, HANGS) for r in mine)
        print(f"{part:<10} {caught:7} {len(mine) - caught:9}")
    caught = sum(r in (CAUGHT, HANGS) for r in results)
    print(f"{'all':<10} {caught:7} {len(results) - caught:9}   {caught / len(results):.0%}")
    return int(stale > 0 or caught < len(results))


if __name__ == "__main__":
    sys.exit(main())
