"""Whether each defect can still be put into the product."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.__main__ import ROOT, missing_tests, place_of, sources
from tests.mutants.defects import PARTS


def test_no_defect_is_stale() -> None:
    texts = {path: path.read_text() for path in sources(ROOT)}
    for defects in PARTS.values():
        for defect in defects:
            assert isinstance(place_of(defect, texts), Path), defect.old
            assert not missing_tests(defect, ROOT), defect.tests
