"""Training and checkpointing are refused while the weights of a job are displaced.

Inside a measurement an optimizer's step would start from displaced weights, a state dict would
hold them, one that is loaded would be lost, and another measurement would be of them. A handler of
preemption steps or saves: it is called after the measurement (`ds_hessian.ranks.interrupts`), and
code inside of it gets a `MeasurementError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ds_hessian.backends.guard import Attributes
from ds_hessian.errors import MeasurementError

_displaced: set[nn.Module] = set()
"""The submodules, with weights of their own, of the measurements that are open."""


@contextmanager
def training_refused(modules: Sequence[nn.Module], weights: Iterable[Tensor]) -> Iterator[None]:
    """Refuse, in the body, steps of torch's optimizers on the weights, state dicts of the modules,
    and other measurements of them.

    Args:
        modules: The modules that hold this rank's weights.
        weights: What an optimizer of the job steps: the weights, and their masters.

    Raises:
        MeasurementError: they are being measured already, by another `Hessian`.
    """
    own = {m for module in modules for m in module.modules() if _trained(m)}
    if own & _displaced:
        refuse("a measurement of the same weights")
    parameters = [p for module in modules for p in module.parameters()]
    storages = {_storage(tensor) for tensor in (*parameters, *weights)} - {0}

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        if any(_storage(p) in storages for p in stepped):
            refuse(f"{type(optimizer).__name__}.step()")

    def before_state_dict(module: nn.Module, *_: object) -> None:
        refuse(f"{type(module).__name__}.state_dict()")

    def before_load(module: nn.Module, *_: object) -> None:
        refuse(f"{type(module).__name__}.load_state_dict()")

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(before_step).remove)
        for module in modules:
            hooked: Any = module  # whose method has no types
            stack.callback(hooked.register_state_dict_pre_hook(before_state_dict).remove)
            loading = hooked._register_load_state_dict_pre_hook  # public from torch 2.5 on
            stack.callback(loading(before_load, with_module=True).remove)
        stack.callback(_displaced.difference_update, own)
        _displaced.update(own)
        yield


def refuse_methods(owner: object, names: Iterable[str], attributes: Attributes) -> None:
    """Make these methods raise, where the owner has them, until `attributes.restore()`."""
    for name in names:
        if hasattr(owner, name):
            attributes.set(owner, name, _Refused(f"{type(owner).__name__}.{name}()"))


def refuse(what: str) -> NoReturn:
    """Raise for what must not be called while the weights are displaced.

    Raises:
        MeasurementError: names it.
    """
    raise MeasurementError(
        f"{what} was called inside of measuring(), where the weights are displaced: leave the "
        "measurement first, which puts them back"
    )


class _Refused:
    """A stand-in for a method, which raises."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        refuse(self.what)


def _trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _storage(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 where it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
