"""Records in tools that follow a training: DeepSpeed's monitor, TensorBoard, W&B, Comet.

Figures that have an error come with a twin tag that ends in `_error`. TensorBoard, W&B and Comet
also get the picture of a spectrum and a histogram of it.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ds_hessian.records.analyses import HessianSharpness
from ds_hessian.records.curvatures import HessianCurvatures
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.fields import Array
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.training_view import TRACKS, Axis, edge_of, ranked, spread

PREFIX = "Train/Hessian/"
PICTURE, STEP = PREFIX + "spectrum", PREFIX + "step"
HISTOGRAM = PREFIX + "eigenvalues"
SAMPLES = 512
"""Eigenvalues that stand for a spectrum where a tool makes its own histogram."""

Event = tuple[str, float, int]
Followed = HessianSpectrum | HessianSharpness | HessianCurvatures


def monitor_events(record: Followed) -> list[Event]:
    """Return finite `(tag, value, optimizer step)` for `engine.monitor.write_events`."""
    step = record.provenance.step
    return [(PREFIX + name, value, step) for name, value in figures_of(record).items()]


def figures_of(record: Followed) -> dict[str, float]:
    """Return the figures to follow over training by name; errors have the suffix `_error`."""
    if isinstance(record, HessianSpectrum):
        named = _of_spectrum(record)
    elif isinstance(record, HessianSharpness):
        named = _of_sharpness(record)
    else:
        named = {f"curvature/{name}": record.along(name) for name in record.directions}
    if not isinstance(record, HessianCurvatures):
        named |= _of_stability(record)
    figures: dict[str, float | None] = {}
    for name, figure in named.items():
        if isinstance(figure, Estimate):
            figures |= {name: figure.value, f"{name}_error": figure.error}
        else:
            figures[name] = figure
    return {
        name: float(value)
        for name, value in figures.items()
        if value is not None and math.isfinite(value)
    }


def _of_stability(record: HessianSpectrum | HessianSharpness) -> dict[str, Estimate | float | None]:
    """Return the edge of stability of the job's optimizer, and 1 where it has been crossed."""
    found = stability(record)
    if found is None:
        return {}
    prefix = "sharpness/" if isinstance(record, HessianSharpness) else ""
    value, edge = found
    return {f"{prefix}edge_of_stability": edge, f"{prefix}above_edge": float(value > edge)}


def stability(record: HessianSpectrum | HessianSharpness) -> tuple[float, float] | None:
    """Return the eigenvalue on which the optimizer's stability depends, and where it ends.

    With Adam that is the largest preconditioned eigenvalue, which a sharpness has. None where the
    optimizer, or its edge of stability, is not known.
    """
    optimizer = record.provenance.optimizer
    if (edge := edge_of(optimizer)) is not None:
        return record.eigenvalue_max.value, edge
    edge = edge_of(optimizer, preconditioned=True)
    if edge is None or isinstance(record, HessianSpectrum) or record.preconditioned is None:
        return None
    return record.preconditioned.value, edge


def _of_spectrum(s: HessianSpectrum) -> dict[str, Estimate | float | None]:
    further: dict[str, Estimate | float | None] = {
        f"{name}_{rank}": estimate
        for name, sign in (("largest", 1), ("smallest", -1))
        for rank, estimate in enumerate(ranked(s, sign)[:TRACKS], 1)
        if rank > 1  # the first is eigenvalue_max, or eigenvalue_min
    }
    return further | {
        "eigenvalue_max": s.eigenvalue_max,
        "eigenvalue_min": s.eigenvalue_min,
        "trace": s.trace,
        "mean_eigenvalue": s.mean_eigenvalue,
        "num_outliers": float(len(s.outlier_eigenvalues())),
        "loss": s.loss,
        "gradient_norm": s.gradient_norm,
        "product_error": s.product_noise,
        "seconds": s.cost.seconds_total,
    }


def _of_sharpness(s: HessianSharpness) -> dict[str, Estimate | float | None]:
    figures: dict[str, Estimate | float | None] = {
        "eigenvalue_max": s.eigenvalue_max,
        "preconditioned": s.preconditioned,
        **{f"{name}_curvature": estimate for name, estimate in s.along.items()},
        "update_norm": s.update_norm,
        "gradient_norm": s.gradient_norm,
        "loss": s.loss,
        "converged": float(all(s.converged)),
        "seconds": s.cost.seconds_total,
    }
    return {f"sharpness/{name}": figure for name, figure in figures.items()}


