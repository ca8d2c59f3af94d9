"""A plain `torch.nn.Module`, in one process or replicated over the ranks of a job.

Every rank stores everything; rank 0 owns it. Gradients are averaged over the ranks, each of which
has its own micro-batches, by one all-reduce of a vector for each `add_gradient`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hessian.backends.adam import collect, moments
from ds_hessian.backends.guard import Guard, guarded
from ds_hessian.backends.objective import (
    LossFn,
    ModelObjective,
    Totals,
    reading,
    refuse_sizes,
    require_equal_numbers,
)
from ds_hessian.backends.protocol import (
    DEFAULT_PASSES,
    AdamState,
    Description,
    Objective,
    Passes,
    Precision,
)
from ds_hessian.backends.sharded import Shard, ShardedWeights
from ds_hessian.errors import UnsupportedError
from ds_hessian.memory import Item, place_of
from ds_hessian.ranks.lockstep import Lockstep
from ds_hessian.vectors import Fragment, Layout, VectorSpace


class ModuleBackend:
    """The `Backend` of one replicated module.

    Args:
        module: Its trainable parameters define the space. Weights may be fp32, bf16 or fp16.
        optimizer: The training's; for what Adam knows.
        masters: One tensor for each trainable parameter, from which displacements are written, as
            training with fp32 masters has them; None for a copy of the weights.

    Attributes:
        named: `(name, parameter)` of the trainable ones.
        step: Optimizer steps made so far, for the record; set it before measuring.

    Collective: the constructor.
    """

    precisions: tuple[Precision, ...] = ("model",)

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        masters: Sequence[Tensor] | None = None,
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.modules: Sequence[nn.Module] = [module]
        self.named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.masters = [None] * len(self.named) if masters is None else list(masters)
        self.parameters: Sequence[tuple[str, torch.Size]] = [
            (name, p.shape) for name, p in self.named
        ]
        device = self.named[0][1].device if self.named else torch.device("cpu")
        owned = not dist.is_initialized() or dist.get_rank() == 0
        fragments = [Fragment(n, 0, p.numel(), p.shape, owned) for n, p in self.named]
        self.layout = Layout(fragments)
        self.space = VectorSpace(self.layout.n_local, self.layout.n_owned, device)
        self.step = 0

    def objective(
        self,
        batches: Iterable[object],
        loss: LossFn | None = None,
        *,
        like: Objective | None = None,
        **sizes: int | None,
    ) -> ModelObjective:
        """See `Backend.objective`."""
        refuse_sizes(sizes)
        if loss is None and isinstance(like, ModelObjective):
            loss = like.loss_fn
        with reading(batches, self.space.device):
            objective = ModelObjective(batches, loss)
        require_equal_numbers(objective, self.space)
        return objective

    @contextmanager
    def measuring(
        self, objective: Objective, passes: Passes = DEFAULT_PASSES
    ) -> Iterator[ModuleSession]:
        """See `Backend.measuring`."""
        assert isinstance(objective, ModelObjective)
        if passes.precision not in self.precisions:
            raise UnsupportedError("ds_hessian does not support fp32 passes of a plain module yet")
        with guarded(self.modules, self.space.device, passes) as guard:
            guard.callback(_put_back, [(p, p.grad) for _, p in self.named])
            parts = [
                Shard(p.data.view(-1), None if master is None else master.view(-1))
                for (_, p), master in zip(self.named, self.masters, strict=True)
            ]
            weights = ShardedWeights(parts, self.layout, self.space, lambda: None)
            guard.callback(weights.restore)
            lockstep = None
            if self.space.distributed:
                lockstep = guard.enter_context(Lockstep(self.space.device))
            yield ModuleSession(self, objective, guard, weights, lockstep)

    def describe(self) -> Description:
        """See `Backend.describe`."""
        ranks = self.space.world_size
        return Description(
            layout=f"torch, {ranks} rank{'s' * (ranks > 1)}",
            model_dtype=str(next(self.module.parameters()).dtype).removeprefix("torch."),
            versions={"python": platform.python_version(), "torch": torch.__version__},
        )

    def adam(self) -> AdamState:
        """See `Backend.adam`. Collective: one all-reduce."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        settings = {id(p): group for group in groups for p in group["params"]}
        state = {} if self.optimizer is None else self.optimizer.state
        found = [
            moments(state[p], settings[id(p)], 0, p.numel()) if p in state else None
            for _, p in self.named
        ]
        return collect(found, self.layout, self.space, self.optimizer)

    def memory(self, precision: Precision = "model") -> list[Item]:
        """See `Backend.memory`."""
        place, size = place_of(self.space.device), sum(p.nbytes for _, p in self.named)
        return [
            Item("weights as they were", place, size),
            Item("gradients of a pass", place, size),
        ]


class ModuleSession:
    """The `Session` of a plain module.

    Args:
        backend: The module's.
        objective: The function.
        guard: What keeps the training state.
        weights: This rank's.
        lockstep: Of the measurement; None in a single process.
    """

    def __init__(
        self,
        backend: ModuleBackend,
        objective: ModelObjective,
        guard: Guard,
        weights: ShardedWeights,
        lockstep: Lockstep | None,
    ) -> None:
        self.layout, self.space = backend.layout, backend.space
        self.num_micro_batches = objective.num_micro_batches
        dtypes = [p.dtype for _, p in backend.named]
        self.unit_roundoff = max((torch.finfo(d).eps / 2 for d in dtypes), default=2.0**-24)
        self.gradient_scale: float | None = None
        self.loss = float("nan")
        self.weights = weights
        self._backend, self._objective, self._guard = backend, objective, guard
        self._lockstep = lockstep
        self._states = [guard.initial]  # before micro-batch 0, 1, ...
        self._totals = Totals()

    def displace(self, v: Tensor | None, h: float) -> Tensor:
        """See `Session.displace`."""
        return self.weights.displace(v, h)

    def weight_norm(self) -> float:
        """See `Session.weight_norm`."""
        return self.weights.norm()

    def add_gradient(self, out: Tensor, micro_batches: range) -> None:
        """See `Session.add_gradient`."""
        if not micro_batches:
            return
        mine = self.space.zeros() if self.space.distributed else out
        for index in micro_batches:
            self._guard.random.set(self._states[index])
            for buffers in self._guard.buffers:
                buffers.restore()
            if self._lockstep is None:
                self._evaluate(mine, index)
            else:
                with self._lockstep.together(f"evaluating micro-batch {index}"):
                    self._evaluate(mine, index)
            if len(self._states) == index + 1:  # first evaluation: the next one goes on from here
                self._states.append(self._guard.random.get())
        if self.space.distributed:
            dist.all_reduce(mine)
            out.add_(mine, alpha=1 / self.space.world_size)
        if self.gradient_scale is None and len(self._totals) == self.num_micro_batches:
            self.gradient_scale, self.loss = self._totals.reduce(self.space)

    def _evaluate(self, out: Tensor, index: int) -> None:
        for _, p in self._backend.named:
            p.grad = None
        loss, count = self._objective.loss(self._backend.module, index, self.space.device)
        loss.backward()
        self._totals.add(index, float(loss.detach()), count)
        for (_, p), (_, part) in zip(self._backend.named, self.layout, strict=True):
            if p.grad is not None:
                out[part].add_(p.grad.view(-1))


def _put_back(gradients: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
    for p, gradient in gradients:
        p.grad = gradient
