"""The precision of the passes, where the settings leave it to be chosen.

Products of a model in 16 bits are off by 1 to 10 %. On fp32 copies of its master weights they are
off by 1e-5 to 1e-3, as those of a model in fp32 (docs/numerics.md), for the memory of the copies,
and of activations that are twice as large. So passes are run in fp32 where the host can and the
memory allows, and otherwise as training runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_hessian.backends.protocol import Precision
from ds_hessian.config import HessianConfig
from ds_hessian.planning.fit import Needs, precision_of, shortage
from ds_hessian.planning.share import Share
from ds_hessian.records.provenance import passes_in_words

WIDE = torch.finfo(torch.float32).eps


@dataclass
class ChosenPrecision:
    """The choice of a measurement's precision.

    Attributes:
        why: Why it was chosen; empty where the settings name it, or the model is not in 16 bits.
        evaluated: Whether a gradient has been evaluated in it.
    """

    why: str = ""
    evaluated: bool = False


def chosen(
    share: Share, config: HessianConfig, needs: Callable[[HessianConfig], Sequence[Needs]]
) -> tuple[HessianConfig, ChosenPrecision]:
    """Return the settings with one of the two precisions, and why it is the one.

    Args:
        share: This rank's part of the job.
        config: The settings.
        needs: Returns every rank's needs with other settings, the same list on all of them, or
            this rank's alone where those of all are met; empty where nothing is known of what is
            free. It is called on all ranks or on none.
    """
    if config.finite_difference.precision != "auto":
        return config, ChosenPrecision()
    if torch.finfo(share.compute_dtype).eps <= WIDE:
        return in_precision(config, "model"), ChosenPrecision()
    dtype = str(share.compute_dtype).removeprefix("torch.")
    if "fp32" not in share.precisions:
        why = f"this host has no fp32 passes of a model in {dtype}"
        return in_precision(config, "model"), ChosenPrecision(why)
    wide = in_precision(config, "fp32")
    ranks = needs(wide)
    short = shortage(ranks)
    if short is not None:
        return in_precision(config, "model"), ChosenPrecision(f"fp32 passes would need {short}")
    known = "and" if any(rank.free for rank in ranks) else "if"
    return wide, ChosenPrecision(f"training computes in {dtype}, {known} fp32 copies fit")


def in_precision(config: HessianConfig, precision: Precision) -> HessianConfig:
    """Return the settings with this precision of the passes."""
    return config.with_overrides(precision=precision)


def in_words(config: HessianConfig, choice: ChosenPrecision) -> str:
    """Return how the passes run, and why; nothing where nothing was chosen."""
    text = passes_in_words(precision_of(config), choice.why)
    return f"passes {text}" if text else ""
