"""What a measurement was made on, for the record."""

from __future__ import annotations

import platform
from typing import Any

import torch

import ds_hessian
from ds_hessian.backends.objective import Objective
from ds_hessian.backends.zero import ZeroBackend
from ds_hessian.config import HessianConfig
from ds_hessian.records import Provenance


def describe_run(
    engine: Any, backend: ZeroBackend, objective: Objective, config: HessianConfig
) -> Provenance:
    """Provenance of a spectrum of `engine`, as of now."""
    import deepspeed

    ranks = backend.space.world_size
    mesh = f", TP {backend.tensor_ranks}" * (backend.tensor_ranks > 1)
    return Provenance(
        step=int(engine.global_steps),
        num_micro_batches=len(objective),
        layout=f"ZeRO-{engine.zero_optimization_stage()}, {ranks} rank{'s' * (ranks > 1)}{mesh}",
        world_size=ranks,
        model_dtype=str(next(engine.module.parameters()).dtype).removeprefix("torch."),
        data_fingerprint=objective.fingerprint(),
        versions={
            "deepspeed": deepspeed.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
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
