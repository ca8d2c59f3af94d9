"""Builds of the kernels that a sanitizer watches, where DS_HESSIAN_SANITIZER asks for one.

`asan` is AddressSanitizer with UBSan, `tsan` ThreadSanitizer; its libraries must be in LD_PRELOAD.
`plain` is none.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

from ds_hessian.ops import toolchain
from ds_hessian.ops.toolchain import Plan

FLAGS = {
    "plain": ("-O2",),
    "asan": ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize=vptr"),
    "tsan": ("-O1", "-g1", "-fsanitize=thread"),
}


def kind() -> str:
    """What the environment asks for."""
    return os.environ.get("DS_HESSIAN_SANITIZER", "plain")


def linked(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a compiler's flags that the link needs too."""
    return tuple(flag for flag in flags if flag.startswith("-fsanitize"))


def plan_cpu(kind: str) -> Plan:
    """How the CPU's kernels are built under a sanitizer; the bindings are not watched."""
    plan, flags = toolchain.plan_cpu(), FLAGS[kind]
    compiles = tuple(
        (command if source.name == "bindings.cpp" else (*command, *flags), source)
        for command, source in plan.compiles
    )
    key = hashlib.sha256(repr((plan.key, flags)).encode()).hexdigest()[:16]
    link = (*plan.link, *linked(flags))
    return replace(plan, backend=f"cpu-{kind}", compiles=compiles, link=link, key=key)
