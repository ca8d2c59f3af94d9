"""The weights that a rank displaces, and the masters from which they are written and restored.

Displaced weights are written from masters, rounded once, and never added to. Where a weight is the
rounded fp32 master that the optimizer keeps, that is its master here. Where there is none, or the
weight has been edited since, a copy of the weight is its master, since training continues from the
weight. Restoring is a displacement by zero, exact by construction.

Memory: a copy of the weights without a master.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from ds_hessian import ops
from ds_hessian.backends.function import FixedFunction
from ds_hessian.backends.graph import dtypes_of
from ds_hessian.backends.guard import Guard
from ds_hessian.backends.objective import Totals
from ds_hessian.backends.protocol import Head, SidesOfKinks
from ds_hessian.errors import NumericsError, UnsupportedError
from ds_hessian.memory import NARROW
from ds_hessian.vectors import Layout, VectorSpace
from ds_hessian.vectors.space import CHUNK

COARSEST = max(torch.finfo(dtype).eps / 2 for dtype in NARROW)
"""The largest unit roundoff of passes."""


@dataclass(frozen=True)
class Shard:
    """The weights of one fragment of the layout.

    Attributes:
        weight: Flat view of the weights that are displaced, in the dtype of the passes.
        master: Flat view of the optimizer's master weights; None where it has none.
    """

    weight: Tensor
    master: Tensor | None


class ShardedWeights:
    """A rank's weights in a measurement.

    Args:
        shards: One for each fragment of the layout, in its order.
        layout: The layout of this rank's vectors.
        space: Their space.
        publish: A function that makes every rank's next forward read the written weights.
            Collective.
        settle: A function after which they can be written again.

    Attributes:
        weights: Flat views, in the order of the layout.
        masters: The tensors from which the weights are written.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        layout: Layout,
        space: VectorSpace,
        publish: Callable[[], None],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.layout, self.space, self.publish, self._settle = layout, space, publish, settle
        self.weights = [shard.weight for shard in shards]
        self.masters = [_master(shard) for shard in shards]

    @functools.cached_property
    def _shards(self) -> ops.Shards:
        return ops.Shards(self.weights, self.masters)

    @functools.cached_property
    def _exact(self) -> bool:
        """Whether the weights can hold all of this rank's masters exactly."""
        return all(
            weight.dtype == master.dtype
            or torch.equal(master, master.to(weight.dtype).to(master.dtype))
            for weight, master in zip(self.weights, self.masters, strict=True)
        )

    def displace(self, v: Tensor | None, h: float, across: bool = False) -> Tensor:
        """Write `w + h v` into the weights of all ranks, as `Session.displace` specifies."""
        direction = self.space.zeros() if v is None else v
        # Elsewhere than the vectors where parameters are offloaded.
        direction = direction.to(self._shards.device)
        on = across and self._exact
        self._settle()
        change = self._shards.displace(direction, 2 * h if on else h, self.space.n_owned, on)
        torch.clear_autocast_cache()
        self.publish()
        return change.to(self.space.device)

    @torch.no_grad()
    def realised(self) -> Tensor:
        """Return the weights less their masters, as `Session.realised` specifies."""
        found = self.space.zeros()
        for weight, master, (_, own) in zip(self.weights, self.masters, self.layout, strict=True):
            found[own] = weight.float() - master.float()
        return found

    @torch.no_grad()
    def whole(self) -> Tensor:
        """Return the masters as a vector, `(n_local,)` fp32."""
        found = self.space.zeros()
        for master, (_, own) in zip(self.masters, self.layout, strict=True):
            found[own] = master.float()
        return found

    @torch.no_grad()
    def restore(self) -> None:
        """Write this rank's weights from the masters; all ranks must publish afterwards."""
        self._settle()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    def norm(self, names: Collection[str] | None = None) -> float:
        """Return `|w|` over all ranks, or that of some parameters.

        Raises:
            NumericsError: it is not finite.

        Collective: one all-reduce.
        """
        device = self.space.device
        owned = [
            master
            for master, f in zip(self.masters, self.layout.fragments, strict=True)
            if f.owned and (names is None or f.name in names)
        ]
        squares = [_square(master).to(device) for master in owned]
        total = torch.cat([torch.zeros(1, dtype=torch.float64, device=device), *squares]).sum()
        norm = float(self.space.reduce(total.reshape(1))[0]) ** 0.5
        if not math.isfinite(norm):
            raise NumericsError(
                f"the weights are not finite: their norm is {norm}; measure before training "
                "diverges"
            )
        return norm


