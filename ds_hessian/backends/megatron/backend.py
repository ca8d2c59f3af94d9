"""A job on megatron-core: DDP chunks, their schedule, and with it every parallel layout.

Vectors are what the rank's optimizer steps: with the distributed optimizer 1/DP of its layers'
parameters, else all of them. Displaced shards are spread by Megatron's own parameter gather,
gradients run through its own schedule and reductions, so a product costs what training pays.

With an interleaved pipeline, which runs whole groups of micro-batches only, a unit of the session
is such a group. Where micro-batches must be evaluated one by one, a group has one of them in all of
its places.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ds_hessian.backends.adam import Moments, collect, moments
from ds_hessian.backends.guard import Guard, guarded
from ds_hessian.backends.megatron import host
from ds_hessian.backends.megatron.forward import FixedForward
from ds_hessian.backends.megatron.gathers import Gathers, of_optimizer
from ds_hessian.backends.megatron.memory import MegatronFigures, memory_of_megatron
from ds_hessian.backends.megatron.objective import ForwardStep, PipelineObjective
from ds_hessian.backends.megatron.reductions import Reductions
from ds_hessian.backends.megatron.replicas import (
    Replicas,
    masters_of,
    refuse_uneven_copies,
    replicated_parameters,
)
from ds_hessian.backends.megatron.runs import parameters_of, runs_of, weights_of
from ds_hessian.backends.megatron.support import refuse_unsupported
from ds_hessian.backends.megatron.wide import (
    WideWeights,
    accumulates_in_fp32,
    without_casts,
    without_rounding,
)
from ds_hessian.backends.names import require_same, trained_tensors
from ds_hessian.backends.objective import common_number, reading
from ds_hessian.backends.protocol import (
    DEFAULT_PASSES,
    AdamState,
    Description,
    Objective,
    Passes,
    Precision,
)
from ds_hessian.backends.refusal import refuse_methods, training_refused
from ds_hessian.backends.sharded import Shard, ShardedSession, ShardedWeights, widen
from ds_hessian.backends.weights import Weight, coarsest
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.memory import Item, tier_of
from ds_hessian.optimizer import follow_steps, settings_of
from ds_hessian.ranks import checkpoint, together, union
from ds_hessian.ranks.lockstep import Lockstep
from ds_hessian.vectors import Layout, VectorSpace

if TYPE_CHECKING:
    from ds_hessian.backends.megatron.host import Chunk


class MegatronBackend:
    """The `Backend` of a Megatron job.

    Args:
        chunks: The model chunks, wrapped in megatron-core's `DistributedDataParallel`, that
            `refuse_unsupported` let pass.
        optimizer: The optimizer of the job, whose Adam state preconditions.

    Attributes:
        runs: This rank's coordinates, in the order of the layout.
        compute_dtype: The coarsest dtype of the weights of all stages, in which passes compute.
        replicated: Names and parameters that all tensor-parallel ranks have whole.
        group: The number of micro-batches that the schedule can only run together.
        step: The number of optimizer steps made so far, for the record; set it before measuring.

    Collective: the constructor.
    """

    def __init__(self, chunks: Sequence[Chunk], optimizer: host.Optimizer = None) -> None:
        self.chunks, self.optimizer = list(chunks), optimizer
        follow_steps(optimizer)
        self.modules: Sequence[nn.Module] = self.chunks
        self.device = host.device(self.chunks)
        with together("mapping the parameters", device=self.device):
            runs = runs_of(self.chunks)
            self.replicated = replicated_parameters(self.chunks)
        self.layout = Layout([run.fragment for run in runs])
        self.runs = [runs[i] for i in self.layout.order]
        self.space = VectorSpace(self.layout.n_local, self.layout.n_owned, self.device)
        self.parameters: Sequence[tuple[str, torch.Size]] = parameters_of(self.chunks, self.device)
        self._attached = trained_tensors(self.chunks)
        self.group = host.micro_batch_group(self.chunks)
        self.step = 0
        dtypes = {p.dtype for chunk in self.chunks for p in chunk.parameters()}
        self.compute_dtype = coarsest(union(dtypes, self.device))
        narrow = self.compute_dtype == torch.bfloat16 and not accumulates_in_fp32(self.chunks)
        self.precisions: tuple[Precision, ...] = ("model",) if narrow else ("model", "fp32")

    def require_measurable(self) -> None:
        """Require the job to be as it was when it was attached."""
        refuse_unsupported(self.chunks)
        require_same(self._attached, trained_tensors(self.chunks))

    # ---- the function

    def objective(
        self,
        batches: Iterable[object],
        loss: ForwardStep | None = None,
        *,
        like: Objective | None = None,
        apart: bool = False,
        **sizes: int | None,
    ) -> PipelineObjective:
        """Read this rank's micro-batches, and check them on all ranks.

        Args:
            batches: The values of `next(data_iterator)` in the forward step. An empty list on ranks
                whose forward step reads nothing.
            loss: The forward step.
            like: An objective from which arguments that are None are taken.
            apart: Whether each micro-batch fills a group.
            sizes: `seq_length` and `micro_batch_size`, as the schedules take them.

        Raises:
            ConfigError: an argument is missing or not valid, ranks that have micro-batches have
                different numbers of them, none has any, or an interleaved pipeline needs another
                number.
        """
        if isinstance(like, PipelineObjective):
            loss = like.forward_step if loss is None else loss
            sizes = {**like.sizes, **{k: v for k, v in sizes.items() if v is not None}}
        with reading(batches, self.device):
            objective = PipelineObjective(batches, loss, sizes, self.group if apart else 1)
        common = objective.num_micro_batches = common_number(len(objective.batches), self.space)
        if common * objective.copies % self.group:
            raise ConfigError(
                f"the interleaved pipeline runs groups of {self.group} micro-batches, got "
                f"{common}; pass a multiple"
            )
        return objective

    @contextmanager
    def measuring(
        self, objective: Objective, passes: Passes = DEFAULT_PASSES
    ) -> Iterator[MegatronSession]:
        """Save the training state, and yield a session.

        This is allowed between an optimizer step and the next forward: the gradient buffers, which
        training clears there, are zero afterwards.
        """
        assert isinstance(objective, PipelineObjective)
        if passes.precision not in self.precisions:
            raise UnsupportedError(
                "ds_hessian does not support fp32 passes of a bf16 Megatron model whose gradients "
                "are summed in bf16; set grad_reduce_in_fp32, or use finite_difference.precision "
                '"model"'
            )
        uneven = refuse_uneven_copies(self.chunks, self.runs, self.parameters, self.space)
        finalize = host.model_config(self.chunks[0]).finalize_model_grads_func
        lockstep = Lockstep(self.device, peers=host.ranks_of_stage())
        with lockstep, ExitStack() as stack:
            with lockstep.together("saving the training state"):
                stack.callback(host.keep_attributes(self.chunks))
                guard = stack.enter_context(
                    guarded(self.chunks, self.device, passes, objective.forward_step)
                )
                stack.callback(host.keep_logs())
                self._refuse_training(guard, stack)
                stack.callback(host.keep_gather_hooks(self.chunks))
            stack.callback(self._gather_parameters)  # on all ranks, wherever one fails
            with lockstep.together("keeping weights and gradients"):
                overlaps = host.overlaps_gathers(self.chunks)
                host.finish_gathers(self.chunks)
                # Undone before the gather hooks come back, which read what `quiet` has switched.
                stack.callback(guard.attributes.restore)
                host.quiet(self.chunks, guard.attributes)
                reductions = Reductions(self.chunks, guard.attributes, stack, finalize)
                stack.callback(_restore_gradients, self.chunks, _take_gradients(self.chunks))
                wide = passes.precision == "fp32" and self.compute_dtype == torch.bfloat16
                masters = masters_of(self.chunks, self.runs, uneven)
                if wide:
                    weights = self._widened(guard, stack, masters, reductions, overlaps)
                else:
                    weights = self._sharded(stack, masters, overlaps)
                if self.compute_dtype == torch.float32:
                    without_rounding(self.chunks, guard.attributes)
                stack.callback(weights.restore)
                step = objective.forward_step
                forward = FixedForward(step, self.chunks, guard, objective.copies)
            with lockstep.guarded():
                yield MegatronSession(
                    self, objective, forward, guard, reductions, weights, lockstep, passes
                )
                guard.function.require_told()

    def _sharded(
        self, stack: ExitStack, masters: Sequence[Tensor | None], overlaps: bool
    ) -> ShardedWeights:
        parts = [Shard(run.weight, m) for run, m in zip(self.runs, masters, strict=True)]
        if not overlaps:
            return ShardedWeights(parts, self.layout, self.space, self._gather_parameters)
        gathers = Gathers(self.chunks, of_optimizer(self.chunks), stack)
        return ShardedWeights(parts, self.layout, self.space, gathers.begin, gathers.finish)

    def _widened(
        self,
        guard: Guard,
        stack: ExitStack,
        masters: Sequence[Tensor | None],
        reductions: Reductions,
        overlaps: bool,
    ) -> ShardedWeights:
        """Let the passes run on fp32 stand-ins of the parameters, made of the masters."""
        wide = WideWeights(self.chunks, reductions)
        without_casts(self.chunks, guard.attributes)
        for buffers in guard.buffers:
            buffers.wide = True
        for run, master in zip(self.runs, masters, strict=True):
            if master is not None:
                widen(wide.weight(run), run.weight, master)
        wide.gather()
        stack.enter_context(wide.taken(guard.state.leave))
        parts = [Shard(wide.weight(run), m) for run, m in zip(self.runs, masters, strict=True)]
        if not overlaps:
            return ShardedWeights(parts, self.layout, self.space, wide.gather)
        gathers = Gathers(self.chunks, wide.gathers(), stack)
        return ShardedWeights(parts, self.layout, self.space, gathers.begin, gathers.finish)

    def _refuse_training(self, guard: Guard, stack: ExitStack) -> None:
        models: list[nn.Module] = [host.unwrap(chunk) for chunk in self.chunks]
        for model in models:
            refuse_methods(model, ("sharded_state_dict",), guard.attributes)
        stepped = [t for run in self.runs for t in (run.weight, run.master) if t is not None]
        stack.enter_context(training_refused([*self.chunks, *models], stepped))

    def _gather_parameters(self) -> None:
        host.gather_parameters(self.chunks)

    # ---- the job

    def describe(self) -> Description:
        """Describe the job: its parallel sizes, its dtype and its optimizer."""
        sizes = ", ".join(f"{axis} {size}" for axis, size in host.mesh().items())
        sharded = self.chunks[0].ddp_config.use_distributed_optimizer
        kind = "distributed optimizer" if sharded else "DDP"
        return Description(
            layout=f"Megatron {sizes}, {kind}",
            model_dtype=str(self.compute_dtype).removeprefix("torch."),
            versions={"megatron-core": host.version()},
            optimizer=settings_of(self.optimizer),
        )

    def adam(self) -> AdamState:
        """Read Adam's state from the job's optimizer. Collective: one all-reduce."""
        if self.optimizer is None:
            raise ConfigError(
                "there is no optimizer to precondition with, which model chunks do not know: pass "
                "it, MegatronHessian(model, config, optimizer)"
            )
        found: list[Moments | None] = []
        for run in self.runs:
            state = host.adam_state(self.optimizer, run.parameter)
            where = run.offset - run.shard, run.fragment.numel
            found.append(None if state is None else moments(*state, *where))
        return collect(found, self.layout, self.space, self.optimizer)

    def weights(self) -> Iterable[Weight]:
        """Return the weights of two dims of this rank's layers, with their rows and columns."""
        return [weight for chunk in self.chunks for weight in weights_of(chunk)]

    def memory(self, precision: Precision = "model") -> list[Item]:
        """Return what a session of the job holds beyond training's memory."""
        figures = MegatronFigures(
            whole=sum(p.numel() for chunk in self.chunks for p in chunk.parameters()),
            alone=sum(run.weight.nbytes for run in self.runs if run.master is None),
            narrow=self.compute_dtype == torch.bfloat16,
            tier=tier_of(self.device),
            received=len({run.master is None for run in self.runs}) == 2,  # of layer-wise ones
        )
        return memory_of_megatron(figures, precision)


