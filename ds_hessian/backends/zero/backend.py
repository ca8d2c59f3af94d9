"""A DeepSpeed engine: what its parameters are, and measurements of it.

Each rank stores, displaces and differentiates its own shards. Displacements are written into the
shards from the masters (or from a kept copy where the weights are their own masters), rounded once;
publishing them lets every rank's next forward read them. Every micro-batch is a whole accumulation
window, so that its gradient is complete after its backward, whatever the stage, and is added up in
fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hessian.backends.adam import collect
from ds_hessian.backends.applied import outside
from ds_hessian.backends.guard import Guard, guarded
from ds_hessian.backends.names import (
    require_same,
    require_same_parameters,
    trained,
    trained_tensors,
)
from ds_hessian.backends.objective import (
    LossFn,
    ModelObjective,
    Totals,
    common_number,
    reading,
    refuse_sizes,
)
from ds_hessian.backends.protocol import (
    DEFAULT_PASSES,
    AdamState,
    Description,
    Head,
    Objective,
    Passes,
    Precision,
)
from ds_hessian.backends.refusal import refuse_methods, training_refused
from ds_hessian.backends.sharded import Shard, ShardedSession, ShardedWeights
from ds_hessian.backends.weights import Weight, module_weights
from ds_hessian.backends.zero import host
from ds_hessian.backends.zero.experts import Known, all_parameters, known
from ds_hessian.backends.zero.flat import BF16Shards, FlatShards
from ds_hessian.backends.zero.host import Engine
from ds_hessian.backends.zero.memory import ZeroFigures, memory_of_zero
from ds_hessian.backends.zero.replicated import ReplicatedShards
from ds_hessian.backends.zero.sequence import factor_of_gradients
from ds_hessian.backends.zero.shards import Piece, Shards
from ds_hessian.backends.zero.stage3 import Stage3Shards
from ds_hessian.backends.zero.support import refuse_unsupported
from ds_hessian.backends.zero.tensor_parallel import Placement, Replicas, place
from ds_hessian.errors import ConfigError, HessianError, UnsupportedError
from ds_hessian.memory import Item, tier_of
from ds_hessian.optimizer import follow_steps, settings_of
from ds_hessian.ranks import Shared, balanced, gather_objects, imbalance
from ds_hessian.ranks.lockstep import Lockstep
from ds_hessian.vectors import Fragment, Layout, VectorSpace, collected


class ZeroBackend:
    """The `Backend` of a DeepSpeed engine.

    Args:
        engine: A `DeepSpeedEngine` that `refuse_unsupported` let pass.

    Attributes:
        shards: Access to the weights, masters and gradients of the engine's optimizer.
        pieces: This rank's coordinates, in the order of the layout.
        placements: `{id of a parameter: (name, placement)}`.

    Raises:
        UnsupportedError: it is not known which part of a tensor-parallel parameter a rank has.
        ConfigError: ranks train different parameters.

    Collective: the constructor.
    """

    precisions: tuple[Precision, ...] = ("model", "fp32")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.modules: Sequence[nn.Module] = [engine.module]
        self.device = torch.device(engine.device)
        self.shards = _shards_of(engine)
        self.tensor_rank, self.tensor_ranks = host.tensor_parallel(engine)
        self.sequence_ranks = host.sequence_parallel_size(engine)
        stepped = set(map(id, self.shards.stepped_parameters()))
        mine = [each for each in known(engine) if id(each.parameter) in stepped]
        self.placements = self._place(mine)
        self._require_own_memory()
        self._attached = trained_tensors(self.modules)
        self.layout, self.pieces = self._map()
        self.space = VectorSpace(self.layout.n_local, self.layout.n_owned, self.device)
        self.parameters: Sequence[tuple[str, torch.Size]] = [
            (name, place.shape) for name, place in self.placements.values()
        ]
        if host.has_experts(engine):
            self.parameters = all_parameters(mine, self.space)
        require_same_parameters(self.parameters, self.space)
        follow_steps(engine.optimizer)

    def _place(self, mine: Sequence[Known]) -> dict[int, tuple[str, Placement]]:
        mesh, found = (self.tensor_rank, self.tensor_ranks), {}
        for each in mine:
            _, name, shape = each.told
            found[id(each.parameter)] = name, place(name, each.parameter, shape, *mesh)
        return found

    def _map(self) -> tuple[Layout, list[Piece]]:
        pieces, fragments = list[Piece](), list[Fragment]()
        for piece in self.shards.pieces():
            if id(piece.parameter) not in self.placements:
                continue  # frozen since the optimizer was made
            name, placement = self.placements[id(piece.parameter)]
            found = placement.fragments(name, piece.start, piece.numel, piece.owned)
            for start, fragment in found:
                offset = piece.offset + start - piece.start
                own = replace(piece, start=start, numel=fragment.numel, offset=offset)
                pieces.append(own)
                fragments.append(fragment)
        layout = Layout(fragments)
        return layout, [pieces[i] for i in layout.order]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which training's passes compute."""
        return host.compute_dtype(self.engine)

    @property
    def step(self) -> int:
        """Optimizer steps made so far."""
        return int(self.engine.global_steps)

    def require_measurable(self) -> None:
        """Require the engine to be as it was when it was attached."""
        refuse_unsupported(self.engine)
        require_same(self._attached, trained_tensors(self.modules))
        self._require_own_memory()

    def _require_own_memory(self) -> None:
        for p in self.shards.detached():
            if p.requires_grad:
                name, _ = self.placements[id(p)]
                raise UnsupportedError(
                    f"ds_hessian does not support the parameter {name!r}, which has other memory "
                    "than that in which its engine trains it: another engine has been made of the "
                    "model since, or it was given other memory; measure the engine that was made "
                    "last, and write values in place"
                )

    # ---- the function

    def objective(
        self,
        batches: Iterable[object],
        loss: LossFn | None = None,
        *,
        like: Objective | None = None,
        apart: bool = False,
        **sizes: int | None,
    ) -> ModelObjective:
        """Read this rank's micro-batches; tensor-parallel ranks must pass the same ones."""
        refuse_sizes(sizes)
        if loss is None and isinstance(like, ModelObjective):
            loss = like.loss_fn
        with reading(batches, self.device):
            objective = ModelObjective(batches, loss)
        common_number(objective.num_micro_batches, self.space)
        if self.tensor_ranks > 1:
            self._require_shared(objective)
        return objective

    def _require_shared(self, objective: ModelObjective) -> None:
        mine = host.data_parallel(self.engine)[0], objective.fingerprint()
        shared = Shared(mine, self.tensor_ranks, self.tensor_rank == 0)
        if balanced(self.space.reduce(imbalance([shared]))):
            return
        found: dict[int, set[str]] = {}
        for row, fingerprint in gather_objects(mine):
            found.setdefault(row, set()).add(fingerprint)
        different = [row for row, fingerprints in sorted(found.items()) if len(fingerprints) > 1]
        raise ConfigError(
            "tensor-parallel ranks share their micro-batches, but those of data-parallel rank "
            f"{different[0]} differ; pass the same list to all of them"
        )

    @contextmanager
    def measuring(
        self, objective: Objective, passes: Passes = DEFAULT_PASSES
    ) -> Iterator[ZeroSession]:
        """Save the training state, and yield a session; allowed wherever no backward is pending."""
        assert isinstance(objective, ModelObjective)
        engine, shards = self.engine, self.shards
        lockstep = Lockstep(self.device, host.communication())
        with lockstep, ExitStack() as stack:
            with lockstep.together("saving the training state"):
                guard = stack.enter_context(
                    guarded(self.modules, self.device, passes, objective.loss_fn)
                )
                guard.state.left_alone |= host.OF_HOOKS
                host.quiet(engine, guard.attributes)
                for owner, name in host.transport(engine):
                    moving = outside(guard.function, getattr(owner, name))
                    guard.attributes.set(owner, name, moving)
                refuse_methods(engine, host.WRITES_WEIGHTS, guard.attributes)
                masters = [m for m in map(shards.master, self.pieces) if m is not None]
                stack.enter_context(training_refused(self.modules, masters))
                stack.enter_context(host.forward_stack())
                stack.callback(shards.stash())
                stack.enter_context(shards.unquantized())
            stack.callback(shards.publish)  # on all ranks, wherever one fails
            with lockstep.together("keeping the weights"):
                shards.publish()
                dtype, widen = self.compute_dtype, passes.precision == "fp32"
                if widen and dtype != torch.float32:
                    stack.enter_context(shards.in_fp32())
                    dtype = torch.float32
                parts = [Shard(shards.weight(piece), shards.master(piece)) for piece in self.pieces]
                weights = ShardedWeights(parts, self.layout, self.space, shards.publish)
                stack.callback(weights.restore)
                stack.callback(shards.clear_gradients)
            try:
                with lockstep.guarded():
                    session = ZeroSession(self, objective, guard, weights, lockstep, dtype, widen)
                    if self.sequence_ranks > 1:
                        session.find_share(self.sequence_ranks)
                    yield session
            except BaseException:
                shards.abandon()  # ranks may have failed in and outside of a pass
                raise

    # ---- the job

    def describe(self) -> Description:
        """Describe the engine: its ZeRO stage, its dtype and its optimizer."""
        import deepspeed

        ranks, engine = self.space.world_size, self.engine
        stage = engine.zero_optimization_stage()
        mesh = f", TP {self.tensor_ranks}" * (self.tensor_ranks > 1)
        mesh += f", SP {self.sequence_ranks}" * (self.sequence_ranks > 1)
        expert_ranks = sorted({layer.ep_size for _, layer in host.expert_layers(engine)})
        mesh += f", EP {' and '.join(map(str, expert_ranks))}" * bool(expert_ranks)
        quantized = host.quantized(engine)
        mesh += f", unquantized ({' and '.join(quantized)} off)" * bool(quantized)
        return Description(
            layout=f"ZeRO-{stage}, {ranks} rank{'s' * (ranks > 1)}{mesh}",
            model_dtype=str(next(engine.module.parameters()).dtype).removeprefix("torch."),
            versions={"deepspeed": deepspeed.__version__},
            optimizer=settings_of(self.engine.optimizer),
        )

    def adam(self) -> AdamState:
        """Read Adam's state from the engine's optimizer. Collective: one all-reduce."""
        found = [self.shards.adam(piece) for piece in self.pieces]
        return collect(found, self.layout, self.space, self.engine.optimizer)

    def weights(self) -> Iterable[Weight]:
        """Return the weights of two dims, which the passes gather.

        Raises:
            UnsupportedError: an mpu has split the layers.
        """
        if self.tensor_ranks > 1:
            raise UnsupportedError(
                "ds_hessian does not support Kronecker factors of layers that an mpu of "
                f"{self.tensor_ranks} tensor-parallel ranks has split; use megatron-core's own, or "
                "a job without tensor parallelism"
            )
        found = module_weights(self.engine.module, self.parameters)
        sequence = host.sequence_parallel_group() if self.sequence_ranks > 1 else None
        return list(self._placed(replace(w, sequence=sequence) for w in found))

    def _placed(self, weights: Iterable[Weight]) -> Iterator[Weight]:
        """Yield weights with their masters, those of experts by their names on all ranks."""
        for weight in weights:
            p = weight.module.get_parameter("weight")
            if not host.is_expert(p):
                yield replace(weight, master=self.shards.whole_master(p))
            elif id(p) in self.placements:
                name, _ = self.placements[id(p)]
                yield replace(weight, name=name, apart="it is an expert's, of deepspeed.moe")

    def memory(self, precision: Precision = "model") -> list[Item]:
        """Return what a session of the engine holds beyond training's memory."""
        return memory_of_zero(self._figures(), precision)

    def _figures(self) -> ZeroFigures:
        zero, optimizer = self.engine._config.zero_config, self.engine.optimizer
        weights = [self.shards.weight(piece) for piece in self.pieces]
        masters = [self.shards.master(piece) for piece in self.pieces]
        accumulated = getattr(optimizer, "grad_partitions_flat_buffer", None)
        return ZeroFigures(
            stage=int(zero.stage),
            n=sum(
                host.shape(p).numel()
                for _, p in trained(self.engine.module)
                if id(p) in self.placements
            ),
            n_local=self.space.n_local,
            weight_bytes=max((w.element_size() for w in weights), default=0),
            narrow=self.compute_dtype != torch.float32,
            gradient_bytes=0 if accumulated is None else accumulated.element_size(),
            has_masters=all(m is not None for m in masters),
            tier=tier_of(self.device),
            offloads_optimizer=host.offloads(zero.offload_optimizer),
            offloads_parameters=host.offloads(zero.offload_param),
            whole_gradients=type(optimizer).__name__ == "BF16_Optimizer",
            bucket=self.shards.bucket,
        )


