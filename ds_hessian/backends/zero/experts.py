"""Experts of `deepspeed.moe`: the names by which all ranks know them, and which ranks have each.

A layer's experts are divided among the ranks of an expert-parallel group; the ranks that have the
same ones are an expert-data-parallel group, over which their gradients are added up and, at stages
1 and 2, their masters sharded. A rank's module numbers its own experts from 0 on. Their names here
are those of DeepSpeed's checkpoints, which number the experts of the layer, so that probes and
coefficients are the same however many ranks share a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_hessian.backends.names import checkpoint_name
from ds_hessian.backends.zero import host
from ds_hessian.backends.zero.host import Engine
from ds_hessian.errors import ConfigError
from ds_hessian.ranks import Shared, balanced, gather_objects, imbalance, union
from ds_hessian.vectors import VectorSpace

EXPERTS = "deepspeed_experts."
"""The list of a layer's experts, in the names of their parameters."""

Place = tuple[int, int, int]
"""Where a parameter comes in the model: the parameter itself or the first one of its layer's
experts, its expert, and its position in that, counted as in a model with all experts."""

Told = tuple[Place, str, torch.Size]
"""What ranks tell each other of a parameter: its place, name and unsharded shape."""


@dataclass(frozen=True)
class Known:
    """A trained parameter as all ranks know it.

    Attributes:
        parameter: The parameter.
        told: Its place, name and shape.
        ranks: The number of ranks that have it.
        first: Whether this rank is the first of them.
    """

    parameter: nn.Parameter
    told: Told
    ranks: int
    first: bool


def known(engine: Engine) -> list[Known]:
    """Return the trained parameters that this rank has, in the order of its module."""
    layers = {checkpoint_name(path): layer for path, layer in host.expert_layers(engine)}
    found, last, slot = [], "", -1
    first_of_expert: dict[tuple[str, int], int] = {}
    for number, (local, p) in enumerate(engine.module.named_parameters()):
        name = checkpoint_name(local)
        path, separator, rest = name.partition(EXPERTS)
        layer = layers.get(path.removesuffix(".experts.")) if separator else None
        expert = inner = 0
        if layer is None:
            slot, last = slot + 1, ""
        else:
            mine, _, rest = rest.partition(".")
            if path != last:
                slot, last = slot + 1, path
            inner = number - first_of_expert.setdefault((path, int(mine)), number)
            expert = int(mine) + host.expert_rank(layer) * layer.num_local_experts
            name = f"{path}{EXPERTS}{expert}.{rest}"
        if p.requires_grad:
            rank, ranks = host.copies(engine, p)
            found.append(Known(p, ((slot, expert, inner), name, host.shape(p)), ranks, rank == 0))
    return found


def all_parameters(mine: Sequence[Known], space: VectorSpace) -> list[tuple[str, torch.Size]]:
    """Return names and unsharded shapes of the parameters of all ranks, in the model's order.

    Raises:
        ConfigError: a rank does not train a parameter that others of its data-parallel or
            expert-data-parallel group train.

    Collective: one all-reduce, and `ds_hessian.ranks.union`, to which each rank of an
    expert-parallel group adds its own.
    """
    terms = imbalance(Shared(k.told, k.ranks, k.first) for k in mine)
    if not balanced(space.reduce(terms.to(space.device))):
        raise ConfigError(
            "all ranks that have a parameter must train it: "
            f"{next(_uneven(mine), 'one')!r} is trained on some of them only"
        )
    told = union({k.told for k in mine}, space.device)
    return [(name, shape) for _, name, shape in sorted(told)]


def _uneven(mine: Sequence[Known]) -> Iterator[str]:
    """Yield the names of parameters that some of their ranks do not train. Collective."""
    found: dict[Told, list[int]] = {}
    for of_rank in gather_objects([(k.told, k.ranks) for k in mine]):
        for told, ranks in of_rank:
            found.setdefault(told, []).append(ranks)
    for told, counts in sorted(found.items()):
        if len(counts) != counts[0]:
            yield told[1]
