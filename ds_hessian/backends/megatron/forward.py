"""The job's forward step inside a measurement: repeatable, and never leaving the pipeline alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hessian.backends.megatron import host
from ds_hessian.backends.megatron.objective import ForwardStep
from ds_hessian.backends.state import Buffers, RandomState
from ds_hessian.errors import ConfigError, NumericsError
from ds_hessian.vectors import checkpoint


class FixedForward:
    """`forward_step_func` of the schedule for one measurement.

    Each micro-batch starts from its own random state and the buffers as they were, in every
    evaluation. An exception after the model has returned its output is kept, and a loss of zero
    goes through the backward of all stages, so that ranks meet again; `check` raises it.

    Args:
        forward_step: The job's.
        chunks: The model chunks.
        random: The generators.
        buffers: Of each chunk.
        alone: Whether ranks call the model without waiting for other stages: without a pipeline.
        device: Of the collectives.

    Attributes:
        losses: `{micro-batch: (loss, tokens or None)}` of the first evaluations on this rank, empty
            but on the last stage.
    """

    def __init__(
        self,
        forward_step: ForwardStep,
        chunks: Sequence[Any],
        random: RandomState,
        buffers: Sequence[Buffers],
        alone: bool,
        device: torch.device,
    ) -> None:
        self.forward_step, self.random, self.alone = forward_step, random, alone
        self.chunks = {id(host.unwrap(chunk)): i for i, chunk in enumerate(chunks)}
        self.buffers, self.device = buffers, device
        self.per_token = bool(host.model_config(chunks[0]).calculate_per_token_loss)
        self.losses: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._states: dict[tuple[int, int], Any] = {}
        self._now: list[tuple[int, Tensor]] = []
        self.start(0)

    def start(self, first: int) -> None:
        """Begin a run of the schedule at micro-batch number `first`."""
        self._next = [first] * len(self.chunks)
        self._failure: Exception | None = None
        self._now = []

    def __call__(self, data_iterator: Any, model: Any, *rest: Any) -> tuple[Any, Any]:
        """As the schedule calls it, in the order of the micro-batches for each chunk."""
        chunk = self.chunks[id(host.unwrap(model))]
        index = self._next[chunk]
        self._next[chunk] += 1
        if (chunk, index) in self._states:
            self.random.set(self._states[chunk, index])
        else:  # first evaluation: the generators run on
            self._states[chunk, index] = self.random.get()
        self.buffers[chunk].renew()
        return self._guarded(index, data_iterator, model, *rest)

    def _guarded(self, index: int, data_iterator: Any, model: Any, *rest: Any) -> tuple[Any, Any]:
        outputs: list[Any] = []
        handles = [model.register_forward_hook(lambda _, __, output: outputs.append(output))]
        if self.alone:
            handles.append(model.register_forward_pre_hook(lambda *_: self._meet(outputs)))
        try:
            output, loss_func = _pair(self.forward_step(data_iterator, model, *rest))
        except Exception as error:
            if not outputs:
                raise
            self._failure = self._failure or error
            return outputs[-1], _zero_loss
        finally:
            for handle in handles:
                handle.remove()
        return output, self._recorded(index, loss_func)

    def _meet(self, outputs: list[Any]) -> None:
        """A rank whose batch failed before it called the model would be missing inside of it."""
        if not outputs:
            checkpoint("evaluating the loss", device=self.device)

    def _recorded(self, index: int, loss_func: Callable[..., Any]) -> Callable[..., Any]:
        def loss(output: Tensor, **options: Any) -> Any:
            try:
                result = loss_func(output, **options)
                if not isinstance(result, tuple) or len(result) not in (2, 3):
                    raise ConfigError(
                        "loss_func must return (loss, logs) or (sum, tokens, logs), got "
                        f"{_kind(result)}"
                    )
                self._record(index, *result[:-1])
            except Exception as error:
                self._failure = self._failure or error
                return _zero_loss(output)
            return result

        return loss

    def _record(self, index: int, loss: Tensor, tokens: Tensor | None = None) -> None:
        # The schedule divides the loss in place.
        value = loss.detach().clone().double().reshape(())
        self._now.append((index, value))
        if self.per_token and tokens is None:
            raise ConfigError(
                "with calculate_per_token_loss, loss_func must return (sum, tokens, logs), got no "
                "tokens"
            )
        if tokens is not None:
            tokens = tokens.detach().clone().double().reshape(())
            if not self.per_token:
                value, tokens = value / tokens.clamp(min=1), None
        self.losses.setdefault(index, (value, tokens))

    def check(self) -> None:
        """Raise what a micro-batch of this run raised, or for a loss that is not finite."""
        if self._failure is not None:
            raise self._failure
        for index, value in self._now:
            if not torch.isfinite(value):
                raise NumericsError(f"the loss of micro-batch {index} is {value.item()}")


def _pair(result: Any) -> tuple[Any, Callable[..., Any]]:
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not callable(result[1]):
        raise ConfigError(f"forward_step must return (output, loss_func), got {_kind(result)}")
    return result[0], result[1]


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


def _zero_loss(output: Tensor, **_: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Goes through the backward of all stages, where the real loss has failed."""
    zero = output.float().nan_to_num().sum() * 0.0
    return zero, torch.ones((), dtype=torch.int32, device=output.device), {}
