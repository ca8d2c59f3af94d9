"""Records as tables: a headline, and a row for each figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ds_hessian.records.alignment import HessianAlignment
from ds_hessian.records.analyses import (
    HessianBlockCoupling,
    HessianEigenpairs,
    HessianInfluence,
    HessianOffBlockShare,
    HessianSharpness,
    HessianSolution,
    HessianTrace,
)
from ds_hessian.records.base import Measured, Record
from ds_hessian.records.block_spectra import HessianBlockSpectra
from ds_hessian.records.comparison import Comparison
from ds_hessian.records.curvatures import HessianCurvatures
from ds_hessian.records.decomposition import HessianDecomposition
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.kronecker import HessianKronecker
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.records.sweep import DisplacementSweep
from ds_hessian.records.verdict import SelfTest
from ds_hessian.show.layers import layer_shares
from ds_hessian.show.spectrum_table import of_block, of_sides, spectrum_headline, spectrum_rows
from ds_hessian.show.style import MATRICES, PHRASES, barred, micro_batches
from ds_hessian.table import Table

Rows = list[tuple[str, str]]

MOST_ROWS = 12
"""Rows of a list of blocks or examples; those left out are counted."""
MOST_LETTERS = 28
"""Letters of a parameter's name in a table of many columns."""
MOST_LAYERS = 3
"""Layers that are named for each eigenvector."""


def table(record: Record) -> Table:
    """Return the table of a record, which is text.

    Raises:
        TypeError: there is no table of this class of records.
    """
    make = TABLES.get(type(record))
    if make is None:
        raise TypeError(f"no table is known for {type(record).__name__}: add one to TABLES")
    return make(record)


def lined(headline: str, rows: Rows) -> Table:
    """Return a headline, and a line for each row."""
    return Table(headline, rows, first=20, gap=1)


def _measured(title: str, rows: Callable[[Any], Rows]) -> Callable[[Any], Table]:
    """Return a function that tabulates a record: the step in the first line, the cost in the last
    rows. The title has `{0}` or `{1}` for the name of the matrix, in a title or in a sentence.
    """

    def make(record: Measured) -> Table:
        source = record.provenance
        name = title.format(MATRICES[source.operator], PHRASES[source.operator])
        last = [("cost", _price(record)), ("measured on", _measured_on(record))]
        if source.passes:
            last.insert(1, ("passes", source.passes))
        if source.outputs is not None:
            last.insert(1, ("matrix", f"{MATRICES[source.operator]}, {source.outputs}"))
        return lined(f"{name} at step {source.step}", rows(record) + last)

    return make


def _price(record: Measured) -> str:
    text = f"{record.cost.products} products, {record.cost.seconds_total:.3g} s in all"
    sides = of_sides(record.provenance, record.cost)
    return f"{text}; {sides}" if sides else text


def _measured_on(record: Measured) -> str:
    source = record.provenance
    where = f"{source.layout}, {source.arithmetic}, {micro_batches(source.num_micro_batches)}"
    return where + of_block(source)


def _spectrum(spectrum: HessianSpectrum) -> Table:
    return lined(spectrum_headline(spectrum), spectrum_rows(spectrum))


def _missed(limited: tuple[bool, ...]) -> str:
    """Say why a tolerance was not reached."""
    return "limited by the products" if any(limited) else "not converged"


def eigenvalue_rows(pairs: HessianEigenpairs) -> Rows:
    """Return a row for each eigenvalue."""
    rows = []
    for i, pair in enumerate(zip(pairs.values, pairs.errors, strict=True)):
        note = "" if pairs.converged[i] else f" ({_missed(pairs.limited[i : i + 1])})"
        rows.append((f"eigenvalue {i + 1}", f"{Estimate(*map(float, pair))}{note}"))
    return rows


def _eigenpairs(pairs: HessianEigenpairs) -> Rows:
    shares = layer_shares(pairs)
    rows = eigenvalue_rows(pairs)
    for i, (name, text) in enumerate(rows):
        largest = sorted(shares, key=lambda layer: -shares[layer][i])[:MOST_LAYERS]
        named = ", ".join(f"{layer} {100 * shares[layer][i]:.0f} %" for layer in largest)
        notes = [f"in {named}"] if named else []
        if len(pairs.participation):
            notes.insert(0, f"IPR {pairs.participation[i]:.2g}")
        if len(pairs.sampling_errors):
            notes.insert(0, f"sampling error {pairs.sampling_errors[i]:.2g}")
        rows[i] = (name, ", ".join([text, *notes]))
    return [*rows, ("products", f"{pairs.num_matvecs}, {pairs.restarts} restarts")]


