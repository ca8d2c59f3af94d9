"""Copies of parameters on several ranks, which must be displaced and differentiated alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.backends.checksums import checksums, sign
from ds_hessian.backends.megatron import buffers, host
from ds_hessian.backends.megatron.runs import ParameterRun
from ds_hessian.backends.names import checkpoint_name
from ds_hessian.errors import UnsupportedError
from ds_hessian.vectors import VectorSpace

if TYPE_CHECKING:
    from ds_hessian.backends.megatron.host import Chunk

SUMMED = 0.1
"""Relative difference from the number of ranks, of the factor by which a sum over them multiplies
equal gradients; it is exact but for rounding."""

EQUAL = 1e-4
"""Relative difference of gradients that all ranks compute from the same numbers, by kernels whose
sums may have no fixed order; parts of a sum differ by their own size."""


def refuse_uneven_copies(
    chunks: Sequence[Chunk],
    runs: Sequence[ParameterRun],
    parameters: Sequence[tuple[str, torch.Size]],
    space: VectorSpace,
) -> set[str]:
    """Raise if one rank trains what another one does not, or if the coordinates of a parameter do
    not count once each.

    Args:
        chunks: The model chunks.
        runs: This rank's coordinates.
        parameters: Names of all parameters, the same on every rank, with their shapes.
        space: The space of the vectors.

    Returns:
        The names of parameters whose master only some of their ranks keep, the same on every rank.

    Raises:
        UnsupportedError: names the parameter.

    Collective: one all-reduce.
    """
    place = {name: i for i, (name, _) in enumerate(parameters)}
    sums = torch.zeros(len(parameters) + 1, 3, dtype=torch.float64)
    for run in runs:
        mine = sums[place[run.fragment.name]]
        mine[int(run.master is not None)] += run.fragment.numel
        mine[2] += run.fragment.numel * run.fragment.owned
    tied = [p for c in chunks for p in c.parameters() if host.is_tied_over_stages(p)]
    for p in tied:
        sums[-1, int(p.requires_grad)] += 1
        sums[-1, 2] += not host.is_summed_over_stages()
    *found, (frozen, trained, apart) = space.reduce(sums.view(-1)).view(-1, 3).tolist()
    if apart:
        raise UnsupportedError(
            "ds_hessian does not support copies of an embedding on pipeline stages that are not in "
            "Megatron's embedding group: it does not sum their gradients, and training makes them "
            "different; give initialize_model_parallel the get_embedding_ranks of Megatron-LM"
        )
    if frozen and trained:
        raise UnsupportedError(
            "ds_hessian does not support an embedding of which one pipeline stage trains its copy "
            "and another has it frozen: Megatron's sum over both would wait for ever; freeze it on "
            "all stages, or on none"
        )
    for (*_, owned), (name, shape) in zip(found, parameters, strict=True):
        if owned != shape.numel():
            raise UnsupportedError(
                f"ds_hessian does not support the parameter {name!r}, of whose {shape.numel()} "
                f"coordinates {owned:.0f} count: ranks have different models, freeze different "
                "parts of it, or their sharded_state_dict does not say who saves what; build and "
                "freeze the same model on all of them"
            )
    return {
        name
        for (without, masters, _), (name, _) in zip(found, parameters, strict=True)
        if without and masters
    }


def masters_of(
    chunks: Sequence[Chunk], runs: Sequence[ParameterRun], uneven: Collection[str]
) -> list[Tensor | None]:
    """Return the fp32 master of each run; None where the weights are their own.

    The layer-wise distributed optimizer, which Muon takes, keeps each master on one of the ranks
    that have the weight. All of them are displaced from it, so the others receive it.

    Args:
        chunks: The model chunks.
        runs: This rank's coordinates.
        uneven: The names that `refuse_uneven_copies` returns.

    Raises:
        UnsupportedError: no data-parallel rank has a master that others have.

    Collective: for each bucket with such parameters a small all-reduce, and a broadcast of each.
    """
    names = {id(run.parameter): run.fragment.name for run in runs if run.fragment.name in uneven}
    received: dict[int, Tensor] = {}
    for chunk in chunks:
        for buffer, bucket in buffers.buckets(chunk):
            wanted = [p for p in bucket.params_list if id(p) in names]
            if wanted:
                received.update(_received(wanted, names, buffer.data_parallel_group))
    return [
        run.in_master(received[id(run.parameter)]) if id(run.parameter) in received else run.master
        for run in runs
    ]


def _received(
    wanted: Sequence[host.MegatronParameter], names: Mapping[int, str], group: dist.ProcessGroup
) -> dict[int, Tensor]:
    """Return the masters, flat, that this rank does not keep."""
    own = [getattr(p, "main_param", None) for p in wanted]
    mine = [-1 if master is None else group.rank() for master in own]
    owners = torch.tensor(mine, device=wanted[0].device)
    dist.all_reduce(owners, dist.ReduceOp.MAX, group=group)
    found = {}
    for p, master, owner in zip(wanted, own, owners.tolist(), strict=True):
        if owner < 0:
            raise UnsupportedError(
                f"ds_hessian does not support the parameter {names[id(p)]!r}, whose fp32 master "
                "only some of its tensor-parallel or pipeline ranks keep: its copies would be "
                "displaced differently; let all of them keep it"
            )
        if master is not None and owner == group.rank():
            whole = master.detach().view(-1)
        else:
            whole = torch.empty(p.numel(), dtype=torch.float32, device=p.device)
        dist.broadcast(whole, dist.get_global_rank(group, owner), group=group)
        if master is None:
            found[id(p)] = whole
    return found


def replicated_parameters(chunks: Sequence[Chunk]) -> list[tuple[str, host.MegatronParameter]]:
    """Return checkpoint names and trained parameters that all tensor-parallel ranks have whole."""
    if host.mesh().get("TP", 1) == 1:
        return []
    found: dict[int, tuple[str, host.MegatronParameter]] = {}
    for chunk in chunks:
        for p, _, tensor in host.sharded_tensors(chunk):
            if p.requires_grad and host.is_replicated_over_tensor_ranks(p, tensor):
                found.setdefault(id(p), (checkpoint_name(tensor.key), p))
    return list(found.values())


class Replicas:
    """A check of the gradients of parameters that all tensor-parallel ranks have whole.

    They must be the same on all of them after Megatron's reductions. And a gradient that each rank
    has whole before must not be summed over the ranks: Megatron does so with the norm of the
    queries of multi-latent attention, and trains with a multiple of its gradient.

    Args:
        chunks: The model chunks.
        parameters: `replicated_parameters` of them.
        runs: This rank's coordinates.
        names: Names of all parameters, the same on every rank.

    Attributes:
        pending: Whether the next gradient is checked, before its reductions and after them.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        parameters: Sequence[tuple[str, host.MegatronParameter]],
        runs: Sequence[ParameterRun],
        names: Sequence[str],
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._ranks, rank = host.mesh().get("TP", 1), host.tensor_parallel_rank()
        self._sign = sign(rank, self._ranks)
        self.pending = self._ranks > 1
        config, ddp = host.model_config(chunks[0]), chunks[0].ddp_config
        ranks = host.mesh()["DP"]
        instances = ddp.num_distributed_optimizer_instances
        # From the sum over ranks of their own gradients to that of reduced ones.
        self._factor = 1.0 if config.calculate_per_token_loss else 1.0 / ranks
        self._factor *= instances if ddp.use_distributed_optimizer else ranks
        known = {id(p) for _, p in parameters}
        self._runs = [run for run in runs if id(run.parameter) in known]

    @contextmanager
    def checked(self, space: VectorSpace, tolerance: float) -> Iterator[None]:
        """Run the body, which reduces the gradients; check them the first time.

        Args:
            space: The space of the vectors.
            tolerance: Of differences after the reductions, relative to the norm of a gradient.

        Raises:
            UnsupportedError: names the parameter.

        Collective: one all-reduce, the first time.
        """
        if not self.pending:
            yield
            return
        own = [(name, p.main_grad.view(-1), 0) for name, p in self._parameters]
        before = self._sums(own)
        yield
        self.pending = False
        reduced = [(run.fragment.name, run.gradient, run.offset) for run in self._runs]
        found = space.reduce(torch.stack([before, self._sums(reduced)]).view(-1))
        self._judge(tolerance, *found.view(2, len(self._names), 5).tolist())

    def _sums(self, gradients: Sequence[tuple[str, Tensor, int]]) -> Tensor:
        """Return the differences between ranks, the checksums and the norm of each gradient."""
        sums = torch.zeros(len(self._names), 5, dtype=torch.float64)
        place = {name: i for i, name in enumerate(self._names)}
        for name, values, start in gradients:
            along, across, size = checksums(values, start)
            differences = self._sign * along, self._sign * across
            sums[place[name]] += torch.tensor([*differences, along, across, size])
        return sums

    def _judge(self, tolerance: float, before: list[list[float]], after: list[list[float]]) -> None:
        for name, own, reduced in zip(self._names, before, after, strict=True):
            apart = max(map(abs, reduced[:2]))
            if apart > tolerance * reduced[4]:
                raise UnsupportedError(
                    f"ds_hessian does not support the replicated parameter {name!r}, whose "
                    "gradient differs between tensor-parallel ranks (by "
                    f"{apart / reduced[4]:.1e} of its size) after Megatron's reductions: its "
                    "copies become different in training too; sum it over these ranks, or use no "
                    "tensor parallelism. Or these have parts of it, and the model's "
                    "sharded_state_dict says that each has the whole, as of Megatron's layers "
                    "inside of a module without one: give that module one"
                )
            equal = max(map(abs, own[:2])) <= EQUAL * own[4]
            larger = 2 if abs(own[2]) > abs(own[3]) else 3
            if not equal or abs(own[larger]) <= 10 * EQUAL * own[4]:
                continue
            times = reduced[larger] / (self._factor * own[larger])
            if abs(times / self._ranks - 1) < SUMMED:
                raise UnsupportedError(
                    f"ds_hessian does not support the replicated parameter {name!r}, whose "
                    "gradient every tensor-parallel rank has whole, and which Megatron sums over "
                    f"them: it trains with {times:.3g} times the gradient of the loss; use "
                    "sequence parallelism, or no tensor parallelism"
                )
