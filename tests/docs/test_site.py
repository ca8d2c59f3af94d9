"""The documentation site builds without a warning, and has every public name."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("backends", "integrations", "krylov", "megatron", "records")
PUBLIC = ["ds_hessian", *(f"ds_hessian.{part}" for part in PARTS)]

pytest.importorskip("sphinx", reason="needs the extra docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = ["-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-d", out / "doctrees"]
    done = subprocess.run(
        [sys.executable, *command, ROOT / "docs", out / "html"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.mark.full
def test_every_page_and_public_name_is_on_the_site(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if not (site / page.with_suffix(".html")).exists()] == []
    header, entries = 4, (site / "objects.inv").read_bytes()
    names = zlib.decompress(entries.split(b"\n", header)[header]).decode()
    documented = {line.split(" ")[0] for line in names.splitlines() if " py:" in line}
    public = {
        f"{module}.{name}": f"{value.__module__}.{value.__qualname__}"
        for module in PUBLIC
        for name, value in public_values(module)
        if inspect.isclass(value) or inspect.isfunction(value)
    }
    assert len(public) > 50
    assert [name for name, home in public.items() if not {name, home} & documented] == []


def public_values(module: str) -> list[tuple[str, Any]]:
    found = importlib.import_module(module)
    return [(name, getattr(found, name)) for name in found.__all__]
