"""A job on megatron-core: DDP chunks, their schedule, and with it every parallel layout.

Vectors are what the rank's optimizer steps: with the distributed optimizer 1/DP of its layers'
parameters, else all of them. Displaced shards are spread by Megatron's own parameter gather,
gradients run through its own schedule and reductions, so a product costs what training pays.

With an interleaved pipeline, which runs whole groups of micro-batches only, a micro-batch of
`ShardBackend` is such a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian import ops
from ds_hessian.backends.guard import Attributes, Buffers, RandomState, full_fp32, training_flags
from ds_hessian.backends.megatron import host
from ds_hessian.backends.megatron.forward import FixedForward
from ds_hessian.backends.megatron.objective import PipelineObjective
from ds_hessian.backends.megatron.pieces import pieces_of
from ds_hessian.backends.megatron.tracker import tracker_states
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.memory import Item, place_of
from ds_hessian.ranks import together
from ds_hessian.ranks.lockstep import Lockstep
from ds_hessian.vectors import Layout, VectorSpace


class MegatronBackend:
    """The shards of a Megatron job; see `ShardBackend`.

    Args:
        chunks: The model chunks, wrapped in megatron-core's `DistributedDataParallel`, that
            `refuse_unsupported` let pass.

    Attributes:
        parameters: `(checkpoint name, unsharded shape)` of all of them, the same on every rank.
        group: Micro-batches that the schedule cannot run apart.
        is_sharded: Whether the distributed optimizer splits parameters over data-parallel ranks.

    Collective: the constructor.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.chunks = list(chunks)
        self.device = next(self.chunks[0].parameters()).device
        with together("mapping the parameters", device=self.device):
            pieces = pieces_of(self.chunks)
        self.layout = Layout([piece.fragment for piece in pieces])
        self.pieces = [pieces[i] for i in self.layout.order]
        self.space = VectorSpace(self.layout.n_local, self.layout.n_owned, self.device)
        mine = {(f.name, tuple(f.shape)) for f in self.layout.fragments}
        everyone: list[Any] = [mine] * self.space.world_size
        dist.all_gather_object(everyone, mine)
        self.parameters = [(n, torch.Size(s)) for n, s in sorted(set().union(*everyone))]
        self.group = host.micro_batch_group(self.chunks)
        self.is_sharded = bool(self.chunks[0].ddp_config.use_distributed_optimizer)
        self.train_mode = False
        self.num_micro_batches = 0
        self.gradient_scale: float | None = None
        self.loss = float("nan")
        self._per_token = bool(host.model_config(self.chunks[0]).calculate_per_token_loss)
        self._objective: PipelineObjective | None = None
        self._weights: list[Tensor] = []
        self._masters: list[Tensor] = []

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.chunks[0].parameters()).dtype

    @property
    def unit_roundoff(self) -> float:
        """Of the dtype in which the passes compute."""
        return torch.finfo(self.dtype).eps / 2

    # ---- the loss

    def use(
        self,
        objective: PipelineObjective,
        train_mode: bool = False,
        precision: Literal["model", "fp32"] = "model",
    ) -> None:
        """Fix the loss. Collective.

        Args:
            objective: This rank's micro-batches and the forward step.
            train_mode: Whether the modules are in train mode.
            precision: `"fp32"` is refused where the model is not fp32.

        Raises:
            ConfigError: ranks that have micro-batches have different numbers of them, none has
                any, or an interleaved pipeline needs another number.
            UnsupportedError: fp32 passes of a bf16 model.
        """
        if precision == "fp32" and self.dtype == torch.bfloat16:
            raise UnsupportedError(
                "ds_hessian does not support fp32 passes of a bf16 Megatron model, whose layers "
                'cast by their own configuration; use finite_difference.precision "model"'
            )
        counts = torch.zeros(self.space.world_size, dtype=torch.float64)
        counts[self.space.rank] = len(objective.batches)
        present = [int(c) for c in self.space.reduce(counts) if c > 0]
        if not present or min(present) != max(present):
            raise ConfigError(
                "every rank that reads data needs the same number of micro-batches, at least 1, "
                f"got {present or 0}; pass lists of equal length"
            )
        if present[0] % self.group:
            raise ConfigError(
                f"the interleaved pipeline runs groups of {self.group} micro-batches, got "
                f"{present[0]}; pass a multiple"
            )
        self._objective, self.train_mode = objective, train_mode
        self._full_fp32 = precision == "fp32"
        self.num_micro_batches = present[0] // self.group

    # ---- the guard

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """See `ShardBackend.measuring`.

        Allowed between an optimizer step and the next forward: the gradient buffers, which training
        clears there, come back zeroed.
        """
        assert self._objective is not None, "use() comes first"
        attributes = Attributes()
        self._finalize = host.model_config(self.chunks[0]).finalize_model_grads_func
        random = RandomState(self.device, tracker_states())
        buffers = [Buffers(chunk) for chunk in self.chunks]
        self._forward = FixedForward(self._objective.forward_step, self.chunks, random, buffers)
        self._evaluated: set[int] = set()
        self.gradient_scale = None
        self._lockstep = Lockstep(self.device, stage=host.pipeline_rank())
        with self._lockstep, ExitStack() as stack:
            with self._lockstep.together("putting the training state aside"):
                stack.callback(random.set, random.get())
                for saved in buffers:
                    stack.callback(saved.restore)
                stack.callback(host.keep_logs(self.chunks))
            stack.callback(host.without_gather_hooks(self.chunks))
            stack.callback(host.gather_parameters, self.chunks)  # on all ranks, wherever one fails
            with self._lockstep.together("keeping weights and gradients"):
                stack.callback(attributes.restore)
                host.quiet(self.chunks, attributes)
                stack.callback(self._put_back_gradients, self._take_gradients())
                for chunk in self.chunks:
                    stack.enter_context(training_flags(chunk, self.train_mode))
                stack.enter_context(torch.enable_grad())
                if self._full_fp32:
                    stack.enter_context(full_fp32())
                stack.callback(self._restore_weights, self._keep_weights())
            with self._lockstep.guarded():
                yield

    def _take_gradients(self) -> list[tuple[Any, Tensor | None]]:
        # After a step of Megatron's fp32 optimizers, `grad` *is* the gradient buffer: a backward
        # would accumulate into it, and DDP's hook add it to itself.
        kept = [(p, p.grad) for chunk in self.chunks for p in chunk.parameters()]
        for p, _ in kept:
            p.grad = None
        return kept

    def _put_back_gradients(self, kept: list[tuple[Any, Tensor | None]]) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for p, gradient in kept:
            p.grad = gradient

    def _keep_weights(self) -> list[Tensor]:
        self._weights = [piece.weight for piece in self.pieces]
        self._masters = []
        for weight, master in zip(self._weights, (p.master for p in self.pieces), strict=True):
            # Weights are the rounded masters after a step; where somebody has edited them since,
            # they themselves are what training goes on with, and a copy is their master.
            mine = master is not None and torch.equal(master.to(weight.dtype), weight)
            self._masters.append(master if mine and master is not None else weight.clone())
        return self._masters

    def _restore_weights(self, kept: list[Tensor]) -> None:
        for weight, value in zip(self._weights, kept, strict=True):
            weight.copy_(value)
        self._weights, self._masters = [], []

    # ---- evaluations

    def displace(self, v: Tensor | None, h: float) -> Tensor:
        """See `ShardBackend.displace`."""
        direction = self.space.zeros() if v is None else v
        change = ops.displace(self._weights, self._masters, direction, h, self.space.n_owned)
        host.gather_parameters(self.chunks)
        return change

    def add_gradient(self, out: Tensor, micro_batches: range) -> None:
        """See `ShardBackend.add_gradient`.

        Raises:
            MeasurementError: forward step, model, loss or backward raised on some rank.
            NumericsError: a loss is not finite.
        """
        if not micro_batches:
            return
        self._run(micro_batches.start * self.group, len(micro_batches) * self.group)
        host.reduce_gradients(self.chunks, self._finalize)
        self._note(micro_batches)
        # The schedule has averaged over the micro-batches of the run, or summed over tokens.
        factor = 1.0 if self._per_token else float(len(micro_batches))
        for piece, (_, part) in zip(self.pieces, self.layout, strict=True):
            out[part].add_(piece.gradient.to(out.dtype), alpha=factor)

    def _run(self, first: int, count: int) -> None:
        objective, forward = self._objective, self._forward
        assert objective is not None
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        forward.start(first)
        last = first + count - 1
        with self._lockstep.run(f"evaluating micro-batches {first} to {last}"):
            host.run_schedule(
                self.chunks,
                forward,
                lambda: objective.iterator(first, count),
                self._lockstep,
                num_microbatches=count,
                seq_length=objective.seq_length,
                micro_batch_size=objective.micro_batch_size,
            )

    def _note(self, micro_batches: range) -> None:
        """Once all micro-batches have been evaluated: the scale of the gradient, and the loss."""
        self._evaluated.update(micro_batches)
        if self.gradient_scale is not None or len(self._evaluated) < self.num_micro_batches:
            return
        totals = torch.zeros(3, dtype=torch.float64)
        if host.first_tensor_rank():
            for loss, tokens in self._forward.losses.values():
                totals += torch.tensor([1.0, float(loss), 0.0 if tokens is None else float(tokens)])
        terms, loss, tokens = self.space.reduce(totals).tolist()
        if self._per_token and tokens <= 0:
            raise ConfigError("the micro-batches have no token that counts in the loss")
        self.gradient_scale = 1.0 / (tokens if self._per_token else self.num_micro_batches)
        self.loss = loss / (tokens if self._per_token else terms)

    def memory(self, precision: Literal["model", "fp32"] = "model") -> list[Item]:
        """See `ShardBackend.memory`."""
        alone = sum(piece.weight.nbytes for piece in self.pieces if piece.master is None)
        return [Item("weights as they were", place_of(self.device), alone)]

    def weight_norm(self) -> float:
        """See `ShardBackend.weight_norm`."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for master, fragment in zip(self._masters, self.layout.fragments, strict=True):
            if fragment.owned:
                wide = master.float()
                total += ops.dots([(wide, wide)], wide.numel())
        return float(self.space.reduce(total)[0]) ** 0.5
