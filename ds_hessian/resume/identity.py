"""The identity of a measurement, by which a state on disk is recognised: settings, model, weights,
data, loss.

None of it depends on the layout. Weights are compared by their norm, summed in fp64; the loss and
the norm of its gradient are the same on another layout up to the rounding of the passes, and differ
where `loss_fn` or the dropout masks do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ds_hessian.backends.protocol import Objective, Session
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.operators import Curvature
from ds_hessian.ranks import gather_integers

SETTINGS = (
    "operator",
    "outputs",
    "num_matvecs",
    "num_probes",
    "probe",
    "seed",
    "finite_difference",
    "reorthogonalization",
    "dropout",
    "parameters",
    "batch_statistics",
)
"""Keys of the configuration that the answer depends on, with the dtype of the basis."""

OF_TRAINING = (
    "optimizer steps",
    "micro-batches",
    "norm of the weights",
    "loss",
    "norm of the gradient",
)
"""What differs between two states of one training, of the same measurement."""

SUMMED = 1e-12
"""Relative difference of a sum of squares in fp64 in another order."""


def identity_of(
    session: Session,
    operator: Curvature,
    objective: Objective,
    config: HessianConfig,
    step: int,
    parameters: Sequence[tuple[str, torch.Size]],
) -> dict[str, object]:
    """Return what identifies a measurement, as JSON values, the same on every rank.

    Args:
        session: The guarded job.
        operator: The Hessian at the weights.
        objective: This rank's micro-batches.
        config: Settings of the measurement.
        step: Optimizer steps made.
        parameters: Names and unsharded shapes.

    Collective.
    """
    return {
        "settings": settings_of(config),
        "optimizer steps": step,
        "parameters": {name: list(shape) for name, shape in parameters},
        "micro-batches": _micro_batches(objective, session.space.device),
        "norm of the weights": session.weight_norm(),
        "loss": session.loss,
        "norm of the gradient": operator.gradient_norm,
    }


def settings_of(config: HessianConfig) -> dict[str, object]:
    """Return the settings that the answer depends on, as JSON values."""
    settings = config.model_dump()
    return {key: settings[key] for key in SETTINGS} | {"basis": settings["basis"]["dtype"]}


def refuse_foreign(found: Mapping[str, Any], here: Mapping[str, Any], roundoff: float) -> None:
    """Raise if a state is not of this measurement.

    Args:
        found: Identity stored with the state, from `identity_of`.
        here: Identity of this measurement.
        roundoff: Unit roundoff of the passes; half of its digits of loss and gradient must agree.

    Raises:
        ConfigError: says what differs.
    """
    lines = [*_differences(found, here, roundoff).values()]
    if lines:
        more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise ConfigError(
            f"the state to resume from is of another measurement; it differs in "
            f"{', '.join(lines[:5])}{more}: restore what it was made with (dropout masks are the "
            "same in the same layout only), or remove the folder to begin anew"
        )


def of_other_training(found: Mapping[str, Any], here: Mapping[str, Any], roundoff: float) -> bool:
    """Return whether a state is of the same measurement at other weights, or of other micro-batches
    of the training; arguments as `refuse_foreign` has them.
    """
    names = _differences(found, here, roundoff).keys()
    return bool(names) and names <= set(OF_TRAINING)


def _differences(
    found: Mapping[str, Any], here: Mapping[str, Any], roundoff: float
) -> dict[str, str]:
    """Return the entries that differ, by their names, in words."""
    near = {"norm of the weights": SUMMED}
    near |= dict.fromkeys(("loss", "norm of the gradient"), math.sqrt(roundoff))
    before, now = dict(_leaves(found)), dict(_leaves(here))
    lines = {}
    for name in dict.fromkeys([*before, *now]):
        a, b = before.get(name), now.get(name)
        same = math.isclose(a, b, rel_tol=near[name]) if name in near and a and b else a == b
        if not same:
            lines[name] = f"{name} ({a} there, {b} here)"
    return lines


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            yield from _leaves(entry, f"{prefix}{name}: ")
        else:
            yield prefix + name, entry


def _micro_batches(objective: Objective, device: torch.device) -> str:
    """Return a hash of all ranks' micro-batches, whichever rank has them.

    Collective: an all-gather of 8 bytes for each micro-batch of each rank. The same set may be
    spread over other ranks, and ranks that share a micro-batch (tensor parallelism) count once,
    which no sum does.
    """
    mine = [int(digest, 16) for digest in objective.digests()]
    size = objective.num_micro_batches
    places = [*mine, *[0] * (size - len(mine)), len(mine)]
    found = gather_integers([n - (n >> 63 << 64) for n in places], device)
    digests = sorted({f"{n % 2**64:016x}" for *row, count in found.tolist() for n in row[:count]})
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=8).hexdigest()
