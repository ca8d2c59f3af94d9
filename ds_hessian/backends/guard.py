"""The guard: it saves the training state common to all hosts, and restores it after a measurement.

`guarded` saves random states, module buffers, train flags, probabilities of dropout, the grad mode
and, for passes in fp32, the switches of reduced fp32 arithmetic. A host pushes its own entries to
the same stack; they are undone in reverse order, also when something raises.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import _len_torch_function_stack, _pop_mode

from ds_hessian.backends.contexts import refuse_context
from ds_hessian.backends.derivatives import unchanging
from ds_hessian.backends.function import FixedFunction
from ds_hessian.backends.hooks import hooks_of, nothing
from ds_hessian.backends.protocol import Passes
from ds_hessian.backends.random_states import RandomState, trackers
from ds_hessian.backends.state import (
    HOSTS,
    State,
    generators_in,
    held_by,
    modules_of,
    package_of,
)
from ds_hessian.memory import FP32, free_on, passes_memory
from ds_hessian.ranks import most_on_a_node

_MISSING = object()


def kept_grad_mode() -> AbstractContextManager[object]:
    """Return a context after which gradients are on or off as now, whatever a loss does."""
    return torch.set_grad_enabled(torch.is_grad_enabled())


class Buffers:
    """A copy of a module's buffers: their contents, and the tensor that each name is bound to.

    Names without a tensor are kept too, which a forward may bind, and names that it adds vanish. A
    tensor that several names share is copied once.

    Attributes:
        wide: Whether passes have those in 16 bits in fp32.
        starts: `{id of a kept copy: what passes start from}`, where that is another.
        saved: Owner, name, tensor and copy of each that has a tensor.
    """

    def __init__(self, module: nn.Module) -> None:
        self.wide, self.starts = False, dict[int, Tensor]()
        self.saved: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._names: list[tuple[nn.Module, dict[str, Tensor | None], set[str]]] = []
        copies = dict[int, Tensor]()
        for owner in module.modules():
            self._names.append(
                (owner, dict(owner._buffers), set(owner._non_persistent_buffers_set))
            )
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    if id(buffer) not in copies:
                        copies[id(buffer)] = buffer.detach().clone()
                    self.saved.append((owner, name, buffer, copies[id(buffer)]))

    def renew(self) -> None:
        """Bind new copies for a pass to write into; tensors that other passes saved stay."""
        self._unbind()
        made = dict[int, Tensor]()
        for owner, name, _, value in self.saved:
            if id(value) not in made:
                made[id(value)] = self._started(value)
            owner._buffers[name] = made[id(value)]

    def _started(self, value: Tensor) -> Tensor:
        start = self.starts.get(id(value), value)
        narrow = start.is_floating_point() and start.dtype.itemsize < FP32
        return start.float() if self.wide and narrow else start.clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore contents and bindings."""
        self._unbind()
        for owner, name, buffer, value in self.saved:
            if not _is_expanded(buffer):
                buffer.copy_(value)
            owner._buffers[name] = buffer

    def _unbind(self) -> None:
        for owner, bound, transient in self._names:
            for name in [name for name in owner._buffers if name not in bound]:
                del owner._buffers[name]
            owner._buffers.update(bound)
            if owner._non_persistent_buffers_set != transient:  # to set it takes 20 us a module
                owner._non_persistent_buffers_set = set(transient)


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share their memory, so that nothing can write it."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.layout == torch.strided and any(n > 1 and step == 0 for n, step in strides)


@contextmanager
def training_flags(module: nn.Module) -> Iterator[None]:
    """Run the body in the mode in which the job trains, and restore every submodule's flag after.

    A module in train mode stays as it is: submodules that the job has in eval mode (frozen ones)
    are so in training. One in eval mode, for an evaluation, has lost these flags: all of it is
    brought to train mode.
    """
    flags = [(m, m.training) for m in module.modules()]
    if not module.training:
        module.train()
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag


