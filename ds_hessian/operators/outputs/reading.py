"""What a Gauss-Newton operator reads in the gradient at the weights: outputs and loss.

The outputs are found and the gradient is taken in one evaluation of all micro-batches. The first
is evaluated once more with something added to the outputs, since a cotangent like that of a cross
entropy may be one of a loss whose weights of tokens depend on the outputs (focal loss). Where the
loss is no cross entropy, each micro-batch is evaluated three times more, with something added to
the outputs in two of them, to see whether the loss is quadratic in them.
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
    Secant,
    Squares,
    Tokens,
    group_of,
    keeps_weights,
    read_cross_entropy,
    read_squares,
)

FAR = 2.0**10
"""The farther of the two displacements of the outputs, in units of the nearer one, at most."""


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


class _Verifier:
    """Reads whether the weights of a cross entropy's tokens are those of other outputs, too."""

    def __init__(self, session: Session, tokens: dict[int, Tokens]) -> None:
        self.session, self.tokens, self.failed = session, tokens, 0
        self._added: dict[int, tuple[Tensor, float]] = {}

    def outputs(self, index: int, f: Tensor) -> Tensor:
        self._added[index] = _beside(f), torch.finfo(f.dtype).eps / 2
        return self._added[index][0]

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> None:
        wide = c.float() * self.session.cotangent_scale
        self.failed += not keeps_weights(self.tokens[index], f, wide, *self._added.pop(index))


class _Prober:
    """Reads whether the loss is quadratic: passes as it is, and with something added on each side.

    Attributes:
        passes: Passes of the micro-batch so far.
    """

    def __init__(self) -> None:
        self.passes, self.failed = 0, 0
        self.squares: dict[int, Squares] = {}
        self._before: dict[int, Tensor] = {}
        self._added: dict[int, Tensor] = {}
        self._near: dict[int, Secant] = {}

    def outputs(self, index: int, f: Tensor) -> Tensor | None:
        if self.passes == 1:
            self._added[index] = _beside(f)
        return self._added.get(index)

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> None:
        if self.passes == 0:
            self._before[index] = c.clone()
            return
        secant = Secant.of(self._before[index], c, self._added[index])
        if self.passes == 1:
            self._near[index] = secant
            # So far that cotangents of squares become others, and their rounding is no more of the
            # slope than it is of them.
            reach = self._before[index].float().abs().max() / secant.slopes.abs().max()
            ratio = (reach / self._added[index].abs().max()).nan_to_num(2.0).clamp(2.0, FAR)
            self._added[index] = -ratio * self._added[index]
            return
        del self._before[index], self._added[index]
        found = read_squares(self._near.pop(index), secant)
        if found is None:
            self.failed += 1
        else:
            self.squares[index] = found


def _beside(f: Tensor) -> Tensor:
    """Return something as large as the outputs, of entries +-a, to be added to them."""
    # Signs that alternate, but not with a period of the data.
    signs = torch.frac(torch.arange(f.numel(), device=f.device) * 0.6180339887) - 0.5
    size = f.float().square().mean().sqrt().clamp_min(1e-3)
    return size * torch.where(signs < 0, -1.0, 1.0).reshape(f.shape)


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
        waste = self.space.zeros()
        if not self._failed(reader.failed):
            verifier = _Verifier(session, reader.tokens)
            with self.tap.listening(every[:1], verifier):
                session.add_gradient(waste, every[:1])
            if not self._failed(verifier.failed):
                self.tokens, self.kind = reader.tokens, "cross entropy"
                return
        prober = _Prober()
        for i in every:
            for prober.passes in range(3):
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
