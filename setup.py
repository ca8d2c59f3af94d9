"""The kernels' part of the packaging; pyproject.toml has the rest.

The kernels' sources always travel with the package, for just-in-time builds. With
`DS_HESSIAN_BUILD_OPS=1` the CPU kernels are built too, and the CUDA kernels where nvcc is. A
machine-independent binary: `DS_HESSIAN_MARCH=x86-64-v3`.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

PREFIX = "ds_hessian.ops._native_"


def load_toolchain() -> ModuleType:
    """`toolchain.py` by its path: importing the package would import torch."""
    path = Path(__file__).resolve().parent / "ds_hessian" / "ops" / "toolchain.py"
    spec = importlib.util.spec_from_file_location("ds_hessian_toolchain", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


toolchain = load_toolchain()


class BuildSources(build_py):
    """Copies `csrc` into the package, where `toolchain.source_root` finds it."""

    def run(self) -> None:
        """Build the package, then add the sources."""
        super().run()
        if not getattr(self, "editable_mode", False):  # else the checkout's are beside the package
            target = Path(self.build_lib) / "ds_hessian" / "csrc"
            shutil.copytree(toolchain.source_root(), target, dirs_exist_ok=True)


class BuildKernels(build_ext):
    """Builds the extensions with the commands of a just-in-time build."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link one backend to where setuptools expects it."""
        kind = ext.name.removeprefix(PREFIX)
        plan = toolchain.plan_cpu() if kind == "cpu" else toolchain.plan_cuda()
        built = toolchain.build(plan, Path(self.build_temp).resolve() / f"{kind}-{plan.key}")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, target)


def extensions() -> list[Extension]:
    """What is built ahead of time."""
    if os.environ.get("DS_HESSIAN_BUILD_OPS", "0") != "1":
        return []
    kinds = ["cpu"]
    try:
        toolchain.find_nvcc()
        kinds.append("cuda")
    except toolchain.BuildError as error:
        sys.stderr.write(f"ds_hessian: no CUDA kernels: {error}\n")
    return [Extension(PREFIX + kind, []) for kind in kinds]


setup(cmdclass={"build_py": BuildSources, "build_ext": BuildKernels}, ext_modules=extensions())
