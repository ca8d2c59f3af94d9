"""A report of the implementation on each kind of device, with the reason; like `ds_report`."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ds_hessian.errors import KernelError
from ds_hessian.ops import cache, native
from ds_hessian.ops.native import Implementation


@dataclass(frozen=True)
class OpsReport:
    """The report of `report()`; `str()` of it is for people.

    Attributes:
        mode: The setting in force: auto, native or torch.
        implementations: One per kind of device.
        threads: Threads that a CPU kernel uses.
        cache: Where just-in-time builds are kept.
    """

    mode: str
    implementations: tuple[Implementation, ...]
    threads: int
    cache: str

    def __getitem__(self, device: str) -> Implementation:
        """Return the implementation for a kind of device, such as "cpu".

        Raises:
            KeyError: the report does not cover this kind.
        """
        for found in self.implementations:
            if found.device == device:
                return found
        raise KeyError(device)

    def __str__(self) -> str:
        """Return a table, and under it what the compiler said where it failed."""
        lines = [f"ds_hessian kernels (DS_HESSIAN_OPS={self.mode}, {self.threads} CPU threads)"]
        for found in self.implementations:
            lines.append(f"  {found.device:<6}{found.name:<8}{found.reason}")
            lines += [f"         | {line}" for line in found.log.splitlines()]
        lines.append(f"  cache of just-in-time builds: {self.cache}")
        return "\n".join(lines)


def report() -> OpsReport:
    """Return the implementation for the CPU and for CUDA devices; builds what is not built yet."""
    kinds = ["cpu"]
    found = []
    if torch.cuda.is_available():
        kinds.append("cuda")
    for kind in kinds:
        try:
            found.append(native.find(kind))
        except KernelError as error:  # DS_HESSIAN_OPS=native and none: a report says so
            first, _, rest = str(error).partition("\n")
            found.append(Implementation(kind, "none", first, log=rest))
    if "cuda" not in kinds:
        found.append(Implementation("cuda", "none", "torch sees no CUDA device"))
    return OpsReport(native.mode(), tuple(found), torch.get_num_threads(), _cache())


def _cache() -> str:
    path = str(cache.root())
    home = os.path.expanduser("~")
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path
