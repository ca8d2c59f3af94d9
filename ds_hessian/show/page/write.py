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
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

import numpy as np

from ds_hessian.records.base import Measured
from ds_hessian.records.comparison import Comparison
from ds_hessian.records.fields import Array
from ds_hessian.records.files import replacing
from ds_hessian.records.provenance import Cost
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.page.accuracy import accuracy, costs
from ds_hessian.show.page.blocks import blocks
from ds_hessian.show.page.cards import Cards, cards_html, cards_of
from ds_hessian.show.page.density import TITLE as SPECTRUM
from ds_hessian.show.page.density import spectra
from ds_hessian.show.page.layers import layers
from ds_hessian.show.page.run import SHOWN, Label, Run, Section, State, step_of
from ds_hessian.show.page.style import TEMPLATE
from ds_hessian.show.page.sweeps import sweeps
from ds_hessian.show.page.systems import systems
from ds_hessian.show.page.training import training
from ds_hessian.show.style import count

MOST_LINKS = 8
"""Steps with warnings that are named at the top of the page."""


def write_page(run: Run, path: Path) -> Path:
    """Write the page of a run; returns its path.

    Raises:
        OSError: the file cannot be written.
    """
    from plotly.offline import get_plotlyjs

    sections, found = sections_of(run), cards_of(run)
    stops = _stops(sections)
    page = Template(
        files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    ).substitute(
        title=escape(run.name),
        head=_head(run, stops, sections),
        slider=_slider(stops),
        cards=cards_html(found[-1][1]) if found else "",
        contents="".join(
            f"<a href='#section-{number}'>{escape(section.title)}</a>"
            for number, section in enumerate(sections)
        ),
        sections="\n".join(_html(number, section) for number, section in enumerate(sections)),
        records=_records(run, path),
        plotly=_packed(get_plotlyjs()),
        data=_packed(_data(sections, found, stops)),
    )
    with replacing(path) as file:
        file.write(page.encode())
    return path


def sections_of(run: Run) -> list[Section]:
    """Return all sections of the page, from top to bottom."""
    parts = (training, spectra, layers, blocks, systems, sweeps, costs, accuracy)
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


def _slider(stops: Sequence[Label]) -> str:
    if not stops:
        return ""
    if len(stops) == 1:
        return f"<p class='at'>{escape(stops[0])}</p>"
    last = len(stops) - 1
    return (
        f"<div id='steps'><input type='range' min='0' max='{last}' value='{last}' "
        f"aria-label='training step'><output>{escape(stops[-1])}</output></div>"
    )


