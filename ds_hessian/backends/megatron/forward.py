"""The job's forward step inside a measurement: the same function of the weights each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_hessian.backends.guard import Guard, kept_grad_mode
from ds_hessian.backends.megatron import host
from ds_hessian.backends.megatron.objective import ForwardStep
from ds_hessian.backends.random_states import GeneratorState
from ds_hessian.backends.state import tensors_in
from ds_hessian.errors import ConfigError, NumericsError

if TYPE_CHECKING:
    from ds_hessian.backends.megatron.host import Chunk


class FixedForward:
    """`forward_step_func` of the schedule for one measurement.

    Each micro-batch starts from its own random state and the buffers as they were, in every
    evaluation.

    Args:
        forward_step: The job's forward step.
        chunks: The model chunks.
        guard: The guard of the measurement.
        copies: How often the schedule runs each micro-batch, in a row. Each copy has a number of
            its own; all have the same random state.

    Attributes:
        function: The mode in which the schedule runs.
        losses: `{micro-batch: (loss, tokens or None)}` of the first evaluations on this rank; empty
            on all stages but the last.
    """

    def __init__(
        self,
        forward_step: ForwardStep,
        chunks: Sequence[Chunk],
        guard: Guard,
        copies: int = 1,
    ) -> None:
        self.copies = copies
        self.forward_step, self.function = forward_step, guard.function
        self.random, self.buffers = guard.random, guard.buffers
        self.chunks = {id(host.unwrap(chunk)): i for i, chunk in enumerate(chunks)}
        self.per_token = bool(host.model_config(chunks[0]).calculate_per_token_loss)
        self.losses: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._states: dict[tuple[int, int], tuple[GeneratorState, ...]] = {}
        self._counts: dict[tuple[int, int], list[Tensor]] = {}  # of routers, at the weights
        self.start(0)

    def keys(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return what tells the forwards of a run apart: chunk and micro-batch."""
        return [(c, i) for c in range(len(self.chunks)) for i in range(first, first + count)]

    def start(self, first: int) -> None:
        """Begin a run of the schedule at micro-batch number `first`."""
        self._next = [first] * len(self.chunks)

    def __call__(
        self, data_iterator: Iterator[object] | None, model: Chunk, *rest: object
    ) -> tuple[object, Callable[..., object]]:
        """Run the next micro-batch of a chunk; the schedule calls it in their order.

        Raises:
            ConfigError: what the job's step returned is not what the schedule takes.
            NumericsError: the loss at the weights is not finite, and gradients are taken of it;
                raised by the function of it that is returned.
        """
        chunk = self.chunks[id(host.unwrap(model))]
        index = self._next[chunk]
        self._next[chunk] += 1
        drawing = chunk, index // self.copies
        if drawing in self._states:
            self.random.set(self._states[drawing])
        else:  # first evaluation: the generators run on
            self._states[drawing] = self.random.get()
        self.function.at((chunk, index))
        self.buffers[chunk].renew()
        counts = host.running_counts(model)
        for count, start in zip(counts, self._counts.get((chunk, index), ()), strict=False):
            count.copy_(start)
        with self.function.forward(), kept_grad_mode():
            output, loss_func = _pair(self.forward_step(data_iterator, model, *rest))
        if torch.is_grad_enabled():  # without gradients routers do not count
            if (chunk, index + 1) not in self._counts:
                for each in tensors_in((output,)):
                    self.function.note_graph(each)
            counts = [count.clone() for count in host.running_counts(model)]
            self._counts.setdefault((chunk, index + 1), counts)

        def loss(output: Tensor, **options: object) -> tuple[object, ...]:
            with self.function.forward(goes_on=True), kept_grad_mode():
                result = loss_func(output, **options)
            if not isinstance(result, tuple) or len(result) not in (2, 3):
                raise ConfigError(
                    "loss_func must return (loss, logs) or (sum, tokens, logs), got "
                    f"{_kind(result)}"
                )
            self._record(index, *result[:-1])
            return result

        return output, loss

    def _record(self, index: int, loss: object, *tokens: object) -> None:
        graded = not torch.is_grad_enabled() or getattr(loss, "requires_grad", False)
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and graded):
            raise ConfigError(
                f"loss_func must return one scalar loss that requires gradients, got {_kind(loss)}"
            )
        if index not in self.losses:
            self.function.note_graph(loss)
        # The schedule divides the loss in place.
        value, count = loss.detach().clone().double().reshape(()), _count(*tokens)
        if index not in self.losses and torch.is_grad_enabled() and not torch.isfinite(value):
            raise NumericsError(
                f"the loss of micro-batch {index // self.copies} is {value.item()} at the weights: "
                "look at its data"
            )
        if self.per_token and count is None:
            raise ConfigError(
                "with calculate_per_token_loss, loss_func must return (sum, tokens, logs), got no "
                "tokens"
            )
        if count is not None and not self.per_token:
            value, count = value / count.clamp(min=1), None
        self.losses.setdefault(index, (value, count))


def _count(tokens: object = None) -> Tensor | None:
    """Return the number of tokens, which the schedule adds to an integer between two steps."""
    if tokens is None:
        return None
    if not isinstance(tokens, Tensor) or tokens.dim() or tokens.is_floating_point():
        raise ConfigError(
            "loss_func must return its number of tokens as an integer tensor of no dims, got "
            f"{_kind(tokens)}; return a mean, (loss, logs), where weights have another sum"
        )
    return tokens.detach().clone().double()


def _pair(result: object) -> tuple[object, Callable[..., object]]:
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not callable(result[1]):
        raise ConfigError(f"forward_step must return (output, loss_func), got {_kind(result)}")
    return result[0], result[1]


def _kind(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type(item).__name__ for item in value)})"
    if isinstance(value, Tensor):
        graph = "" if value.requires_grad else ", without a graph"
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}{graph}"
    return type(value).__name__
