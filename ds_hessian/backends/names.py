"""The names by which probes, records and checkpoints know parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import nn

from ds_hessian.errors import ConfigError
from ds_hessian.ranks import Shared, balanced, first_of, from_rank, imbalance
from ds_hessian.vectors import VectorSpace


def checkpoint_name(name: str) -> str:
    """Return the name that a parameter has in the model alone, without `torch.compile` around it
    or around a part of it.
    """
    return name.replace("_orig_mod.", "")


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return checkpoint names and parameters of those that are trained."""
    named = module.named_parameters()
    return [(checkpoint_name(name), p) for name, p in named if p.requires_grad]


Stored = tuple[int, torch.dtype | None, int]
"""A parameter's identity, its type, and the address of its memory; no type and 0 where it has no
memory of its own, as ZeRO-3 gathers it."""


def stored(modules: Sequence[nn.Module]) -> dict[str, Stored]:
    """Return where the parameters that are trained are stored, by name."""
    found = dict[str, Stored]()
    for number, module in enumerate(modules):
        for name, p in trained(module):
            place = (None, 0) if hasattr(p, "ds_id") else (p.dtype, p.data_ptr())
            found[f"{name} of {number}" if name in found else name] = id(p), *place
    return found


def trained_tensors(modules: Sequence[nn.Module]) -> list[tuple[str, int]]:
    """Return the name of each of this rank's parameters that are trained, and which tensor it is.

    The optimizer keeps those that it steps, so that no other one has their identity.
    """
    return [(name, id(p)) for module in modules for name, p in trained(module)]


def require_same(
    attached: Sequence[tuple[str, Hashable]], here: Sequence[tuple[str, Hashable]]
) -> None:
    """Require the trained parameters to be those that were attached.

    A parameter that is frozen later, or that another one has replaced, has a coordinate, but no
    gradient.

    Args:
        attached: The names of the trained parameters of the modules when they were attached, each
            with what else must be the same.
        here: Those of now.

    Raises:
        ConfigError: a parameter has been frozen, unfrozen, added, removed, replaced or renamed.
    """
    if list(here) != list(attached):
        different = sorted({name for name, _ in set(here) ^ set(attached)})
        raise ConfigError(
            "the trainable parameters have changed since attach(): "
            f"{', '.join(different[:5]) or 'their order'}; freeze and wrap before you attach"
        )


def require_same_parameters(
    parameters: Sequence[tuple[str, torch.Size]], space: VectorSpace
) -> None:
    """Raise unless all ranks have these names and shapes, in this order.

    Raises:
        ConfigError: names the first parameter that differs, on every rank.

    Collective: one all-reduce of 16 bytes; where they differ, rank 0 sends its list.
    """
    mine = [(name, tuple(shape)) for name, shape in parameters]
    shared = Shared(mine, space.world_size, space.rank == 0)
    if balanced(space.reduce(imbalance([shared]))):
        return
    expected = from_rank(mine, 0, space.device)
    here, there = (dict(enumerate(found)) for found in (mine, expected))
    both = range(max(len(mine), len(expected)))
    place = next((i for i in both if here.get(i) != there.get(i)), None)
    other = first_of(place is not None, space.device)
    assert other is not None
    at, found = from_rank((place, here.get(place or 0)), other, space.device)
    raise ConfigError(
        f"all ranks must train the same parameters in the same order: number {at} is "
        f"{_described(there.get(at or 0))} on rank 0 and {_described(found)} on rank {other}"
    )


def _described(parameter: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if parameter is None else f"{parameter[0]!r} of shape {parameter[1]}"
