"""The two tiers, the build cache of the tests, pools of ranks, and how long each folder takes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.build import CACHE, ROOT, use_cache
from tests.build import main as build
from tests.ranks import RankPool, context, pools_of_ranks, remove_buffers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what is marked full")


def pytest_configure(config: pytest.Config) -> None:
    use_cache()
    # Before torch is imported, here and in the workers: threads of several processes on two cores
    # wait for each other, and tests have small matrices.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    # Files that start processes take longest. With them first, no worker is left alone with one.
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    order = {path: (not any(map(_starts, tests)), -len(tests)) for path, tests in files.items()}
    items.sort(key=lambda item: order[item.path])


def _starts(item: pytest.Item) -> bool:
    """Whether a test starts processes."""
    return "built" in getattr(item, "fixturenames", ())


def pytest_sessionfinish() -> None:
    remove_buffers()


@pytest.fixture(scope="session")
def built() -> None:
    """The kernels, and what DeepSpeed builds when it starts, are in the cache: for all that starts
    processes, which a timeout may kill.
    """
    process = context().Process(target=build)
    process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode


@pytest.fixture(scope="session")
def ranks(built: None) -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)`: a pool of n ranks."""
    yield from pools_of_ranks()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds by folder, and by test in a file."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    if not seconds:
        return
    folders: dict[str, list[float]] = defaultdict(list)
    for name, duration in seconds.items():
        folders["/".join(name.split("::")[0].split("/")[:2])].append(duration)
    terminalreporter.section("seconds by folder")
    for folder, durations in sorted(folders.items(), key=lambda each: -sum(each[1])):
        terminalreporter.write_line(f"{sum(durations):8.1f}  {len(durations):5} tests  {folder}")
    CACHE.mkdir(parents=True, exist_ok=True)
    longest = sorted(seconds.items(), key=lambda each: -each[1])
    lines = (f"{duration:8.2f}  {name}\n" for name, duration in longest)
    (CACHE / "durations.txt").write_text("".join(lines))
    terminalreporter.write_line(f"by test: {(CACHE / 'durations.txt').relative_to(ROOT)}")
