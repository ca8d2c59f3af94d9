"""Functions of torch's that drop (dropout, attention), and whether a call of one would."""

from __future__ import annotations

from typing import Any

from ds_hessian.backends.kinks import argument

_DROPOUTS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
PROBABILITIES: dict[str, tuple[int, str]] = {
    **{name + suffix: (1, "p") for name in _DROPOUTS for suffix in ("", "_")},
    **{name: (1, "p") for name in ("dropout1d", "dropout2d", "dropout3d", "native_dropout")},
    "scaled_dot_product_attention": (4, "dropout_p"),
}
"""Functions that drop, with position and name of their probability."""


def drops(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of a function that drops would drop anything."""
    index, keyword = PROBABILITIES[name]
    probability = argument(args, kwargs, index, keyword)
    if keyword != "p":  # of attention, whose probability is 0 where none is given
        return probability not in (None, 0)
    training = argument(args, kwargs, index + 1, "training")
    return probability != 0 and (training is None or bool(training))
