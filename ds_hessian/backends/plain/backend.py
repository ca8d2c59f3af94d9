"""A plain `torch.nn.Module`, in one process or replicated over the ranks of a job.

Every rank stores everything; rank 0 owns it. Passes run on stand-ins of the parameters
(`stand_ins`), past the buckets of `DistributedDataParallel`; the gradient of all micro-batches
asked for is averaged over the ranks, each of which has its own, by one all-reduce of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ds_hessian import ops
from ds_hessian.backends.adam import Moments, collect, moments_of
from ds_hessian.backends.guard import Guard, guarded
from ds_hessian.backends.hooks import unheard
from ds_hessian.backends.names import require_same, require_same_parameters, trained
from ds_hessian.backends.objective import (
    LossFn,
    ModelObjective,
    Totals,
    common_number,
    reading,
    refuse_sizes,
)
from ds_hessian.backends.plain.stand_ins import kept_attributes, stand_ins, transparent
from ds_hessian.backends.plain.steps import StepCount
from ds_hessian.backends.plain.support import refuse_unsupported, unwrapped, wrappers
from ds_hessian.backends.protocol import (
    DEFAULT_PASSES,
    AdamState,
    Description,
    Head,
    Objective,
    Passes,
    Precision,
)
from ds_hessian.backends.refusal import training_refused
from ds_hessian.backends.sharded import Shard, ShardedSession, ShardedWeights
from ds_hessian.backends.weights import Weight, coarsest, module_weights
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.memory import FP32, Item, tier_of
from ds_hessian.optimizer import follow_steps, own_part, settings_of
from ds_hessian.ranks import Shared, balanced, imbalance
from ds_hessian.ranks.lockstep import Lockstep
from ds_hessian.vectors import Fragment, Layout, VectorSpace

SCALES = tuple(2.0**k for k in (31, 23, 15, 11, 7, 3, 0))
"""What a loss of passes in fp16 is multiplied by, in the order in which it is tried: 2**15 is the
largest power of 2 in fp16; a loss in fp32 takes more."""
MARGIN = 16.0
"""By how much gradients at displaced weights may be larger."""


class ModuleBackend:
    """The `Backend` of a module that every rank has whole.

    Args:
        module: The model, or `DistributedDataParallel` around it. Its trainable parameters define
            the space; they may be fp32, bf16 or fp16.
        optimizer: The optimizer of the training, whose Adam state preconditions.
        masters: One tensor for each trainable parameter, from which displacements are written, as a
            training with fp32 masters of its own has them; None for the weights themselves.

    Attributes:
        after_step: Called after each optimizer step that `step()` has counted.

    Raises:
        UnsupportedError: the module is one on which products would be wrong.

    Collective: the constructor.
    """

    precisions: tuple[Precision, ...] = ("model", "fp32")

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        masters: Sequence[Tensor] | None = None,
    ) -> None:
        refuse_unsupported(module)
        self.module, self.optimizer, self.masters = module, optimizer, masters
        follow_steps(optimizer)
        self.model = unwrapped(module)
        self.modules: Sequence[nn.Module] = [self.model]
        named = trained(self.model)
        self.parameters: Sequence[tuple[str, torch.Size]] = [(n, p.shape) for n, p in named]
        owned = not dist.is_initialized() or dist.get_rank() == 0
        self.layout = Layout([Fragment(n, 0, p.numel(), p.shape, owned) for n, p in named])
        self.space = VectorSpace(self.layout.n_local, self.layout.n_owned, named[0][1].device)
        require_same_parameters(self.parameters, self.space)
        self.after_step: Callable[[], None] = lambda: None
        self._steps = 0

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which training's passes compute: the coarsest one of the weights."""
        return coarsest(p.dtype for p in self.model.parameters())

    @property
    def step(self) -> StepCount:
        """The number of optimizer steps; `step()` counts one more. Set it after a resume."""
        return StepCount.of(self._steps, self._advance)

    @step.setter
    def step(self, count: int) -> None:
        self._steps = int(count)

    def _advance(self) -> None:
        self._steps += 1
        self.after_step()

    def objective(
        self,
        batches: Iterable[object],
        loss: LossFn | None = None,
        *,
        like: Objective | None = None,
        apart: bool = False,
        **sizes: int | None,
    ) -> ModelObjective:
        """Read this rank's micro-batches, and check them on all ranks."""
        refuse_sizes(sizes)
        if loss is None and isinstance(like, ModelObjective):
            loss = like.loss_fn
        with reading(batches, self.space.device):
            objective = ModelObjective(batches, loss)
        common_number(objective.num_micro_batches, self.space)
        return objective

    def require_measurable(self) -> None:
        """Require the module to be as it was when it was attached."""
        refuse_unsupported(self.module)
        require_same(self.parameters, [(name, p.shape) for name, p in trained(self.model)])

    @contextmanager
    def measuring(
        self, objective: Objective, passes: Passes = DEFAULT_PASSES
    ) -> Iterator[ModuleSession]:
        """Save the training state, and yield a session; allowed wherever no backward is pending.

        Raises:
            UnsupportedError: the weights differ between the ranks.
        """
        assert isinstance(objective, ModelObjective)
        named, widen = trained(self.model), passes.precision == "fp32"
        self._require_equal_weights(named)
        given = self.masters or [p.detach() for _, p in named]
        sources = {id(p): source for (_, p), source in zip(named, given, strict=True)}
        lockstep = Lockstep(self.space.device)
        with lockstep, ExitStack() as stack:
            with lockstep.together("saving the training state"):
                guard = stack.enter_context(
                    guarded(self.modules, self.space.device, passes, objective.loss_fn)
                )
                stack.enter_context(kept_attributes(self.model))
                stack.enter_context(training_refused(self.modules, given))
                stack.enter_context(transparent(wrappers(self.module)))
                leave = guard.state.leave
                made = stack.enter_context(stand_ins(self.model, sources, widen, leave))
                copies = [made[id(p)] for _, p in named]
                shards = [
                    Shard(p.data.view(-1), source.detach().reshape(-1).contiguous())
                    for p, source in zip(copies, given, strict=True)
                ]
                weights = ShardedWeights(shards, self.layout, self.space, lambda: None)
            with lockstep.guarded():
                yield ModuleSession(self, objective, guard, copies, weights, lockstep, widen)
                guard.function.require_told()

    def _require_equal_weights(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        if not self._is_shared(p.detach().reshape(-1) for _, p in named):
            raise UnsupportedError(
                "ds_hessian does not support a module whose weights differ between the ranks of "
                "the job; wrap it in DistributedDataParallel, or measure in a process of its own"
            )

    def _is_shared(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether all ranks have the same flat tensors. Collective: one small all-reduce."""
        square = 0.0
        for tensor in tensors:
            wide = tensor.float().contiguous()
            square += float(ops.dots([(wide, wide)], wide.numel())[0])
        shared = Shared(square, self.space.world_size, self.space.rank == 0)
        return balanced(self.space.reduce(imbalance([shared])))

    def describe(self) -> Description:
        """Describe the module: how it is replicated, its dtype and its optimizer."""
        ranks = self.space.world_size
        kind = "DDP" if isinstance(self.module, DistributedDataParallel) else "torch"
        return Description(
            layout=f"{kind}, {ranks} rank{'s' * (ranks > 1)}",
            model_dtype=str(next(self.model.parameters()).dtype).removeprefix("torch."),
            versions={},
            optimizer=settings_of(self.optimizer),
        )

    def adam(self) -> AdamState:
        """Read Adam's state from the optimizer.

        Raises:
            ConfigError: there is none.
            UnsupportedError: it differs between the ranks, as after steps that each made alone.

        Collective: two small all-reduces, and two of the size of the model where ranks share the
        state.
        """
        if self.optimizer is None:
            raise ConfigError(
                "there is no optimizer to precondition with: pass it, "
                "ds_hessian.attach(module, optimizer), or measure without it: preconditioned=false"
            )
        whole = getattr(self.optimizer, "optimizer", self.optimizer)  # in Accelerate's wrapper
        own = own_part(whole)
        settings = {id(p): group for group in own.param_groups for p in group["params"]}
        every = {id(p) for group in whole.param_groups for p in group["params"]}
        shared, found = own is not whole, list[Moments | None]()
        for _, p in trained(self.model):
            if id(p) in every - settings.keys():  # another rank has it
                found.append(Moments(torch.zeros(p.numel()), torch.zeros(p.numel()), False))
                continue
            found.append(moments_of(own, p, settings.get(id(p), {}), 0, p.numel()))
        state = collect(found, self.layout, self.space, own)
        if shared:
            for part in state:
                dist.all_reduce(part)
        if not self._is_shared(state):
            raise UnsupportedError(
                "ds_hessian does not support a preconditioner of Adam's state that differs between "
                "the ranks of the job, as where each steps by its own gradients before weights are "
                "averaged; measure without it: preconditioned=false"
            )
        return state

    def weights(self) -> Iterable[Weight]:
        """Return the weights of two dims, which every rank has whole."""
        return module_weights(self.model, self.parameters)

    def memory(self, precision: Precision = "model") -> list[Item]:
        """Return what a session of the module holds beyond training's memory."""
        tier, n = tier_of(self.space.device), self.layout.n_local
        size = FP32 * n if precision == "fp32" else sum(p.nbytes for _, p in trained(self.model))
        items = [
            Item("weights for the passes", tier, size),
            Item("gradients of a pass", tier, size, ("passes",)),
        ]
        if self.space.distributed:
            items.append(Item("gradients before their reduction", tier, FP32 * n, ("passes",)))
        return items


class ModuleSession(ShardedSession):
    """The `Session` of a plain module.

    Args:
        backend: The backend of the module.
        objective: The function.
        guard: The guard that restores the training state.
        trained: The stand-ins of the trainable parameters.
        weights: This rank's weights, in the stand-ins.
        lockstep: The lockstep of the measurement.
        widen: Whether the passes run in fp32.
    """

    def __init__(
        self,
        backend: ModuleBackend,
        objective: ModelObjective,
        guard: Guard,
        trained: Sequence[nn.Parameter],
        weights: ShardedWeights,
        lockstep: Lockstep,
        widen: bool,
    ) -> None:
        roundoff = max(torch.finfo(p.dtype).eps / 2 for p in trained)
        head = Head(backend.modules)
        super().__init__(weights, guard.function, objective.num_micro_batches, head, roundoff)
        self._backend, self._objective, self._guard = backend, objective, guard
        self._trained = trained
        self._lockstep, self._widen = lockstep, widen
        self._scales = dict[int, float]()
        self._states = [guard.initial]  # before micro-batch 0, 1, ...
        self._totals = Totals()
        buffers = guard.buffers[0]
        buffers.wide, buffers.starts = widen, self._first_buffers()
        self.cotangent_scale = 1.0 / self.space.world_size
        self.watch_autocast(guard, widen)

    def _first_buffers(self) -> dict[int, Tensor]:
        """Return `Buffers.starts`: rank 0's, where `DistributedDataParallel` broadcasts them."""
        outer, found = self._backend.module, dict[int, Tensor]()
        if isinstance(outer, DistributedDataParallel) and outer.broadcast_buffers:
            for _, _, _, value in self._guard.buffers[0].saved:
                if id(value) not in found:
                    found[id(value)] = value.clone()
                    dist.broadcast(found[id(value)], src=0)
        return found

    @torch.enable_grad()  # also where the caller has switched gradients off
    def add_gradient(self, out: Tensor | None, micro_batches: range, factor: float = 1.0) -> None:
        """Add the gradients of these micro-batches, averaged over the ranks, to `out`."""
        if not micro_batches:
            return
        averages = self.space.distributed and out is not None
        mine = self.space.zeros() if averages else out
        for index in micro_batches:
            with self._evaluating(index):
                self._evaluate(mine, index, factor)
            if len(self._states) == index + 1:  # first evaluation: the next one starts from here
                self._states.append(self._guard.random.get())
        if out is not None and mine is not None and averages:
            dist.all_reduce(mine)
            out.add_(mine, alpha=1 / self.space.world_size)
        if self.gradient_scale is None and len(self._totals) == self.num_micro_batches:
            self._reduce(self._totals)

    def forward(self, micro_batches: range) -> None:
        """Run the forward of these micro-batches, without a graph."""
        for index in micro_batches:
            with self._evaluating(index), self._guard.function.without_graph([index]):
                self._loss(index)

    @contextmanager
    def _evaluating(self, index: int) -> Iterator[None]:
        """Run a pass of a micro-batch, from its own random state and buffers, on all ranks."""
        self._guard.random.set(self._states[index])
        self._guard.buffers[0].renew()
        with (
            self._lockstep.together(f"evaluating micro-batch {index}"),
            self._guard.function.evaluating(index),
        ):
            yield

    def _loss(self, index: int) -> tuple[Tensor, float | None]:
        device = self.space.device
        first = index not in self._totals.losses
        with self._guard.function.forward():
            return self._objective.loss(self._backend.module, index, device, self._widen, first)

    def _evaluate(self, out: Tensor | None, index: int, factor: float) -> None:
        for p in self._trained:
            p.grad = None
        loss, count = self._loss(index)
        if index not in self._totals.losses:
            self._note_graph(loss)
        scale = self._scale(loss, index) * factor
        self.cotangent_scale = 1.0 / (self.space.world_size * scale)
        (loss if scale == 1 else loss.float() * scale).backward()
        self._totals.add(index, float(loss.detach()), count)
        for p, (_, part) in zip(self._trained, self.layout, strict=True):
            if p.grad is not None and out is not None:
                out[part].add_(p.grad.reshape(-1), alpha=1 / scale)

    def _scale(self, loss: Tensor, index: int) -> float:
        """Return by what a micro-batch's loss is multiplied, so that gradients in fp16 are not lost
        below its smallest number.

        It is a power of 2 that is found at the weights, 16 times below one at which no gradient
        overflows, and is kept: all gradients are those of one function.
        """
        if self.unit_roundoff != torch.finfo(torch.float16).eps / 2:
            return 1.0
        if index in self._scales:
            return self._scales[index]
        for scale in SCALES:
            with unheard():
                (loss.float() * scale).backward(retain_graph=True)
            found = [p.grad for p in self._trained if p.grad is not None]
            finite = all(bool(torch.isfinite(g).all()) for g in found)
            for p in self._trained:
                p.grad = None
            if finite:
                break
        self._scales[index] = max(scale / MARGIN, 1.0)
        return self._scales[index]
