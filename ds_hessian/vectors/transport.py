"""Transfer of parameters between the ranks' shards and one rank, one whole parameter at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.vectors.layout import Layout
from ds_hessian.vectors.space import VectorSpace


def collected(
    layout: Layout, space: VectorSpace, v: Tensor, name: str, shape: Sequence[int], rank: int = 0
) -> Tensor:
    """Collect a parameter's coordinates of v in its unsharded shape, complete on one rank.

    Args:
        layout: Layout of this rank's vectors.
        space: Their space.
        v: `(n_local,)`.
        name: Checkpoint name of the parameter.
        shape: Its unsharded shape.
        rank: The rank.

    Collective: one reduction to the rank.
    """
    whole = placed(layout, space, v, name, shape)
    if space.distributed:
        dist.reduce(whole, dst=rank, group=space.group)
    return whole


def placed(
    layout: Layout, space: VectorSpace, v: Tensor, name: str, shape: Sequence[int]
) -> Tensor:
    """Return a parameter's coordinates of v that this rank owns in its unsharded shape, else 0."""
    whole = torch.zeros(math.prod(shape), dtype=torch.float32, device=space.device)
    for fragment, part in layout:
        if fragment.name == name and fragment.owned:
            whole[fragment.place(whole.device)] = v[part]
    return whole.reshape(tuple(shape))


def distribute(
    layout: Layout, space: VectorSpace, v: Tensor, name: str, whole: Tensor, rank: int = 0
) -> None:
    """Write one rank's values of a parameter into every rank's part of v.

    Args:
        layout: Layout of this rank's vectors.
        space: Their space.
        v: `(n_local,)`, written in place.
        name: Checkpoint name of the parameter.
        whole: Its values in its unsharded shape; overwritten on the other ranks.
        rank: The rank.

    Collective: one broadcast.
    """
    flat = whole.reshape(-1)
    if space.distributed:
        dist.broadcast(flat, src=rank, group=space.group)
    for fragment, part in layout:
        if fragment.name == name:
            v[part] = flat[fragment.place(flat.device)]
