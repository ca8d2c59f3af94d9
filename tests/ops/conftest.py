"""The devices that the kernels are tested on, the emulated one among them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from ds_hessian.ops import native
from tests.ops import emulator

DEVICES = [
    "cpu",
    "emulated",
    *(
        pytest.param(f"emulated {name} {order}", marks=pytest.mark.full)
        for name, order in (("A100", "backward"), ("RTX 4090", "shuffled"), ("T4", "shuffled"))
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ],
    ),
]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The CUDA kernels as a module for the CPU. DS_HESSIAN_EMULATOR: asan or tsan."""
    if platform.machine() != "x86_64":
        pytest.skip("the emulator switches fibers in x86-64 assembly")
    kind = os.environ.get("DS_HESSIAN_EMULATOR", "plain")
    return native.load(emulator.plan(kind, tmp_path_factory.mktemp("emulator") / "csrc"))[0]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The torch device; on "emulated" the CUDA kernels are handed tensors of the CPU.

    What torch allocates begins as NaN, so that what a kernel does not write shows.
    """
    name, *rest = request.param.split(" ")
    if name == "emulated":
        found = native.Implementation(
            "cpu", "native", "emulated", request.getfixturevalue("emulated")
        )
        monkeypatch.setitem(native._known, ("cpu", "auto"), found)
        described = {"device": " ".join(rest[:-1]), "order": rest[-1]} if rest else {}
        for key, value in emulator.environment(**described).items():
            monkeypatch.setenv(key, value)
        name = "cpu"
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield name
    torch.use_deterministic_algorithms(False)