def _trace(trace: HessianTrace) -> Rows:
    rows = [
        ("trace", str(Estimate(trace.value, trace.error))),
        ("99 % interval", f"± {trace.bound:.2g}, the products' errors included"),
    ]
    if trace.frobenius is not None:
        rows.append(("Frobenius norm", str(Estimate(*trace.frobenius))))
    rows.append(("method", f"{trace.method}, {trace.num_matvecs} products"))
    pairs = zip(trace.blocks, trace.block_values, trace.block_errors, strict=True)
    blocks = [(f"block {name}", str(Estimate(float(v), float(e)))) for name, v, e in pairs]
    return rows + _shortened(blocks, "blocks")


def system_rows(systems: HessianSolution | HessianInfluence) -> Rows:
    """Return how far each damped system is solved, and a warning where one is indefinite."""
    rows = []
    for i, damping in enumerate(systems.dampings):
        notes = [f"|r| / |b| = {systems.residuals[i]:.1e}"]
        if not systems.converged[i]:
            notes.append(_missed(systems.limited[i : i + 1]))
        rows.append((f"damping {damping:.4g}", ", ".join(notes)))
    indefinite = [f"{d:.4g}" for d in systems.dampings[systems.negative_curvature]]
    if indefinite:
        matrix = PHRASES[systems.provenance.operator]
        text = f"{matrix} + damping I has negative curvature at damping {', '.join(indefinite)}"
        rows.append(("warning", text))
    return rows


def solution_rows(solution: HessianSolution) -> Rows:
    """Return how far each system is solved, by what, and the smallest curvature seen."""
    steps = ", ".join(str(count) for count in solution.steps)
    lowest = str(Estimate(*solution.curvature))
    return [
        *system_rows(solution),
        ("method", solution.method),
        ("steps", steps),
        ("smallest curvature seen", lowest),
    ]


def _influence(influence: HessianInfluence) -> Rows:
    scores, errors = influence.scores[0], influence.errors[0]
    order = sorted(range(len(scores)), key=lambda i: -abs(scores[i]))
    rows = [
        (f"example {i}", f"score {Estimate(float(scores[i]), float(errors[i]))}") for i in order
    ]
    return [
        ("query's loss", f"{influence.query_loss:.4g}"),
        *system_rows(influence),
        ("scores", f"of {len(scores)} examples at damping {influence.dampings[0]:.4g}"),
        *_shortened(rows, "examples"),
    ]


def _sharpness(sharpness: HessianSharpness) -> Table:
    text = f"largest eigenvalue {sharpness.eigenvalue_max}"
    if sharpness.preconditioned is not None:
        text += f", preconditioned {sharpness.preconditioned}"
    if not all(sharpness.converged):
        text += f" ({_missed(sharpness.limited)})"
    step = sharpness.provenance.step
    matrix = MATRICES[sharpness.provenance.operator]
    return Table(f"{matrix} sharpness at step {step}: {text}; {sharpness.num_matvecs} products")


def _block_coupling(coupling: HessianBlockCoupling) -> Table:
    """Tabulate each block, and the mean."""
    c, source = coupling, coupling.provenance
    title = f"Coupling of the blocks of {PHRASES[source.operator]} at step {source.step}"
    columns = (c.relative_errors, c.null_relative_errors, c.cosines, c.null_cosines)
    figures = np.column_stack(columns)
    cells = [[f"{value:.3f}" for value in row] for row in [*figures, figures.mean(0)]]
    return Table(
        title,
        [(name, *row) for name, row in zip([*c.names, "mean"], cells, strict=True)],
        head=("block", "relative error", " null", "cosine", " null"),
        notes=[f"{c.share:.3f} of |Hv|^2 is made by off-diagonal blocks; {_measured_on(c)}"],
    )