class MegatronSession(ShardedSession):
    """The `Session` of a Megatron job.

    Args:
        backend: The backend of the job.
        objective: The function.
        forward: The job's forward step on it, the same function in each evaluation.
        guard: The guard that restores the training state.
        reductions: Those of its gradients.
        weights: This rank's weights.
        lockstep: The lockstep of the measurement.
        passes: How the passes run.
    """

    def __init__(
        self,
        backend: MegatronBackend,
        objective: PipelineObjective,
        forward: FixedForward,
        guard: Guard,
        reductions: Reductions,
        weights: ShardedWeights,
        lockstep: Lockstep,
        passes: Passes,
    ) -> None:
        units = objective.num_micro_batches * objective.copies // backend.group
        dtype, widen = backend.compute_dtype, passes.precision == "fp32"
        if widen and dtype == torch.bfloat16:
            dtype = torch.float32
        roundoff = torch.finfo(dtype).eps / 2
        head = host.head(backend.chunks, backend.group)
        costly = any(host.mesh().get(axis, 1) > 1 for axis in ("DP", "PP"))
        super().__init__(weights, forward.function, units, head, roundoff, costly)
        self._backend, self._objective = backend, objective
        self._forward, self._reductions, self._lockstep = forward, reductions, lockstep
        self._evaluated: set[int] = set()
        self.watch_autocast(guard, widen)
        names = [name for name, _ in backend.parameters]
        self._replicas = Replicas(backend.chunks, backend.replicated, backend.runs, names)

    @torch.enable_grad()  # also where the caller has switched gradients off
    def add_gradient(self, out: Tensor | None, micro_batches: range, factor: float = 1.0) -> None:
        """Run the schedule on these units, reduce the gradients, and add them to `out`."""
        if not micro_batches:
            return
        backend = self._backend
        # The schedule averages over the micro-batches of the run, or sums over tokens.
        terms = (1.0 if self._forward.per_token else float(len(micro_batches))) / factor
        self.cotangent_scale = terms * host.share_of_rank(self._forward.per_token, self.head)
        wanted = out is not None
        with self._reductions.begun(overlap=wanted and not self._replicas.pending):
            with host.scaled(backend.chunks, factor):
                self._run(micro_batches.start * backend.group, len(micro_batches) * backend.group)
            if wanted:
                with self._replicas.checked(self.space, self.unit_roundoff**0.5):
                    self._meet_stages("reducing gradients")
                    self._reductions.make()
        self._note(micro_batches)
        if out is None:
            return
        for run, (_, part) in zip(backend.runs, self.layout, strict=True):
            out[part].add_(run.gradient.to(out.dtype), alpha=terms)

    def forward(self, micro_batches: range) -> None:
        """Run the schedule on these units without backward or graph."""
        group = self._backend.group
        with self._forward.function.without_graph(self.forwards_of(micro_batches)):
            self._run(micro_batches.start * group, len(micro_batches) * group, forward_only=True)

    def forwards_of(self, micro_batches: range) -> Collection[Hashable]:
        """Return chunk and micro-batch of each forward."""
        group = self._backend.group
        return self._forward.keys(micro_batches.start * group, len(micro_batches) * group)

    def _run(self, first: int, count: int, forward_only: bool = False) -> None:
        objective, chunks = self._objective, self._backend.chunks
        for chunk in chunks:
            if not forward_only:
                chunk.zero_grad_buffer()
        self._forward.start(first)
        copies = objective.copies
        begin, end = first // copies, (first + count - 1) // copies
        with (
            self._lockstep.together(f"evaluating micro-batches {begin} to {end}"),
            self._forward.function.running(self._forward.keys(first, count)),
        ):
            data = [objective.iterator(first, count) for _ in chunks]
            host.run_schedule(
                chunks,
                self._forward,
                data,
                self._lockstep,
                num_microbatches=count,
                meet=lambda: self._meet_stages("beginning a schedule"),
                begin=self._begin_backward,
                forward_only=forward_only,
                **objective.sizes,
            )
            self._reductions.require_whole()

    def _begin_backward(self) -> None:
        self.backward += 1

    def _meet_stages(self, doing: str) -> None:
        """Raise if a rank has failed, before stages wait for what others send.

        A rank that has failed follows the ranks of its own stage alone.

        Collective, in a pipeline: one small all-reduce.
        """
        if host.mesh().get("PP", 1) > 1:
            checkpoint(doing, device=self._backend.device)

    def _note(self, micro_batches: range) -> None:
        """Compute the scale of the gradient and the loss, once all micro-batches are evaluated."""
        self._evaluated.update(micro_batches)
        if self.gradient_scale is not None or len(self._evaluated) < self.num_micro_batches:
            return
        roundoffs = torch.zeros(self.space.world_size, dtype=torch.float64)
        roundoffs[self.space.rank] = self.unit_roundoff  # of the stage that runs under autocast
        totals = torch.zeros(3, dtype=torch.float64)
        if host.tensor_parallel_rank() == 0:
            for loss, tokens in self._forward.losses.values():
                totals += torch.tensor([1.0, float(loss), 0.0 if tokens is None else float(tokens)])
        found = self.space.reduce(torch.cat([totals, roundoffs])).tolist()
        (terms, loss, tokens), self.unit_roundoff = found[:3], max(found[3:])
        per_token = self._forward.per_token
        if per_token and tokens <= 0:
            raise ConfigError(
                "the micro-batches have no token that counts in the loss: look at their labels and "
                "loss masks"
            )
        self.gradient_scale = 1.0 / (tokens if per_token else self.num_micro_batches)
        self.loss = loss / (tokens if per_token else terms)


def _take_gradients(chunks: Sequence[Chunk]) -> list[tuple[nn.Parameter, Tensor | None]]:
    # After a step of Megatron's fp32 optimizers, `grad` *is* the gradient buffer: a backward would
    # accumulate into it, and DDP's hook add it to itself.
    kept = [(p, p.grad) for chunk in chunks for p in chunk.parameters()]
    for p, _ in kept:
        p.grad = None
    return kept


def _restore_gradients(
    chunks: Sequence[Chunk], kept: list[tuple[nn.Parameter, Tensor | None]]
) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    for p, gradient in kept:
        p.grad = gradient
