"""The true Hessian of a live DeepSpeed engine: spectra and products on the job's own shards.

import ds_hessian

engine, optimizer, _, scheduler = ds_hessian.initialize(model=model, config="ds_config.json")
spectrum = engine.hessian_spectrum(batches)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_hessian.display import Display, provide
from ds_hessian.errors import (
    ConfigError,
    HessianError,
    KernelError,
    MeasurementError,
    NumericsError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from ds_hessian.config import HessianConfig
    from ds_hessian.engine import HessianEngine, attach, initialize
    from ds_hessian.records import DisplacementSweep, HessianSpectrum

__version__ = "0.1.0"

_LAZY = {
    "DisplacementSweep": "ds_hessian.records",
    "HessianConfig": "ds_hessian.config",
    "HessianEngine": "ds_hessian.engine",
    "HessianSpectrum": "ds_hessian.records",
    "attach": "ds_hessian.engine",
    "initialize": "ds_hessian.engine",
}

__all__ = [
    "ConfigError",
    "DisplacementSweep",
    "HessianConfig",
    "HessianEngine",
    "HessianError",
    "HessianSpectrum",
    "KernelError",
    "MeasurementError",
    "NumericsError",
    "UnsupportedError",
    "attach",
    "initialize",
]


def __getattr__(name: str) -> Any:
    """Import DeepSpeed (seconds) only when something is used that needs it."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _display() -> Display:
    """Import what shows records, which imports torch, when the first one is shown."""
    from ds_hessian import show

    return show


provide(_display)
