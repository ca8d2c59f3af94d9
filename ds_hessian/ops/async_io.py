"""DeepSpeed's asynchronous IO (`async_io`), where it is built; found, never built.

Building it takes minutes and needs libaio's headers: a measurement that began so would look as if
it hung. It counts as built where the job has loaded it (NVMe offload does), where DeepSpeed was
installed with it (`DS_BUILD_AIO=1`), or where torch's cache of just-in-time builds has it, newer
than its sources and than the torch it was compiled against (ninja is asked).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ds_hessian.errors import KernelError

SETTING = "DS_HESSIAN_AIO"
"""Environment: `auto` (where it is built), `on` (or an error), `off`."""

NAMES = ("pin_memory", "async_io")
"""Ops in the order in which they are loaded: the second takes symbols of the first."""


def find() -> tuple[ModuleType | None, str]:
    """Return the op, or None, and its source, or the reason why it is not used.

    Raises:
        KernelError: `DS_HESSIAN_AIO` is no setting, or `on` and the op is not built.
    """
    setting = os.environ.get(SETTING, "auto")
    if setting not in ("auto", "on", "off"):
        raise KernelError(f'{SETTING} must be "auto", "on" or "off", got {setting!r}')
    if setting == "off":
        return None, f"{SETTING}=off"
    module, reason = _built()
    if module is None and setting == "on":
        raise KernelError(f"{SETTING}=on, and {reason}")
    return module, reason


@lru_cache(maxsize=1)
def _built() -> tuple[ModuleType | None, str]:
    if sys.platform != "linux":
        return None, "asynchronous IO is Linux's"
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder

    loaded: dict[str, Any] = OpBuilder._loaded_ops
    if NAMES[1] in loaded:
        return loaded[NAMES[1]], "loaded by the job"
    try:
        if installed_ops.get(NAMES[1]) and accelerator_name == get_accelerator()._name:
            return AsyncIOBuilder().load(verbose=False), "installed with DeepSpeed"
        return _cached()
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"async_io is built but cannot be loaded: {error}"


def _cached() -> tuple[ModuleType | None, str]:
    """Load the op from torch's cache; torch itself would build what is out of date."""
    from torch.utils import cpp_extension

    ninja, found = shutil.which("ninja", path=_path()), list[ModuleType]()
    for name in NAMES:
        folder = Path(cpp_extension._get_build_directory(name, False))
        if not (folder / f"{name}.so").is_file() or ninja is None:
            return None, f"{name} of DeepSpeed is not built: install libaio's headers and build it"
        dry = subprocess.run([ninja, "-n"], cwd=folder, capture_output=True, text=True)
        if dry.returncode or "no work to do" not in dry.stdout:
            return None, f"{name} of DeepSpeed was built for other versions: build it again"
        found.append(cpp_extension._import_module_from_library(name, str(folder), True))
        ctypes.CDLL(found[-1].__file__, mode=ctypes.RTLD_GLOBAL)
    return found[-1], "from torch's cache of builds"


def _path() -> str:
    """Return where ninja is searched: also beside this interpreter, whose environment may not be
    active.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
