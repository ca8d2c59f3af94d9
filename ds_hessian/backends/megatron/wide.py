"""Passes in fp32 of a Megatron model in 16 bits, whose own weights are neither written nor read.

A parameter whose type changes loses its accumulator, and with it the hook by which Megatron's DDP
takes its gradient. So for the measurement each parameter is replaced by a stand-in, an fp32 copy of
its master with all of its attributes, `main_grad` among them: its gradient is added to Megatron's
own buffer, whose reductions are those of training. Shards of the distributed optimizer are gathered
in fp32.

Megatron's layers cast by their configuration and by what they were built with: types of 16 bits
among the attributes of modules and configurations become fp32, flags of them false, and the wrapper
of models in 16 bits casts nothing.

Memory: the weights of this rank's layers in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hessian.backends.guard import Attributes
from ds_hessian.backends.megatron import buffers, host
from ds_hessian.backends.megatron.gathers import Gather
from ds_hessian.backends.megatron.reductions import Reductions
from ds_hessian.backends.megatron.runs import ParameterRun
from ds_hessian.backends.places import in_place_of
from ds_hessian.memory import NARROW

if TYPE_CHECKING:
    from ds_hessian.backends.megatron.host import Chunk

ROUNDING = ("cross_entropy_loss_fusion", "activation_func_fp8_input_store")
"""Those that choose what rounds in a model of any type: `fused_cross_entropy` of
`megatron.core.fusions` in its backward, to bf16, and `fused_bias_swiglu` what it keeps for its own,
to 8 bits."""

FLAGS = ("bf16", "fp16", "input_in_bf16", "input_in_fp16", "input_in_float16", *ROUNDING)
"""Attributes by which modules and configurations choose 16 bits."""


class WideWeights:
    """fp32 stand-ins of all parameters of a rank's chunks.

    Args:
        chunks: The model chunks.
        reductions: Those of their gradients.

    Collective: `gather`.
    """

    def __init__(self, chunks: Sequence[Chunk], reductions: Reductions) -> None:
        self._chunks = chunks
        self._gathered: list[tuple[Tensor, Tensor, dist.ProcessGroup]] = []
        values = self._buckets()
        self.made: dict[int, nn.Parameter] = {}
        for chunk in chunks:
            for p in chunk.parameters():
                if p.is_floating_point() and id(p) not in self.made:
                    self.made[id(p)] = made = _stand_in(p, values.get(id(p)))
                    if p.requires_grad:
                        ready = reductions.ready_for(chunk, p)
                        made.register_post_accumulate_grad_hook(_accumulates(ready))

    def _buckets(self) -> dict[int, Tensor]:
        """Return places of the parameters of which the distributed optimizer gathers shards."""
        values: dict[int, Tensor] = {}
        for chunk in self._chunks:
            if not chunk.ddp_config.use_distributed_optimizer:
                continue
            for buffer, bucket in buffers.buckets(chunk):
                group = buffer.data_parallel_group
                whole = torch.zeros_like(bucket.param_data, dtype=torch.float32).view(-1)
                mine = whole.chunk(buffer.data_parallel_world_size)[group.rank()]
                self._gathered.append((whole, mine, group))
                for p, start, stop in buffers.places(buffer, bucket):
                    values[id(p)] = whole[start:stop]
        return values

    def weight(self, run: ParameterRun) -> Tensor:
        """Return a view of the stand-in of a run."""
        flat = self.made[id(run.parameter)].data.view(-1)
        return flat.narrow(0, run.offset, run.fragment.numel)

    def gather(self) -> None:
        """Make every rank's next forward read the weights that were written."""
        for gather in self.gathers():
            gather.begin().wait()

    def gathers(self) -> Iterator[Gather]:
        """Yield the gathers of `gather`, which begin by themselves."""
        for whole, mine, group in self._gathered:
            store = whole.untyped_storage().data_ptr()
            inside = [p for p in self.made.values() if p.untyped_storage().data_ptr() == store]
            begin = functools.partial(
                dist.all_gather_into_tensor, whole, mine, group=group, async_op=True
            )
            yield Gather(begin, inside)

    @contextmanager
    def taken(self, leave: Callable[[], None]) -> Iterator[None]:
        """Run the body with the stand-ins in the modules.

        Args:
            leave: Is called before they leave these.

        Raises:
            UnsupportedError: a parameter got a gradient, past its stand-in.
        """
        with ExitStack() as stack:
            for chunk in self._chunks:  # whose wrappers have lists of their own
                stack.enter_context(in_place_of(self.made, host.unwrap(chunk), leave))
            yield


def _stand_in(p: Any, place: Tensor | None) -> nn.Parameter:
    values = torch.empty(p.shape, dtype=torch.float32, device=p.device)
    if place is not None:
        values = place.view(p.shape)
    copy = nn.Parameter(values.copy_(p.detach()), requires_grad=p.requires_grad)
    vars(copy).update(vars(p))
    return copy


def _accumulates(ready: Callable[[], None]) -> Callable[[Any], None]:
    """Return what does with the gradient of a stand-in as DDP's hook with that of the parameter."""

    def accumulate(p: Any) -> None:
        """Add it to Megatron's buffer, unless a fused kernel already has."""
        added = getattr(p, "grad_added_to_main_grad", False)
        if p.grad is not None and (not added or getattr(p, "zero_out_wgrad", False)):
            p.main_grad.add_(p.grad)
        p.grad, p.grad_added_to_main_grad = None, False
        ready()

    return accumulate


def without_casts(chunks: Sequence[Chunk], attributes: Attributes) -> None:
    """Keep what the modules compute in fp32, until `attributes.restore()`."""
    for owner, name, value in _attributes(chunks):
        if isinstance(value, torch.dtype) and value in NARROW:
            attributes.set(owner, name, torch.float32)
        elif name in FLAGS and value is True:
            attributes.set(owner, name, False)
        elif name == "float16_convertor":
            attributes.set(owner, name, _as_it_is)


def without_rounding(chunks: Sequence[Chunk], attributes: Attributes) -> None:
    """Keep in fp32 what an fp32 model rounds, until `attributes.restore()`."""
    for owner, name, value in _attributes(chunks):
        if name in ROUNDING and value is True:
            attributes.set(owner, name, False)


def _attributes(chunks: Sequence[Chunk]) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and value of the attributes of modules and of their configurations."""
    modules = [m for chunk in chunks for m in chunk.modules()]
    found = {id(c): c for c in (getattr(m, "config", None) for m in modules)}
    for owner in (*modules, *found.values()):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            yield owner, name, value


def _as_it_is(value: Tensor) -> Tensor:
    return value


def accumulates_in_fp32(chunks: Sequence[Chunk]) -> bool:
    """Return whether gradients are summed in fp32, which those of fp32 passes need."""
    trained = (p for chunk in chunks for p in chunk.parameters() if p.requires_grad)
    return all(p.main_grad.dtype == torch.float32 for p in trained)
