"""The parts of the unsharded model that a tensor-parallel rank's parameters are.

Read off what the layers say of their parameters, under ZeRO-3 too, whose parameters have no data to
look at. Megatron's layers set `tensor_model_parallel`, `partition_dim` and `partition_stride`
(tensor_parallel/layers.py of megatron-core, and of Megatron-DeepSpeed): a rank stores `stride`
blocks of a dim, every `ranks`-th one of the whole; the halves of a gated layer are two of them.
DeepSpeed's own layers (AutoTP) have a map of the blocks that each rank stores, for their universal
checkpoints. What says nothing is replicated; it counts on the first tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hessian.backends.checksums import checksums, sign
from ds_hessian.errors import UnsupportedError
from ds_hessian.vectors import Box, Fragment, VectorSpace

DS_AUTOTP_META = "ds_autotp_universal_checkpoint_meta"
"""The attribute of a parameter by which DeepSpeed's universal checkpoints know its layout."""


@dataclass(frozen=True)
class Run:
    """A block of the unsharded parameter, as one run of this rank's flattened part.

    Attributes:
        start: Index of the run's first element.
        numel: Its length.
        box: The block.
    """

    start: int
    numel: int
    box: Box


@dataclass(frozen=True)
class Placement:
    """The part of an unsharded parameter that this rank stores.

    Attributes:
        shape: Shape of the unsharded parameter.
        runs: The blocks of the rank's flattened part, in order.
        owned: Whether the part counts here; replicas count on one rank.
        replicated: Whether every tensor-parallel rank has the whole parameter.
    """

    shape: torch.Size
    runs: tuple[Run, ...]
    owned: bool
    replicated: bool

    def fragments(
        self, name: str, start: int, numel: int, owned: bool
    ) -> Iterator[tuple[int, Fragment]]:
        """Yield `(begin, fragment)` for elements `start` to `start + numel` of the part."""
        for run in self.runs:
            low, high = max(start, run.start), min(start + numel, run.start + run.numel)
            if low < high:
                mine = owned and self.owned
                where = low - run.start, high - low
                yield low, Fragment.in_block(name, *where, self.shape, run.box, mine)


def is_split(p: Tensor) -> bool:
    """Return whether tensor-parallel ranks store different parts of the parameter."""
    return bool(getattr(p, "tensor_model_parallel", False))


def place(name: str, p: Tensor, shape: torch.Size, rank: int, ranks: int) -> Placement:
    """Locate the part, of this `shape`, that tensor-parallel rank `rank` of `ranks` stores.

    Raises:
        UnsupportedError: the attributes of `p` do not determine it.
    """
    if ranks == 1 or not is_split(p):
        whole = Run(0, shape.numel(), Box((0,) * len(shape), tuple(shape)))
        return Placement(shape, (whole,), rank == 0, ranks > 1)
    if hasattr(p, DS_AUTOTP_META):
        return _mapped(name, getattr(p, DS_AUTOTP_META), shape, rank)
    dim, stride = getattr(p, "partition_dim", -1), getattr(p, "partition_stride", 1)
    if not 0 <= dim < len(shape) or shape[dim] % stride or (stride > 1 and dim > 0):
        raise UnsupportedError(
            f"ds_hessian does not support the tensor-parallel parameter {name!r} of shape "
            f"{tuple(shape)} with partition_dim {dim} and partition_stride {stride}, which do not "
            "say what part of the whole it is; use Megatron's parallel layers"
        )
    block = list(shape)
    block[dim] //= stride
    numel = shape.numel() // stride
    runs = []
    for k in range(stride):
        offset = [0] * len(shape)
        offset[dim] = (k * ranks + rank) * block[dim]
        runs.append(Run(k * numel, numel, Box(tuple(offset), tuple(block))))
    whole_shape = list(shape)
    whole_shape[dim] *= ranks
    return Placement(torch.Size(whole_shape), tuple(runs), True, False)


def _mapped(name: str, said: Mapping[str, Any], shape: torch.Size, rank: int) -> Placement:
    """Locate the part by DeepSpeed's map of it (checkpoint/affine.py): blocks of the whole.

    Raises:
        UnsupportedError: there is no map, or a block is not one run of the flattened part.
    """
    layout = said.get("conversion", {}).get("affine_map")
    if layout is None:
        why = said.get("conversion", {}).get("unsupported_reason") or "it does not say how"
        raise _not_mapped(name, shape, str(why))
    whole, mine = torch.Size(layout["logical_shape"]), layout["ranks"][rank]
    if tuple(mine["shard_shape"]) != tuple(shape):
        raise _not_mapped(name, shape, f"its map is of a part of shape {mine['shard_shape']}")
    runs = []
    for piece in mine["pieces"]:
        block, (source, strides), (start, steps) = piece["shape"], piece["source"], piece["dest"]
        plain = list(strides) == _strides(whole) and list(steps) == _strides(block)
        if not plain or len(piece["locations"]) > 1 or piece.get("scale", 1.0) != 1.0:
            raise _not_mapped(name, shape, "it is more than blocks of whole rows")
        offset = [source // stride % size for stride, size in zip(strides, whole, strict=True)]
        runs.append(Run(start, math.prod(block), Box(tuple(offset), tuple(block))))
    runs.sort(key=lambda run: run.start)
    return Placement(whole, tuple(runs), True, False)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _not_mapped(name: str, shape: torch.Size, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"ds_hessian does not support the part {tuple(shape)} of the parameter {name!r} that "
        f"DeepSpeed's AutoTP has split: {why}; leave its layer whole (tensor_parallel."
        "partition_config), or measure a data-parallel job, of which a checkpoint has the same "
        "Hessian"
    )


class Replicas:
    """A check that replicated parameters have the same gradient on all tensor-parallel ranks.

    Where they have parts of a sum (of each rank's tokens, or of its heads), Megatron adds them up
    outside of the engine, if at all: a product would be wrong.

    Args:
        rank: Tensor-parallel rank.
        ranks: How many there are.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.sign = sign(rank, ranks)
        self.sums: dict[str, list[float]] = {}

    def add(self, fragment: Fragment, gradient: Tensor | None) -> None:
        """Record a run of a replicated parameter's gradient."""
        entry = self.sums.setdefault(fragment.name, [0.0, 0.0, 0.0])
        if gradient is not None:
            along, across, size = checksums(gradient, fragment.start)
            entry[0] += self.sign * along
            entry[1] += self.sign * across
            entry[2] += size

    def check(self, space: VectorSpace, names: Sequence[str], tolerance: float) -> None:
        """Raise if one of `names` differs by more than `tolerance` of its gradient's norm.

        Raises:
            UnsupportedError: names the first.

        Collective: one all-reduce.
        """
        mine = [self.sums.get(name, [0.0, 0.0, 0.0]) for name in names]
        summed = space.reduce(torch.tensor(mine, dtype=torch.float64).view(-1)).view(-1, 3)
        for name, (along, across, size) in zip(names, summed.tolist(), strict=True):
            difference = max(abs(along), abs(across))
            if difference > tolerance * size:
                raise UnsupportedError(
                    f"ds_hessian does not support the replicated parameter {name!r}, whose "
                    "gradient differs between tensor-parallel ranks (by "
                    f"{difference / size:.1e} of its size): parts of a sum that the engine does "
                    "not add up; measure a job on megatron-core (ds_hessian.megatron), or a "
                    "data-parallel one"
                )