def normalise_by_running_statistics(module: nn.Module) -> None:
    """Bring submodules that update statistics in train mode, and then use those of the micro-batch,
    to eval mode: batch normalisation, and spectral normalisation.
    """
    for m in module.modules():
        legacy = any(isinstance(hook, SpectralNorm) for hook in m._forward_pre_hooks.values())
        if "running_mean" in m._buffers or isinstance(m, _SpectralNorm) or legacy:
            m.training = False


def without_dropout(module: nn.Module, attributes: Attributes) -> None:
    """Set the probabilities of dropout to 0 that no call of torch's functions shows.

    Kernels of other libraries are given them as arguments, from attributes of modules and of their
    configurations: numbers in (0, 1] with "drop" in their name. A module without parameters,
    buffers and submodules (dropout, stochastic depth, a randomised activation) does in train mode
    nothing but draw: it is brought to eval mode. Calls of torch's functions are the business of
    `FixedFunction`.
    """
    configurations = {id(c): c for c in (getattr(m, "config", None) for m in module.modules())}
    for m in module.modules():
        if not (m._parameters or m._buffers or m._modules):
            m.training = False
    for owner in (*module.modules(), *configurations.values()):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            dropping = "drop" in name.lower() or (name == "p" and isinstance(owner, _DropoutNd))
            if dropping and isinstance(value, float) and 0 < value <= 1:
                attributes.keep(owner, name)
                vars(owner)[name] = 0.0  # a frozen dataclass refuses setattr


@contextmanager
def without_parameter_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run the body without hooks of parameters: what training makes of a gradient (a mask, a scale,
    a step of an optimizer) is no part of the loss. Those of the hosts, which reduce it, do run.
    """
    with ExitStack() as stack:
        for p in (p for module in modules for p in module.parameters()):
            for hooks, key, hook in hooks_of(p):
                if package_of(hook) not in HOSTS:
                    stack.callback(hooks.__setitem__, key, hook)
                    hooks[key] = nothing
        yield


@contextmanager
def unchanging_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run the body with hooks of modules' backwards that refuse to change gradients."""
    with ExitStack() as stack:
        for module in (m for root in modules for m in root.modules()):
            for hooks in (module._backward_hooks, module._backward_pre_hooks):
                for key, hook in list(hooks.items()):
                    stack.callback(hooks.__setitem__, key, hook)
                    hooks[key] = unchanging(hook)
        yield


