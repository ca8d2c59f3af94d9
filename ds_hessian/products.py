"""How many products each analysis takes, and vectors its state on disk has: from settings alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError

Settings = dict[str, Any]

MAX_MATVECS = 300
"""Of `eigenpairs`, unless they are given; also of each search for a first `sharpness`."""


def keywords_of(
    function: Callable[..., Any], given: Mapping[str, Any]
) -> tuple[Settings, Settings]:
    """Those of the keywords that a function takes by keyword only, and all others."""
    names = inspect.getfullargspec(function).kwonlyargs
    own = {name: value for name, value in given.items() if name in names}
    return own, {name: value for name, value in given.items() if name not in own}


def _spectrum(config: HessianConfig) -> int:
    sampled = 2 + config.num_probes if config.sampling else 0
    return config.num_probes * config.num_matvecs + sampled


def _eigenpairs(config: HessianConfig, *, k: int = 1, max_matvecs: int = MAX_MATVECS) -> int:
    return max_matvecs + k


def _trace(config: HessianConfig, *, num_matvecs: int | None = None) -> int:
    return num_matvecs or config.num_matvecs


def _solve(
    config: HessianConfig, *, dampings: Sequence[float], num_matvecs: int | None = None
) -> int:
    return (num_matvecs or config.num_matvecs) + len(dampings)


def _sharpness(
    config: HessianConfig, *, max_matvecs: int = 5, preconditioned: bool = True, warm: bool = True
) -> int:
    return max_matvecs + (0 if warm else (1 + preconditioned) * (MAX_MATVECS + 1))


def _block_coupling(config: HessianConfig, *, num_blocks: int) -> int:
    return num_blocks + 1


def _off_block_share(config: HessianConfig, *, num_probes: int = 4) -> int:
    return 2 * num_probes


PRODUCTS: dict[str, Callable[..., int]] = {
    "spectrum": _spectrum,
    "eigenpairs": _eigenpairs,
    "trace": _trace,
    "solve": _solve,
    "influence": _solve,
    "sharpness": _sharpness,
    "block_coupling": _block_coupling,
    "off_block_share": _off_block_share,
}
"""Products of each analysis that can be taken up, at most."""


def products_of(
    analysis: str, config: HessianConfig, arguments: Mapping[str, Any] | None = None
) -> int:
    """Products that an analysis takes, at most.

    Args:
        analysis: Name of the method of `HessianEngine`.
        config: The settings.
        arguments: The method's own; those that do not matter here are ignored.

    Raises:
        ConfigError: the number depends on the model.
    """
    products = PRODUCTS.get(analysis)
    if products is None or (analysis == "block_coupling" and "num_blocks" not in (arguments or {})):
        raise ConfigError(
            f"how many products {analysis} takes depends on the model: give --products"
        )
    return products(config, **keywords_of(products, arguments or {})[0])


def vectors_kept(
    analysis: str, config: HessianConfig, arguments: Mapping[str, Any] | None = None
) -> int:
    """Vectors that `resume` has on disk, at most: all products; of a spectrum, the basis.

    With those of two generations of the state, and of the one being written (see
    `ds_hessian.resume.store`).

    Args:
        analysis: See `products_of`.
        config: See `products_of`.
        arguments: See `products_of`.

    Raises:
        ConfigError: the number depends on the model.
    """
    if analysis != "spectrum":
        cold = {"warm": False} if analysis == "sharpness" else {}  # unless it is said
        return products_of(analysis, config, {**cold, **(arguments or {})})
    mode, window = config.reorthogonalization.mode, config.reorthogonalization.window
    if mode in ("window", "none"):
        return min(config.num_matvecs, 2 + (window if mode == "window" else 2))
    kept = config.num_matvecs + 2 * (config.num_probes > 1)  # the next probe's first two
    if mode == "full":
        return kept
    # Ritz vectors, two of them just replaced; and the last two before rounding, and those before.
    return kept + window + 2 + 4 * (config.basis.dtype == "bf16")
