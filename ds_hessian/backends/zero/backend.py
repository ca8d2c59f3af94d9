"""A DeepSpeed engine: each rank stores, displaces and differentiates its own shards.

Displacements are written into the shards from the fp32 masters; the next gather spreads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_hessian import ops
from ds_hessian.backends.objective import Objective, Totals
from ds_hessian.backends.state import Attributes, Buffers, RandomState, training_flags
from ds_hessian.backends.zero import host
from ds_hessian.backends.zero.lockstep import Lockstep
from ds_hessian.backends.zero.stage3 import Stage3Shards
from ds_hessian.errors import ConfigError, HessianError
from ds_hessian.vectors import Fragment, Layout, VectorSpace


class ZeroBackend:
    """The shards of a DeepSpeed engine; see `ShardBackend`.

    Args:
        engine: A `DeepSpeedEngine` that `refuse_unsupported` let pass.

    Collective: the constructor.
    """

    unit_roundoff = 2.0**-24

    def __init__(self, engine: Any) -> None:
        self.engine, self.module = engine, engine.module
        self.shards = Stage3Shards(engine.optimizer)
        self.device = torch.device(engine.device)
        self.layout, self.pieces = self._map()
        self.space = VectorSpace(self.layout.n_local, self.layout.n_owned, self.device)
        self.train_mode = False
        self.num_micro_batches = 0
        self.gradient_scale: float | None = None
        self.loss = float("nan")
        self._objective: Objective | None = None
        self._weights: list[Tensor] = []
        self._masters: list[Tensor] = []

    def _map(self) -> tuple[Layout, list[tuple[Any, int, int, int]]]:
        """The layout, and for each of its fragments (parameter, sub-group, offset, numel)."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        fragments, pieces = [], []
        for p, group, offset, length in self.shards.parameters():
            start = length * torch.distributed.get_rank(p.ds_process_group)
            numel = max(0, min(length, p.ds_numel - start))
            fragments.append(Fragment(names[id(p)], start, numel, p.ds_shape))
            pieces.append((p, group, offset, numel))
        layout = Layout(fragments)
        return layout, [pieces[i] for i in layout.order]

    # ---- the loss

    def use(self, objective: Objective, train_mode: bool = False) -> None:
        """Fix the loss. Collective.

        Raises:
            ConfigError: ranks have different numbers of micro-batches.
        """
        counts = torch.zeros(self.space.world_size, dtype=torch.float64)
        counts[self.space.rank] = len(objective)
        counts = self.space.reduce(counts)
        if counts.min() != counts.max():
            raise ConfigError(
                "every rank needs the same number of micro-batches, got "
                f"{[int(c) for c in counts]} on ranks 0, 1, ...; pass lists of equal length"
            )
        self._objective, self.num_micro_batches = objective, len(objective)
        self.train_mode = train_mode

    # ---- the guard

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """See `ShardBackend.measuring`. Allowed wherever no forward awaits its backward."""
        assert self._objective is not None, "use() comes first"
        engine, attributes = self.engine, Attributes()
        self._random = RandomState(self.device, host.tracker_states())
        self._states: list[Any] = [self._random.get()]
        self._buffers = Buffers(self.module)
        self._totals, self.gradient_scale = Totals(), None
        gradients = [(p, p.grad) for p in self.module.parameters()]
        with ExitStack() as stack:
            stack.callback(self._random.set, self._states[0])
            stack.callback(self._buffers.restore)
            stack.callback(attributes.restore)
            host.quiet(engine, attributes)
            stack.enter_context(host.forward_stack())
            stack.enter_context(training_flags(self.module, self.train_mode))
            for p, _ in gradients:
                p.grad = None
            stack.callback(_put_gradients, gradients)
            stack.callback(self.shards.unstash, self.shards.stash())
            stack.callback(self._restore_weights, self._keep_weights())
            self._lockstep = stack.enter_context(Lockstep(self.device))
            yield

    def _keep_weights(self) -> list[Tensor]:
        self.shards.publish()
        self._weights = [
            p.ds_tensor.data.view(-1).narrow(0, 0, numel) for p, _, _, numel in self.pieces
        ]
        self._masters = [self.shards.master(*piece[1:]) for piece in self.pieces]
        # Weights and masters hold the same bits after every step, but not after a user's own edit
        # of either: the weights are what training would go on with, so they are kept themselves.
        same = all(torch.equal(w, m) for w, m in zip(self._weights, self._masters, strict=True))
        return [] if same else [w.clone() for w in self._weights]

    def _restore_weights(self, kept: list[Tensor]) -> None:
        for weight, value in zip(self._weights, kept or self._masters, strict=True):
            weight.copy_(value)
        self.shards.clear_gradients()
        self.shards.publish()
        self._weights, self._masters = [], []

    # ---- evaluations

    def displace(self, v: Tensor | None, h: float) -> Tensor:
        """See `ShardBackend.displace`."""
        direction = self.space.zeros() if v is None else v
        change = ops.displace(self._weights, self._masters, direction, h, self.space.n_owned)
        self.shards.publish()
        return change

    def add_gradient(self, out: Tensor, micro_batches: range) -> None:
        """See `ShardBackend.add_gradient`.

        Raises:
            MeasurementError: the model, the loss or the backward raised on some rank.
            NumericsError: a loss is not finite.
        """
        for index in micro_batches:
            self._random.set(self._states[index])
            self._buffers.restore()
            factor = self._run(index)
            if len(self._states) == index + 1:  # first evaluation: the next one goes on from here
                self._states.append(self._random.get())
            self.shards.synchronize_reduction()
            for (p, _, _, numel), (_, part) in zip(self.pieces, self.layout, strict=True):
                out[part].add_(self.shards.gradient(p, numel), alpha=factor)
            self.shards.clear_gradients()

    def _run(self, index: int) -> float:
        """Forward and backward; returns what the reduced gradient must be multiplied with."""
        assert self._objective is not None
        try:
            with self._lockstep.together(f"evaluating micro-batch {index}"):
                loss, count = self._objective.loss(self.engine, index, self.device)
                scale = host.backward(self.engine, loss)
                self._totals.add(index, float(loss.detach()), count)
        except HessianError:
            self.shards.abandon()
            raise
        if self.gradient_scale is None and len(self._totals) == self.num_micro_batches:
            self.gradient_scale, self.loss = self._totals.reduce(self.space)
        return 1.0 / scale

    def weight_norm(self) -> float:
        """See `ShardBackend.weight_norm`."""
        owned = zip(self._masters, self.layout.fragments, strict=True)
        squares = [ops.dots([(m, m)], m.numel()) for m, f in owned if f.owned]
        total = torch.cat([torch.zeros(1, dtype=torch.float64, device=self.device), *squares])
        total = total.sum().reshape(1)
        return float(self.space.reduce(total)[0]) ** 0.5


def _put_gradients(gradients: list[tuple[Any, Tensor | None]]) -> None:
    for p, gradient in gradients:
        p.grad = gradient