@contextmanager
def eager(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run the body without `torch.compile`: compiled code calls no functions that could be held."""
    with ExitStack() as stack:
        for module in (m for root in modules for m in root.modules()):
            if vars(module).get("_compiled_call_impl") is not None:  # of module.compile()
                swap(stack, module, "_compiled_call_impl", None)
        force = functools.partial(torch.compiler.set_stance, "force_eager")
        if "torch._dynamo" in sys.modules:
            stack.enter_context(force())
        else:  # whose import takes seconds: when the model is the first to ask for it
            owner: Any = torch
            compiled = owner.compile

            def forced(*args: Any, **kwargs: Any) -> Any:
                stack.enter_context(force())
                owner.compile = compiled
                return compiled(*args, **kwargs)

            swap(stack, owner, "compile", forced)
        yield


def swap(stack: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute (or property) for as long as the stack lives."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@contextmanager
def full_fp32() -> Iterator[None]:
    """Run the body with true fp32 arithmetic: TF32 and similar modes are off."""
    backends: Any = torch.backends
    switches: list[tuple[object, str, object]] = [
        (owner, "allow_tf32", False) for owner in (backends.cuda.matmul, backends.cudnn)
    ]
    if hasattr(backends.cuda.matmul, "fp32_precision"):  # which from torch 2.9 on replaces these
        owners = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
        owners += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
        switches = [(owner, "fp32_precision", "ieee") for owner in owners]
    with ExitStack() as stack:
        for owner, name, value in switches:
            swap(stack, owner, name, value)
        yield


class Attributes:
    """Temporary values of attributes: the old ones are saved, and restored in reverse order."""

    def __init__(self) -> None:
        self.undo: list[tuple[object, str, object]] = []

    def keep(self, owner: object, *names: str) -> None:
        """Save the attributes' values, or their absence."""
        for name in names:
            self.undo.append((owner, name, owner.__dict__.get(name, _MISSING)))

    def set(self, owner: object, name: str, value: object) -> None:
        """Save the attribute's value and set it."""
        self.keep(owner, name)
        setattr(owner, name, value)

    def restore(self) -> None:
        """Restore all attributes."""
        for owner, name, value in reversed(self.undo):
            if value is _MISSING:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = value
        self.undo.clear()


SHARE_OF_KINKS = 4
"""One part in so many of the free memory may hold the sides of kinks: they are worth less than the
basis of a spectrum, which is allocated later."""


def _allowed(passes: Passes, device: torch.device) -> int:
    """Return the bytes that this rank may hold of the sides of kinks."""
    if passes.kinks == "crossed":
        return 0
    sharing = 1
    if device.type == "cpu" and dist.is_available() and dist.is_initialized():
        sharing = most_on_a_node() or dist.get_world_size()
    free = (free_on(device) - passes_memory(device)) // sharing
    return max(min(free // SHARE_OF_KINKS, free - passes.reserved), 1)


class Guard(ExitStack):
    """The stack of callbacks that restore the training state after a measurement.

    Attributes:
        random: The random generators.
        initial: Their states when the measurement began.
        buffers: The buffers of each module.
        attributes: The attributes that a host switches.
        state: What forwards change beside these.
        function: The mode in which all passes run.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        passes: Passes,
        loss: object = None,
    ) -> None:
        super().__init__()
        held = [] if loss is None else held_by(loss)
        self.random = RandomState(device, trackers())
        for drawn in (*held, *generators_in([*modules_of([*modules, *held]), *held])):
            self.random.add(drawn)
        self.initial = self.random.get()
        self.buffers = [Buffers(module) for module in modules]
        self.attributes = Attributes()
        allowed = _allowed(passes, device)
        self.function = FixedFunction(passes.dropout, allowed, modules, device)
        self.state = self.function.state = State(modules, held, self.random.add)


def _drop_modes(before: int) -> None:
    """Leave the modes of torch's functions that are still entered, where an interrupt or a failure
    has come just before the end of one.
    """
    while _len_torch_function_stack() > before:
        _pop_mode()


@contextmanager
def guarded(
    modules: Sequence[nn.Module], device: torch.device, passes: Passes, loss: object = None
) -> Iterator[Guard]:
    """Save the state common to all hosts, and restore it after the body.

    The body may push further callbacks to the yielded stack.

    Args:
        modules: The modules that hold this rank's weights.
        device: The device whose random generator is restored, beside the CPU's.
        passes: How the passes run.
        loss: The function of the loss, which may refer to modules and generators of its own.

    Raises:
        UnsupportedError: the caller has changed how torch computes.
    """
    refuse_context(device)
    with Guard(modules, device, passes, loss) as guard:
        guard.callback(guard.function.end)
        guard.callback(_drop_modes, _len_torch_function_stack())
        guard.callback(guard.random.set, guard.initial)
        for buffers in guard.buffers:
            guard.callback(buffers.restore)
        guard.callback(guard.state.restore)
        guard.callback(guard.attributes.restore)
        for module in modules:
            guard.enter_context(training_flags(module))
            if not passes.batch_statistics:
                normalise_by_running_statistics(module)
            if not passes.dropout:
                without_dropout(module, guard.attributes)
        guard.enter_context(torch.enable_grad())
        guard.enter_context(eager(modules))
        guard.enter_context(without_parameter_hooks(modules))
        guard.enter_context(unchanging_hooks(modules))
        if passes.precision == "fp32":
            guard.enter_context(full_fp32())
        yield guard
