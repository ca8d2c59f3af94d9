"""Records in tools that follow a training: DeepSpeed's monitor, TensorBoard, W&B.

Figures that have an error come with a twin tag that ends in `_error`.
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

PREFIX = "Train/Hessian/"
PICTURE, STEP = PREFIX + "spectrum", PREFIX + "step"

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


def _of_spectrum(s: HessianSpectrum) -> dict[str, Estimate | float | None]:
    return {
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
    figures = {
        "eigenvalue_max": s.eigenvalue_max,
        "preconditioned": s.preconditioned,
        "gradient_curvature": s.gradient_curvature,
        "update_curvature": s.update_curvature,
        "update_norm": s.update_norm,
        "gradient_norm": s.gradient_norm,
        "loss": s.loss,
        "converged": float(all(s.converged)),
        "seconds": s.cost.seconds_total,
    }
    return {f"sharpness/{name}": figure for name, figure in figures.items()}


def write_tensorboard(writer: Any, record: Followed, picture: Path | None) -> None:
    """Write figures, and the picture if there is one, to a TensorBoard `SummaryWriter`."""
    for event in monitor_events(record):
        writer.add_scalar(*event)
    if picture is not None:
        writer.add_image(PICTURE, _pixels(picture), record.provenance.step, dataformats="HWC")
    writer.flush()


def write_wandb(
    wandb: ModuleType,
    record: Followed,
    picture: Path | None,
    step: int | None = None,
) -> None:
    """Write figures, and the picture if there is one, to the current run of W&B.

    The optimizer step is a metric of its own, which they are drawn over: W&B drops what comes with
    a step behind its counter, and DeepSpeed's monitor counts samples there.

    Args:
        wandb: The module.
        record: What to write.
        picture: File of its picture; None if there is none.
        step: W&B's counter where the host logs by optimizer step; None for where it stands.
    """
    content: dict[str, object] = {tag: value for tag, value, _ in monitor_events(record)}
    content[STEP] = record.provenance.step
    if picture is not None:
        content[PICTURE] = wandb.Image(str(picture))
    wandb.define_metric(STEP, hidden=True)
    wandb.define_metric(PREFIX + "*", step_metric=STEP)
    wandb.log(content, step=step, commit=False)  # the host's next entry must not come late


def _pixels(picture: Path) -> Array:
    """Return the picture as `(height, width, 3)` bytes."""
    from PIL import Image

    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB"))
