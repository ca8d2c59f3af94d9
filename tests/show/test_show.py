"""Pictures and progress: they come out for every kind of spectrum, and do not spam."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ds_hessian.krylov import slq
from ds_hessian.show.progress import SpectrumProgress
from tests.records.makers import DenseOperator, language_model_like, semicircle, spectrum_of


@pytest.mark.parametrize(
    ("eigenvalues", "m", "probes", "panels"),
    [
        (language_model_like(2000), 20, 2, 4),
        (language_model_like(2000) * 1e-9, 20, 1, 4),
        (semicircle(500), 20, 1, 2),
        (np.zeros(50), 5, 1, 2),
        (np.ones(50), 5, 2, 2),
        (semicircle(100), 1, 1, 2),
    ],
    ids=["outliers", "tiny", "bulk", "zero", "identity", "one product"],
)
def test_every_spectrum_has_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eigenvalues, m, probes, panels
):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kw: drawn.append(self))
    spectrum_of(eigenvalues, m, probes, 1e-3).plot(tmp_path / "spectrum.png")
    figure = drawn[0]
    assert len(figure.axes) == panels  # the bulk is enlarged where outliers are far away
    for axes in figure.axes:
        assert np.isfinite([*axes.get_xlim(), *axes.get_ylim()]).all()
    text = " ".join(entry.get_text() for entry in figure.texts)
    parts = ["step 500", "loss 2.7", "largest", "trace", "smoothing", "noise of a product"]
    parts.append("no band: one probe" if probes == 1 else "band: 95 % over probes")
    for part in parts:
        assert part in text


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
