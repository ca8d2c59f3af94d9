"""Factors that a job's own optimizer keeps of a weight, read from its state.

| state of a weight | of |
|---|---|
| `GG`, a list of two | SOAP and its kin (its authors', pytorch_optimizer, heavyball) |
| `L`, `R` | SOAP of Emerging-Optimizers |
| `pre_cond_0`, `pre_cond_1` | Shampoo of pytorch_optimizer |
| `precond_0`, `precond_1` | Shampoo of torch_optimizer |
| `pre_conditioner`, whose `statistics` are a list of two | ScalableShampoo of pytorch_optimizer |

They are sums, or averages that decay, of `G G'` and `G' G` over steps: the curvature for which they
stand is `L (x) R / tr L` (Shampoo^2: Morwani et al., arXiv 2406.17748). Factors of KL-Shampoo are
`L (x) R` in these units already (Lin et al., arXiv 2509.03378). An average is taken as it is, which
after t steps with a decay b may be 1 - b^t of the true one: a factor of K.

Muon and Adam keep no factors, nor does what steps flat parts of many weights, as the optimizers of
ZeRO 1 - 3 do: they are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from torch import Tensor

from ds_hessian.backends.weights import Weight
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.optimizer import inside

Pair = tuple[Tensor | None, Tensor | None]
"""Factors of the rows and of the columns of a weight as it is stored, None for the identity."""

Adapter = Callable[[str], Pair | None]
"""Takes the name of a weight; returns the factors L and R of `K = L (x) R` that the optimizer keeps
for it, or None on a rank that has none. Called on every rank."""

PAIRS = (("L", "R"), ("pre_cond_0", "pre_cond_1"), ("precond_0", "precond_1"))

LISTS = re.compile(r"(^|_)GG(_\d+)?$")
"""The key of a list of factors, as it is or, in heavyball, between other names."""

IN_UNITS = "kl"
"""Part of the class names of optimizers whose factors are those of KL-Shampoo."""


Size = tuple[int, ...]


def fitting(
    factors: Sequence[Tensor | None], shape: Sequence[int]
) -> tuple[bool, list[Size | None], list[Size]]:
    """Return whether factors are of the rows and of the columns of a matrix of that shape; the
    sizes that they have, None for the identity, and those that they should have.
    """
    sizes = [None if factor is None else tuple(factor.shape) for factor in factors]
    wanted: list[Size] = [(size, size) for size in shape]
    fit = len(sizes) == len(wanted) and all(
        size in (None, square) for size, square in zip(sizes, wanted, strict=True)
    )
    return fit, sizes, wanted


class KeptFactors:
    """An `Adapter` that reads the state of an optimizer.

    Args:
        optimizer: The optimizer of the job, or a wrapper around one or several.
        weights: This rank's weights, whose modules have the parameters that it steps, or of which
            it steps masters.

    Raises:
        ConfigError: it is no optimizer.
    """

    def __init__(self, optimizer: Any, weights: Iterable[Weight]) -> None:
        self._optimizers = list(inside(optimizer))
        if not all(isinstance(getattr(each, "state", None), Mapping) for each in self._optimizers):
            raise ConfigError(
                "an adapter is a function of a weight's name, or an optimizer that keeps factors; "
                f"got {type(optimizer).__name__}"
            )
        self._stepped = {w.name: (w.module._parameters["weight"], w.master) for w in weights}

    def __call__(self, name: str) -> Pair | None:
        """Return the factors of a weight; None on ranks that do not have it.

        Raises:
            UnsupportedError: the optimizer keeps no factors of its rows and of its columns.
        """
        stepped = [x for x in self._stepped.get(name, ()) if x is not None]
        if not stepped:
            return None
        for optimizer, x in product(self._optimizers, stepped):
            if optimizer.state.get(x):
                kind = type(optimizer).__name__
                return _read(name, kind, _flat(optimizer.state[x]), x.shape)
        kinds = " and ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        raise _refused(
            name,
            kinds,
            "no state of this weight: make an optimizer step first; one that steps flat parts of "
            "many weights, as under ZeRO 1 - 3, keeps factors of none of them",
        )


def _refused(name: str, kind: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"ds_hessian does not support factors of {name} that the optimizer keeps: {kind} has {what}"
    )


def _read(name: str, kind: str, state: list[tuple[str, Any]], shape: Sequence[int]) -> Pair:
    factors = _factors(state)
    if factors is None:
        keys = ", ".join(sorted({key for key, _ in state}))
        raise _refused(name, kind, f"no Kronecker factors, but {keys}")
    fit, sizes, wanted = fitting(factors, shape)
    if not fit or not any(sizes):
        raise _refused(
            name,
            kind,
            f"factors of sizes {sizes} in place of {wanted}: of merged dims, of blocks, or of a "
            "part of the weight; let it keep one of the rows and one of the columns",
        )
    left, right = factors
    if IN_UNITS in kind.lower():
        return left, right
    if left is None or right is None:  # one side alone, of the mean over the other
        return _over(left, shape[1]), _over(right, shape[0])
    return left, _over(right, float(left.float().trace()) or 1.0)  # torch 2.9 has none in bf16


def _over(factor: Tensor | None, divisor: float) -> Tensor | None:
    return None if factor is None else factor.float() / divisor


def _flat(state: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Return the entries of a state whose values may be states of parts of the weight."""
    found = list[tuple[str, Any]]()
    for key, value in state.items():
        nested = isinstance(value, Mapping) and not isinstance(key, str)
        found += _flat(value) if nested else [(str(key), value)]
    return found


def _factors(state: list[tuple[str, Any]]) -> list[Tensor | None] | None:
    """Return all factors of a state; None if it has nothing of the kind."""
    for pair in PAIRS:
        found = [value for name in pair for key, value in state if key == name]
        if found:
            return [_square(value) for value in found]
    lists = [value for key, value in state if LISTS.search(key)]
    lists += [value.statistics for _, value in state if hasattr(value, "statistics")]
    every = [_square(value) for entries in lists for value in entries]
    return every if lists else None


def _square(value: Any) -> Tensor | None:
    """Return a factor; None for what stands for the identity, as of a dimension that is too large.

    Some implementations stack the factors of weights of one shape, of which there is one here.
    """
    if not isinstance(value, Tensor) or not value.numel():
        return None
    return value[0] if value.ndim == 3 and len(value) == 1 else value
