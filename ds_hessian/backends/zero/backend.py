"""A DeepSpeed engine: each rank stores, displaces and differentiates its own shards.

Displacements are written into the shards from the masters (or from a kept copy where the weights
are their own masters), rounded once; publishing them lets every rank's next forward read them.
Every micro-batch is a whole accumulation window, so that its gradient is complete after its
backward, whatever the stage, and is added up in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ds_hessian import ops
from ds_hessian.backends.guard import (
    Attributes,
    Buffers,
    RandomState,
    full_fp32,
    training_flags,
)
from ds_hessian.backends.megatron.tracker import tracker_states
from ds_hessian.backends.objective import Objective, Totals
from ds_hessian.backends.zero import host
from ds_hessian.backends.zero.flat import BF16Shards, FlatShards
from ds_hessian.backends.zero.memory import ZeroFigures, memory_of_zero
from ds_hessian.backends.zero.refusal import refuse_training
from ds_hessian.backends.zero.replicated import ReplicatedShards
from ds_hessian.backends.zero.shards import Piece, Shards
from ds_hessian.backends.zero.stage3 import Stage3Shards
from ds_hessian.backends.zero.tensor_parallel import Placement, Replicas, place
from ds_hessian.errors import ConfigError, HessianError
from ds_hessian.memory import Item, place_of
from ds_hessian.ranks import gather_objects
from ds_hessian.ranks.lockstep import Lockstep
from ds_hessian.vectors import Fragment, Layout, VectorSpace

Precision = Literal["model", "fp32"]


class ZeroBackend:
    """The shards of a DeepSpeed engine; see `ShardBackend`.

    Args:
        engine: A `DeepSpeedEngine` that `refuse_unsupported` let pass.

    Attributes:
        parameters: `(name, unsharded shape)` of the trainable ones, the same on every rank.

    Raises:
        UnsupportedError: what part of a tensor-parallel parameter a rank has is not known.

    Collective: the constructor.
    """

    def __init__(self, engine: Any) -> None:
        self.engine, self.module = engine, engine.module
        self.shards = _shards_of(engine)
        self.device = torch.device(engine.device)
        self.tensor_ranks = host.tensor_parallel(engine)[1]
        self._places = self._place()
        self.parameters = [(name, place.shape) for name, place in self._places.values()]
        self.layout, self.pieces = self._map()
        self.space = VectorSpace(self.layout.n_local, self.layout.n_owned, self.device)
        self.train_mode = False
        self.precision: Precision = "model"
        self.num_micro_batches = 0
        self.gradient_scale: float | None = None
        self.loss = float("nan")
        self._objective: Objective | None = None
        self._weights: list[Tensor] = []
        self._masters: list[Tensor] = []

    def _place(self) -> dict[int, tuple[str, Placement]]:
        mesh = host.tensor_parallel(self.engine)
        return {
            id(p): (name, place(name, p, host.shape(p), *mesh))
            for name, p in self.module.named_parameters()
            if p.requires_grad
        }

    def _map(self) -> tuple[Layout, list[Piece]]:
        pieces, fragments = list[Piece](), list[Fragment]()
        for piece in self.shards.pieces():
            name, placement = self._places[id(piece.parameter)]
            found = placement.fragments(name, piece.start, piece.numel, piece.owned)
            for start, fragment in found:
                offset = piece.offset + start - piece.start
                own = replace(piece, start=start, numel=fragment.numel, offset=offset)
                pieces.append(own)
                fragments.append(fragment)
        layout = Layout(fragments)
        return layout, [pieces[i] for i in layout.order]

    @property
    def unit_roundoff(self) -> float:
        """Of the dtype in which the passes compute."""
        dtype = torch.float32 if self.precision == "fp32" else host.compute_dtype(self.engine)
        return torch.finfo(dtype).eps / 2

    # ---- the loss

    def use(
        self, objective: Objective, train_mode: bool = False, precision: Precision = "model"
    ) -> None:
        """Fix the loss, and the arithmetic in which it is evaluated. Collective.

        Args:
            objective: This rank's micro-batches.
            train_mode: Whether the modules are in train mode.
            precision: `"model"`, as training runs, or `"fp32"`, on fp32 copies of the masters.

        Raises:
            ConfigError: ranks have different numbers of micro-batches, or tensor-parallel ranks
                different ones.
        """
        counts = torch.zeros(self.space.world_size, dtype=torch.float64)
        counts[self.space.rank] = len(objective)
        counts = self.space.reduce(counts)
        if counts.min() != counts.max():
            raise ConfigError(
                "every rank needs the same number of micro-batches, got "
                f"{[int(c) for c in counts]} on ranks 0, 1, ...; pass lists of equal length"
            )
        if self.tensor_ranks > 1:
            self._require_shared(objective)
        self._objective, self.num_micro_batches = objective, len(objective)
        self.train_mode, self.precision = train_mode, precision

    def _require_shared(self, objective: Objective) -> None:
        mine = host.data_parallel(self.engine)[0], objective.fingerprint()
        found: dict[int, set[str]] = {}
        for row, fingerprint in gather_objects(mine):
            found.setdefault(row, set()).add(fingerprint)
        different = [row for row, fingerprints in sorted(found.items()) if len(fingerprints) > 1]
        if different:
            raise ConfigError(
                "tensor-parallel ranks share their micro-batches, but those of data-parallel rank "
                f"{different[0]} differ; pass the same list to all of them"
            )

    # ---- the guard

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """See `ShardBackend.measuring`. Allowed wherever no forward awaits its backward."""
        assert self._objective is not None, "use() comes first"
        engine, attributes = self.engine, Attributes()
        trackers = host.tracker_states() + tracker_states()
        self._random = RandomState(self.device, trackers)
        self._states: list[Any] = [self._random.get()]
        self._buffers = Buffers(self.module)
        self._totals, self.gradient_scale = Totals(), None
        self._replicas_checked = self.tensor_ranks == 1
        self._lockstep = Lockstep(self.device, host.communication())
        with self._lockstep, ExitStack() as stack:
            with self._lockstep.together("putting the training state aside"):
                stack.callback(self._random.set, self._states[0])
                stack.callback(self._buffers.restore)
                stack.callback(attributes.restore)
                host.quiet(engine, attributes)
                refuse_training(engine, attributes)
                stack.enter_context(host.forward_stack())
                stack.enter_context(training_flags(self.module, self.train_mode))
                stack.callback(self.shards.stash())
            stack.callback(self.shards.publish)  # on all ranks, wherever one fails
            with self._lockstep.together("keeping the weights"):
                self.shards.publish()
                if self.precision == "fp32":
                    stack.enter_context(full_fp32())
                    if host.compute_dtype(engine) != torch.float32:
                        stack.enter_context(self.shards.in_fp32())
                stack.callback(self._restore_weights, self._keep_weights())
            try:
                with self._lockstep.guarded():
                    yield
            except BaseException:
                self.shards.abandon()  # ranks may have failed in and outside of a pass
                raise

    def _keep_weights(self) -> list[Tensor]:
        self._weights = [self.shards.weight(piece) for piece in self.pieces]
        masters = [self.shards.master(piece) for piece in self.pieces]
        # Weights are the rounded masters after every step, but not after a user's own edit of
        # either: the weights are what training would go on with, so they are kept themselves.
        same = all(
            master is not None and torch.equal(weight, master.to(weight.device, weight.dtype))
            for weight, master in zip(self._weights, masters, strict=True)
        )
        kept = [] if same else [weight.clone() for weight in self._weights]
        self._masters = [
            copy if master is None else master.to(copy.device)
            for copy, master in zip(kept or self._weights, masters, strict=True)
        ]
        return kept

    def _restore_weights(self, kept: list[Tensor]) -> None:
        for weight, value in zip(self._weights, kept or self._masters, strict=True):
            weight.copy_(value)
        self.shards.clear_gradients()
        self._weights, self._masters = [], []

    # ---- the optimizer

    def adam(self) -> tuple[Tensor, Tensor]:
        """What Adam divides its step by, and its last step, `(n_local,)` each; see `Shards.adam`.

        Raises:
            ConfigError: the optimizer is not Adam, or has not made a step yet.

        Collective: one all-reduce.
        """
        divisor, step = self.space.zeros(), self.space.zeros()
        missing = 0
        for piece, (_, part) in zip(self.pieces, self.layout, strict=True):
            found = self.shards.adam(piece)
            if found is None:
                missing += 1
            else:
                divisor[part], step[part] = found
        moved = float(step.any())  # DeepSpeed makes the moments, all zero, before the first step
        figures = self.space.reduce(torch.tensor([float(missing), moved], dtype=torch.float64))
        if figures[0] or not figures[1]:
            raise ConfigError(
                f"the optimizer {type(self.engine.optimizer).__name__} has no second moments to "
                "precondition with: use Adam or AdamW, and make an optimizer step (with a learning "
                "rate above 0) first"
            )
        return divisor, step

    # ---- evaluations

    def displace(self, v: Tensor | None, h: float) -> Tensor:
        """See `ShardBackend.displace`."""
        direction = self.space.zeros() if v is None else v
        if self._weights:  # elsewhere than the vectors where parameters are offloaded
            direction = direction.to(self._weights[0].device)
        change = ops.displace(self._weights, self._masters, direction, h, self.space.n_owned)
        torch.clear_autocast_cache()
        self.shards.publish()
        return change.to(self.device)

    def add_gradient(self, out: Tensor, micro_batches: range) -> None:
        """See `ShardBackend.add_gradient`.

        Raises:
            MeasurementError: the model, the loss or the backward raised on some rank.
            NumericsError: a loss is not finite.
        """
        accumulates = self.shards.accumulates
        for index in micro_batches:
            self._random.set(self._states[index])
            self._buffers.restore()
            last = index == micro_batches[-1] or not accumulates
            factor = self._run(index, last)
            if len(self._states) == index + 1:  # first evaluation: the next one goes on from here
                self._states.append(self._random.get())
            if last:
                self._collect(out, factor)

    def _collect(self, out: Tensor, factor: float) -> None:
        gradients = self.shards.gradients(self.pieces)
        first = not self._replicas_checked
        replicas = Replicas(*host.tensor_parallel(self.engine))
        for (fragment, part), piece, gradient in zip(
            self.layout, self.pieces, gradients, strict=True
        ):
            if gradient is not None:
                out[part].add_(gradient.to(out.device), alpha=factor)
            if first and self._places[id(piece.parameter)][1].replicated:
                replicas.add(fragment, gradient)
        self.shards.clear_gradients()
        if first:
            names = [name for name, placement in self._places.values() if placement.replicated]
            replicas.check(self.space, names, self.unit_roundoff**0.5)
            self._replicas_checked = True

    def _run(self, index: int, last: bool) -> float:
        """Forward and backward; returns what the reduced gradient must be multiplied with."""
        assert self._objective is not None
        try:
            with self._lockstep.together(f"evaluating micro-batch {index}"):
                self.shards.prepare()
                widen = self.precision == "fp32"
                loss, count = self._objective.loss(self.engine, index, self.device, widen)
                scale = host.backward(self.engine, loss, last)
                self._totals.add(index, float(loss.detach()), count)
        except HessianError:
            self.shards.abandon()
            raise
        if self.gradient_scale is None and len(self._totals) == self.num_micro_batches:
            self.gradient_scale, self.loss = self._totals.reduce(self.space)
        return host.averaging_factor(self.engine) / scale

    def memory(self, precision: Precision = "model") -> list[Item]:
        """See `ShardBackend.memory`."""
        return memory_of_zero(self._figures(), precision)

    def _figures(self) -> ZeroFigures:
        zero, optimizer = self.engine._config.zero_config, self.engine.optimizer
        weights = [self.shards.weight(piece) for piece in self.pieces]
        masters = [self.shards.master(piece) for piece in self.pieces]
        accumulated = getattr(optimizer, "grad_partitions_flat_buffer", None)
        return ZeroFigures(
            stage=int(zero.stage),
            n=sum(host.shape(p).numel() for p in self.module.parameters() if p.requires_grad),
            n_local=self.space.n_local,
            weight_bytes=max((w.element_size() for w in weights), default=0),
            gradient_bytes=0 if accumulated is None else accumulated.element_size(),
            has_masters=all(m is not None for m in masters),
            place=place_of(self.device),
            offloads_optimizer=host.offloads(zero.offload_optimizer),
            offloads_parameters=host.offloads(zero.offload_param),
            whole_gradients=type(optimizer).__name__ == "BF16_Optimizer",
        )

    def weight_norm(self) -> float:
        """See `ShardBackend.weight_norm`."""
        owned = zip(self._masters, self.layout.fragments, strict=True)
        squares = [_square(m).to(self.device) for m, f in owned if f.owned]
        total = torch.cat([torch.zeros(1, dtype=torch.float64, device=self.device), *squares])
        total = total.sum().reshape(1)
        return float(self.space.reduce(total)[0]) ** 0.5


def _square(values: Tensor) -> Tensor:
    wide = values.float()
    return ops.dots([(wide, wide)], wide.numel())


def _shards_of(engine: Any) -> Shards:
    kind = type(engine.optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return Stage3Shards(engine)
    if kind == "BF16_Optimizer":
        return BF16Shards(engine)
    if kind == "DeepSpeedZeroOptimizer":
        return FlatShards(engine)
    return ReplicatedShards(engine)
