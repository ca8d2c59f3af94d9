"""Blocks of coordinates: the model's parameters grouped by name.

Every rank knows all names in the same order, whatever it stores, so that figures by block line up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian import ops
from ds_hessian.errors import ConfigError
from ds_hessian.vectors.layout import Layout
from ds_hessian.vectors.space import VectorSpace

OTHER = "other"
"""The block of parameters that no pattern matches."""


def by_layer(names: Iterable[str]) -> dict[str, str]:
    """Return {parameter name: block}: transformer layers, and everything else by its module.

    A name's block ends with its first number (`model.layers.3.mlp.up.weight` is in
    `model.layers.3`); a name without one belongs to its module (`embed.weight` to `embed`).
    """
    blocks = {}
    for name in names:
        numbered = re.match(r"(?:.*?\.)?\d+(?=\.|$)", name)
        blocks[name] = numbered.group() if numbered else name.rpartition(".")[0] or name
    return blocks


def by_pattern(names: Iterable[str], patterns: Mapping[str, str]) -> dict[str, str]:
    """Return {parameter name: block}, with the first block whose regular expression matches.

    Names without a match form the block `OTHER`.

    Raises:
        ConfigError: a pattern matches no parameter, or is none, or its block has that name too.
    """
    try:
        found = {b: re.compile(pattern) for b, pattern in patterns.items()}
    except re.error as error:
        raise ConfigError(f"blocks: {error.pattern!r} is no regular expression: {error}") from None
    blocks = {
        name: next((b for b, pattern in found.items() if pattern.search(name)), OTHER)
        for name in names
    }
    rest = [name for name in blocks if not any(p.search(name) for p in found.values())]
    if rest and OTHER in patterns:
        raise ConfigError(
            f"blocks: {OTHER!r} is the block of parameters that no pattern matches, such as "
            f"{', '.join(rest[:8])}; give the block of {patterns[OTHER]!r} another name"
        )
    for unused in patterns.keys() - set(blocks.values()):
        raise ConfigError(
            f"the pattern {patterns[unused]!r} of block {unused!r} matches no parameter that is "
            f"not in an earlier block; the parameters are {', '.join(list(blocks)[:8])}, ..."
        )
    return blocks


class Partition:
    """The coordinates of a space in blocks.

    Args:
        layout: The layout of this rank's vectors.
        space: Their space.
        blocks: {parameter name: block}, all parameters of the model, the same on every rank.

    Attributes:
        names: The names of the B blocks, in order of appearance.
        sizes: The number of coordinates of each, `(B,)`, over all ranks.

    Collective: the constructor and `dots`.
    """

    def __init__(self, layout: Layout, space: VectorSpace, blocks: Mapping[str, str]) -> None:
        self.space = space
        self.names: Sequence[str] = list(dict.fromkeys(blocks.values()))
        index = {name: i for i, name in enumerate(self.names)}
        self._parts = [(index[blocks[f.name]], part, f.owned) for f, part in layout if f.numel > 0]
        counts = torch.zeros(len(self.names), dtype=torch.float64)
        for block, part, owned in self._parts:
            counts[block] += (part.stop - part.start) * owned
        self.sizes = self.space.reduce(counts).numpy()

    def dots(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> NDArray[np.float64]:
        """Return inner products within each block, `(B, len(pairs))`, in one all-reduce."""
        partials = torch.zeros(
            len(self.names), len(pairs), dtype=torch.float64, device=self.space.device
        )
        for block, part, owned in self._parts:
            if owned:
                inside = [(a[part], b[part]) for a, b in pairs]
                partials[block] += ops.dots(inside, part.stop - part.start)
        return self.space.reduce(partials.view(-1)).view(partials.shape).numpy()

    def scale(self, v: Tensor, factors: Sequence[float] | NDArray[np.float64]) -> Tensor:
        """Return a copy of v with each block multiplied by its factor."""
        out = v.clone()
        for block, part, _ in self._parts:
            out[part] *= float(factors[block])
        return out

    def only(self, v: Tensor, block: int) -> Tensor:
        """Return a copy of v that is zero outside of one block."""
        return self.scale(v, np.eye(len(self.names))[block])
