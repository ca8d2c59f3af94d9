"""All analyses by the name of their method, and what is derived from them."""

from __future__ import annotations

from typing import Any

from ds_hessian.analyses.alignment import Alignment
from ds_hessian.analyses.base import Analysis
from ds_hessian.analyses.block_spectra import BlockSpectra
from ds_hessian.analyses.blocks import BlockCoupling, OffBlockShare
from ds_hessian.analyses.curvatures import Curvatures
from ds_hessian.analyses.decomposition import Decomposition
from ds_hessian.analyses.eigenpairs import Eigenpairs
from ds_hessian.analyses.influence import Influence
from ds_hessian.analyses.kronecker import Kronecker
from ds_hessian.analyses.self_test import SelfTest
from ds_hessian.analyses.sharpness import Sharpness
from ds_hessian.analyses.solve import Solve
from ds_hessian.analyses.spectrum import Spectrum
from ds_hessian.analyses.sweep import Sweep
from ds_hessian.analyses.trace import Trace
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.memory import MemoryPlan
from ds_hessian.planning import Job, Settings, chosen, in_words, plan

ANALYSES: dict[str, type[Analysis[Any]]] = {
    kind.title: kind
    for kind in (
        Spectrum,
        Eigenpairs,
        Trace,
        Solve,
        Influence,
        Sharpness,
        BlockCoupling,
        OffBlockShare,
        BlockSpectra,
        Kronecker,
        Alignment,
        Curvatures,
        Decomposition,
        Sweep,
        SelfTest,
    )
}


def analysis_of(title: str, settings: Settings) -> tuple[Analysis[Any], Settings]:
    """Return the analysis of this name with the settings that are its own, and the other settings.

    Raises:
        ConfigError: there is no such analysis, or an argument is missing.
    """
    if title not in ANALYSES:
        raise ConfigError(f"there is no analysis {title!r}; there are {', '.join(ANALYSES)}")
    return ANALYSES[title].from_settings(settings)


def plan_job(
    config: HessianConfig, title: str = "spectrum", settings: Settings | None = None, **job: Any
) -> MemoryPlan:
    """Return the memory plan of an analysis of a DeepSpeed job that need not exist yet.

    What is free is not known: passes whose precision is `auto` are in fp32 for a model in 16 bits.

    Args:
        config: The settings.
        title: Name of the method of `Hessian`.
        settings: The method's own arguments.
        **job: The fields of `ds_hessian.planning.Job`.

    Raises:
        ConfigError: there is no such analysis, or an argument is missing or not its own.
    """
    analysis, others = analysis_of(title, settings or {})
    if others:
        known = ", ".join(analysis.settings())
        raise ConfigError(
            f"{title} has no argument {', '.join(others)}; its own are {known or 'none'}"
        )
    share = Job(**job).share
    config, choice = chosen(share, config, lambda _: ())
    return plan(analysis, share, config, in_words(config, choice))
