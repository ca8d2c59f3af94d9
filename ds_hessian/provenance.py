"""What a measurement was made on, for the record."""

from __future__ import annotations

from typing import Any

import ds_hessian
from ds_hessian.backends import Backend, Objective
from ds_hessian.config import HessianConfig
from ds_hessian.records import Provenance


def describe_run(backend: Backend, objective: Objective, config: HessianConfig) -> Provenance:
    """Provenance of a measurement, as of now."""
    job = backend.describe()
    return Provenance(
        step=backend.step,
        num_micro_batches=objective.num_micro_batches,
        layout=job.layout,
        world_size=backend.space.world_size,
        model_dtype=job.model_dtype,
        data_fingerprint=objective.fingerprint(),
        versions=job.versions,
        **settings(config),
    )


def settings(config: HessianConfig) -> dict[str, Any]:
    """What every host's provenance says of the settings, and of this package."""
    difference = config.finite_difference
    return {
        "seed": config.seed,
        "probe": config.probe,
        "displacement": difference.displacement,
        "scheme": difference.scheme,
        "precision": difference.precision,
        "dropout": config.dropout,
        "ds_hessian_version": ds_hessian.__version__,
    }
