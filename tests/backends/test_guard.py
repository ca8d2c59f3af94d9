"""What the guard puts back, piece by piece."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from ds_hessian.backends.guard import (
    Attributes,
    Buffers,
    eager,
    full_fp32,
    training_flags,
)
from ds_hessian.backends.random_states import RandomState


def draws() -> list[float]:
    """A number of each library's generator."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_each_library_draws_again_what_it_drew() -> None:
    own = torch.Generator().manual_seed(3)
    state = RandomState(torch.device("cpu"), ((own.get_state, own.set_state),))
    before = state.get()
    first = [*draws(), float(torch.rand((), generator=own))]
    state.set(before)
    assert [*draws(), float(torch.rand((), generator=own))] == first


def test_modules_that_have_compiled_themselves_run_eagerly() -> None:
    module = nn.Sequential(nn.Linear(3, 3))

    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x

    module[0]._compiled_call_impl = compiled  # as `module.compile()` sets it
    with eager([module]):
        assert module(torch.ones(3)).requires_grad
    assert module[0]._compiled_call_impl is compiled


def test_buffers_have_their_contents_and_their_tensors_again() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    kept = {name: (tensor, tensor.clone()) for name, tensor in module.named_buffers()}
    buffers = Buffers(module)
    for training_pass in range(2):  # each begins with the buffers as they were
        buffers.renew()
        for name, tensor in module.named_buffers():
            assert torch.equal(tensor, kept[name][1]), (name, training_pass)
        module(torch.randn(8, 3))
    assert module[0].running_mean.any()
    kept["0.running_var"][0].fill_(7.0)  # written in place, as by a captured graph
    buffers.restore()
    for name, tensor in module.named_buffers():
        assert tensor is kept[name][0] and torch.equal(tensor, kept[name][1]), name


def test_every_submodule_has_its_own_mode_again() -> None:
    """A model in train mode keeps the submodules that are in eval mode; one in eval mode trains."""
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Dropout()))
    module[1][0].eval()
    for mode in (True, False):
        module.training = mode
        flags = [m.training for m in module.modules()]
        with training_flags(module):
            inside = [m.training for m in module.modules()]
            assert inside == (flags if mode else [True] * len(flags))
        assert [m.training for m in module.modules()] == flags


def test_attributes_are_what_they_were_or_gone() -> None:
    owner, attributes = SimpleNamespace(a=1, b=2), Attributes()
    attributes.set(owner, "a", 10)
    attributes.set(owner, "a", 11)
    attributes.set(owner, "new", 12)
    attributes.keep(owner, "b", "absent")
    owner.b, owner.absent = 20, 30
    attributes.restore()
    assert vars(owner) == {"a": 1, "b": 2}


def test_fp32_means_fp32_and_the_switches_return() -> None:
    matmul, others = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = matmul.fp32_precision, others.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with full_fp32():
            assert (matmul.fp32_precision, others.fp32_precision) == ("ieee", "ieee")
            assert not matmul.allow_tf32
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before[0]
    assert (matmul.fp32_precision, others.fp32_precision) == before


def test_a_zero_of_a_buffer_has_its_sign_again() -> None:
    """Both zeros compare equal."""
    module = nn.Module()
    module.register_buffer("kept", torch.tensor([-0.0, 1.0]))
    buffers = Buffers(module)
    module.kept.abs_()
    buffers.restore()
    assert torch.signbit(module.kept)[0]
