"""H = G + R: the spectra of the Hessian, of its Gauss-Newton part and of the residual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ds_hessian.analyses.base import Analysis
from ds_hessian.analyses.measurement import Subject
from ds_hessian.analyses.spectrum import SILENT, Show, Spectrum
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.memory import Item
from ds_hessian.planning import Settings, Share
from ds_hessian.records import HessianDecomposition
from ds_hessian.records.decomposition import PARTS


@dataclass(frozen=True, kw_only=True, eq=False)
class Decomposition(Analysis[HessianDecomposition]):
    """The arguments of a decomposition; its settings are those of a spectrum.

    Attributes:
        show: Shows the progress.
    """

    title = "decomposition"
    summary = "spectra of H, of its Gauss-Newton part and of the residual"

    show: Show = SILENT

    @property
    def _spectrum(self) -> Spectrum:
        return Spectrum(show=self.show)

    def products(self, config: HessianConfig) -> int:
        """Return the products of three spectra."""
        return len(PARTS) * self._spectrum.products(config)

    def vectors_kept(self, config: HessianConfig) -> int:
        """Return those of one spectrum: the state of one that is complete is removed."""
        return self._spectrum.vectors_kept(config)

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return what one spectrum holds."""
        return self._spectrum.memory(share, config)

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return what a spectrum would do with less."""
        return self._spectrum.with_less(config)

    def run(self, subject: Subject) -> HessianDecomposition:
        """Measure the spectra one after another. Collective.

        Raises:
            ConfigError: the settings name one operator.
        """
        config = subject.config
        if config.operator != "hessian":
            raise ConfigError(
                f"a decomposition measures all of {', '.join(PARTS)}; operator = "
                f'"{config.operator}" has no meaning here: leave it out'
            )
        found = {}
        for part in PARTS:
            folder = None if config.resume is None else str(Path(config.resume) / part)
            settings = config.with_overrides(operator=part, resume=folder)
            found[part] = self._spectrum.run(replace(subject, config=settings))
        return HessianDecomposition(found)
