"""The true Hessian of a training job as it is: spectra and products on the job's own shards.

    import ds_hessian

    engine, optimizer, _, scheduler = ds_hessian.initialize(model=model, config="ds_config.json")
    spectrum = engine.hessian_spectrum(batches)

`attach` takes an engine made elsewhere, a module of plain torch or model chunks of Megatron;
`measure` takes a checkpoint.
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
    ResultError,
    UnsupportedError,
)
from ds_hessian.version import __version__

if TYPE_CHECKING:
    from ds_hessian.checkpoints import measure
    from ds_hessian.config import HessianConfig
    from ds_hessian.hessian import Hessian
    from ds_hessian.hosts import attach, initialize
    from ds_hessian.records import DisplacementSweep, HessianSpectrum

    HessianEngine = Hessian

_LAZY = {
    "DisplacementSweep": ("ds_hessian.records", "DisplacementSweep"),
    "Hessian": ("ds_hessian.hessian", "Hessian"),
    "HessianConfig": ("ds_hessian.config", "HessianConfig"),
    "HessianEngine": ("ds_hessian.hessian", "Hessian"),
    "HessianSpectrum": ("ds_hessian.records", "HessianSpectrum"),
    "attach": ("ds_hessian.hosts", "attach"),
    "initialize": ("ds_hessian.hosts", "initialize"),
    "measure": ("ds_hessian.checkpoints", "measure"),
}

__all__ = [
    "__version__",
    "ConfigError",
    "DisplacementSweep",
    "Hessian",
    "HessianConfig",
    "HessianEngine",
    "HessianError",
    "HessianSpectrum",
    "KernelError",
    "MeasurementError",
    "NumericsError",
    "ResultError",
    "UnsupportedError",
    "attach",
    "initialize",
    "measure",
]


def __getattr__(name: str) -> Any:
    """Import torch and what else a name needs, which takes seconds, when it is used."""
    if name in _LAZY:
        import importlib

        module, original = _LAZY[name]
        return getattr(importlib.import_module(module), original)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _display() -> Display:
    """Import what shows records, which imports torch, when the first one is shown."""
    from ds_hessian import show

    return show


provide(_display)
