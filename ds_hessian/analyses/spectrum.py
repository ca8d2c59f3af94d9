"""Spectral density, extreme eigenvalues and trace by stochastic Lanczos quadrature."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ds_hessian.analyses.base import Analysis, R, transient
from ds_hessian.analyses.measurement import Measurement, Subject
from ds_hessian.config import HessianConfig
from ds_hessian.krylov import LanczosRun, LanczosState, ritz_vectors, slq
from ds_hessian.memory import Item
from ds_hessian.operators.sampling import micro_batch_curvatures, standard_error
from ds_hessian.planning import (
    ELSEWHERE,
    FEWEST,
    Settings,
    Share,
    halves,
    lanczos_options,
    memory_of_lanczos,
)
from ds_hessian.records import HessianSpectrum, SamplingErrors
from ds_hessian.resume import SavedSpectrum

logger = logging.getLogger(__name__)

SELECTIVE: tuple[Settings, ...] = (
    {"mode": "selective", "device": "host"},
    {"mode": "selective", "device": "disk"},
)


class Progress(Protocol):
    """A display of how many of a spectrum's products are done."""

    def update(self, probe: int, state: LanczosState) -> None:
        """Show one more product of a probe."""
        ...


Show = Callable[[int, bool, str], AbstractContextManager[Progress]]
"""Makes a `Progress` from the number of products to come, whether it is to show anything, and the
name of the operator."""


class _Silent:
    def update(self, probe: int, state: LanczosState) -> None:
        """Show nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OfSpectra(Analysis[R]):
    """An analysis made of spectra as they are configured.

    Attributes:
        show: Shows the progress.
    """

    show: Show = transient(lambda total, enabled, operator: nullcontext(_Silent()))

    def products(self, config: HessianConfig) -> int:
        """Return the products of all probes, and two evaluations for each extreme and one for each
        probe.
        """
        sampled = 2 + config.num_probes if config.sampling else 0
        return config.num_probes * config.num_matvecs + sampled

    def vectors_kept(self, config: HessianConfig) -> int:
        """Return the basis, with the vectors that two generations of the state do not share."""
        mode, window = config.reorthogonalization.mode, config.reorthogonalization.window
        if mode in ("window", "none"):
            return min(config.num_matvecs, 2 + (window if mode == "window" else 2))
        kept = config.num_matvecs + 2 * (config.num_probes > 1)  # the next probe's first two
        if mode == "full":
            return kept
        # Ritz vectors, two just replaced; and the last two before rounding, and those before.
        found = lanczos_options(config).ritz_vectors(config.num_matvecs)
        return kept + found + 2 + 4 * (config.basis.dtype == "bf16")

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return the basis, and Ritz vectors for the errors of sampling."""
        steps, options = min(config.num_matvecs, share.n), lanczos_options(config)
        return [
            *memory_of_lanczos(share.n_local, share.tier, steps, options),
            share.vectors(
                "extreme Ritz vectors", 2 * config.sampling, ("passes",), stage="sampling"
            ),
        ]

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return another basis, fewer steps, or a recurrence without a basis."""
        fewer = halves("num_matvecs", config.num_matvecs, FEWEST)
        return [*ELSEWHERE, *SELECTIVE, *fewer, {"mode": "none", "device": "accelerator"}]


@dataclass(frozen=True, kw_only=True, eq=False)
class Spectrum(OfSpectra[HessianSpectrum]):
    """The arguments of a spectrum; all of its settings are values of the configuration."""

    title = "spectrum"
    summary = "spectral density, extreme eigenvalues, trace"

    def run(self, subject: Subject) -> HessianSpectrum:
        """Measure, from where the same spectrum was interrupted. Collective."""
        config, space = subject.config, subject.backend.space
        with subject.open(SavedSpectrum, HessianSpectrum.kind) as (run, saved):
            total = config.num_matvecs * config.num_probes - (saved.products if saved else 0)
            complete = list[LanczosState]()  # the last probe's run, whose basis sampling needs
            shown = config.progress and space.rank == 0
            with self.show(total, shown, config.operator) as progress:

                def report(probe: int, state: LanczosState) -> None:
                    if state.done and probe == config.num_probes - 1:
                        complete.append(state)  # and nothing to save: there are no more products
                    elif saved is not None:
                        saved.save(probe, state)
                    progress.update(probe, state)

                runs = slq(
                    run.curvature,
                    run.session.layout,
                    config.num_matvecs,
                    config.num_probes,
                    config.seed,
                    config.probe,
                    report,
                    lanczos_options(config),
                    before=saved.runs if saved else (),
                    restore=saved.restore if saved else None,
                )
                gradient_norm = run.curvature.gradient_norm
                sampling = None
                if config.sampling:
                    sampling = _sampling_errors(run, complete.pop(), runs)
        spectrum = HessianSpectrum.from_runs(
            runs,
            n=space.n,
            cost=run.cost(),
            provenance=run.provenance(),
            loss=run.session.loss,
            gradient_norm=gradient_norm,
            sampling=sampling,
        )
        run.finished()
        if space.rank == 0:
            for warning in spectrum.warnings:
                logger.warning("Hessian spectrum: %s", warning)
        return spectrum


def _sampling_errors(
    run: Measurement, last: LanczosState, runs: Sequence[LanczosRun]
) -> SamplingErrors:
    """Return standard errors from the last probe's extreme Ritz vectors, and from all probes."""
    displacement = float(np.median(runs[-1].displacements))
    extremes = [
        standard_error(micro_batch_curvatures(run.curvature, y, displacement))
        for y in ritz_vectors(last, [-1, 0])
    ]
    forms = [
        micro_batch_curvatures(run.curvature, run.subject.draw(p), float(found.displacements[0]))
        for p, found in enumerate(runs)
    ]
    trace = run.session.space.n * np.mean(forms, axis=0)
    largest, smallest = extremes
    return SamplingErrors(largest, smallest, standard_error(trace), len(trace))
