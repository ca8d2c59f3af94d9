"""The table of estimates in docs/kernels.md is the one that its script prints."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_roofline_table_is_the_scripts() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "roofline.py"))
    assert script["table"]() in (ROOT / "docs" / "kernels.md").read_text()
