"""The memory of outputs on one rank, from the modules and the micro-batches of a job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ds_hessian.backends.containers import tensors_of
from ds_hessian.memory import FP32

SIZES = ("output_size_per_partition", "out_features")
"""Attributes of a layer that have the number of its outputs on a rank: Megatron's, and torch's."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model on a rank.

    Attributes:
        size: Bytes of those of the largest micro-batch in fp32; 0 where they are not foreseen.
        count: Micro-batches.
    """

    size: int = 0
    count: int = 1

    def peak(self, vector: int) -> int:
        """Return the most bytes that a Gauss-Newton product holds of them, beside what passes of
        training do: the outputs of a group at two displacements, or its differences and the outputs
        of a micro-batch at the weights. They are two vectors where nothing is foreseen.

        Args:
            vector: Bytes of a vector, into which a group fits if it has several.
        """
        if not self.size:
            return 2 * vector
        group = min(max(1, vector // self.size), max(1, self.count - 1))
        return 2 * group * self.size


def outputs_of(
    modules: Sequence[nn.Module], batches: Sequence[object], name: str | None
) -> Outputs:
    """Foresee the outputs of a model.

    They have as many rows as a micro-batch has integers (tokens, or labels), or else as its first
    tensor has.

    Args:
        modules: The modules that hold this rank's weights.
        batches: This rank's micro-batches.
        name: The name of the module that returns the outputs; None if it is to be found.
    """
    columns = next((c for c in map(_width, _candidates(modules, name)) if c), 0)
    rows = max((_rows(list(tensors_of(batch))) for batch in batches), default=0)
    return Outputs(FP32 * rows * columns, max(len(batches), 1))


def _candidates(modules: Sequence[nn.Module], name: str | None) -> Iterable[object]:
    """Yield what may be the module of the outputs, the likeliest first."""
    for module in modules:
        named = dict(module.named_modules())
        if name is not None:
            yield named.get(name)
        yield getattr(module, "get_output_embeddings", lambda: None)()
        for of in named.values():
            yield getattr(of, "output_layer", None)
        yield from reversed(named.values())


def _width(module: object) -> int:
    return next((int(size) for a in SIZES if isinstance(size := getattr(module, a, None), int)), 0)


def _rows(tensors: Sequence[Tensor]) -> int:
    whole = [x.numel() for x in tensors if not x.is_floating_point() and not x.is_complex()]
    if whole:
        return max(whole)
    return next((x.numel() // max(x.shape[-1], 1) for x in tensors if x.ndim), 0)
