"""The kernels in the form of a DeepSpeed op builder, so that DeepSpeed's own tools list them.

DeepSpeed's `jit_load` compiles against torch and takes about a minute; these sources are free of
torch, so the builder keeps DeepSpeed's interface and loads through `native.py` instead.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ds_hessian.errors import KernelError
from ds_hessian.ops import native, toolchain


def deepspeed_builder(kind: str = "cpu") -> Any:
    """An instance of a `deepspeed.ops.op_builder.builder.OpBuilder` for "cpu" or "cuda".

    `all_ops.ALL_OPS[builder.name] = builder` makes `deepspeed.env_report.op_report()` list it.

    Raises:
        ImportError: DeepSpeed is not installed; `ops.report()` and `native.find` need no DeepSpeed.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    class HessianOpsBuilder(OpBuilder):
        BUILD_VAR = "DS_HESSIAN_BUILD_OPS"
        NAME = f"ds_hessian_{kind}"

        def __init__(self) -> None:
            super().__init__(name=self.NAME)

        def absolute_name(self) -> str:
            return f"ds_hessian.ops._native_{kind}"

        def sources(self) -> list[str]:
            return [str(source) for _, source in native.plan(kind).compiles]

        def include_paths(self) -> list[str]:
            return [str(toolchain.source_root())]

        def is_compatible(self, verbose: bool = False) -> bool:
            try:
                native.plan(kind)
            except toolchain.BuildError as error:
                if verbose:
                    self.warning(f"{self.NAME}: {error}")
                return False
            return bool(super().is_compatible(verbose))

        def builder(self) -> Any:
            raise NotImplementedError("ds_hessian's setup.py builds this op; DeepSpeed's cannot")

        def load(self, verbose: bool = True) -> ModuleType:
            found = native.find(kind)
            if found.module is None:
                raise KernelError(f"{self.NAME}: {found.reason}\n{found.log}".rstrip())
            return found.module

        def jit_load(self, verbose: bool = True) -> ModuleType:
            return self.load(verbose)

    return HessianOpsBuilder()
