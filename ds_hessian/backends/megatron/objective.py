"""The loss of a Megatron job: its own forward step on fixed micro-batches.

    L(w) = mean over micro-batches and data-parallel ranks of the micro-batch's own mean loss

or, with `calculate_per_token_loss`, the sum over all tokens divided by their number, as the job's
own schedule averages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ds_hessian.backends.objective import MicroBatches, code_of
from ds_hessian.errors import ConfigError

SIZES = ("seq_length", "micro_batch_size")

ForwardStep = Callable[..., tuple[Any, Callable[..., Any]]]
"""`forward_step(data_iterator, model)` returns the output and `loss_func(output)`, as Megatron's
`forward_backward_func` takes it; `loss_func` returns `(loss, logs)` or `(sum, tokens, logs)`."""


class PipelineObjective(MicroBatches):
    """Micro-batches and the forward step that reads them.

    Args:
        batches: This rank's micro-batches, the values of `next(data_iterator)`. Ranks whose forward
            step reads none (tensor-parallel ranks that receive them from another, middle stages of
            a pipeline) pass an empty list.
        forward_step: A function of (data_iterator, model), as `ForwardStep` describes.
        sizes: `seq_length` and `micro_batch_size`, as the schedule takes them.
        copies: How often a schedule runs each micro-batch, in a row.

    Raises:
        ConfigError: names the argument that is missing or not valid.
    """

    def __init__(
        self,
        batches: Iterable[object],
        forward_step: ForwardStep | None,
        sizes: Mapping[str, int | None],
        copies: int = 1,
    ) -> None:
        given: dict[str, object] = {"forward_step": forward_step, **dict.fromkeys(SIZES), **sizes}
        unknown = [name for name in sizes if name not in SIZES]
        if unknown:
            raise ConfigError(f"{unknown[0]} is not an argument here; there are {', '.join(SIZES)}")
        missing = [name for name, value in given.items() if value is None]
        if missing or forward_step is None:
            raise ConfigError(
                f"no {', '.join(missing)} yet: call hessian.use(batches, forward_step, "
                "seq_length=..., micro_batch_size=...) first"
            )
        super().__init__(batches)
        if not callable(forward_step):
            raise ConfigError(
                "forward_step must be a function of (data_iterator, model), as "
                f"get_forward_backward_func() takes it, got {forward_step!r}"
            )
        self.forward_step, self.sizes, self.copies = forward_step, dict[str, int](), copies
        self.loss_code = code_of(forward_step)
        for name in SIZES:
            size = given[name]
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} must be a positive integer, got {size!r}")
            self.sizes[name] = size

    def iterator(self, first: int, count: int) -> Iterator[object] | None:
        """Return the data of one run of the schedule; None on ranks without batches.

        Args:
            first: The first of the micro-batches that it runs, of which each copy counts.
            count: Their number.

        Containers are copied: Megatron-LM's `get_batch` writes moved tensors back into its dict.
        """
        if not self.batches:
            return None
        return _Data([self.batches[i // self.copies] for i in range(first, first + count)])


class _Data(Iterator[object]):
    """The data iterator of one run, which says what is wrong when more is read than it has."""

    def __init__(self, batches: Sequence[object]) -> None:
        self._batches = iter(batches)

    def __next__(self) -> object:
        for batch in self._batches:
            return copy.copy(batch)
        raise ConfigError(
            "forward_step reads more than one micro-batch a call: pass as one all that it reads, "
            "and have it read that with one next(data_iterator)"
        )
