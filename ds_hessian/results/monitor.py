"""A spectrum as events of DeepSpeed's monitor (TensorBoard, WandB, Comet, CSV)."""

from __future__ import annotations

import math

from ds_hessian.results.spectrum import HessianSpectrum

PREFIX = "Train/Hessian/"

Event = tuple[str, float, int]


def monitor_events(spectrum: HessianSpectrum) -> list[Event]:
    """`(tag, value, optimizer step)` for `engine.monitor.write_events`, finite values only."""
    s = spectrum
    figures: dict[str, float | None] = {}
    for name in ("eigenvalue_max", "eigenvalue_min", "trace", "mean_eigenvalue"):
        estimate = getattr(s, name)
        figures[name] = estimate.value
        figures[f"{name}_error"] = estimate.error
    figures["num_outliers"] = float(len(s.outlier_eigenvalues()))
    figures["loss"] = s.loss
    figures["gradient_norm"] = s.gradient_norm
    figures["product_error"] = s.product_noise
    figures["seconds"] = s.cost.seconds_total
    return [
        (PREFIX + name, float(value), s.provenance.step)
        for name, value in figures.items()
        if value is not None and math.isfinite(value)
    ]
