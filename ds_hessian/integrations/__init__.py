"""Spectra where other libraries own the training loop."""

from ds_hessian.integrations.transformers import HessianCallback

__all__ = ["HessianCallback"]
