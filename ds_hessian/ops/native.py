"""The choice of an implementation for a device: the compiled kernels, or the torch twins.

For each kind of device, in this order: a module built ahead of time beside this file, a module
built just in time before (by these sources, this compiler and these flags), a build now. What
cannot be had is said once in the log, with the compiler's message, and stays in the report.

Settings, read from the environment: `DS_HESSIAN_OPS` is `auto` (default), `native` (the lack of a
compiled kernel is an error) or `torch` (twins only); `DS_HESSIAN_CACHE_DIR` is where just-in-time
builds are kept.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType

import torch

from ds_hessian.errors import ConfigError, KernelError
from ds_hessian.ops import cache, toolchain

logger = logging.getLogger(__name__)

MODES = ("auto", "native", "torch")
NATIVE_KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Implementation:
    """The implementation that runs on one kind of device.

    Attributes:
        device: Kind of device, as in `torch.device.type`.
        name: "native" or "torch".
        reason: Why: where the module is and how it came to be, or what is missing.
        module: The compiled module; None for "torch".
        log: The compiler's message where a build failed.
    """

    device: str
    name: str
    reason: str
    module: ModuleType | None = None
    log: str = ""


_forced: ContextVar[str | None] = ContextVar("ds_hessian_ops_mode", default=None)
_lock = threading.Lock()
_known: dict[tuple[str, str], Implementation] = {}


def mode() -> str:
    """Return the setting in force: `auto`, `native` or `torch`.

    Raises:
        ConfigError: DS_HESSIAN_OPS is none of them.
    """
    value = _forced.get() or os.environ.get("DS_HESSIAN_OPS", "auto")
    if value not in MODES:
        raise ConfigError(f"DS_HESSIAN_OPS must be one of {', '.join(MODES)}; it is {value!r}")
    return value


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Let `name` (auto, native or torch) replace DS_HESSIAN_OPS within this context."""
    if name not in MODES:
        raise ConfigError(f"an implementation is one of {', '.join(MODES)}; this is {name!r}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def find(kind: str) -> Implementation:
    """Return the implementation for a kind of device; builds at the first call.

    Raises:
        KernelError: the mode is `native` and there is no compiled kernel.
    """
    setting = mode()
    found = _known.get((kind, setting))
    if found is not None:
        return found
    with _lock:
        found = _known.get((kind, setting)) or _choose(kind, setting)
        _known[kind, setting] = found
    return found


def prepare(kind: str) -> None:
    """Build the kernels for a kind of device now, if none are built: a build takes as long as a
    compiler, and belongs into no collective and under no clock.

    What cannot be had is said by the first call that needs it, where ranks are together.
    """
    with suppress(Exception):
        find(kind)


def forget() -> None:
    """Choose again at the next call: after a change of the environment or of the sources."""
    with _lock:
        _known.clear()


def _choose(kind: str, setting: str) -> Implementation:
    if setting == "torch":
        return Implementation(kind, "torch", "chosen by DS_HESSIAN_OPS=torch")
    other = _known.get((kind, "native" if setting == "auto" else "auto"))
    found = other or _load(kind)
    if found.module is not None:
        return found
    if setting == "native":
        raise KernelError(
            f"DS_HESSIAN_OPS=native, but there is no compiled kernel for {kind}: {found.reason}; "
            f"mend that, or set DS_HESSIAN_OPS=auto to run the torch twins\n{found.log}".rstrip()
        )
    if other is None and os.environ.get("RANK", "0") == "0":  # one message for people, not N
        logger.warning(
            "no compiled kernels for %s, running the slower torch twins: %s%s",
            kind,
            found.reason,
            f"\n{found.log}" if found.log else "",
        )
    return found


def _load(kind: str) -> Implementation:
    if kind not in NATIVE_KINDS:
        return Implementation(kind, "torch", f"there are no compiled kernels for {kind} devices")
    if kind == "cuda" and getattr(torch.version, "hip", None):
        return Implementation(kind, "torch", "the CUDA kernels are not ported to ROCm")
    prebuilt_reason = ""
    prebuilt = importlib.util.find_spec(f"ds_hessian.ops._native_{kind}")
    if prebuilt is not None:
        try:
            module = importlib.import_module(f"ds_hessian.ops._native_{kind}")
            _require_processor(module)
            return Implementation(kind, "native", f"built ahead of time: {prebuilt.origin}", module)
        except (ImportError, toolchain.BuildError) as error:
            prebuilt_reason = f"the module built ahead of time does not load ({error}); "
    try:
        module, reason = load(plan(kind))
    except toolchain.BuildError as error:
        first, _, rest = str(error).partition("\n")
        return Implementation(kind, "torch", prebuilt_reason + _short(first), log=rest)
    except (ImportError, OSError) as error:
        return Implementation(kind, "torch", f"{prebuilt_reason}{type(error).__name__}: {error}")
    return Implementation(kind, "native", prebuilt_reason + reason, module)


def _short(line: str) -> str:
    """Return a failed command without its dozens of flags."""
    words = line.split()
    if len(words) < 8 or "failed" not in line:
        return line
    return f"{words[0]} ... {' '.join(words[-2:])}"


def _require_processor(module: ModuleType) -> None:
    missing = module.missing_feature()
    if missing:
        raise toolchain.BuildError(f"it needs the instructions {missing}, which this CPU lacks")


def plan(kind: str) -> toolchain.Plan:
    """Return how the kernels for this kind of device are built here.

    Raises:
        BuildError: something that the build needs is missing.
    """
    if kind == "cpu":
        return toolchain.plan_cpu()
    archs = set[str]()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            archs.add("{}.{}".format(*torch.cuda.get_device_capability(index)))
    return toolchain.plan_cuda(sorted(archs))


def load(made: toolchain.Plan) -> tuple[ModuleType, str]:
    """Return the extension of a plan, from the cache or built now, and how it was obtained.

    Raises:
        BuildError: the build failed, or this processor lacks instructions that the module uses.
        ImportError: the module does not load.
        OSError: the cache cannot be written.
    """
    target, reason = cache.obtain(made)
    loader = importlib.machinery.ExtensionFileLoader(made.module, str(target))
    spec = importlib.util.spec_from_file_location(made.module, target, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    _require_processor(module)
    return module, reason
