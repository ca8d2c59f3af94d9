"""What is required of a model's outputs: that the loss is a function of them, and none that is
linear; where nobody has named them, that they are all that it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ds_hessian.backends.hooks import on_cotangents
from ds_hessian.backends.protocol import Session
from ds_hessian.errors import MeasurementError, UnsupportedError
from ds_hessian.operators.outputs.losses import beside_outputs
from ds_hessian.operators.outputs.tap import Silence, Tap, in_backward, tensors_of, with_tensors
from ds_hessian.ranks import union


class _Stopped(Silence):
    """Stops the loss at the outputs, and keeps its cotangents."""

    def __init__(self) -> None:
        self.cotangents: dict[int, Tensor] = {}

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        self.cotangents[index] = c.clone()
        return super().cotangent(index, f, c)


class _Moved(_Stopped):
    """Does so at outputs to which something is added."""

    def outputs(self, index: int, f: Tensor) -> Tensor:
        return beside_outputs(f)


def require_function(session: Session, tap: Tap, found: bool) -> None:
    """Raise if the loss is no function of the outputs alone, or is linear in outputs that were
    `found`.

    Collective: two gradients of the first micro-batch.
    """
    here, there = _Stopped(), _Moved()
    around = [session.space.zeros(), session.space.zeros()]
    for listener, out in zip((here, there), around, strict=True):
        with requiring_others(tap), tap.listening(range(1), listener):
            session.add_gradient(out, range(1))
    require_same_around(session, tap, *around)
    require_one_head(session, tap)
    if not found:
        return
    before, after = here.cotangents, there.cotangents
    told = any(bool(c.any()) for c in before.values())
    require_curved(session, tap, told, any(not c.equal(after[i]) for i, c in before.items()))


def require_one_head(session: Session, tap: Tap) -> None:
    """Raise if a part of the loss takes what other modules with weights return, past outputs of
    which nothing has shown that they are those of the model: they may be one head of several.

    Collective: the gradient of the first micro-batch, and a small exchange.
    """
    if tap.others is None:
        return
    mine = set[tuple[int, str]]()

    def judge(number: int, name: str, c: Tensor) -> None:
        if c.any():
            mine.add((number, name))

    def hook(number: int, name: str, module: nn.Module, args: object, output: object) -> object:
        if in_backward():
            return None
        found = {i: f for i, f in enumerate(tensors_of(output)) if f.requires_grad}
        for f in found.values():
            f.register_hook(on_cotangents(partial(judge, number, name)))
        # Others, since the outputs' module may return this very tensor, which is silenced there.
        return with_tensors(output, {i: f.view_as(f) for i, f in found.items()})

    with ExitStack() as stack:
        for number, (name, module) in enumerate(tap.others):
            stack.callback(module.register_forward_hook(partial(hook, number, name)).remove)
        with tap.listening(range(1), Silence()):
            session.add_gradient(None, range(1))
    found = union(mine, session.space.device)
    if found:
        _, other = max(found)
        raise UnsupportedError(
            f"ds_hessian does not know the outputs of this model: the loss depends on {other!r} "
            f"beside those of {tap.name!r}; name the module that returns all that the loss is made "
            "of (a tuple will do), outputs=..., or the one that is meant, so that the rest is in "
            "the residual"
        )


def require_curved(session: Session, tap: Tap, told: bool, curved: bool) -> None:
    """Raise where the loss is linear in outputs that nobody has named: they are a loss, or parts of
    one.

    Args:
        session: The measurement.
        tap: The outputs.
        told: Whether this rank has cotangents other than zero.
        curved: Whether these are others at other outputs.

    Collective: a small all-reduce.
    """
    some, bent = session.space.reduce(torch.tensor([told, curved], dtype=torch.float64)).tolist()
    if some and not bent:
        raise UnsupportedError(
            "ds_hessian does not know the outputs of this model: the loss is linear in those of "
            f"{tap.name!r}, so that G would be 0 and the residual H; name the module that returns "
            "what the loss is made of, outputs=..., or this one if it is meant"
        )


def requiring_fp32(tap: Tap) -> AbstractContextManager[None]:
    """Raise by name where what follows the outputs fails in the body, which makes them in fp32.

    Raises:
        UnsupportedError: it did, on all ranks alike.
        MeasurementError: it had too little memory.
    """
    return _naming(
        f"outputs ({tap.name!r}) in 16 bits if what follows them, weights perhaps, takes none in "
        "fp32",
        "name the module that returns the last outputs, or all of them, outputs=..., set "
        'finite_difference.precision to "fp32"',
    )


def requiring_others(tap: Tap) -> AbstractContextManager[None]:
    """Raise by name where the loss fails in the body, which adds something to the outputs.

    Raises:
        UnsupportedError: it did, on all ranks alike.
        MeasurementError: it had too little memory.
    """
    return _naming(
        f"outputs ({tap.name!r}) of which the loss refuses others, such as probabilities beyond 0 "
        "and 1",
        "name the module that returns what they are made of, such as the logits before a sigmoid, "
        "outputs=...",
    )


@contextmanager
def _naming(what: str, remedy: str) -> Iterator[None]:
    """Say what is not supported where an evaluation of the body fails."""
    try:
        yield
    except MeasurementError as error:
        if "OutOfMemoryError" in str(error):  # of the rank that failed
            raise
        raise UnsupportedError(
            f'ds_hessian does not support {what} ({error}); {remedy}, or use operator "hessian"'
        ) from error


def require_same_around(session: Session, tap: Tap, one: Tensor, other: Tensor) -> None:
    """Raise if the gradient that does not pass the outputs differs between two outputs, as that of
    weights behind them does.

    Collective: two small all-reduces.
    """
    size, apart = session.space.norm(one), session.space.norm(other - one)
    if apart > math.sqrt(session.unit_roundoff) * size:
        raise UnsupportedError(
            f"ds_hessian does not support outputs ({tap.name!r}) with weights behind them: the "
            "loss is no function of the outputs alone, as where the head behind them is called "
            "several times for a micro-batch, or they are one head of several; name the module "
            'that returns the last outputs, or all of them, outputs=..., or use operator "hessian"'
        )
