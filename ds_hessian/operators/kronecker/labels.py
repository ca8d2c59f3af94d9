"""Labels drawn from the model, with which Kronecker factors are those of the Fisher matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.errors import UnsupportedError
from ds_hessian.operators.outputs.losses import size_of
from ds_hessian.operators.outputs.reading import Reading


class Labels:
    """The labels of the passes: the data's own, or drawn from the model.

    Micro-batches are numbered over all data-parallel ranks, dealt out to them in turn, and have the
    labels of their number: as many draws as micro-batches, and the same ones in every layout.

    Attributes:
        draws: Times that labels are drawn; 0 for the data's own.
        unit: The cotangents of drawn labels in those of the layers' hooks.
        copies: Tensor-parallel ranks that have the same whole outputs, each with its share of the
            tokens' weights.

    Raises:
        UnsupportedError: labels are to be drawn, and the loss is no cross entropy.

    Collective: the constructor.
    """

    reads = True

    def __init__(self, session: Session, outputs: str | None, draws: int) -> None:
        self.draws, self.unit, self.copies = draws, 1.0, 1
        if not draws:
            return
        self._reading = Reading(session, outputs)
        if self._reading.kind != "cross entropy":
            raise UnsupportedError(
                "ds_hessian does not support labels drawn from the model where the loss is no "
                f"cross entropy ({self._reading.words}); take the labels of the data, draws = 0"
            )
        tokens, tap = self._reading.tokens, self._reading.tap
        self._place, self._ranks = _place_among_data(session, bool(tokens))
        self._count = len(tap.calls(range(session.num_micro_batches)))
        self._drawn = 0  # of the present pass
        group = session.head.group
        if group is not None and any(each.group is None for each in tokens.values()):
            self.copies = group.size()
        self.copies = int(session.space.of_all_ranks(self.copies).max())
        largest = max((size_of(each.weights) for each in tokens.values()), default=0.0)
        steepest = max((each.steepest for each in tokens.values()), default=0.0)
        self.unit = _unit_of(*session.space.of_all_ranks(largest, steepest).amax(1).tolist())

    @contextmanager
    def drawn(self, unit: int, number: int) -> Iterator[None]:
        """Let a pass of a unit run with drawn labels, the same ones for the same numbers."""
        self._drawn = number
        with self._reading.tap.listening(range(unit, unit + 1), self):
            yield

    def outputs(self, index: int, f: Tensor) -> None:
        """Add nothing to the outputs."""

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        """Return that of drawn labels."""
        seed = (self._drawn * self._count + index) * self._ranks + self._place
        found = self._reading.tokens[index].sampled(f, seed)
        return found.div_(self.unit).to(c.dtype)


def _place_among_data(session: Session, has_outputs: bool) -> tuple[int, int]:
    """Return this rank's number among those that have outputs, and how many these are; ranks that
    split the classes of the same ones are one.

    Collective.
    """
    space, group = session.space, session.head.group
    first = space.rank if group is None else min(dist.get_process_group_ranks(group))
    firsts = torch.zeros(space.world_size, dtype=torch.float64)
    firsts[first] += has_outputs
    found = space.reduce(firsts)
    return int((found[:first] > 0).sum()), int((found > 0).sum())


def _unit_of(largest: float, steepest: float) -> float:
    """Return what cotangents of drawn labels are divided by: a power of 2, at most 1, so that they
    are as large as the job's own, whose scale keeps these from being lost in 16 bits.

    Args:
        largest: The largest weight of a token.
        steepest: The largest entry of the job's own cotangents.
    """
    unit = math.sqrt(2 * largest) / steepest if steepest > 0 else 1.0
    return 2.0 ** math.ceil(math.log2(unit)) if 0 < unit < 1 else 1.0
