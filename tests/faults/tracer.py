"""Enumerates the calls that ds_hessian makes on a rank, and raises an error in place of one."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch

import ds_hessian
from ds_hessian.ranks.agreement import active
from ds_hessian.ranks.lockstep import Lockstep

HOME = str(Path(ds_hessian.__file__).parent)
MACHINERY = tuple(
    f"{HOME}/ranks/{name}.py"
    for name in (
        *("lockstep", "log", "following", "collectives", "interrupts", "passes", "calls"),
        "between",
    )
)
"""What brings the ranks together, which is not failed itself."""

KERNELS = f"{HOME}/ops/"
PLUMBING = ("contextlib.py", "functools.py", "dataclasses.py", "enum.py", "typing.py", "abc.py")
"""Files of Python's library whose calls are not calls of anything."""

WITHIN_C = ("torch/storage.py",)
"""Files whose functions safetensors' Rust code calls while it reads; it replaces their errors."""

KINDS: dict[str, type[BaseException]] = {
    error.__name__: error for error in (MemoryError, RuntimeError, OSError, KeyboardInterrupt)
}


class Site(NamedTuple):
    """A call: where it is made, what is called, and in which phase of a measurement.

    Attributes:
        phase: "outside" of a lockstep, "around" the measurement of a call, "inside" of it, or
            "restoring" the training state.
    """

    phase: str
    file: str
    line: int
    callee: str


class Tracer:
    """A context manager that counts the calls of this thread, or fails one of them.

    Args:
        fault: `(site, number, kind)` of the call that fails; None to count.

    Attributes:
        sites: How often each was called.
        raised: Whether the fault was.
    """

    def __init__(self, fault: tuple[Site, int, str] | None = None) -> None:
        self.sites: Counter[Site] = Counter()
        self.fault, self.raised = fault, False

    def __enter__(self) -> Tracer:
        sys.setprofile(self._see)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            caller, callee = frame.f_back, frame.f_code
            if caller is None or not _ours(caller):
                return
            if callee.co_filename.startswith(HOME) and not _kernel(callee.co_filename, caller):
                return
            if callee.co_filename.endswith(PLUMBING + WITHIN_C):
                return
            self._count(caller, callee.co_name)
        elif event == "c_call" and _ours(frame) and _does_something(argument):
            self._count(frame, argument.__name__)

    def _count(self, caller: FrameType, callee: str) -> None:
        file = caller.f_code.co_filename.removeprefix(HOME)
        site = Site(_phase(), file, caller.f_lineno, callee)
        self.sites[site] += 1
        if self.fault is None or self.raised:
            return
        where, number, kind = self.fault
        if site == where and self.sites[site] == number:
            self.raised = True
            sys.setprofile(None)
            raise KINDS[kind]("injected")


def _ours(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(HOME) and not name.startswith(MACHINERY)


def _kernel(file: str, caller: FrameType) -> bool:
    return file.startswith(KERNELS) and not caller.f_code.co_filename.startswith(KERNELS)


def _does_something(function: Any) -> bool:
    """Whether a builtin allocates, computes, reads or writes, and is not Python's plumbing."""
    owner, module = getattr(function, "__self__", None), getattr(function, "__module__", None) or ""
    return (
        isinstance(owner, torch.Tensor)
        or module.startswith(("torch", "posix", "_io", "io"))
        or type(owner).__module__ in ("_io", "ds_hessian._C")
        or getattr(owner, "__name__", "") in ("posix", "torch", "torch._C")
    )


def _phase() -> str:
    follower = active.follower
    if not isinstance(follower, Lockstep):
        return "outside"
    if follower.restoring:
        return "restoring"
    return "inside" if isinstance(follower.outer, Lockstep) else "around"