class ShardedSession:
    """What the sessions of all hosts share: displaced weights, and what is known once all
    micro-batches have been evaluated.

    Args:
        weights: This rank's weights.
        function: The mode in which the passes run.
        num_micro_batches: Units that can be evaluated alone.
        head: The outputs of the model.
        roundoff: Unit roundoff of the passes.
        costly_runs: Whether calls of `add_gradient` cost more than their units.
    """

    def __init__(
        self,
        weights: ShardedWeights,
        function: FixedFunction,
        num_micro_batches: int,
        head: Head,
        roundoff: float,
        costly_runs: bool = False,
    ) -> None:
        self.costly_runs = costly_runs
        self.weights, self.layout, self.space = weights, weights.layout, weights.space
        self.num_micro_batches, self.head, self.unit_roundoff = num_micro_batches, head, roundoff
        self.gradient_scale: float | None = None
        self.loss = self.cotangent_scale = float("nan")
        self.backward = 0
        self._function, function.note_graph = function, self._note_graph
        self.kinks: SidesOfKinks = function.decisions
        function.begin()

    def _reduce(self, totals: Totals) -> None:
        """Set what all first evaluations have told: scale, loss and unit roundoff. Collective."""
        found = totals.reduce(self.space, self.unit_roundoff)
        self.gradient_scale, self.loss, self.unit_roundoff = found

    def watch_autocast(self, guard: Guard, widen: bool) -> None:
        """Adopt the unit roundoff of autocast where a module is called under it, in the first
        evaluations of all micro-batches.

        Args:
            guard: The guard of the measurement.
            widen: Whether the passes are to run in fp32, which autocast refuses.
        """
        kind, thread = self.space.device.type, threading.get_ident()

        def watch(*_: object) -> None:
            if self.gradient_scale is not None:
                handle.remove()
            elif threading.get_ident() == thread and torch.is_autocast_enabled(kind):
                if widen:
                    raise UnsupportedError(
                        "ds_hessian does not support fp32 passes of a model or loss_fn that uses "
                        'torch.autocast; leave it out, or use finite_difference.precision "model"'
                    )
                self._adopt(torch.get_autocast_dtype(kind))

        handle = register_module_forward_pre_hook(watch)
        guard.callback(handle.remove)

    def _note_graph(self, output: Tensor) -> None:
        """Adopt the unit roundoff of 16 bits where values in the graph of a first evaluation are in
        them, whatever the weights are.
        """
        if self.unit_roundoff < COARSEST:
            for dtype in dtypes_of(output) & set(NARROW):
                self._adopt(dtype)

    def _adopt(self, dtype: torch.dtype) -> None:
        self.unit_roundoff = max(self.unit_roundoff, torch.finfo(dtype).eps / 2)

    def displace(self, v: Tensor | None, h: float, across: bool = False) -> Tensor:
        """Displace this rank's shards, and give all ranks the weights of them."""
        self._function.require_unchanged()
        return self.weights.displace(v, h, across)

    def realised(self) -> Tensor:
        """Return what this rank's shards are displaced by."""
        return self.weights.realised()

    def masters(self) -> Tensor:
        """Return what this rank's shards are rounded from."""
        return self.weights.whole()

    def weight_norm(self, names: Collection[str] | None = None) -> float:
        """Return the norm of the weights, from the masters of all ranks."""
        return self.weights.norm(names)

    def choices(self, micro_batches: range) -> Tensor:
        """Return the number of held choices, and how many of them would have changed; the same of
        the elements at kinks.
        """
        return self._function.decisions.choices(self.forwards_of(micro_batches))

    def forwards_of(self, micro_batches: range) -> Collection[Hashable]:
        """Return what tells the forwards of these units apart."""
        return micro_batches


@torch.no_grad()
def widen(wide: Tensor, weight: Tensor, master: Tensor) -> None:
    """Write in fp32 what training goes on from: a master, or the weight where it was edited since.

    Args:
        wide: Is written.
        weight: The weight in 16 bits, rounded from its master.
        master: The master, in fp32.
    """
    parts = (torch.atleast_1d(t).split(CHUNK) for t in (wide, weight, master))
    for new, here, kept in zip(*parts, strict=True):
        new.copy_(kept)
        new.copy_(torch.where(new.to(here.dtype) == here, new, here.float()))


def _master(shard: Shard) -> Tensor:
    weight, master = shard.weight, shard.master
    if master is None or not torch.equal(weight, master.to(weight.device, weight.dtype)):
        return weight.clone()
    return master.to(weight.device)


def _square(values: Tensor) -> Tensor:
    wide = values.float()
    return ops.dots([(wide, wide)], wide.numel())
