"""ZeRO stage 0: a plain optimizer, or DeepSpeed's `FP16_Optimizer` and `FP16_UnfusedOptimizer`.

Every rank holds all weights, masters and gradients, and so all of a vector; sums are divided over
the ranks, each of which owns an equal part of the coordinates. Of experts it holds its own, which
it shares with the ranks of its expert-data-parallel group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from typing_extensions import override

from ds_hessian.backends.guard import swap
from ds_hessian.backends.names import trained
from ds_hessian.backends.sharded import widen
from ds_hessian.backends.zero.host import Engine, Private, copies
from ds_hessian.backends.zero.shards import Piece, Shards
from ds_hessian.errors import UnsupportedError


class ReplicatedShards(Shards):
    """Shards of a stage-0 optimizer: every rank has the whole of everything."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.masters: dict[int, Tensor] = {}
        for group, params in enumerate(getattr(self.optimizer, "fp16_groups", [])):
            for p, master in zip(params, self._group_masters(group), strict=True):
                self.masters[id(p)] = master.detach().view(-1)

    def _group_masters(self, group: int) -> Sequence[Tensor]:
        optimizer = self.optimizer
        if hasattr(optimizer, "fp32_groups"):  # unfused: one tensor for each parameter
            return list(optimizer.fp32_groups[group])
        flat, params = optimizer.fp32_groups_flat[group], optimizer.fp16_groups[group]
        return list(flat.detach().split([p.numel() for p in params]))

    def stepped_parameters(self) -> Iterator[Private]:
        """Yield the parameters of all groups."""
        groups = getattr(self.optimizer, "fp16_groups", None)
        if groups is None:
            groups = [group["params"] for group in self.optimizer.param_groups]
        return itertools.chain.from_iterable(groups)

    def pieces(self) -> list[Piece]:
        """Return all coordinates, split at the ends of the part that this rank owns of those that
        it shares with the same ranks.

        Raises:
            UnsupportedError: a parameter's memory is not contiguous.
        """
        stepped = set(map(id, self.stepped_parameters()))
        named = [(name, p) for name, p in trained(self.engine.module) if id(p) in stepped]
        shares = {id(p): copies(self.engine, p) for _, p in named}
        totals: dict[tuple[int, int], int] = {}
        for _, p in named:
            totals[shares[id(p)]] = totals.get(shares[id(p)], 0) + p.numel()
        pieces, begins = [], dict.fromkeys(totals, 0)
        for name, p in named:
            if not p.data.is_contiguous():
                raise UnsupportedError(
                    f"ds_hessian does not support parameters in another memory format, such as "
                    f"{name}; make it contiguous, or use ZeRO 1, 2 or 3"
                )
            rank, ranks = share = shares[id(p)]
            total, begin = totals[share], begins[share]
            low, high = total * rank // ranks, total * (rank + 1) // ranks
            cuts = sorted(
                {0, p.numel(), *(c - begin for c in (low, high) if 0 < c - begin < p.numel())}
            )
            for start, stop in zip(cuts, cuts[1:], strict=False):
                owned = low <= begin + start < high
                pieces.append(Piece(p, start, stop - start, 0, start, owned))
            begins[share] += p.numel()
        return pieces

    @override
    def weight(self, piece: Piece) -> Tensor:
        flat: Tensor = piece.parameter.data.view(-1)
        return flat.narrow(0, piece.start, piece.numel)

    @override
    def master(self, piece: Piece) -> Tensor | None:
        master = self.masters.get(id(piece.parameter))
        return None if master is None else master.narrow(0, piece.start, piece.numel)

    @override
    def stepped(self, piece: Piece) -> tuple[Tensor, int, int]:
        p = piece.parameter
        found = self._in_masters(p)
        if found is not None:
            master, before, group = found
            return master, before + piece.start, group
        groups = getattr(self.optimizer, "param_groups", [])
        group = next(i for i, g in enumerate(groups) if any(q is p for q in g["params"]))
        return p, piece.start, group

    @override
    def whole_master(self, p: Tensor) -> Tensor | None:
        found = self._in_masters(p)
        return None if found is None or found[0].shape != p.shape else found[0]

    def _in_masters(self, p: Tensor) -> tuple[Tensor, int, int] | None:
        """Return the master that has a parameter, where in it this begins, and the number of its
        group; None where the weights are their own.

        A fused optimizer has a flat one for each group, another one for each parameter.
        """
        optimizer = self.optimizer
        for group, params in enumerate(getattr(optimizer, "fp16_groups", [])):
            numbers = [i for i, other in enumerate(params) if other is p]
            if numbers and hasattr(optimizer, "fp32_groups"):
                return optimizer.fp32_groups[group][numbers[0]], 0, group
            if numbers:
                before = sum(q.numel() for q in params[: numbers[0]])
                return optimizer.fp32_groups_flat[group], before, group
        return None

    def publish(self) -> None:
        """Do nothing: every rank has written the same weights already."""

    @property
    def accumulates(self) -> bool:
        """True if all weights are fp32: gradients have the dtype of their weights."""
        return all(
            p.dtype == torch.float32 for p in self.engine.module.parameters() if p.requires_grad
        )

    @override
    def gradients(self, pieces: Sequence[Piece]) -> Iterator[Tensor | None]:
        for piece in pieces:
            gradient = piece.parameter.grad
            if gradient is None:
                yield None
            else:
                yield gradient.detach().reshape(-1).narrow(0, piece.start, piece.numel)

    def _copy_to_fp32(self, stack: ExitStack) -> None:
        for p in self.engine.module.parameters():
            if p.is_floating_point():
                wide, master = p.data.to(torch.float32, copy=True), self.masters.get(id(p))
                if master is not None:
                    widen(wide, p.data, master.view(p.shape))
                swap(stack, p, "data", wide)
