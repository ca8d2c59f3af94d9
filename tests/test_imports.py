"""The import order of docs/architecture.md, read from the code's own imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ds_hessian"

# part: the parts it may import. torch, numpy and the standard library are free for all.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "ops": {"errors"},
    "memory": set(),
    "vectors": {"ops", "ranks", "errors"},
    "ranks": {"errors"},
    "backends": {"ranks", "vectors", "ops", "memory", "config", "errors"},
    "operators": {"backends", "ranks", "vectors", "ops", "memory", "errors"},
    "krylov": {"operators", "ranks", "vectors", "ops", "memory", "errors"},
    "records": {"krylov", "show", "errors"},
    "show": {"records", "krylov", "errors"},
}
JOINING = {
    "analyses",
    "engine",
    "measurement",
    "schedule",
    "plan",
    "products",
    "provenance",
    "resume",
    "self_test",
    "timing",
    "megatron",
    "cli",
    "integrations",
    "launch",
    "vector_files",
}  # may import everything
HOSTS = {
    "deepspeed": ("backends/zero/", "engine.py", "provenance.py", "launch.py", "ops/", "cli/"),
    "megatron": ("backends/megatron/", "megatron/"),
    "transformers": ("integrations/",),
}


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


FILES = sorted(p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_part_imports_only_parts_to_its_left(file: Path) -> None:
    part = file.parts[0].removesuffix(".py")
    if part == "__init__" or part in JOINING:
        return
    assert part in ALLOWED, f"{part} is a new part: give it a place in the import order"
    own = {n.split(".")[1] for n in imports(PACKAGE / file) if n.startswith("ds_hessian.")}
    assert own - {part} <= ALLOWED[part]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_hosts_are_known_in_their_own_modules_only(file: Path) -> None:
    found = {name.split(".")[0] for name in imports(PACKAGE / file)}
    for host, places in HOSTS.items():
        if host in found:
            assert str(file).startswith(places), f"{file} imports {host}"


def test_krylov_never_sees_torch_distributed() -> None:
    for path in (PACKAGE / "krylov").glob("*.py"):
        assert not any(n.startswith("torch.distributed") for n in imports(path)), path
