"""What `setup.py` needs to build the kernels ahead of time; imports neither torch nor DeepSpeed.

    import runpy
    setup(..., **runpy.run_path("ds_hessian/ops/build_ext.py")["setup_arguments"]())

The sources always travel with the package, for just-in-time builds. With `DS_HESSIAN_BUILD_OPS=1`
the CPU kernels are built too, and the CUDA kernels where nvcc is; without nvcc that is said and the
CPU kernels stand alone. A machine-independent binary: `DS_HESSIAN_MARCH=x86-64-v3`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py


def _load_toolchain() -> ModuleType:
    """`toolchain.py` by its path: importing the package would import torch."""
    path = Path(__file__).resolve().with_name("toolchain.py")
    spec = importlib.util.spec_from_file_location("ds_hessian_toolchain", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class BuildSources(build_py):
    """Copies `csrc` into the package, where `toolchain.source_root` finds it."""

    def run(self) -> None:
        """Build the package, then add the sources."""
        super().run()
        if getattr(self, "editable_mode", False):
            return  # the checkout's csrc is beside the package
        root = _load_toolchain().source_root()
        target = Path(self.build_lib) / "ds_hessian" / "csrc"
        shutil.copytree(root, target, dirs_exist_ok=True)


class BuildKernels(build_ext):
    """Builds the extensions with the commands of a just-in-time build."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link one backend to where setuptools expects it.

        Raises:
            RuntimeError: a command failed; the message is the compiler's.
        """
        toolchain = _load_toolchain()
        kind = ext.name.rsplit("_", 1)[-1]
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            plan = toolchain.plan_cpu() if kind == "cpu" else toolchain.plan_cuda()
            built = toolchain.build(plan, Path(self.build_temp).resolve() / f"{kind}-{plan.key}")
        except toolchain.BuildError as error:
            raise RuntimeError(f"building the {kind} kernels failed: {error}") from error
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, target)


def setup_arguments() -> dict[str, Any]:
    """Keyword arguments for `setuptools.setup`: the commands, and the extensions if wanted."""
    arguments: dict[str, Any] = {"cmdclass": {"build_py": BuildSources, "build_ext": BuildKernels}}
    if os.environ.get("DS_HESSIAN_BUILD_OPS", "0") != "1":
        return arguments
    toolchain = _load_toolchain()
    kinds = ["cpu"]
    try:
        toolchain.find_nvcc()
        kinds.append("cuda")
    except toolchain.BuildError as error:
        sys.stderr.write(f"ds_hessian: no CUDA kernels: {error}\n")
    arguments["ext_modules"] = [Extension(f"ds_hessian.ops._native_{k}", []) for k in kinds]
    return arguments