def block_spectra_rows(spectra: HessianBlockSpectra) -> Rows:
    """Return the extremes and the trace of each block, and the mean distance of the blocks."""
    s, rows = spectra, list[tuple[str, str]]()
    for i, name in enumerate(s.names):
        top, bottom, trace = (
            Estimate(float(values[i]), float(errors[i]))
            for values, errors in (
                (s.largest, s.largest_errors),
                (s.smallest, s.smallest_errors),
                (s.traces, s.trace_errors),
            )
        )
        rows.append((f"block {name}", f"{bottom} .. {top}, trace {trace}"))
    floor = float(np.nanmax(s.floors, initial=0.0)) if not np.isnan(s.floors).all() else None
    known = "not known from one probe" if floor is None else f"at most {floor:.2f}"
    return [
        *_shortened(rows, "blocks"),
        ("mean distance", f"{s.heterogeneity:.3f} between blocks; within a block {known}"),
    ]


def _reasons(what: str, layers: Mapping[str, str]) -> list[str]:
    """Return a line for each of these layers, and one that counts those beyond MOST_ROWS."""
    lines = [f"{what}: {_ended(name)}, {reason}" for name, reason in layers.items()]
    if len(lines) > MOST_ROWS:
        lines[MOST_ROWS:] = [f"{what}: {len(lines) - MOST_ROWS} others"]
    return lines


def _kronecker(found: HessianKronecker) -> Table:
    """Tabulate each layer and kind."""
    k, source, rows = found, found.provenance, list[tuple[str, ...]]()
    for i, name in enumerate(k.layers):
        for j, kind in enumerate(k.kinds):
            figures = (
                barred(k.cosines[i, j], k.cosine_errors[i, j]),
                _estimated(k.scales[i, j], k.scale_errors[i, j]),
                barred(k.shares[i, j], k.share_errors[i, j]),
                _estimated(k.extremes[i, j], k.extreme_errors[i, j]),
                barred(k.solves[i, j], k.solve_errors[i, j]),
                f"{k.samples[i, j]:,d}",
            )
            rows.append((_ended(name) if j == 0 else "", f"{kind:<11}", *figures))
        plain = barred(k.plain_shares[i], k.plain_share_errors[i])
        rows.append(("", "parameters ", "", "", plain, "", "", ""))
    without = _reasons("left out", k.left_out) + _reasons("no figures", k.unknown)
    without += _reasons("no solve", k.unsolved)
    return Table(
        f"Kronecker factors beside {PHRASES[source.operator]} at step {source.step}",
        rows,
        head=(
            *("layer", "kind       ", "cosine", "best scale"),
            *("diagonal share", "largest", "solve", "samples"),
        ),
        notes=[f"{_price(k)}; {_measured_on(k)}", *without],
    )


def _estimated(value: float, error: float) -> str:
    """Return a figure with its error, or nan alone."""
    return str(value) if math.isnan(value) else str(Estimate(float(value), float(error)))


def _ended(name: str) -> str:
    """Return a parameter's name, of a long one its end."""
    return name if len(name) <= MOST_LETTERS else f"...{name[3 - MOST_LETTERS :]}"


def _off_block_share(share: HessianOffBlockShare) -> Rows:
    return [
        ("off-block share", str(Estimate(share.value, share.error))),
        ("without structure", f"{share.null:.3f}"),
        ("products' errors", f"add at most {share.noise:.2g}"),
    ]


def _sweep(sweep: DisplacementSweep) -> Rows:
    rows = []
    for name in sweep.directions:
        h = sweep.displacements[sweep.best(name)]
        rows.append((f"v'Hv, {name}", f"{sweep.plateau(name)} at h = {h:.2g}"))
    low, high = sweep.displacements[[0, -1]]
    return [*rows, ("displacements", f"{len(sweep.displacements)}: {low:.2g} .. {high:.2g}")]


def _comparison(comparison: Comparison) -> Table:
    """Tabulate each spectrum, extreme eigenvalues and trace with their errors, then notes."""
    head, rows = ("", "step", "loss", "largest", "smallest", "trace", "outliers"), []
    for name, s in comparison.spectra.items():
        loss = "-" if s.loss is None else f"{s.loss:.4g}"
        extremes = (str(s.eigenvalue_max), str(s.eigenvalue_min), str(s.trace))
        number = str(len(s.outlier_eigenvalues()))
        rows.append((name, str(s.provenance.step), loss, *extremes, number))
    return Table("", rows, head=head, notes=[f"note: {note}" for note in comparison.notes()])


