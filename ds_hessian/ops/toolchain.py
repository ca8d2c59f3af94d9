"""Compile the kernels of `csrc/` into one extension module per backend.

Imports the standard library only: `setup.py` runs it where neither torch nor DeepSpeed is
installed, `cache.py` runs it at first use. The sources know nothing of torch, so the result serves
every torch version and is ready in seconds; half a dozen files need no build system.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# Neither flag changes a result: sqrt need not set errno, comparisons need not raise the FP flags.
# Products and sums are rounded one by one, as CUDA and the torch twins round them.
KERNELS = (
    *("-O3", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=off", "-Wno-psabi", "-pthread"),
)
BINDINGS = ("-O1",)  # compile time: a call converts a dozen integers
CUDA = ("-std=c++17", "-O3", "--fmad=false", "--expt-relaxed-constexpr", "-lineinfo")
DEFAULT_CUDA_ARCHS = ("8.0", "9.0")

Compile = tuple[tuple[str, ...], Path]  # a command without its input and output, and its source


class BuildError(Exception):
    """A build could not be made; the message says why and holds the compiler's own."""


@dataclass(frozen=True)
class Plan:
    """The commands that build one backend.

    Attributes:
        backend: "cpu" or "cuda".
        module: Name of the extension module.
        compiles: (command without its input and output, source) of each object file.
        link: Command without inputs and output.
        key: Hash of everything that the result depends on.
    """

    backend: str
    module: str
    compiles: tuple[Compile, ...]
    link: tuple[str, ...]
    key: str

    @property
    def filename(self) -> str:
        """The name of the extension's file on this interpreter."""
        return self.module + str(sysconfig.get_config_var("EXT_SUFFIX"))


def source_root() -> Path:
    """Return the `csrc` directory: in an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "contracts.h").is_file():
            return candidate
    raise BuildError(f"the kernels' sources (csrc) are neither in {package} nor beside it")


def find_compiler() -> str:
    """Return the C++ compiler: `CXX`, else the first of the usual names on the PATH."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if found := shutil.which(name):
            return found
    raise BuildError("no C++ compiler: none of $CXX, c++, g++, clang++ is on the PATH")


def find_nvcc() -> str:
    """Return the CUDA compiler: below `CUDA_HOME` or `CUDA_PATH`, else on the PATH."""
    for home in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))):
        if found := shutil.which(os.path.join(home, "bin", "nvcc")):
            return found
    if found := shutil.which("nvcc"):
        return found
    raise BuildError("no CUDA compiler: nvcc is neither below $CUDA_HOME nor on the PATH")


def find_pybind11() -> str:
    """Return the directory of pybind11's headers: the package's own, else torch's copy."""
    for package, below in (("pybind11", "include"), ("torch", "include")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            candidate = Path(spec.origin).parent / below
            if (candidate / "pybind11" / "pybind11.h").is_file():
                return str(candidate)
    raise BuildError("no pybind11 headers: install pybind11 (torch's copy was not found either)")


def version(compiler: str) -> str:
    """Return what a compiler says about itself."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} --version failed: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{compiler} --version failed: {(done.stdout + done.stderr).strip()}")
    return done.stdout


def _processor() -> str:
    """Return what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))})
    )


def plan_cpu() -> Plan:
    """Return the plan of the CPU backend. `DS_HESSIAN_MARCH` replaces `native`.

    Raises:
        BuildError: no compiler or no pybind11.
    """
    root, compiler = source_root(), find_compiler()
    march = os.environ.get("DS_HESSIAN_MARCH", "native")
    kernels = (compiler, *COMMON, *KERNELS, f"-march={march}", "-DDS_HESSIAN_BACKEND=cpu")
    compiles = _compiles(kernels, bindings(compiler, "cpu"), root, "cpu/*.cpp")
    versions = (version(compiler), _processor() if march == "native" else "")
    link = (compiler, "-shared", "-pthread")
    return _plan("cpu", compiles, link, root, versions)


def plan_cuda(archs: Sequence[str] = ()) -> Plan:
    """Return the plan of the CUDA backend for compute capabilities such as "9.0".

    `DS_HESSIAN_CUDA_ARCHS` ("8.0;9.0") comes first, then `archs`, then those that are supported.
    The newest one is also kept as PTX, for devices that are newer.

    Raises:
        BuildError: no nvcc, no compiler or no pybind11.
    """
    root, compiler, nvcc = source_root(), find_compiler(), find_nvcc()
    setting = os.environ.get("DS_HESSIAN_CUDA_ARCHS", "").replace(",", ";")
    chosen = [x.strip() for x in setting.split(";") if x.strip()] or list(archs)
    numbers = sorted({int(x.replace(".", "")) for x in chosen or DEFAULT_CUDA_ARCHS})
    targets = [f"-gencode=arch=compute_{x},code=sm_{x}" for x in numbers]
    targets.append(f"-gencode=arch=compute_{numbers[-1]},code=compute_{numbers[-1]}")
    host = ("-ccbin", compiler, "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall")
    kernels = (nvcc, *CUDA, *host, *targets, "-DDS_HESSIAN_BACKEND=cuda")
    compiles = _compiles(kernels, bindings(compiler, "cuda"), root, "cuda/*.cu")
    link = (nvcc, "-shared", "-ccbin", compiler, "-cudart=static")
    return _plan("cuda", compiles, link, root, (version(compiler), version(nvcc)))


def _compiles(
    kernels: tuple[str, ...], bindings: tuple[str, ...], root: Path, pattern: str
) -> list[Compile]:
    sources = sorted(root.glob(pattern))
    return [(bindings, root / "bindings.cpp"), *((kernels, source) for source in sources)]


def bindings(compiler: str, backend: str) -> tuple[str, ...]:
    """Return the command that compiles `bindings.cpp`."""
    defines = (
        *(f"-DDS_HESSIAN_BACKEND={backend}", f"-DDS_HESSIAN_{backend.upper()}"),
        f"-DDS_HESSIAN_MODULE=_native_{backend}",
    )
    includes = ("-isystem", find_pybind11(), "-isystem", sysconfig.get_path("include"))
    return (compiler, *COMMON, *BINDINGS, *defines, *includes)


def _plan(
    backend: str,
    compiles: Sequence[Compile],
    link: tuple[str, ...],
    root: Path,
    versions: Sequence[str],
) -> Plan:
    digest = hashlib.sha256()
    for text in (*versions, sys.version, *link, *(" ".join(command) for command, _ in compiles)):
        digest.update(text.encode() + b"\0")
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh")):
        digest.update(path.read_bytes() + b"\0")
    return Plan(backend, f"_native_{backend}", tuple(compiles), link, digest.hexdigest()[:16])


def build(plan: Plan, directory: Path, jobs: int | None = None) -> Path:
    """Compile and link `plan` inside `directory`; returns the path of the extension.

    Raises:
        BuildError: a command failed; the message is the command and what it printed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    objects = [directory / f"{i}_{source.name}.o" for i, (_, source) in enumerate(plan.compiles)]
    commands = [
        [*command, "-c", str(source), "-o", str(target)]
        for (command, source), target in zip(plan.compiles, objects, strict=True)
    ]
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        list(pool.map(_run, commands))
    built = directory / plan.filename
    _run([*plan.link, *map(str, objects), "-o", str(built)])
    return built


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        printed = (done.stdout + done.stderr).strip()
        raise BuildError(f"{' '.join(command)} failed ({done.returncode}):\n{printed}")
