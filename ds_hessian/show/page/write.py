"""The page itself: one HTML file with figures, the plotting library and the data in it.

The file's content security policy forbids every request, so that it reads the same without network.
The library and the data are compressed; the page unpacks them where it is opened.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ds_hessian.records.base import Measured
from ds_hessian.records.comparison import Comparison
from ds_hessian.records.fields import Array
from ds_hessian.records.files import replacing
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.page.accuracy import accuracy, costs
from ds_hessian.show.page.blocks import blocks
from ds_hessian.show.page.cards import Cards, cards_of
from ds_hessian.show.page.density import TITLE as SPECTRUM
from ds_hessian.show.page.density import spectra
from ds_hessian.show.page.figures import figures
from ds_hessian.show.page.layers import layers
from ds_hessian.show.page.run import SHOWN, Label, Run, Section, step_of
from ds_hessian.show.page.style import TEMPLATE
from ds_hessian.show.page.sweeps import sweeps
from ds_hessian.show.page.systems import systems
from ds_hessian.show.page.training import training
from ds_hessian.show.style import count, micro_batches

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
)
"""All HTML is in them; what is put in is escaped."""


def write_page(run: Run, path: Path) -> Path:
    """Write the page of a run; returns its path.

    Raises:
        OSError: the file cannot be written.
    """
    from plotly.offline import get_plotlyjs

    sections, cards = sections_of(run), cards_of(run)
    stops, measured = _stops(sections), run.labelled(HessianSpectrum)
    page = TEMPLATES.get_template("page.html").render(
        run=run,
        facts=_facts(run),
        notes=_notes(run),
        num_spectra=len(measured),
        warned=[label for label, spectrum in measured if spectrum.warnings],
        spectrum_title=SPECTRUM,
        stops=stops,
        cards=cards,
        sections=sections,
        records=_records(run, path),
        plotly=_packed(get_plotlyjs()),
        data=_packed(_data(sections, cards, stops)),
    )
    with replacing(path) as file:
        file.write(page.encode(errors="replace"))  # a folder's name may be no text
    return path


def sections_of(run: Run) -> list[Section]:
    """Return all sections of the page, from top to bottom."""
    parts = (training, spectra, figures, layers, blocks, systems, sweeps, costs, accuracy)
    return [section for part in parts for section in part(run)]


def _stops(sections: Sequence[Section]) -> list[Label]:
    """Return what the slider selects: every step, and where a step repeats every folder."""
    labels = {
        state.label: None
        for section in sections
        for state in section.states
        if isinstance(state.label, Label)
    }
    return sorted(labels, key=lambda label: label.step)


def _packed(text: str) -> str:
    """Return a text as base64 of its gzip: a third of its size, and safe inside of an element."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _facts(run: Run) -> list[str]:
    """Return the model, the steps and the layout."""
    records = [record for _, record in run.records if isinstance(record, SHOWN)]
    steps, source = sorted({step_of(r) for r in records}), records[-1].provenance
    spectra = run.of(HessianSpectrum)
    when = f"step {steps[0]:,}"
    if len(steps) > 1:
        when = f"{len(steps)} steps from {steps[0]:,} to {steps[-1]:,}"
    size = [f"{count(spectra[-1].n)} parameters"] if spectra else []
    data = micro_batches(source.num_micro_batches)
    return [*size, when, source.layout, source.arithmetic, data]


def _notes(run: Run) -> tuple[str, ...]:
    """Return in what else than the weights the spectra differ."""
    spectra = run.of(HessianSpectrum)
    if len(spectra) < 2:
        return ()
    return Comparison({str(number): s for number, s in enumerate(spectra)}).notes()


def _records(run: Run, path: Path) -> list[tuple[str, Measured, str]]:
    """Return folder, record and the path of its file from the page's; empty if on no disk."""
    return [
        (name, record, _link(run, path, name, record))
        for name, record in run.records
        if isinstance(record, SHOWN)
    ]


def _link(run: Run, path: Path, name: str, record: Measured) -> str:
    if run.folder is None:
        return ""
    file = f"{record.kind}.json"
    below = run.folder / name / file
    target = below if below.exists() else run.folder / file
    return quote(os.fsencode(os.path.relpath(target, path.resolve().parent)))


def _data(
    sections: Iterable[Section], cards: Sequence[tuple[Label, Cards]], stops: Sequence[Label]
) -> str:
    """Return all states as JSON."""
    parts: Any = TEMPLATES.get_template("parts.html").module
    content = {
        "template": TEMPLATE,
        "stops": [{"label": label, "step": label.step} for label in stops],
        "cards": [
            {"label": label, "step": label.step, "html": parts.cards(found)}
            for label, found in cards
        ],
        "sections": [_states(section, parts) for section in sections],
    }
    return json.dumps(content, default=_typed, allow_nan=False, separators=(",", ":"))


def _typed(array: Array) -> dict[str, str]:
    """Return an array as plotly.js reads it: its bytes, which keep every bit and NaN."""
    kind = "f4" if array.dtype == np.float32 else "f8"
    text = base64.b64encode(array.astype(f"<{kind}").tobytes()).decode()
    return {"dtype": kind, "bdata": text, "shape": ", ".join(map(str, array.shape))}


def _states(section: Section, parts: Any) -> list[dict[str, Any]]:
    """Return what the page's script draws for each state; `parts` makes its rows."""
    return [
        {
            "label": state.label,
            "step": state.label.step if isinstance(state.label, Label) else None,
            "rows": parts.rows(state.rows),
            "figures": [
                {
                    "data": chart.figure["data"],
                    "layout": chart.figure["layout"] | {"height": chart.height},
                    "wide": chart.wide,
                }
                for chart in state.charts
            ],
        }
        for state in section.states
    ]