def _self_test(verdict: SelfTest) -> Table:
    failed = sum(not check.passed for check in verdict.checks)
    text = "all is well" if not failed else f"{failed} of {len(verdict.checks)} checks failed"
    rows = []
    for check in verdict.checks:
        mark = "ok    " if check.passed else "FAILED"
        rows.append((f"{mark} {check.name}", f"{check.value:.1e}  (limit {check.limit:.1e})"))
        if not check.passed:
            rows.append(("", check.meaning))
    error = f"error {verdict.error:.1e} at h = {verdict.displacement:.2e}"
    notes = [f"  products of random vectors: {error}"]
    notes += [f"  suggestion: {text}" for text in verdict.suggestions]
    return Table(f"Hessian self-test: {text}", rows, notes=notes, first=23)


def _curvatures(record: HessianCurvatures) -> Rows:
    return [(name, str(record.along(name))) for name in record.directions]


def _decomposition(parts: HessianDecomposition) -> Table:
    rows = [
        (
            f"{MATRICES[name]}",
            f"largest {s.eigenvalue_max}, smallest {s.eigenvalue_min}, trace {s.trace}",
        )
        for name, s in parts.spectra.items()
    ]
    rows += [
        ("tr G + tr R - tr H", str(parts.closure)),
        ("|R| / |H|", f"{parts.share_of_residual:.3g}"),
        ("negative eigenvalues", f"sum {parts.negative('hessian')} in H"),
        ("", f"sum {parts.negative('residual')} in R, of which {parts.surviving} is left in H"),
        ("outputs", str(parts.gauss_newton.provenance.outputs)),
    ]
    return lined(f"H = G + R at step {parts.provenance.step}", rows)


def _alignment(alignment: HessianAlignment) -> Rows:
    pairs = zip(alignment.values, alignment.errors, strict=True)
    rows = [(f"eigenvalue {i + 1}", str(Estimate(*map(float, p)))) for i, p in enumerate(pairs)]
    rows = _shortened(rows, "eigenvalues")
    if alignment.next_value is not None:
        rows.append(("the next one", str(alignment.next_value)))
    known = f"known to within {math.degrees(alignment.angle):.2g} degrees"
    definite = known if alignment.angle < math.pi / 2 else "not told apart from the next directions"
    rows.append(("their space", definite))
    chance = f"{len(alignment.values) / alignment.n:.2g}"
    rows += [
        (f"share of the {name}", f"{share}, of a random direction {chance}")
        for name, share in (("gradient", alignment.gradient), ("update", alignment.update))
        if share is not None
    ]
    if alignment.overlap is not None:
        angles = ", ".join(f"{math.degrees(a):.3g}" for a in alignment.principal_angles[:MOST_ROWS])
        rows.append(("overlap with before", str(alignment.overlap)))
        rows.append(("angles in degrees", angles))
    return rows


def _shortened(rows: Rows, what: str) -> Rows:
    left = len(rows) - MOST_ROWS
    return rows if left <= 0 else [*rows[:MOST_ROWS], (f"other {what}", str(left))]


TABLES: dict[type[Record], Callable[[Any], Table]] = {
    HessianSpectrum: _spectrum,
    HessianEigenpairs: _measured("{0} eigenpairs", _eigenpairs),
    HessianTrace: _measured("{0} trace", _trace),
    HessianSolution: _measured("Solutions with the inverse of {1}", solution_rows),
    HessianInfluence: _measured("Influence of examples", _influence),
    HessianAlignment: _measured("Alignment with the top eigenspace", _alignment),
    HessianSharpness: _sharpness,
    HessianBlockCoupling: _block_coupling,
    HessianBlockSpectra: _measured("Spectra of the blocks of {1}", block_spectra_rows),
    HessianKronecker: _kronecker,
    HessianOffBlockShare: _measured("Off-block share of {1}", _off_block_share),
    DisplacementSweep: _measured("Curvature against scale", _sweep),
    Comparison: _comparison,
    HessianDecomposition: _decomposition,
    HessianCurvatures: _measured("Curvature along directions", _curvatures),
    SelfTest: _self_test,
}
"""The table of each class of records."""
