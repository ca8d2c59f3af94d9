"""Spectra where other libraries own the training loop; each is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_hessian.integrations.transformers import HessianCallback

__all__ = ["HessianCallback"]


def __getattr__(name: str) -> Any:
    if name != "HessianCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ds_hessian.integrations.transformers import HessianCallback

    return HessianCallback
