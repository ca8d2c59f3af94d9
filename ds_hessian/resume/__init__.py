"""Resuming a measurement that was killed: its state on disk, and what must match."""

from ds_hessian.resume.generations import discard, retire
from ds_hessian.resume.identity import identity_of, refuse_foreign, settings_of
from ds_hessian.resume.journal import Journal
from ds_hessian.resume.run import SavedRun
from ds_hessian.resume.spectrum import SavedSpectrum
from ds_hessian.resume.store import StateStore

__all__ = [
    "Journal",
    "SavedRun",
    "SavedSpectrum",
    "StateStore",
    "discard",
    "identity_of",
    "refuse_foreign",
    "retire",
    "settings_of",
]
