"""H = G + R: the spectra of the Hessian, of its Gauss-Newton part and of the residual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ds_hessian.analyses.measurement import Subject
from ds_hessian.analyses.spectrum import OfSpectra, Spectrum
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.records import HessianDecomposition
from ds_hessian.records.decomposition import PARTS


@dataclass(frozen=True, kw_only=True, eq=False)
class Decomposition(OfSpectra[HessianDecomposition]):
    """The arguments of a decomposition; its settings are those of a spectrum."""

    title = "decomposition"
    summary = "spectra of H, of its Gauss-Newton part and of the residual"

    def products(self, config: HessianConfig) -> int:
        """Return the products of three spectra."""
        return len(PARTS) * super().products(config)

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
        found, spectrum = {}, Spectrum(show=self.show)
        for part in PARTS:
            folder = None if config.resume is None else str(Path(config.resume) / part)
            settings = config.with_overrides(operator=part, resume=folder)
            found[part] = spectrum.run(replace(subject, config=settings))
        return HessianDecomposition(found)
