"""Stand-ins: parameters of their own for the passes of a measurement.

While a measurement runs, every trainable parameter of the model is replaced by a new one with the
same values. Training's parameters are never written, their `grad` is never touched, and nothing
attached to them runs: the buckets of `DistributedDataParallel`, hooks, an optimizer that steps in
the backward. So there is nothing to restore. In fp32 passes the stand-ins are fp32 copies.

Wrappers (`DistributedDataParallel`, `torch.compile`) are passed through: their forward calls the
model's.

Memory: one copy of the weights in the dtype of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ds_hessian.backends.places import in_place_of


@contextmanager
def stand_ins(
    model: nn.Module, sources: dict[int, Tensor], widen: bool, leave: Callable[[], None]
) -> Iterator[dict[int, nn.Parameter]]:
    """Run the body with other parameters in the model.

    Args:
        model: The model, without its wrappers.
        sources: `{id of a trainable parameter: what its stand-in copies}`.
        widen: Whether all floating-point parameters become fp32, frozen ones too.
        leave: Is called before they leave the model.

    Yields:
        `{id of a parameter: its stand-in}` of the replaced ones.
    """
    made = dict[int, nn.Parameter]()
    for p in model.parameters():
        if id(p) in sources or (widen and p.is_floating_point()):
            made[id(p)] = _stand_in(p, sources.get(id(p), p), widen)
    with in_place_of(made, model, leave):
        yield made


def _stand_in(p: nn.Parameter, source: Tensor, widen: bool) -> nn.Parameter:
    dtype = torch.float32 if widen and p.is_floating_point() else p.dtype
    copy = torch.empty(p.shape, dtype=dtype, device=p.device)
    copy.copy_(source.detach().view(p.shape))
    return nn.Parameter(copy, requires_grad=p.requires_grad)


@contextmanager
def transparent(wrappers: Sequence[nn.Module]) -> Iterator[None]:
    """Run the body with wrappers whose forward is that of the module inside."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            inner = wrapper._modules.get("module") or wrapper._modules["_orig_mod"]
            assert inner is not None
            attributes = vars(wrapper)
            kept = dict(attributes)
            stack.callback(_put_back, attributes, kept)
            attributes["forward"] = _through(inner)
        yield


def _through(inner: nn.Module) -> Callable[..., object]:
    def forward(*args: object, **kwargs: object) -> object:
        return inner(*args, **kwargs)

    return forward


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Run the body, and restore the attributes of every submodule after it.

    Forwards may count, or cache tensors that are made of displaced weights.
    """
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, before in kept:
            _put_back(attributes, before)


def _put_back(attributes: dict[str, object], kept: dict[str, object]) -> None:
    for name in [name for name in attributes if name not in kept]:
        del attributes[name]
    attributes.update(kept)
