"""The order of the house (docs/architecture.md), read from the code's own imports."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ds_hessian
from ds_hessian.backends import choices, state

PACKAGE = Path(__file__).parent.parent / "ds_hessian"

# From the ground up. A file imports files of its own room and of the rooms below, wherever in the
# file the import stands. torch, numpy and the standard library are free for all.
ROOMS = (
    ("errors", "version", "display", "table"),
    ("config",),
    ("memory", "optimizer", "defaults"),
    ("ops",),
    ("ranks",),
    ("vectors",),
    ("backends",),
    ("operators",),
    ("krylov",),
    ("records",),
    ("resume",),
    ("planning",),
    ("vector_files",),
    ("analyses",),
    ("show",),
    ("job_vectors",),
    ("job_measuring",),
    ("hessian",),
    ("slices",),
    ("interop",),
    ("schedule",),
    ("hosts",),
    ("checkpoints",),
    ("integrations",),
    ("launch",),
    ("self_test",),
    ("cli",),
    ("megatron",),
    ("__init__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
HOSTS = {
    "deepspeed": ("backends/zero/", "hosts.py", "launch.py", "ops/", "cli/", "checkpoints/"),
    "megatron": ("backends/megatron/", "integrations/megatron_pretrain.py"),
    "transformers": ("integrations/transformers.py", "checkpoints/models.py"),
}


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` is an import of the module.
            names.update(
                name if module_of(name) != module_of(node.module) else node.module
                for name in (f"{node.module}.{alias.name}" for alias in node.names)
            )
    return names


def module_of(name: str) -> Path | None:
    """The file of this package that a dotted name lies in, relative to it; None for others'."""
    first, *rest = name.split(".")
    if first != "ds_hessian":
        return None
    folder = PACKAGE
    for part in rest:
        if (folder / f"{part}.py").exists():
            return (folder / f"{part}.py").relative_to(PACKAGE)
        if not (folder / part).is_dir():
            break
        folder = folder / part
    return (folder / "__init__.py").relative_to(PACKAGE)


FILES = sorted(p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py"))
GRAPH = {
    file: {
        found
        for name in imports(PACKAGE / file)
        if (found := module_of(name)) is not None and found != file
    }
    for file in FILES
}


def room_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def circles(graph: dict[Path, set[Path]]) -> list[set[Path]]:
    """Files that reach each other by imports; a package's own `__init__` counts as a file."""
    reached = {file: reach(graph, file) for file in graph}
    found: list[set[Path]] = []
    for file in graph:
        ring = {other for other in reached[file] if file in reached[other]}
        if ring and ring not in found:
            found.append(ring)
    return found


def reach(graph: dict[Path, set[Path]], start: Path) -> set[Path]:
    """Files that a file imports, and those that these import, and so on."""
    found: set[Path] = set()
    waiting = list(graph[start])
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += graph[file]
    return found


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_imports_its_own_room_and_rooms_below(file: Path) -> None:
    assert room_of(file) in FLOOR, f"{room_of(file)} is a new room: give it a place in the order"
    above = {str(f) for f in GRAPH[file] if room_of(f) != room_of(file)}
    above = {f for f in above if FLOOR[room_of(Path(f))] >= FLOOR[room_of(file)]}
    assert not above


def test_no_two_files_import_each_other_also_not_in_a_ring() -> None:
    assert [sorted(map(str, ring)) for ring in circles(GRAPH)] == []


def test_rings_are_found() -> None:
    a, b, c, d = map(Path, "abcd")
    assert circles({a: {b}, b: {c}, c: {a}, d: {a}}) == [{a, b, c}]
    assert circles({a: {b}, b: {c}, c: set(), d: {a, b}}) == []


@pytest.mark.parametrize("file", FILES, ids=str)
def test_hosts_are_known_in_their_own_modules_only(file: Path) -> None:
    found = {name.split(".")[0] for name in imports(PACKAGE / file)}
    for host, places in HOSTS.items():
        if host in found:
            assert str(file).startswith(places), f"{file} imports {host}"


def test_a_curvature_is_named_in_its_own_room_only() -> None:
    for file in FILES:
        if room_of(file) != "operators":
            text = (PACKAGE / file).read_text()
            assert "FiniteDifferenceHessian" not in text, file


def test_files_by_which_frames_are_told_exist() -> None:
    """One that is renamed would be taken for the model's code."""
    for file in (*choices.BETWEEN, *state.BETWEEN):
        assert Path(file).is_file(), file


def test_no_public_name_is_that_of_a_module() -> None:
    """An import of the module would take its place on the package."""
    for name in ds_hessian.__all__:
        assert not (PACKAGE / f"{name}.py").exists() and not (PACKAGE / name).is_dir(), name


def test_krylov_never_sees_torch_distributed() -> None:
    for path in (PACKAGE / "krylov").glob("*.py"):
        assert not any(n.startswith("torch.distributed") for n in imports(path)), path


WAYS_IN = ("hosts", "megatron", "integrations", "checkpoints", "cli")
IMPORTING = """
import importlib, json, sys
hosts, found = ("deepspeed", "megatron", "transformers", "datasets"), {}
for way_in in sys.argv[1:]:
    importlib.import_module(f"ds_hessian.{way_in}")
    found[way_in] = [host for host in hosts if host in sys.modules]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def hosts_after() -> Any:
    """The hosts that are imported after each way in, one after the other in one process."""
    command = [sys.executable, "-c", IMPORTING, *WAYS_IN]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("way_in", WAYS_IN)
def test_a_way_in_imports_no_host_before_it_is_used(hosts_after: Any, way_in: str) -> None:
    """They take seconds and hundreds of megabytes on each rank, and may not be installed."""
    assert hosts_after[way_in] == []
