"""Layout-independent random vectors.

A probe is a function of (seed, probe number, parameter name, index in the unsharded parameter), so
every world size, ZeRO stage and parallel layout draws the same vector, bit for bit.
"""

from __future__ import annotations

import hashlib
import numbers
from typing import Literal, get_args

from torch import Tensor

from ds_hessian import ops
from ds_hessian.errors import ConfigError, NumericsError
from ds_hessian.vectors.layout import Layout
from ds_hessian.vectors.space import VectorSpace

CHUNK = 1 << 18
"""Coordinates of a box that are filled at a time: each takes some 200 bytes of temporaries."""

ProbeKind = Literal["gaussian", "rademacher"]


def refuse_impossible_probe(seed: object, probe: object, kind: object) -> None:
    """Raise for what no probe has.

    Raises:
        ConfigError: seed or probe is no integer of at least 0, or the kind is unknown.
    """
    for name, value in (("seed", seed), ("probe", probe)):
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{name} must be an integer, at least 0, got {value!r}")
    if kind not in get_args(ProbeKind):
        kinds = " or ".join(map(repr, get_args(ProbeKind)))
        raise ConfigError(f"kind must be {kinds}, got {kind!r}")


def _hash64(*parts: object) -> int:
    """Return a stable 64-bit number for the parts (Python's own hash differs between processes)."""
    text = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def random_vector(
    layout: Layout, space: VectorSpace, seed: int, probe: int = 0, kind: ProbeKind = "gaussian"
) -> Tensor:
    """Return probe number `probe` of `seed`, `(n_local,)` fp32, of unit length over all ranks.

    Gaussian probes are uniform on the sphere; Rademacher probes have entries +-1/sqrt(n).

    Collective: one all-reduce.

    Raises:
        NumericsError: the space has no coordinates.
    """
    fill, variate = {
        "gaussian": (ops.fill_gaussian, ops.gaussian),
        "rademacher": (ops.fill_rademacher, ops.rademacher),
    }[kind]
    key = _hash64("ds_hessian probe", seed)
    v = space.zeros()
    for fragment, part in layout:
        stream = _hash64(fragment.name, probe)
        if fragment.box is None:  # indices one after the other: the kernel, without temporaries
            fill(v[part], key, stream, fragment.start)
            continue
        for start in range(0, fragment.numel, CHUNK):
            stop = min(start + CHUNK, fragment.numel)
            index = fragment.index(start, stop, space.device)
            v[part.start + start : part.start + stop] = variate(key, stream, index)
    length = space.norm(v)
    if length == 0.0:
        raise NumericsError("a probe needs at least one trainable coordinate; the model has none")
    return v.mul_(1.0 / length)
