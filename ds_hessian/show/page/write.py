"""The page itself: one HTML file with figures, the plotting library and the data in it.

The file's content security policy forbids every request, so that it reads the same without network.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from ds_hessian.records.comparison import Comparison
from ds_hessian.records.fields import Array
from ds_hessian.records.files import replacing
from ds_hessian.records.provenance import Cost
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.page.accuracy import accuracy, costs
from ds_hessian.show.page.blocks import blocks
from ds_hessian.show.page.density import spectra
from ds_hessian.show.page.layers import layers
from ds_hessian.show.page.run import SHOWN, Run, Section, State, step_of
from ds_hessian.show.page.style import TEMPLATE
from ds_hessian.show.page.sweeps import sweeps
from ds_hessian.show.page.systems import systems
from ds_hessian.show.page.training import training
from ds_hessian.show.style import count

EXTRA = "the report page needs plotly, which is not installed: pip install 'ds_hessian[report]'"


def write_page(run: Run, path: Path) -> Path:
    """Write the page of a run; returns its path.

    Raises:
        ImportError: plotly is not installed; the extra `report` has it.
        OSError: the file cannot be written.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(EXTRA) from error
    sections = sections_of(run)
    text = Template(
        files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    ).substitute(
        title=escape(run.name),
        head=_head(run),
        sections="\n".join(_html(number, section) for number, section in enumerate(sections)),
        records=_records(run),
        plotly=get_plotlyjs(),
        data=_data(sections),
    )
    with replacing(path) as file:
        file.write(text.encode())
    return path


def sections_of(run: Run) -> list[Section]:
    """Return all sections of the page, from top to bottom."""
    parts = (training, spectra, layers, blocks, systems, sweeps, costs, accuracy)
    return [section for part in parts for section in part(run)]


def _head(run: Run) -> str:
    """Return the model, the steps and the layout, and a note for each warning."""
    records = [record for _, record in run.records if isinstance(record, SHOWN)]
    steps, source = sorted({step_of(r) for r in records}), records[-1].provenance
    spectra = run.of(HessianSpectrum)
    when = f"step {steps[0]:,}"
    if len(steps) > 1:
        when = f"{len(steps)} steps from {steps[0]:,} to {steps[-1]:,}"
    size = [f"{count(spectra[-1].n)} parameters"] if spectra else []
    facts = [*size, when, source.layout, source.model_dtype, _plural(source.num_micro_batches)]
    lines = [f"<p>{escape(' · '.join(facts))}</p>"]
    if len(spectra) > 1:
        found = Comparison({str(number): s for number, s in enumerate(spectra)})
        lines += [f"<p class='note'>Note: {escape(note)}</p>" for note in found.notes()]
    warned = [f"{step_of(s):,}" for s in spectra if s.warnings]
    if warned:
        where = ", ".join(warned[:8]) + (", ..." if len(warned) > 8 else "")
        text = f"Warnings at {len(warned)} of {len(spectra)} spectra (step {where}): see there."
        lines.append(f"<p class='warning'>{text}</p>")
    return "\n".join(lines)


def _plural(micro_batches: int) -> str:
    return f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"


def _html(number: int, section: Section) -> str:
    """Return a section without its figures, which the script draws."""
    last = len(section.states) - 1
    slots = max(len(state.charts) for state in section.states)
    slider = ""
    if last:
        slider = (
            f"<label class='slider'><input type='range' min='0' max='{last}' value='{last}' "
            f"aria-label='{escape(section.title)}: training step'>"
            f"<output>{escape(section.states[-1].label)}</output></label>"
        )
    elif section.states[0].label:
        slider = f"<p class='slider'><output>{escape(section.states[0].label)}</output></p>"
    return (
        f"<section id='section-{number}'><h2>{escape(section.title)}</h2>"
        f"<p class='about'>{escape(section.text)}</p>{slider}"
        f"<div class='rows'>{_rows(section.states[-1])}</div>"
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


def _data(sections: Iterable[Section]) -> str:
    """Return all states as JSON that is safe inside of a script element."""
    content = {"template": TEMPLATE, "sections": [_states(section) for section in sections]}
    text = json.dumps(content, default=_typed, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _typed(array: Array) -> dict[str, str]:
    """Return an array as plotly.js reads it: its bytes, which keep every bit and NaN."""
    kind = "f4" if array.dtype == np.float32 else "f8"
    text = base64.b64encode(array.astype(f"<{kind}").tobytes()).decode()
    return {"dtype": kind, "bdata": text, "shape": ", ".join(map(str, array.shape))}


def _states(section: Section) -> list[dict[str, Any]]:
    return [
        {
            "label": state.label,
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


def _records(run: Run) -> str:
    """Return a row for each record, with its cost."""
    titles = ("step", "record", "folder", "products", "gradients each", "seconds each", "seconds")
    shown = [(name, record) for name, record in run.records if isinstance(record, SHOWN)]
    rows = [
        (f"{step_of(record):,}", record.kind.replace("_", " "), name, *_cost(record.cost))
        for name, record in shown
    ]
    versions = {record.provenance.ds_hessian_version for _, record in shown}
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return (
        f"<details><summary>Records: {len(shown)}</summary><div class='scroll'><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
        f"<p class='about'>ds_hessian {escape(', '.join(sorted(versions)))}</p>"
    )


def _cost(cost: Cost) -> tuple[str, ...]:
    return (
        f"{cost.products:,}",
        f"{cost.gradients_per_product:.2f}",
        f"{cost.seconds_per_product:.3g}",
        f"{cost.seconds_total:.3g}",
    )


def _cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in row)
