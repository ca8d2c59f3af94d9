"""The memory of outputs on one rank, from the modules and the micro-batches of a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ds_hessian.backends.containers import tensors_of
from ds_hessian.memory import FP32, FP64
from ds_hessian.operators.outputs.tap import sampled

SIZES = ("output_size_per_partition", "out_features")
"""Attributes of a layer that have the number of its outputs on a rank: Megatron's, and torch's."""

INPUTS = ("input_size_per_partition", "in_features")
"""Those that have the number of its inputs."""

IN_FP64, OF_GROUP = 8, 3
"""Outputs in fp32 that have the memory of a product of a loss in fp64, of one micro-batch, and
those of them that each micro-batch of a group has: differences, and cotangents that are kept. The
others are outputs, their logarithms or the like, cotangents, and third differences."""

SMALL = 2**24
"""Bytes that are no matter of memory."""

Seen = tuple[float, bool]
"""Outputs as a measurement found them: entries for each row of a micro-batch, and whether the loss
in them is known."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model on a rank.

    Attributes:
        size: Bytes of those of the largest micro-batch in fp32; 0 where they are not foreseen.
        count: Micro-batches.
        known: Whether the loss in them is known, so that no cotangents are kept; None where no
            measurement has told.
    """

    size: int = 0
    count: int = 1
    known: bool | None = None

    @property
    def sample(self) -> int:
        """Bytes of a sample of those of the largest micro-batch."""
        return FP32 * sampled(self.size // FP32)

    def cotangents(self, vector: int) -> int:
        """Return the bytes of the samples of the cotangents of all micro-batches, which are kept
        where the loss is not known; half of them where it is not known whether it is.

        Args:
            vector: Bytes of a vector.
        """
        width = FP64 if fits_fp64(self.size, vector) else FP32
        whole = self.count * self.sample * width // FP32
        return {True: 0, False: whole, None: whole // 2}[self.known]

    def peak(self, vector: int) -> int:
        """Return the most bytes that a Gauss-Newton product holds of them, and of the trial before
        it, beside what passes of training do. A trial holds those of one micro-batch, and the rest
        of a product those of a group: differences with samples of sums and, where the loss is known
        by its values, cotangents; and of one micro-batch outputs or cotangents, or what a loss in
        fp64 has. Where it is not known which, the mean, which is within a tenth of both where
        outputs are not far larger than a vector. They are three vectors where nothing is foreseen.

        Args:
            vector: Bytes of a vector, into which a group fits if it has several.
        """
        if not self.size:
            return 3 * vector
        known = self._held(vector, FP32, 1, 1)
        if fits_fp64(self.size, vector):
            other = self._held(vector, FP64, OF_GROUP, IN_FP64 - OF_GROUP)
        else:
            other = self._held(vector, FP32, 2, 1)
        return {True: known, False: other, None: (known + other) // 2}[self.known]

    def _held(self, vector: int, width: int, each: int, once: int) -> int:
        """Return the most bytes of so many outputs in fp32 of each micro-batch, and of so many of
        one, where groups are of outputs of so many bytes each.
        """
        one, rest = each * self.size + self.sample, once * self.size
        group = min(group_of(vector, self.size, width), max(1, self.count - 1))
        return max(vector + one, group * one) + rest


def group_of(vector: int, size: int, width: int) -> int:
    """Return how many micro-batches have outputs that fit into a vector, one at least.

    Args:
        vector: Bytes of a vector.
        size: Bytes of the outputs of the largest micro-batch, in fp32.
        width: Bytes of an output that is held.
    """
    return max(1, FP32 * vector // (width * max(size, 1)))


def fits_fp64(size: int, vector: int) -> bool:
    """Return whether a loss may have outputs in fp64: what is known by its values needs no more
    than a vector then, or next to nothing.

    Args:
        size: Bytes of the outputs of the largest micro-batch, in fp32.
        vector: Bytes of a vector.
    """
    return IN_FP64 * size <= max(vector, SMALL)


def outputs_of(
    modules: Sequence[nn.Module],
    batches: Sequence[object],
    name: str | None,
    seen: Seen | None = None,
) -> Outputs:
    """Foresee the outputs of a model.

    They have as many rows as a micro-batch has integers (tokens, or labels), or else as its first
    tensor has.

    Args:
        modules: The modules that hold this rank's weights.
        batches: This rank's micro-batches.
        name: The name of the module that returns the outputs; None if it is to be found.
        seen: What a measurement has found, of these micro-batches or of others.
    """
    columns, known = seen or (next((c for c in _candidates(modules, name) if c), 0), None)
    size = FP32 * round(_most_rows(batches) * columns)
    return Outputs(size, max(len(batches), 1), known)


def seen_of(largest: int, known: bool, batches: Sequence[object]) -> Seen | None:
    """Return what a measurement has found, for later plans; None if this rank has no outputs.

    Args:
        largest: Bytes of the outputs of the largest micro-batch, in fp32.
        known: Whether the loss in them is known.
        batches: This rank's micro-batches.
    """
    rows = _most_rows(batches)
    return (largest / FP32 / rows, known) if largest and rows else None


def _candidates(modules: Sequence[nn.Module], name: str | None) -> Iterator[int]:
    """Yield the sizes of what may be the outputs, the likeliest first."""
    for module in modules:
        named = dict(module.named_modules())
        if name in named:
            yield _width(named[name]) or _heads(named[name])
        yield _width(getattr(module, "get_output_embeddings", lambda: None)())
        for of in named.values():
            yield _width(getattr(of, "output_layer", None))
        yield from map(_width, reversed(named.values()))


def _heads(module: nn.Module) -> int:
    """Return the outputs of a module's layers that no later one of them takes: of its heads."""
    total, taken = 0, set[int]()
    for layer in reversed(list(module.modules())):
        total += 0 if _width(layer) in taken else _width(layer)
        taken.add(_width(layer, INPUTS))
    return total


def _width(module: object, sizes: Sequence[str] = SIZES) -> int:
    return next((int(size) for a in sizes if isinstance(size := getattr(module, a, None), int)), 0)


def _most_rows(batches: Sequence[object]) -> int:
    return max((_rows(list(tensors_of(batch))) for batch in batches), default=0)


def _rows(tensors: Sequence[Tensor]) -> int:
    whole = [x.numel() for x in tensors if not x.is_floating_point() and not x.is_complex()]
    if whole:
        return max(whole)
    return next((x.numel() // max(x.shape[-1], 1) for x in tensors if x.ndim), 0)