def _packed(text: str) -> str:
    """Return a text as base64 of its gzip: a third of its size, and safe inside of an element."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _head(run: Run, stops: Sequence[Label], sections: Sequence[Section]) -> str:
    """Return the model, the steps and the layout, and a note for each warning."""
    records = [record for _, record in run.records if isinstance(record, SHOWN)]
    steps, source = sorted({step_of(r) for r in records}), records[-1].provenance
    spectra = run.of(HessianSpectrum)
    when = f"step {steps[0]:,}"
    if len(steps) > 1:
        when = f"{len(steps)} steps from {steps[0]:,} to {steps[-1]:,}"
    size = [f"{count(spectra[-1].n)} parameters"] if spectra else []
    facts = [*size, when, source.layout, source.arithmetic, _plural(source.num_micro_batches)]
    lines = [f"<p>{escape(' · '.join(facts))}</p>"]
    if len(spectra) > 1:
        found = Comparison({str(number): s for number, s in enumerate(spectra)})
        lines += [f"<p class='note'>Note: {escape(note)}</p>" for note in found.notes()]
    every = run.labelled(HessianSpectrum)
    warned = [label for label, s in every if s.warnings]
    if warned:
        shown = [section.title for section in sections].index(SPECTRUM)
        links = [
            f"<a href='#section-{shown}' data-stop='{stops.index(label)}'>{escape(label)}</a>"
            for label in warned[:MOST_LINKS]
        ]
        more = ", ..." if len(warned) > MOST_LINKS else ""
        text = f"Warnings at {len(warned)} of {len(every)} spectra: {', '.join(links)}{more}"
        lines.append(f"<p class='warning'>{text}</p>")
    return "\n".join(lines)


def _plural(micro_batches: int) -> str:
    return f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"


def _html(number: int, section: Section) -> str:
    """Return a section without its figures, which the script draws."""
    slots = max(len(state.charts) for state in section.states)
    last = section.states[-1]
    at = f"<p class='at'>{escape(last.label)}</p>" if last.label else ""
    return (
        f"<section id='section-{number}'><h2>{escape(section.title)}</h2>"
        f"<p class='about'>{escape(section.text)}</p>{at}"
        f"<div class='rows'>{_rows(last)}</div>"
        f"<div class='figures'>{'<div></div>' * slots}</div></section>"
    )


def _rows(state: State) -> str:
    if not state.rows:
        return ""
    rows = [
        f"<div class='{'warning' if name == 'warning' else 'row'}'>"
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
        for name, text in state.rows
    ]
    return f"<dl>{''.join(rows)}</dl>"


def _data(
    sections: Iterable[Section], cards: Sequence[tuple[Label, Cards]], stops: Sequence[Label]
) -> str:
    """Return all states as JSON."""
    content = {
        "template": TEMPLATE,
        "stops": [{"label": label, "step": label.step} for label in stops],
        "cards": [
            {"label": label, "step": label.step, "html": cards_html(found)}
            for label, found in cards
        ],
        "sections": [_states(section) for section in sections],
    }
    return json.dumps(content, default=_typed, allow_nan=False, separators=(",", ":"))


def _typed(array: Array) -> dict[str, str]:
    """Return an array as plotly.js reads it: its bytes, which keep every bit and NaN."""
    kind = "f4" if array.dtype == np.float32 else "f8"
    text = base64.b64encode(array.astype(f"<{kind}").tobytes()).decode()
    return {"dtype": kind, "bdata": text, "shape": ", ".join(map(str, array.shape))}


def _states(section: Section) -> list[dict[str, Any]]:
    return [
        {
            "label": state.label,
            "step": state.label.step if isinstance(state.label, Label) else None,
            "rows": _rows(state),
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


def _records(run: Run, path: Path) -> str:
    """Return a row for each record, with its cost and links to its files."""
    titles = ("step", "record", "folder", "products", "gradients each", "seconds each", "seconds")
    shown = [(name, record) for name, record in run.records if isinstance(record, SHOWN)]
    rows = [
        (f"{step_of(r):,}", _linked(run, path, name, r), escape(name), *_cost(r.cost))
        for name, r in shown
    ]
    versions = {record.provenance.ds_hessian_version for _, record in shown}
    head = "".join(f"<th>{title}</th>" for title in titles)
    cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return (
        f"<details><summary>Records: {len(shown)}</summary><div class='scroll'><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
        f"<p class='about'>ds_hessian {escape(', '.join(sorted(versions)))}</p>"
    )


def _linked(run: Run, path: Path, name: str, record: Measured) -> str:
    """Return the name of a record as a link to its file, from where the page is."""
    text = escape(record.kind.replace("_", " "))
    if run.folder is None:
        return text
    place = run.folder if name == run.folder.resolve().name else run.folder / name
    target = os.path.relpath((place / f"{record.kind}.json").resolve(), path.resolve().parent)
    return f"<a href='{escape(quote(target))}'>{text}</a>"


def _cost(cost: Cost) -> tuple[str, ...]:
    return (
        f"{cost.products:,}",
        f"{cost.gradients_per_product:.2f}",
        f"{cost.seconds_per_product:.3g}",
        f"{cost.seconds_total:.3g}",
    )