class ZeroSession(ShardedSession):
    """The `Session` of a DeepSpeed engine.

    Args:
        backend: The backend of the engine.
        objective: The function.
        guard: The guard that restores the training state.
        weights: This rank's weights.
        lockstep: The lockstep of the measurement.
        dtype: The dtype in which the passes compute.
        widen: Whether 16-bit tensors of the micro-batches are passed as fp32.
    """

    def __init__(
        self,
        backend: ZeroBackend,
        objective: ModelObjective,
        guard: Guard,
        weights: ShardedWeights,
        lockstep: Lockstep,
        dtype: torch.dtype,
        widen: bool,
    ) -> None:
        head = Head(() if backend.tensor_ranks > 1 else backend.modules)
        roundoff = torch.finfo(dtype).eps / 2
        super().__init__(weights, guard.function, objective.num_micro_batches, head, roundoff)
        self._backend, self._objective, self._guard = backend, objective, guard
        self._lockstep, self._widen = lockstep, widen
        self._states = [guard.initial]  # before micro-batch 0, 1, ...
        self._totals = Totals()
        self._share = self._repeats = 1.0
        self._replicas_checked = backend.tensor_ranks == 1
        self.watch_autocast(guard, widen)

    @torch.enable_grad()  # also where the caller has switched gradients off
    def add_gradient(self, out: Tensor | None, micro_batches: range, factor: float = 1.0) -> None:
        """Add the gradients of these micro-batches, each reduced by the engine, to `out`."""
        accumulates = self._backend.shards.accumulates
        for index in micro_batches:
            last = index == micro_batches[-1] or not accumulates
            share = self._run(index, last, factor)
            if len(self._states) == index + 1:  # first evaluation: the next one starts from here
                self._states.append(self._guard.random.get())
            if last:
                self._collect(out, share)

    def forward(self, micro_batches: range) -> None:
        """Run the forward of these micro-batches, without a graph."""
        for index in micro_batches:
            with self._guard.function.without_graph([index]), self._evaluating(index):
                self._loss(index)

    def find_share(self, ranks: int) -> None:
        """Find the factor with which gradients are those of the loss, where `ranks` ranks share a
        sequence: gradients of all micro-batches and of one, and two forward passes (see
        `sequence`). Collective.
        """
        everything, gradient = range(self.num_micro_batches), self.space.zeros()
        self.add_gradient(gradient, everything)
        assert self.gradient_scale is not None
        norm = self.space.norm(gradient) * self.gradient_scale
        if norm == 0:
            return
        gradient.mul_(self.gradient_scale / norm)
        # Rounding over a change of the loss by its part u^(1/3) is as small as the third
        # derivative's share of it (Gill, Murray, Saunders and Wright, 1983), within the weights.
        part = self.unit_roundoff ** (1 / 3)
        h = part * min(abs(self.loss) / norm or math.inf, self.weight_norm())
        values = []
        for side in (h, -h):
            self.displace(gradient, side)
            values.append(self._value(everything))
        self.displace(None, 0.0)
        slope = (values[0] - values[1]) / (2 * h)
        noise = self.unit_roundoff * abs(self.loss) / h
        self._share = factor_of_gradients(slope, norm, noise, ranks)
        self._find_repeats(gradient, ranks)

    def _find_repeats(self, gradient: Tensor, ranks: int) -> None:
        """Find what the engine makes of the sum of all ranks' gradients: it divides it by all of
        them, or by those of a sequence less, as stage and settings have it. One parameter shows it,
        whose entries are large: one gradient of a micro-batch. Collective.

        Args:
            gradient: In the direction of that of all micro-batches.
            ranks: Number of ranks that share a sequence.
        """
        backend, space = self._backend, self.space
        shapes = dict(backend.parameters)
        squares = dict.fromkeys(shapes, 0.0)
        for fragment, part in self.layout:
            squares[fragment.name] += float(gradient[part].square().sum()) * fragment.owned
        sizes = torch.tensor([shape.numel() for shape in shapes.values()])
        found = space.reduce(torch.tensor([*squares.values()], dtype=torch.float64))
        name = list(shapes)[int((found / sizes).argmax())]
        summed, term = torch.zeros(shapes[name], device=space.device), space.zeros()

        def note(g: Tensor) -> None:
            summed.add_(g.to(summed))

        handle = dict(trained(backend.engine.module))[name].register_hook(note)
        try:
            for index in range(self.num_micro_batches):
                self.add_gradient(term, range(index, index + 1))
                reduced = collected(self.layout, space, term, name, shapes[name])
                dist.all_reduce(summed, group=space.group)
                figures = float((summed * reduced).sum()), float(summed.square().sum())
                product, square = space.of_rank_0(*figures)
                if square:
                    break
        finally:
            handle.remove()
        if product > 0:
            times = product / (square * self.cotangent_scale)
            self._repeats = float(ranks) ** round(math.log(times, ranks))
        self.cotangent_scale *= self._repeats

    def _value(self, micro_batches: range) -> float:
        """Return the loss at the displaced weights."""
        total = 0.0
        for index in micro_batches:
            with torch.no_grad(), self._evaluating(index):
                total += float(self._loss(index)[0])
        assert self.gradient_scale is not None
        summed = self.space.reduce(torch.tensor([total], dtype=torch.float64))
        return float(summed[0]) * self.gradient_scale / self.space.world_size

    @contextmanager
    def _evaluating(self, index: int) -> Iterator[None]:
        """Run a pass of a micro-batch, from its own random state and buffers, on all ranks."""
        self._guard.random.set(self._states[index])
        for buffers in self._guard.buffers:
            buffers.restore()
        shards = self._backend.shards
        try:
            with self._lockstep.together(f"evaluating micro-batch {index}"):
                shards.prepare()
                with self._guard.function.evaluating(index):
                    yield
        except HessianError:
            shards.abandon()
            raise
        finally:
            host.empty_checkpoints()

    def _loss(self, index: int) -> tuple[Tensor, float | None]:
        backend = self._backend
        first = index not in self._totals.losses
        with self._guard.function.forward():
            return self._objective.loss(backend.engine, index, backend.device, self._widen, first)

    def _run(self, index: int, last: bool, factor: float) -> float:
        """Forward and backward; returns the factor of the reduced gradient."""
        engine = self._backend.engine
        with self._evaluating(index):
            loss, count = self._loss(index)
            if index not in self._totals.losses:
                self._note_graph(loss)
            scaled = loss if factor == 1 else loss.float() * factor
            self.cotangent_scale /= factor
            scale = host.backward(engine, scaled, last)
            self._totals.add(index, float(loss.detach()), count)
        if self.gradient_scale is None and len(self._totals) == self.num_micro_batches:
            self._reduce(self._totals)
        self.cotangent_scale = self._share * self._repeats / (scale * self.space.world_size)
        return self._share * host.averaging_factor(engine) / (scale * factor)

    def _collect(self, out: Tensor | None, factor: float) -> None:
        backend, first = self._backend, not self._replicas_checked
        gradients = backend.shards.gradients(backend.pieces)
        replicas = Replicas(backend.tensor_rank, backend.tensor_ranks)
        for (fragment, part), piece, gradient in zip(
            self.layout, backend.pieces, gradients, strict=True
        ):
            if gradient is not None and out is not None:
                out[part].add_(gradient.to(out.device), alpha=factor)
            if first and backend.placements[id(piece.parameter)][1].replicated:
                replicas.add(fragment, gradient)
        backend.shards.clear_gradients()
        if first:
            placements = backend.placements.values()
            names = [name for name, placement in placements if placement.replicated]
            replicas.check(self.space, names, self.unit_roundoff**0.5)
            self._replicas_checked = True


def _shards_of(engine: Engine) -> Shards:
    kind = type(engine.optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return Stage3Shards(engine)
    if kind == "BF16_Optimizer":
        return BF16Shards(engine)
    if kind == "DeepSpeedZeroOptimizer":
        return FlatShards(engine)
    return ReplicatedShards(engine)
