"""Access to the weights, masters and gradients of one of DeepSpeed's optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hessian.backends.adam import Moments, moments_of
from ds_hessian.backends.guard import swap
from ds_hessian.backends.zero.host import Engine, Private
from ds_hessian.errors import UnsupportedError


@dataclass(frozen=True)
class Piece:
    """A run of coordinates of one parameter that this rank stores in its vectors.

    Attributes:
        parameter: The parameter.
        start: Flat index of the first coordinate in the parameter, as this rank's layers have it.
        numel: Number of coordinates.
        group: The optimizer's group (or ZeRO-3 sub-group) that the parameter is in.
        offset: Offset of the run in this rank's part of the group.
        owned: False on all but one of the ranks that hold these coordinates.
    """

    parameter: Private
    start: int
    numel: int
    group: int = 0
    offset: int = 0
    owned: bool = True


class Shards(ABC):
    """Access to what one kind of DeepSpeed optimizer stores; one subclass for each kind.

    Between two passes there are no gradients: `clear_gradients` forgets the last pass, and `stash`
    saves what training had pending.

    Args:
        engine: A `DeepSpeedEngine`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.optimizer = engine, engine.optimizer

    def require(self, *names: str) -> None:
        """Refuse an optimizer that lacks a private attribute which is used.

        Raises:
            UnsupportedError: this version of DeepSpeed has other attributes.
        """
        missing = [name for name in names if not hasattr(self.optimizer, name)]
        if missing:
            raise UnsupportedError(
                f"this DeepSpeed's {type(self.optimizer).__name__} has no {', '.join(missing)}; "
                "use a version that ds_hessian was tried with (see docs/support.md)"
            )

    @abstractmethod
    def stepped_parameters(self) -> Iterator[Private]:
        """Yield the parameters that the optimizer has; some may be frozen."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """Return this rank's coordinates; padding may follow a parameter's last element."""

    def detached(self) -> Iterator[Private]:
        """Yield parameters that have other memory than the optimizer writes."""
        return iter(())

    @abstractmethod
    def weight(self, piece: Piece) -> Tensor:
        """Return a flat view of the weights to displace, in the dtype of the passes."""

    @abstractmethod
    def master(self, piece: Piece) -> Tensor | None:
        """Return a flat view of the master weights; None where the weights are their own."""

    @abstractmethod
    def stepped(self, piece: Piece) -> tuple[Tensor, int, int]:
        """Return the tensor that the inner optimizer steps for the piece, the offset of the piece
        in it, and the number of its parameter group.
        """

    def whole_master(self, p: Tensor) -> Tensor | None:
        """Return what the inner optimizer steps in place of a parameter, of its shape; None where
        that is the parameter, or flat parts of many.
        """
        return None

    def inner(self, tensor: Tensor) -> Private:
        """Return the optimizer that steps what `stepped` returns."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def adam(self, piece: Piece) -> Moments | None:
        """Return Adam's state of the piece; None if the optimizer is not Adam."""
        tensor, offset, group = self.stepped(piece)
        inner = self.inner(tensor)
        return moments_of(inner, tensor, inner.param_groups[group], offset, piece.numel)

    @abstractmethod
    def publish(self) -> None:
        """Make every rank's next forward read the written weights. Collective."""

    def prepare(self) -> None:  # noqa: B027  # most have nothing to do
        """Gather before a forward, inside the lockstep, what is cheaper to gather at once."""

    def unquantized(self) -> AbstractContextManager[None]:
        """Communicate weights and gradients as they are, where training quantizes them."""
        return nullcontext()

    @abstractmethod
    def gradients(self, pieces: Sequence[Piece]) -> Iterator[Tensor | None]:
        """Yield flat views of the reduced gradient, right after a backward; None for zero.

        The gradient is that of the last pass, or the sum since `clear_gradients` where the
        optimizer `accumulates`.
        """

    @property
    def accumulates(self) -> bool:
        """True if the gradients of an accumulation window are summed in fp32 as now configured."""
        return False

    @property
    def bucket(self) -> int:
        """The elements of a buffer for gradients of which fp32 passes need another one."""
        return 0

    def clear_gradients(self) -> None:
        """Clear the gradients; a parameter that a later pass does not use has gradient 0."""
        self.engine.zero_grad()

    def abandon(self) -> None:
        """Discard a forward or backward that ranks have left at different points."""
        self.clear_gradients()

    def stash(self) -> Callable[[], None]:
        """Save the gradients that training has pending; return a function that restores them."""
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
                own = p.data
                if isinstance(value, Tensor) and value.shape != own.shape:
                    # From before the weights were parted: torch takes none of another size.
                    p.data = torch.empty_like(value)
                setattr(p, name, value)
                p.data = own

        return unstash

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Let the passes run on fp32 copies of the masters; the weights themselves stay untouched.

        Inside, `weight` returns the copies.
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
        """Swap in fp32 copies of all parameters, frozen ones too, until the stack closes."""

    def _frozen(self) -> Iterator[Private]:
        for p in self.engine.module.parameters():
            if not p.requires_grad and p.is_floating_point():
                yield p
