"""What the Hessian operator needs of a host: shards to displace, gradients to add up, a guard."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol

from torch import Tensor

from ds_hessian.memory import Item
from ds_hessian.vectors import Layout, VectorSpace


class ShardBackend(Protocol):
    """The shards of one training job, seen as a function from weights to gradients.

    The function is fixed by `measuring`: the same micro-batches, random states and module buffers
    on every evaluation, whatever the order. All methods are collective.

    Attributes:
        layout: The fragments this rank stores, in the order of its vectors.
        space: Inner products over all ranks.
        num_micro_batches: Micro-batches per rank that define the loss.
        gradient_scale: See `add_gradient`; None until every micro-batch has been evaluated once.
        loss: The mean loss at the weights, from then on.
    """

    layout: Layout
    space: VectorSpace
    num_micro_batches: int
    gradient_scale: float | None
    loss: float

    @property
    def unit_roundoff(self) -> float:
        """Half of `torch.finfo(dtype).eps`, with the dtype in which the passes compute."""
        ...

    def measuring(self) -> AbstractContextManager[None]:
        """Guard of the training state. Evaluations are allowed inside only; leaving it, also by an
        exception, puts back every bit that they touched.
        """
        ...

    def displace(self, v: Tensor | None, h: float) -> Tensor:
        """Make the weights of all ranks `w + h v` (`w` with None), rounded once from the masters.

        Returns this rank's partial `<change, v>` and `<change, change>` (see `ops.displace`).
        """
        ...

    def add_gradient(self, out: Tensor, micro_batches: range) -> None:
        """Add to `out` `(n_local,)` fp32 the gradient terms of these micro-batches at the current
        weights. The gradient of the loss is `gradient_scale` times the sum over all micro-batches.
        """
        ...

    def memory(self, precision: Literal["model", "fp32"] = "model") -> list[Item]:
        """What this rank holds inside `measuring` beyond training's memory; not collective.

        Args:
            precision: Of the passes.
        """
        ...

    def weight_norm(self) -> float:
        """`|w|` over all ranks."""
        ...
