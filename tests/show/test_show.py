"""Pictures and progress: they come out for every kind of spectrum, and do not spam."""

from __future__ import annotations

import io
import itertools
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_hessian.krylov import slq
from ds_hessian.show.progress import SpectrumProgress
from tests.records.makers import DenseOperator, language_model_like, semicircle, spectrum_of
from tests.tiers import cells

SPECTRA = {
    "outliers": (language_model_like(2000), 20, 2),
    "tiny": (language_model_like(2000) * 1e-9, 20, 1),
    "bulk": (semicircle(500), 20, 1),
    "zero": (np.zeros(50), 5, 1),
    "long numbers": (np.append(np.linspace(-0.0012, 0.0022, 400), [0.044, 0.066]), 30, 1),
    "identity": (np.ones(50), 5, 2),
    "one product": (semicircle(100), 1, 1),
    "sixty": (np.concatenate([0.3 * semicircle(3000), np.geomspace(2, 900, 60)]), 110, 1),
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would have been written."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kw: figures.append(self))
    return figures


@pytest.mark.parametrize("name", cells(SPECTRA, ["long numbers", "outliers", "tiny"]))
def test_every_spectrum_has_a_picture_whose_texts_do_not_overlap(
    tmp_path: Path, drawn: list[Any], name: str
) -> None:
    spectrum = spectrum_of(*SPECTRA[name], 1e-3)
    spectrum.plot(tmp_path / "spectrum.png")
    (figure,) = drawn
    assert len(figure.axes) == 3
    for axes in figure.axes:
        assert np.isfinite([*axes.get_xlim(), *axes.get_ylim()]).all()
    text = " ".join(entry.get_text() for entry in figure.texts)
    for part in ("step 500", "loss 2.7", "trace", "noise", "the largest is"):
        assert part in text or (name == "zero" and "All 50 eigenvalues are 0." in text)
    assert overlapping(figure) == []


def overlapping(figure: Any) -> list[tuple[str, str]]:
    """Return pairs of texts of a figure that share pixels, the numbers at ticks included."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    texts = [*figure.texts, *figure.legends[0].get_texts()]
    for axes in figure.axes:
        texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label, axes._left_title]
        texts += [label for axis in (axes.xaxis, axes.yaxis) for label in shown_ticks(axis)]
    boxes = [
        (text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()
    ]
    pairs = itertools.combinations(boxes, 2)
    return [(a, b) for (a, one), (b, other) in pairs if one.padded(-1).overlaps(other.padded(-1))]


def shown_ticks(axis: Any) -> list[Any]:
    low, high = sorted(axis.get_view_interval())
    return [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high]


def test_outliers_are_marked_with_their_values(tmp_path: Path):
    path = spectrum_of(np.append(semicircle(2000), [8.0, -3.0]), m=20).plot(tmp_path / "new/s.svg")
    import re

    # Glyphs are paths in SVG, but matplotlib writes the text as a comment beside them.
    comments = re.findall(r"<!-- (.*?) -->", path.read_text())
    assert {"8", "-3"} <= set(comments)


def test_plotting_needs_no_display_and_leaves_pyplot_alone(tmp_path: Path):
    code = (
        "import sys; import ds_hessian.records; assert 'matplotlib' not in sys.modules\n"
        "from tests.records.makers import *\n"
        f"spectrum_of(semicircle(100), 5).plot({str(tmp_path / 's.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root)
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _measure(enabled: bool, m: int = 20, probes: int = 2) -> None:
    operator = DenseOperator(np.append(semicircle(300), [5.0, -4.0]))
    with SpectrumProgress(m * probes, enabled) as progress:
        slq(operator, operator.layout, m, probes, 0, progress=progress.update)


def test_a_terminal_gets_a_bar_with_the_extreme_values(monkeypatch: pytest.MonkeyPatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    _measure(True)
    assert "40/40" in terminal.getvalue()
    assert "eigenvalues -4 .. 5" in terminal.getvalue()


def test_a_log_file_gets_a_handful_of_lines(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="ds_hessian.show.progress"):
        _measure(True)
    assert 1 <= len(caplog.records) <= 5
    assert "40 of 40 products, 0 s left, eigenvalues -4 .. 5" in caplog.messages[-1]


def test_other_ranks_are_quiet(caplog: pytest.LogCaptureFixture, capsys):
    with caplog.at_level(logging.INFO):
        _measure(False)
    assert not caplog.records and capsys.readouterr() == ("", "")


def test_fewer_products_than_announced_still_report_sensibly(caplog: pytest.LogCaptureFixture):
    operator = DenseOperator(np.arange(1.0, 4.0))
    with (
        caplog.at_level(logging.INFO, logger="ds_hessian.show.progress"),
        SpectrumProgress(30) as progress,
    ):
        slq(operator, operator.layout, 30, 1, 0, progress=progress.update)
    assert progress.done == 3 and len(caplog.records) <= 5
