"""The spectra of diagonal blocks: the figure of "Why Transformers need Adam"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ds_hessian.analyses.base import Analysis, Blocks, groups_of, transient
from ds_hessian.analyses.measurement import Subject
from ds_hessian.analyses.spectrum import Spectrum
from ds_hessian.backends.protocol import Backend
from ds_hessian.backends.restricted import Restricted, names_of
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.memory import Item
from ds_hessian.planning import Settings, Share
from ds_hessian.records import HessianBlockSpectra


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockSpectra(Analysis[HessianBlockSpectra]):
    """The arguments of the spectra of blocks; each is a spectrum as configured.

    At least two probes are needed to say which distances are noise. Nothing is kept for `resume`.

    Attributes:
        blocks: `layers`, `parameters`, or {block: regular expression of names}.
        num_blocks: Their number, where the model is not known.
        largest: Coordinates of the largest block, over all ranks and on this one.
    """

    title = "block_spectra"
    summary = "a spectrum for each diagonal block, and how far apart they are"
    resumes = False

    blocks: Blocks = "layers"
    num_blocks: int | None = None
    largest: tuple[int, int] | None = transient(None)

    def products(self, config: HessianConfig) -> int:
        """Return the products of a spectrum for each block."""
        if self.num_blocks is None:
            raise ConfigError(
                "how many products block_spectra takes depends on the model: give --products"
            )
        return self.num_blocks * config.num_probes * config.num_matvecs

    def share(self, share: Share) -> Share:
        """Return the share of the job that the largest block is."""
        return share if self.largest is None else share.within(*self.largest)

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return what the largest block's spectrum holds."""
        return Spectrum().memory(share, _plain(config))

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return settings with which a spectrum needs less."""
        return Spectrum().with_less(_plain(config))

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """Fill in the number of blocks and the size of the largest."""
        inside = [Restricted(backend, names) for names in self._names(backend).values()]
        largest = max(b.space.n for b in inside), max(b.space.n_local for b in inside)
        return replace(self, num_blocks=len(inside), largest=largest)

    def run(self, subject: Subject) -> HessianBlockSpectra:
        """Measure one block after the other. Collective."""
        spectra = {}
        for block, names in self._names(subject.backend).items():
            inside = Restricted(subject.backend, names)
            spectra[block] = Spectrum().run(
                replace(subject, backend=inside, config=_plain(subject.config))
            )
        found = [s.provenance for s in spectra.values()]
        of_all = replace(
            found[0],
            parameters=names_of(subject.backend),
            flipped_choices=sum(p.flipped_choices for p in found) / len(found),
        )
        return HessianBlockSpectra.of(spectra, of_all)

    def _names(self, backend: Backend) -> dict[str, list[str]]:
        """Return the names of the parameters of each block."""
        found: dict[str, list[str]] = {}
        for name, block in groups_of(backend, self.blocks).items():
            found.setdefault(block, []).append(name)
        return found


def _plain(config: HessianConfig) -> HessianConfig:
    """Return the settings of a block's spectrum: without a state, a display or sampling errors."""
    return config.with_overrides(resume=None, progress=False, sampling=False)
