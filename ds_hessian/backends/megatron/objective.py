"""The loss of a Megatron job: its own forward step on fixed micro-batches.

    L(w) = mean over micro-batches and data-parallel ranks of the micro-batch's own mean loss

or, with `calculate_per_token_loss`, the sum over all tokens divided by their number, as the job's
own schedule averages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ds_hessian.backends.objective import Objective
from ds_hessian.errors import ConfigError

ForwardStep = Callable[..., tuple[Any, Callable[..., Any]]]
"""`forward_step(data_iterator, model)` returns the output and `loss_func(output)`, as Megatron's
`forward_backward_func` takes it; `loss_func` returns `(loss, logs)` or `(sum, tokens, logs)`."""


class PipelineObjective(Objective):
    """Micro-batches and the forward step that reads them.

    Args:
        batches: This rank's micro-batches, what `next(data_iterator)` gives. Ranks whose forward
            step reads none (tensor-parallel ranks that receive them from another, middle stages of
            a pipeline) pass an empty list.
        forward_step: See `ForwardStep`.
        seq_length: Of a micro-batch, as the schedule takes it.
        micro_batch_size: Of a micro-batch.

    Raises:
        ConfigError: names the argument that cannot be.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        forward_step: ForwardStep,
        seq_length: int,
        micro_batch_size: int,
    ) -> None:
        if isinstance(batches, (Tensor, Mapping)):
            raise ConfigError("batches must be a list of micro-batches, got one; pass [batch]")
        if not isinstance(batches, Iterable):
            raise ConfigError(f"batches must be a list of micro-batches, got {batches!r}")
        if not callable(forward_step):
            raise ConfigError(
                "forward_step must be a function of (data_iterator, model), as "
                f"get_forward_backward_func() takes it, got {forward_step!r}"
            )
        for name, size in (("seq_length", seq_length), ("micro_batch_size", micro_batch_size)):
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} must be a positive integer, got {size!r}")
        self.batches = list(batches)
        self.forward_step = forward_step
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size

    def iterator(self, first: int, count: int) -> Iterator[Any] | None:
        """What the forward step reads in one run of the schedule; None on ranks without batches.

        Containers are copied: Megatron-LM's `get_batch` writes moved tensors back into its dict.
        """
        if not self.batches:
            return None
        return iter([copy.copy(batch) for batch in self.batches[first : first + count]])
