"""The gathers of displaced weights, which overlap with the forward where those of training do.

With `overlap_param_gather`, Megatron's DDP waits for the weights of a module before its forward.
Its hooks would gather once more in a pass that follows another at the same weights, and know
nothing of stand-ins (`wide`). Here other hooks wait, and gathers begin as weights are displaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import nn

from ds_hessian.backends.megatron import buffers

if TYPE_CHECKING:
    from ds_hessian.backends.megatron.host import Chunk


class Gather(NamedTuple):
    """A gather of the weights of some parameters.

    Attributes:
        begin: Begins it, and returns what waits for it.
        parameters: The parameters, as the modules have them.
    """

    begin: Callable[[], Any]
    parameters: Sequence[nn.Parameter]


def of_optimizer(chunks: Sequence[Chunk]) -> Iterator[Gather]:
    """Yield the gathers of the distributed optimizer's shards, Megatron's own.

    On gloo, as in training, no two of them are under way at once: they are coalesced, and of two
    that end together its threads may free the name of the last one twice (torch 2.13).
    """

    def begin(group: Any) -> Any:
        group.start_param_sync()
        work, group.param_gather_handle = group.param_gather_handle, None
        ranks = group.intra_distributed_optimizer_instance_group
        if work is not None and dist.get_backend(ranks) == "gloo":
            work.wait()
        return work

    for chunk in chunks:
        for group in buffers.bucket_groups(chunk):
            yield Gather(functools.partial(begin, group), list(group.params))


class Gathers:
    """Gathers that modules wait for.

    Args:
        chunks: The model chunks.
        gathers: What to gather.
        stack: Ends them, and removes the hooks.

    Collective: `begin`.
    """

    def __init__(
        self, chunks: Sequence[Chunk], gathers: Iterable[Gather], stack: ExitStack
    ) -> None:
        self._gathers, self._begun = list(gathers), dict[int, Any]()
        of = {id(p): i for i, gather in enumerate(self._gathers) for p in gather.parameters}
        for chunk in chunks:
            for module in chunk.modules():
                own = {of[id(p)] for p in module._parameters.values() if id(p) in of}
                if own:
                    hook = module.register_forward_pre_hook(self._waiting(own), prepend=True)
                    stack.callback(hook.remove)
        stack.callback(self.finish)

    def begin(self) -> None:
        """Begin to gather what was written."""
        for i, gather in enumerate(self._gathers):
            self._begun[i] = gather.begin()

    def finish(self, which: Iterable[int] | None = None) -> None:
        """Wait for those that have begun, or some of them: nothing is to be written before."""
        for i in list(self._begun if which is None else which):
            work = self._begun.pop(i, None)
            if work is not None:
                work.wait()

    def _waiting(self, which: set[int]) -> Callable[..., None]:
        def wait(*_: object) -> None:
            self.finish(which)

        return wait
