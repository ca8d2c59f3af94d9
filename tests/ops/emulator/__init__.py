"""The CUDA sources of `csrc/cuda` as a module for the CPU: no GPU, no CUDA toolkit.

A block's threads run as fibers, one operating system thread in all; barriers, shuffles, shared
memory and asynchronous copies do what CUDA says they do, and no more: shared memory begins as NaN,
copies arrive when they are waited for, a lane that is missing at a shuffle, divergent barriers, a
deadlock and a launch that the device would refuse are errors. AddressSanitizer, UBSan and
ThreadSanitizer see the kernels' accesses. x86-64 only: switching fibers is a dozen instructions of
assembly.

Not covered: what nvcc makes of the sources (flags, registers, contraction), the memory model beyond
barriers, streams (all is synchronous), speed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from ds_hessian.ops import toolchain
from ds_hessian.ops.toolchain import Compile, Plan
from tests.ops import sanitized

HERE = Path(__file__).resolve().parent

FLAGS = (
    *("-std=c++17", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-ffp-contract=off", "-mfma"),
    *("-fno-strict-aliasing", "-g1", "-fno-omit-frame-pointer", "-DDS_HESSIAN_BACKEND=cuda"),
    "-DDS_HESSIAN_MAX_BLOCKS=16",  # so that a thread has many elements, as on large vectors
)
KINDS = {kind: (*flags, f"-DCUDASIM_{kind.upper()}") for kind, flags in sanitized.FLAGS.items()}

DEVICES = {
    "H100": {"SHARED_SM": 233472, "SHARED_BLOCK": 232448},
    "A100": {"SHARED_SM": 167936, "SHARED_BLOCK": 166912},
    "RTX 4090": {"SHARED_SM": 102400, "SHARED_BLOCK": 101376},
    "T4": {"SHARED_SM": 65536, "SHARED_BLOCK": 65536},
}
"""Shared memory of a multiprocessor and of a block, in bytes."""

ORDERS = {"forward": 0, "backward": 1, "shuffled": 2}
"""In which order the blocks of a grid and the threads of a block run."""


def environment(device: str = "H100", order: str = "forward", sms: int = 2) -> dict[str, str]:
    """Settings of the emulated device, as the emulator reads them before each launch."""
    settings = {**DEVICES[device], "ORDER": ORDERS[order], "SMS": sms}
    return {f"CUDASIM_{name}": str(value) for name, value in settings.items()}


def plan(kind: str, directory: Path, root: Path | None = None) -> Plan:
    """How the emulated module is built: "plain", or under the sanitizers "asan" or "tsan".

    The translated sources are written into `directory`, where they must be until it is built.
    `root` is another `csrc`.
    """
    root, compiler = root or toolchain.source_root(), toolchain.find_compiler()
    (directory / "cuda").mkdir(parents=True)
    for name in ("contracts.h", "probe_math.h"):
        shutil.copyfile(root / name, directory / name)
    digest = hashlib.sha256(repr((FLAGS, KINDS[kind], toolchain.version(compiler))).encode())
    for path in sorted([*root.rglob("*.*"), *HERE.rglob("*.*")]):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh", ".py"):
            digest.update(path.read_bytes() + b"\0")
    sources = list[Path]()
    for path in sorted((root / "cuda").iterdir()):
        target = directory / "cuda" / path.name
        target.write_text(f'#line 1 "{path}"\n{translate(path.read_text())}')
        if path.suffix == ".cu":
            sources.append(target)
    flags = (compiler, *FLAGS, *KINDS[kind], f"-I{HERE / 'shim'}")
    compiles: list[Compile] = [
        ((*flags, "-x", "c++"), source) for source in [*sources, HERE / "copies.cpp"]
    ]
    unseen = tuple(flag for flag in flags if "sanitize" not in flag)  # the machinery itself
    compiles.append((unseen, HERE / "emulator.cpp"))
    compiles.append((toolchain.bindings(compiler, "cuda"), root / "bindings.cpp"))
    link = (compiler, "-shared", *sanitized.linked(KINDS[kind]))
    key = digest.hexdigest()[:16]
    return Plan(f"emulated-{kind}", "_native_cuda", tuple(compiles), link, key)


def translate(text: str) -> str:
    """The two things that a header cannot give C++: launches and shared variables. Line for line.

    Raises:
        ValueError: one of them was not understood.
    """
    while (at := text.find("<<<")) >= 0:
        text = _closure(text, at)
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];",
        r"\1* \2 = static_cast<\1*>(cudasim::shared_dynamic());",
        text,
    )
    text = re.sub(
        r"__shared__ (\w+) (\w+)((?:\[[^\]]*\])+);",
        r"static char \2_tag; \1 (&\2)\3 = *static_cast<\1 (*)\3>("
        r"cudasim::shared_static(&\2_tag, sizeof(\1\3), alignof(\1)));",
        text,
    )
    if re.search(r"\b__shared__\b", text):
        raise ValueError("a shared variable was not translated")
    return text


def _closure(text: str, at: int) -> str:
    """The launch whose `<<<` is at `at` as a call of `cudasim::launch` with a closure."""
    kernel = re.search(r"[\w:]+(?:<[^<>;]*>)?\s*$", text[:at])
    if kernel is None:
        raise ValueError(f"no kernel before a launch: {text[at - 40 : at]!r}")
    middle = text.index(">>>", at)
    opening = text.index("(", middle)
    end, depth = opening + 1, 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    call = (
        f"cudasim::launch(cudasim::Config({text[at + 3 : middle]}), [&] {{ "
        f"{kernel.group().strip()}({text[opening + 1 : end - 1]}); }}, CUDASIM_SITE)"
    )
    lines = text[kernel.start() : end].count("\n") - call.count("\n")
    return text[: kernel.start()] + call + "\n" * lines + text[end:]
