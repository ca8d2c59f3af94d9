"""The distributions install and work from another folder, kernels included."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import cells

ROOT = Path(__file__).parent.parent
LEFT_OUT = (".git", ".venv", ".cache", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
USE = """
import sys, torch, ds_hessian
assert ds_hessian.__file__.startswith(sys.argv[1]), ds_hessian.__file__
from ds_hessian import ops
v = torch.arange(5, dtype=torch.float32)
assert ops.dots([(v, v)], 5).item() == 30.0
print(ops.report())
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist of the tree, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("release")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree)]
    subprocess.run(command, check=True, capture_output=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.mark.parametrize("kind", cells(["sdist", "wheel"], ["sdist"]))
def test_a_distribution_installs_and_its_kernels_work_in_another_folder(
    distributions: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    command += ["--no-build-isolation", "--target", str(target), str(distributions[kind])]
    subprocess.run(command, check=True, capture_output=True)
    environment = os.environ | {"PYTHONPATH": str(target)}
    run = [sys.executable, "-c", USE, str(target)]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "native" in done.stdout


def test_the_metadata_is_in_order(distributions: dict[str, Path]) -> None:
    files = [str(path) for path in distributions.values()]
    check = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files])
    assert check.returncode == 0
