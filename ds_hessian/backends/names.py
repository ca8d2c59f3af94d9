"""The names by which probes, records and checkpoints know parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

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


class Stored:
    """Where the parameters that are trained are, noted so that a change of any is seen quickly."""

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self._homes = list[tuple[str, dict[str, Any], str, object]]()
        self._trained = list[tuple[str, nn.Parameter, object]]()
        for path, inside in (each for module in modules for each in module.named_modules()):
            for home in (inside._modules, inside._parameters):
                for key, each in home.items():
                    name = checkpoint_name(f"{path}.{key}" if path else key)
                    if isinstance(each, nn.Parameter) and each.requires_grad:
                        self._trained.append((name, each, _memory(each)))
                    elif not isinstance(each, nn.Module):
                        continue
                    self._homes.append((name, home, key, each))

    def changed(self) -> list[str]:
        """Return the names of what was frozen, replaced, or given another type or memory."""
        other = [name for name, home, key, each in self._homes if home.get(key) is not each]
        for name, p, memory in self._trained:
            if not p.requires_grad or _memory(p) != memory:
                other.append(name)
        return list(dict.fromkeys(other))


def _memory(p: nn.Parameter) -> object:
    """Return a parameter's type and address; None of one that ZeRO-3 gathers, which has other
    memory then and, partitioned, none.
    """
    return None if hasattr(p, "ds_id") else (p.dtype, p.data_ptr())


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
