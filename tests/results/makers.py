"""Spectra of dense matrices whose eigenvalues are known, through the package's own SLQ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_hessian.krylov import LanczosRun, slq
from ds_hessian.operators import Product
from ds_hessian.records import Cost, DisplacementSweep, HessianSpectrum, Provenance
from ds_hessian.vectors import Fragment, Layout, VectorSpace

COST = Cost(
    seconds_total=65.0,
    seconds_per_product=2.0,
    seconds_per_gradient=1.0,
    products=30,
    gradient_evaluations=63.0,
    trials=6,
    all_reduces=400,
)

PROVENANCE = Provenance(
    step=500,
    seed=0,
    probe="gaussian",
    displacement="auto",
    scheme="central",
    precision="model",
    num_micro_batches=8,
    layout="ZeRO-3, 2 ranks",
    world_size=2,
    model_dtype="fp32",
    data_fingerprint="0123abcd",
    versions={"torch": "2.13.0", "python": "3.11"},
    ds_hessian_version="0.1.0",
)


@dataclass
class DenseOperator:
    """A symmetric matrix with the given eigenvalues (diagonal: probes are isotropic)."""

    eigenvalues: np.ndarray
    relative_noise: float = 0.0

    def __post_init__(self) -> None:
        n = len(self.eigenvalues)
        self.space = VectorSpace(n)
        self.layout = Layout([Fragment("w", 0, n, torch.Size([n]))])
        self.diagonal = torch.tensor(self.eigenvalues, dtype=torch.float32)

    def matvec(self, v: Tensor) -> Product:
        w = self.diagonal * v
        norm = float(w.norm() / v.norm())
        return Product(w, norm, 1e-2, None, None, 1.0, self.relative_noise or None, 0)


def runs_of(
    eigenvalues: np.ndarray, m: int = 30, probes: int = 1, noise: float = 0.0, seed: int = 0
) -> list[LanczosRun]:
    operator = DenseOperator(np.asarray(eigenvalues, dtype=np.float64), noise)
    return slq(operator, operator.layout, m, probes, seed)


def spectrum_of(
    eigenvalues: np.ndarray, m: int = 30, probes: int = 1, noise: float = 0.0, seed: int = 0
) -> HessianSpectrum:
    runs = runs_of(eigenvalues, m, probes, noise, seed)
    return HessianSpectrum.from_runs(runs, len(eigenvalues), COST, PROVENANCE, 2.7, 0.4)


def semicircle(n: int) -> np.ndarray:
    """Quantiles of Wigner's semicircle on [-1, 1]."""
    theta = np.linspace(0, np.pi, 20 * n)
    x, cdf = -np.cos(theta), (theta - np.sin(theta) * np.cos(theta)) / np.pi
    return np.interp((np.arange(n) + 0.5) / n, cdf, x)


def language_model_like(n: int) -> np.ndarray:
    """A heavy bulk near zero, a tail to both sides, five far outliers."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(n) * 0.05 * np.exp(rng.standard_normal(n) * 0.9)
    values[: n // 50] = rng.exponential(1.5, n // 50)
    values[-5:] = [84.5, 66.7, 29.1, 24.9, 18.5]
    return values


def sweep() -> DisplacementSweep:
    """Noise below, a plateau, and averaging above, along two directions."""
    h = np.logspace(-5, 1, 19)
    curvatures = np.array([[30.0], [-0.5]]) * (1 + 1e-4 * np.cos(9 * h) / h) / (1 + h**2)
    changes = np.abs(np.diff(curvatures, axis=1, prepend=np.nan))
    return DisplacementSweep(
        n=1000,
        directions=("random 0", "gradient"),
        displacements=h,
        curvatures=curvatures,
        norms=abs(curvatures) + 1,
        changes=changes,
        nonlinearities=np.full_like(changes, np.nan),
        fidelities=np.ones_like(changes),
        loss=2.0,
        gradient_norm=1.0,
        cost=COST,
        provenance=PROVENANCE,
    )
