"""What a Gauss-Newton operator reads in the gradient at the weights: outputs and loss.

The outputs are found and the gradient is taken in one evaluation of all micro-batches. Where the
loss is no cross entropy, each micro-batch is evaluated once more, with something added to the
outputs, to see whether the loss is quadratic in them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.memory import FP32
from ds_hessian.operators.clock import add_gradient
from ds_hessian.operators.outputs.find import find_outputs
from ds_hessian.operators.outputs.losses import (
    Squares,
    Tokens,
    group_of,
    read_cross_entropy,
    read_squares,
)


class _Reader:
    """Reads the loss at the outputs."""

    def __init__(self, session: Session) -> None:
        self.head, self.largest = session.head, 0
        self.tokens: dict[int, Tokens] = {}
        self.failed = 0

    def outputs(self, index: int, f: Tensor) -> None:
        self.largest = max(self.largest, FP32 * f.numel())

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> None:
        found = read_cross_entropy(f, c, group_of(f, self.head))
        if found is None:
            self.failed += 1
        else:
            self.tokens[index] = found


class _Prober:
    """Reads whether the loss is quadratic: one pass as it is, one with something added.

    Attributes:
        probes: Whether something is added.
    """

    def __init__(self) -> None:
        self.probes, self.failed = False, 0
        self.squares: dict[int, Squares] = {}
        self._before: dict[int, Tensor] = {}
        self._added: dict[int, Tensor] = {}

    def outputs(self, index: int, f: Tensor) -> Tensor | None:
        if not self.probes:
            return None
        # Signs that alternate, but not with a period of the data.
        signs = torch.frac(torch.arange(f.numel(), device=f.device) * 0.6180339887) - 0.5
        size = f.float().square().mean().sqrt().clamp_min(1e-3)
        self._added[index] = size * torch.where(signs < 0, -1.0, 1.0).reshape(f.shape)
        return self._added[index]

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> None:
        if not self.probes:
            self._before[index] = c.clone()
            return
        found = read_squares(self._before.pop(index), c, self._added.pop(index))
        if found is None:
            self.failed += 1
        else:
            self.squares[index] = found


class Reading:
    """Outputs and loss at the session's weights.

    Args:
        session: The measurement.
        outputs: The name of the outputs' module; None to find it.

    Attributes:
        tap: The outputs.
        gradient: The gradient at the weights, divided by the session's scale.
        tokens: By micro-batch, where the loss is cross entropy, in units of the terms of the
            gradient; else empty.
        squares: The same where the loss is quadratic in the outputs.
        kind: Which of the two, on all ranks; None for another loss.
        seconds: The time of one gradient over all micro-batches.
        largest: Bytes of the largest outputs of a micro-batch, in fp32.

    Collective: the constructor.
    """

    def __init__(self, session: Session, outputs: str | None) -> None:
        self.session, self.space = session, session.space
        self.tokens: dict[int, Tokens] = {}
        self.squares: dict[int, Squares] = {}
        self.kind: Literal["cross entropy", "squares"] | None = None
        session.displace(None, 0.0)
        self.gradient = self.space.zeros()
        self.tap = find_outputs(session, outputs, self.gradient)
        reader, every = _Reader(session), range(session.num_micro_batches)
        # The first micro-batch again, now that it is known where to listen.
        again = self.space.zeros()
        self.seconds = 0.0
        for out, some in ((again, every[:1]), (self.gradient, every[1:])):
            with self.tap.listening(some, reader):
                self.seconds += add_gradient(session, out, some)
            for i in set(self.tap.calls(some)) & reader.tokens.keys():
                reader.tokens[i] = reader.tokens[i].scaled(session.cotangent_scale)
        del again
        self.largest = reader.largest
        if not self._failed(reader.failed):
            self.tokens, self.kind = reader.tokens, "cross entropy"
            return
        prober, waste = _Prober(), self.space.zeros()
        for i in every:
            for prober.probes in (False, True):
                with self.tap.listening(range(i, i + 1), prober):
                    session.add_gradient(waste, range(i, i + 1))
            if self._failed(prober.failed):
                return
            for k in set(self.tap.calls(range(i, i + 1))) & prober.squares.keys():
                prober.squares[k] = prober.squares[k].scaled(session.cotangent_scale)
        self.squares, self.kind = prober.squares, "squares"

    def _failed(self, count: int) -> bool:
        return bool(self.space.reduce(torch.tensor([float(count)], dtype=torch.float64))[0])

    @property
    def words(self) -> str:
        """The outputs and the loss in them, in words."""
        return f"{self.tap.name}: {self.kind or 'a loss known by its values'}"
