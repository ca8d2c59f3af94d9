"""The steps of Megatron's schedules, in which a rank may fail alone.

A schedule makes forward and backward steps of micro-batches, and sends their results between the
stages of a pipeline. A step that fails on some rank is a segment of the lockstep: the rank takes
part in what the others of its stage communicate in it, and then gives its schedule zeros of the
right shape to send. All later steps of the rank do the same, until all ranks meet at the end.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ds_hessian.backends.guard import swap
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.ranks.lockstep import Lockstep

FORWARD, BACKWARD = 0, 1

Activations: TypeAlias = Tensor | list["Activations"] | None
"""The input or output of a stage, or a gradient of one; None at the ends of the pipeline."""


class Steps:
    """The forward and backward step of one run of a schedule.

    From the meeting of the stages on, a rank cannot leave between the steps: others wait for what
    it sends. Signals wait for the next step there. A schedule that fails there, as where it
    allocates what it will receive, is run once more, past the steps and exchanges that it has made,
    to the end; if it fails there again, the job ends.

    Failures are ordered by what may follow from what: a forward of a later stage from that of an
    earlier one, a backward of an earlier stage from that of a later one.

    Args:
        schedules: The module `megatron.core.pipeline_parallel.schedules`.
        lockstep: The lockstep of the measurement, in a pass.
        stage: This rank's stage of the pipeline.
        shape: The shape of the activations that a stage sends.
        varies: Whether stages tell each other another shape.
        dtype: Their dtype.
        device: Their device.
        last: The model chunk whose output is not sent, but given to `loss_func`; None on the stages
            before the last.
        meet: Lets the stages meet.
        begin: Is called before each backward.
    """

    def __init__(
        self,
        schedules: ModuleType,
        lockstep: Lockstep,
        stage: int,
        shape: tuple[int, ...],
        varies: bool,
        dtype: torch.dtype,
        device: torch.device,
        last: object,
        meet: Callable[[], object],
        begin: Callable[[], object],
    ) -> None:
        self.lockstep, self.stage = lockstep, stage
        self._schedules, self._counts = schedules, [0, 0]
        self._forward, self._backward = schedules.forward_step, schedules.backward_step
        self._output, self._varies, self._last_chunk = (shape, dtype, device), varies, last
        self._meet, self._begin_backward = meet, begin
        self._begun = 0  # steps, in all attempts
        self._last: tuple[int, ...] = (FORWARD, 0, stage)

    def run(self, schedule: Callable[[], object]) -> None:
        """Run a schedule, which calls these steps, after a meeting of the stages."""
        with ExitStack() as stack:
            swap(stack, self._schedules, "forward_step", self.forward)
            swap(stack, self._schedules, "backward_step", self.backward)
            stack.enter_context(self.lockstep.between_segments())
            self._meet()  # the last before `again`: what fails after it, fails in that
            self.lockstep.again(lambda: self._attempt(schedule), lambda: (*self._last, sys.maxsize))

    def _attempt(self, schedule: Callable[[], object]) -> None:
        self._counts = [0, 0]
        schedule()

    def forward(self, *args: object, **kwargs: object) -> tuple[Activations, Tensor]:
        """Run `forward_step` of the schedules; return `(output or outputs, number of tokens)`."""
        if self._begins(FORWARD):
            with self.lockstep.segment(*self._last):
                self.lockstep.raise_if_failed()
                result: tuple[Activations, Tensor] = self._forward(*args, **kwargs)
                model = _argument(self._forward, "model", args, kwargs)
                if model is not self._last_chunk:
                    self._require_sendable(result[0], model)
                return result
        shape, dtype, device = self._output
        output = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        listed = isinstance(_argument(self._forward, "input_tensor", args, kwargs), list)
        return [output] if listed else output, torch.zeros((), dtype=torch.int)

    def backward(self, *args: object, **kwargs: object) -> Activations:
        """Run `backward_step` of the schedules; return the gradient of the input or inputs."""
        if self._begins(BACKWARD):
            with self.lockstep.segment(*self._last):
                self.lockstep.raise_if_failed()
                self._begin_backward()
                gradient: Activations = self._backward(*args, **kwargs)
                return gradient
        return _zeros(_argument(self._backward, "input_tensor", args, kwargs))

    def _require_sendable(self, output: Activations, model: nn.Module) -> None:
        """Require what the next stage waits to receive, as anything else would leave it waiting,
        with a graph: Megatron makes no backward of what has none, which no other rank sees.
        """
        sent = output[0] if isinstance(output, list) else output
        shape, dtype, _ = self._output
        if not isinstance(sent, Tensor):
            found = type(sent).__name__
        elif sent.dtype != dtype or (tuple(sent.shape) != shape and not self._varies):
            found = f"{tuple(sent.shape)}, {sent.dtype}"
        elif sent.requires_grad or not torch.is_grad_enabled():
            return
        elif any(p.requires_grad for p in model.parameters()):
            raise UnsupportedError(
                "ds_hessian does not support a pipeline stage that trains parameters, but sends "
                "activations without a graph: they have no gradient. Where they are recomputed, "
                "their input must require gradients, as that of adapters after a frozen embedding "
                "does not: let the embedding's output require them, or do not recompute"
            )
        else:
            return
        raise ConfigError(
            f"a pipeline stage sends a tensor of shape {shape}, {dtype}, by seq_length, "
            f"micro_batch_size and the model's configuration; forward_step returned {found}: pass "
            "the sizes that the micro-batches have"
        )

    def _begins(self, direction: int) -> bool:
        """Begin the attempt's next step; return whether no attempt before has made it."""
        self._counts[direction] += 1
        later = self.stage if direction == FORWARD else -self.stage
        self._last = direction, self._counts[direction], later
        before, self._begun = self._begun, max(self._begun, sum(self._counts))
        return self._begun > before


def _argument(
    function: Callable[..., object],
    name: str,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Any:
    found: Any = inspect.signature(function).bind(*args, **kwargs).arguments[name]
    return found


def _zeros(like: Activations) -> Activations:
    if isinstance(like, list):
        return [_zeros(item) for item in like]
    return None if like is None else torch.zeros_like(like)
