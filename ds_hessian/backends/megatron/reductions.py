"""The reductions of gradients, which overlap with the backward where those of training do.

With `overlap_grad_reduce`, Megatron's DDP reduces a bucket of parameters once all of them have
gradients of the last micro-batch, and waits for all buckets in the end. When that is, it knows by
how often each parameter had one in the first step of training: nothing overlaps before that step,
nor between several instances of the distributed optimizer, whose streams are CUDA's alone. Passes
here may leave parameters without gradients, on one rank alone where its data need fewer modules,
which DDP's own hooks refuse while they overlap: the hooks are told that they do not, and others
tell the buckets. These begin in the same order on all ranks, which would take one for another: one
that stays incomplete, and those after it, in the end.

A rank that fails follows the reductions that the others begin (`ds_hessian.ranks.lockstep`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_hessian.backends.guard import Attributes
from ds_hessian.backends.megatron import buffers, host
from ds_hessian.errors import MeasurementError

if TYPE_CHECKING:
    from ds_hessian.backends.megatron.host import Chunk


class Reductions:
    """Sums and averages over ranks as training has them, but for the division by the tokens.

    Args:
        chunks: The model chunks, whose gradients are set to zero.
        attributes: Restores what is switched: among it the check for NaN, which raises on one rank
            alone.
        stack: Removes hooks.
        finalize: The job's `config.finalize_model_grads_func`; None for Megatron's own.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        attributes: Attributes,
        stack: ExitStack,
        finalize: Callable[..., None] | None,
    ) -> None:
        self._chunks, self._finalize = chunks, finalize
        for chunk in chunks:
            chunk.zero_grad_buffer()  # the next step knows how often gradients came in the last
        self._groups = [group for chunk in reversed(chunks) for group in _as_completed(chunk)]
        counted = not any(getattr(group, "is_first_batch", True) for group in self._groups)
        self._configs = list({id(chunk.ddp_config): chunk.ddp_config for chunk in chunks}.values())
        for ddp in self._configs:
            for name in ("check_for_nan_in_grad", "check_for_large_grads"):
                attributes.set(ddp, name, False)
            if not counted or ddp.num_distributed_optimizer_instances > 1:
                attributes.set(ddp, "overlap_grad_reduce", False)
        overlapping = [chunk for chunk in chunks if chunk.ddp_config.overlap_grad_reduce]
        for chunk in overlapping:
            alone = copy.copy(chunk.ddp_config)
            alone.overlap_grad_reduce = False
            attributes.set(chunk, "ddp_config", alone)
            for node in chunk.grad_accs:
                ready = self.ready_for(chunk, node.variable)
                stack.callback(node.register_hook(lambda *_, ready=ready: ready()).remove)
        if overlapping:
            waits = [chunk.no_sync for chunk in chunks]
            config = host.model_config(chunks[0])
            attributes.set(config, "no_sync_func", waits if len(chunks) > 1 else waits[0])

    def ready_for(self, chunk: Chunk, parameter: nn.Parameter) -> Callable[[], None]:
        """Return what says that a parameter has the gradient of a micro-batch, or none."""
        group = chunk.param_to_bucket_group[parameter]

        def ready() -> None:
            if group.ddp_config.overlap_grad_reduce and group.is_last_microbatch:
                counts = group.per_param_grad_ready_counts
                counts[parameter] = counts.get(parameter, 0) + 1
                self._begin()

        return ready

    def _begin(self) -> None:
        """Begin those of complete buckets, up to the first that is not."""
        for group in self._groups:
            if group.grad_reduce_handle is None:
                if not _complete(group):
                    return
                group.start_grad_sync()

    @contextmanager
    def begun(self, overlap: bool) -> Iterator[None]:
        """Run a body that evaluates gradients, whose reductions begin in it if they may overlap,
        and makes them; those that have begun end where it fails.
        """
        with ExitStack() as stack:
            if not overlap:
                attributes = Attributes()
                stack.callback(attributes.restore)
                for ddp in self._configs:
                    attributes.set(ddp, "overlap_grad_reduce", False)
            try:
                yield
            except BaseException:
                for group in self._groups:
                    handle, group.grad_reduce_handle = group.grad_reduce_handle, None
                    if handle is not None:
                        with suppress(RuntimeError):  # of a rank that has ended
                            handle.wait()
                raise

    def require_whole(self) -> None:
        """Require that no gradient came after the reduction of its bucket had begun.

        Raises:
            MeasurementError: one did.
        """
        for group in self._groups:
            if group.grad_reduce_handle is not None and not _complete(group):
                raise MeasurementError(
                    "parameters have gradients more often than in the first step of training, by "
                    "which overlap_grad_reduce knows when to reduce them; train without it"
                )

    def make(self) -> None:
        """Make them, or wait for them. Collective."""
        from megatron.core.distributed import finalize_model_grads

        for group in self._groups:
            if group.ddp_config.overlap_grad_reduce and group.grad_reduce_handle is None:
                group.start_grad_sync()
        (self._finalize or finalize_model_grads)(list(self._chunks), None)


def _as_completed(chunk: Chunk) -> list[Any]:
    """Return the buckets of a chunk in the order in which a backward completes them."""
    place = {p: i for i, p in enumerate(chunk.parameters())}
    groups = buffers.bucket_groups(chunk)
    return sorted(groups, key=lambda group: -min(map(place.__getitem__, group.params)))


def _complete(group: Any) -> bool:
    """Return whether all parameters of a bucket have their gradients, as in the first step."""
    counts: dict[nn.Parameter, int] = group.per_param_grad_ready_counts
    return counts == group.golden_per_param_grad_ready_counts
