"""A spectrum in a dozen rows of text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ds_hessian.records.provenance import Cost, Provenance
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.style import MATRICES, micro_batches

Array = NDArray[np.float64]


def spectrum_rows(spectrum: HessianSpectrum) -> list[tuple[str, str]]:
    """Return the name and the text of each figure, warnings at the end."""
    return _rows(spectrum) + [("warning", text) for text in spectrum.warnings]


def spectrum_headline(spectrum: HessianSpectrum) -> str:
    """Return step, size and loss in one line."""
    parts = [f"{spectrum.n:,} parameters"]
    if spectrum.loss is not None:
        parts.append(f"loss {spectrum.loss:.4g}")
    if spectrum.gradient_norm is not None:
        parts.append(f"|gradient| {spectrum.gradient_norm:.3g}")
    source = spectrum.provenance
    return f"{MATRICES[source.operator]} spectrum at step {source.step}: " + ", ".join(parts)


def of_block(source: Provenance) -> str:
    """Return the parameters whose block was measured, to be added to a line; nothing for all."""
    if not source.parameters:
        return ""
    first, *others = source.parameters
    return f", block of {first}" + (f" and {len(others)} more" if others else "")


def of_sides(source: Provenance, cost: Cost) -> str:
    """Return how many products were of each kind of difference; nothing without a tolerance."""
    if source.tolerance is None:
        return ""
    central = cost.products - cost.one_sided - cost.extrapolated
    text = f"{cost.one_sided} one-sided and {central} central"
    if cost.extrapolated:
        text = f"{cost.one_sided} one-sided, {central} central and {cost.extrapolated} fourth-order"
    text += f" for a tolerance of {source.tolerance:g}"
    beyond = cost.beyond_tolerance
    return f"{text}, which {beyond} did not reach" if beyond else text


def products_line(spectrum: HessianSpectrum) -> str:
    """Return the number of products and their price."""
    s, cost = spectrum, spectrum.cost
    text = f"{cost.products} ({s.num_probes} x {s.num_matvecs}), {cost.seconds_per_product:.3g} s"
    if cost.product_time_in_gradients is not None:
        text += f" = {cost.product_time_in_gradients:.2f} gradients"
    return text + " each"


def _rows(spectrum: HessianSpectrum) -> list[tuple[str, str]]:
    s, cost, source = spectrum, spectrum.cost, spectrum.provenance
    outliers = s.outlier_eigenvalues()
    listed = ", ".join(f"{float(outlier):.4g}" for outlier in outliers[:6])
    more = ", ..." if len(outliers) > 6 else ""
    sides = of_sides(source, cost)
    total = f"{cost.seconds_total:.3g} s in all"
    if cost.lanczos_overhead is not None:
        total += f"; outside of products {100 * cost.lanczos_overhead:.1f} % of theirs"
    return [
        ("largest eigenvalue", str(s.eigenvalue_max)),
        ("smallest eigenvalue", str(s.eigenvalue_min)),
        ("trace", str(s.trace)),
        ("mean eigenvalue", str(s.mean_eigenvalue)),
        *_sampling(s),
        ("outliers", f"{len(outliers)}: {listed}{more}" if outliers else "none converged"),
        ("products", products_line(s)),
        *([("differences", sides)] if sides else []),
        ("time", total),
        ("product error", _error_text(s)),
        ("displacement", _range(s.displacements)),
        ("nonlinearity", _range(s.nonlinearities)),
        ("fidelity", f"at least {s.fidelities.min():.4f}"),
        *([("outputs", source.outputs)] if source.outputs is not None else []),
        *([("passes", source.passes)] if source.passes else []),
        (
            "measured on",
            f"{source.layout}, {source.arithmetic}, {micro_batches(source.num_micro_batches)}, "
            f"{source.probe} probes, seed {source.seed}{of_block(source)}",
        ),
    ]


def _sampling(spectrum: HessianSpectrum) -> list[tuple[str, str]]:
    s = spectrum.sampling
    if s is None:
        return []
    figures = f"{s.eigenvalue_max:.2g}, {s.eigenvalue_min:.2g}, {s.trace:.2g}"
    return [("sampling errors", f"{figures} of these, from {s.micro_batches} micro-batches")]


def _error_text(spectrum: HessianSpectrum) -> str:
    errors = spectrum.product_errors
    if not errors.any():
        return "unknown"
    return f"{np.median(errors):.1e} (median), {errors.max():.1e} (worst), absolute"


def _range(array: Array) -> str:
    known = array[~np.isnan(array)]
    if not len(known):
        return "not measured"
    low, high = known.min(), known.max()
    return f"{low:.2g}" if low == high else f"{low:.2g} .. {high:.2g}"
