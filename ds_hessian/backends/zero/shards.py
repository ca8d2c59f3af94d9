"""What the backend needs to know of an optimizer: where its weights, masters and gradients lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hessian.backends.adam import moments
from ds_hessian.backends.guard import swap
from ds_hessian.backends.protocol import AdamState
from ds_hessian.errors import UnsupportedError


@dataclass(frozen=True)
class Piece:
    """A run of coordinates of one parameter that this rank stores in its vectors.

    Attributes:
        parameter: The parameter.
        start: Flat index of the first coordinate in the parameter, as this rank's layers have it.
        numel: Number of coordinates.
        group: The optimizer's group (or ZeRO-3 sub-group) that the parameter is in.
        offset: Of the run, in this rank's part of the group.
        owned: False on all but one of the ranks that hold these coordinates.
    """

    parameter: Any
    start: int
    numel: int
    group: int = 0
    offset: int = 0
    owned: bool = True


class Shards(ABC):
    """Where one kind of DeepSpeed optimizer keeps things; one subclass for each kind.

    Between two passes there are no gradients: `clear_gradients` forgets the last pass, and `stash`
    puts aside what training had pending.

    Args:
        engine: A `DeepSpeedEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self.engine, self.optimizer = engine, engine.optimizer

    def require(self, *names: str) -> None:
        """Refuse an optimizer that lacks a private attribute which is used.

        Raises:
            UnsupportedError: this version of DeepSpeed keeps things elsewhere.
        """
        missing = [name for name in names if not hasattr(self.optimizer, name)]
        if missing:
            raise UnsupportedError(
                f"this DeepSpeed's {type(self.optimizer).__name__} has no {', '.join(missing)}; "
                "use a version that ds_hessian was tried with (see docs/support.md)"
            )

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """This rank's coordinates, without padding."""

    @abstractmethod
    def weight(self, piece: Piece) -> Tensor:
        """Flat view of what is displaced, in the dtype of the passes."""

    @abstractmethod
    def master(self, piece: Piece) -> Tensor | None:
        """Flat view of the master weights; None where the weights are their own."""

    @abstractmethod
    def stepped(self, piece: Piece) -> tuple[Tensor, int, int]:
        """The tensor that the inner optimizer steps for the piece, the offset of the piece in it,
        and the number of its parameter group.
        """

    def adam(self, piece: Piece) -> AdamState | None:
        """What Adam knows of the piece; None if the optimizer is not Adam."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        tensor, offset, group = self.stepped(piece)
        state, settings = inner.state.get(tensor, {}), inner.param_groups[group]
        return moments(state, settings, offset, piece.numel)

    @abstractmethod
    def publish(self) -> None:
        """Make every rank's next forward read the written weights. Collective."""

    def prepare(self) -> None:  # noqa: B027  # most have nothing to do
        """Before a forward, inside the lockstep: what is cheaper at once than on the way."""

    @abstractmethod
    def gradients(self, pieces: Sequence[Piece]) -> Iterator[Tensor | None]:
        """Flat views of the reduced gradient of the last pass, or the sum of those since
        `clear_gradients` where it `accumulates`; right after a backward. None for zero.
        """

    @property
    def accumulates(self) -> bool:
        """Whether the passes of an accumulation window add up in fp32, as they are asked to now."""
        return False

    def clear_gradients(self) -> None:
        """Forget the passes made; a parameter that a later pass does not use has gradient 0."""
        self.engine.zero_grad()

    def abandon(self) -> None:
        """Forget a forward or backward that ranks have left at different places."""
        self.clear_gradients()

    def stash(self) -> Callable[[], None]:
        """Put aside the gradients that training has pending; returns what puts them back."""
        kept = [
            (p, name, getattr(p, name))
            for p in self.engine.module.parameters()
            for name in ("grad", "grad_accum")
            if hasattr(p, name)
        ]
        for p, name, _ in kept:
            setattr(p, name, None)

        def unstash() -> None:
            for p, name, value in kept:
                setattr(p, name, value)

        return unstash

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Let the passes run on fp32 copies of the masters; the weights themselves stay untouched.

        Inside, `weight` gives the copies.
        """
        engine, config = self.engine, self.engine._config
        with ExitStack() as stack:
            swap(stack, config, "communication_data_type", torch.float32)
            if config.float16_config.auto_cast:
                swap(stack, config.float16_config, "auto_cast", False)
            if getattr(config, "torch_autocast_enabled", False):
                swap(stack, config, "torch_autocast_enabled", False)
                for p in engine.module.parameters():
                    if hasattr(p, "comm_dtype"):
                        swap(stack, p, "comm_dtype", torch.float32)
            for buffer in engine.module.buffers():
                if buffer.is_floating_point():
                    swap(stack, buffer, "data", buffer.data.float())
            self._copy_to_fp32(stack)
            yield

    @abstractmethod
    def _copy_to_fp32(self, stack: ExitStack) -> None:
        """The kind's own part of `in_fp32`: all parameters, frozen ones too."""

    def _frozen(self) -> Iterator[Any]:
        for p in self.engine.module.parameters():
            if not p.requires_grad and p.is_floating_point():
                yield p
