"""The devices that the kernels are tested on, the emulated one among them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from ds_hessian.ops import native
from tests.ops import emulator, sanitized

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
    """The CUDA kernels as a module for the CPU."""
    if platform.machine() != "x86_64":
        pytest.skip("the emulator switches fibers in x86-64 assembly")
    csrc = tmp_path_factory.mktemp("emulator") / "csrc"
    return native.load(emulator.plan(sanitized.kind(), csrc))[0]


@pytest.fixture(scope="session", autouse=True)
def watched() -> None:
    """Under a sanitizer the CPU's kernels, too, are a build that it watches."""
    if (kind := sanitized.kind()) != "plain":
        module = native.load(sanitized.plan_cpu(kind))[0]
        native._known["cpu", "auto"] = native.Implementation("cpu", "native", kind, module)


@pytest.fixture
def emulate(emulated: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`emulate(device=, order=, sms=)`: from now on the CUDA kernels run, on tensors of the CPU."""
    found = native.Implementation("cpu", "native", "emulated", emulated)

    def start(**described: str | int) -> None:
        monkeypatch.setitem(native._known, ("cpu", "auto"), found)
        for key, value in emulator.environment(**described).items():
            monkeypatch.setenv(key, value)

    return start


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The torch device; on "emulated" the CUDA kernels are handed tensors of the CPU.

    What torch allocates begins as NaN, so that what a kernel does not write shows.
    """
    name, *rest = request.param.split(" ")
    if name == "emulated":
        described = {"device": " ".join(rest[:-1]), "order": rest[-1]} if rest else {}
        request.getfixturevalue("emulate")(**described)
        name = "cpu"
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield name
    torch.use_deterministic_algorithms(False)