def histogram_of(spectrum: HessianSpectrum) -> tuple[Array, Array]:
    """Return the number of eigenvalues in each cell, and the edges of the cells.

    Cells are narrow around 0 and wide far from it (`ds_hessian.show.training_view.Axis`).
    """
    edges = Axis.of([spectrum]).edges()
    return spread(spectrum, edges), edges


def write_tensorboard(
    writer: Any,
    record: Followed,
    picture: Path | None,
    figures: bool = True,
) -> None:
    """Write figures, histogram, and the picture if there is one, to a TensorBoard `SummaryWriter`.

    Args:
        writer: The writer.
        record: What to write.
        picture: File of its picture; None if there is none.
        figures: Whether to write the figures too; False where the host logs them itself.
    """
    step = record.provenance.step
    for event in monitor_events(record) if figures else ():
        writer.add_scalar(*event)
    if isinstance(record, HessianSpectrum) and hasattr(writer, "add_histogram_raw"):
        counts, edges = histogram_of(record)
        middles = (edges[1:] + edges[:-1]) / 2
        writer.add_histogram_raw(
            HISTOGRAM,
            min=float(edges[0]),
            max=float(edges[-1]),
            num=float(counts.sum()),
            sum=float(counts @ middles),
            sum_squares=float(counts @ middles**2),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )
    if picture is not None:
        writer.add_image(PICTURE, _pixels(picture), step, dataformats="HWC")
    writer.flush()


def write_wandb(
    wandb: ModuleType,
    record: Followed,
    picture: Path | None,
    step: int | None = None,
    figures: bool = True,
) -> None:
    """Write figures, histogram, and the picture if there is one, to the current run of W&B.

    The optimizer step is a metric of its own, which they are drawn over: W&B drops what comes with
    a step behind its counter, and DeepSpeed's monitor counts samples there.

    Args:
        wandb: The module.
        record: What to write.
        picture: File of its picture; None if there is none.
        step: W&B's counter where the host logs by optimizer step; None for where it stands.
        figures: Whether to write the figures too; False where the host logs them itself.
    """
    content: dict[str, object] = {}
    if figures:
        content |= {tag: value for tag, value, _ in monitor_events(record)}
    content[STEP] = record.provenance.step
    if isinstance(record, HessianSpectrum):
        content[HISTOGRAM] = wandb.Histogram(np_histogram=histogram_of(record))
    if picture is not None:
        content[PICTURE] = wandb.Image(str(picture))
    wandb.define_metric(STEP, hidden=True)
    wandb.define_metric(PREFIX + "*", step_metric=STEP)
    wandb.log(content, step=step, commit=False)  # the host's next entry must not come late


def write_comet(
    experiment: Any,
    record: Followed,
    picture: Path | None,
    figures: bool = True,
) -> None:
    """Write figures, histogram, and the picture if there is one, to an experiment of Comet.

    Comet makes its own histograms, of eigenvalues at even quantiles of the spectrum. DeepSpeed's
    monitor would drop figures that come within `samples_log_interval` of the last, which counts
    samples where these have optimizer steps; so they are written without it.

    Args:
        experiment: The experiment.
        record: What to write.
        picture: File of its picture; None if there is none.
        figures: Whether to write the figures too; False where the host logs them itself.
    """
    step = record.provenance.step
    for tag, value, _ in monitor_events(record) if figures else ():
        experiment.log_metric(tag, value, step=step)
    if isinstance(record, HessianSpectrum):
        counts, edges = histogram_of(record)
        below = np.append(0.0, np.cumsum(counts)) / counts.sum()
        quantiles = np.interp((np.arange(SAMPLES) + 0.5) / SAMPLES, below, edges)
        experiment.log_histogram_3d(quantiles.tolist(), name=HISTOGRAM, step=step)
    if picture is not None:
        experiment.log_image(str(picture), name=PICTURE, step=step)


def _pixels(picture: Path) -> Array:
    """Return the picture as `(height, width, 3)` bytes."""
    from PIL import Image

    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB"))
