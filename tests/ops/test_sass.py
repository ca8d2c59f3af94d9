"""What nvcc makes of the kernels, read in their machine code: no GPU is needed.

nvdisasm comes with the CUDA toolkit, and as the package nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from ds_hessian.ops import toolchain

pytestmark = pytest.mark.full

REGISTERS = 65536  # of a multiprocessor, on every architecture from sm_80 on
SIZES = {"float": 4, "bf16": 2, "fp16": 2}
FUSED = [
    *(f"fused_kernel<{rows},float>" for rows in (2, 4, 8, 16, 27)),
    *(f"fused_kernel<{rows},bf16>" for rows in (2, 4, 8, 16, 32)),
]

Instructions = list[tuple[str, str]]  # (opcode or label, operands)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, without namespaces in its name: `stream_kernel<Normalize<bf16>>`."""

    name: str
    registers: int
    spilled: int  # bytes of stores and loads
    code: Instructions

    def loops(self) -> list[Counter[str]]:
        """How often each opcode is in each loop, loops in loops too; the shortest come first.

        A loop is what is between a label and a branch back to it.
        """
        places = {opcode: k for k, (opcode, _) in enumerate(self.code) if opcode[0] == "."}
        ends = dict[int, int]()
        for k, (opcode, operands) in enumerate(self.code):
            label = re.search(r"\.L_x_\d+", operands)
            if opcode.startswith("BRA") and label and places[label[0]] < k:
                ends[places[label[0]]] = k
        spans = sorted(ends.items(), key=lambda span: span[1] - span[0])
        return [Counter(opcode for opcode, _ in self.code[a:b]) for a, b in spans]

    def loop(self, opcode: str) -> Counter[str]:
        """The shortest loop with an opcode that begins with `opcode`."""
        return next(loop for loop in self.loops() if count(loop, opcode))


def count(opcodes: Counter[str], begins: str, ends: str = "") -> int:
    """Instructions whose opcode begins and goes on so: `LDG`, `.128`."""
    return sum(n for x, n in opcodes.items() if x.startswith(begins) and ends in x)


def find_nvdisasm() -> str:
    """Beside nvcc, on the PATH, or in a package."""
    beside = Path(toolchain.find_nvcc()).resolve().parent / "nvdisasm"
    packages = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"))
    for place in (beside, "nvdisasm", *packages):
        if found := shutil.which(place):
            return found
    raise toolchain.BuildError("no nvdisasm: neither beside nvcc, on the PATH nor as a package")


def printed(command: list[str]) -> str:
    """What a command says."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def plain(name: str) -> str:
    """A kernel's name without namespaces, arguments and the spaces between brackets."""
    name = re.sub(r"\(anonymous namespace\)::|\w+::|^void ", "", name)
    return re.sub(r"\s+(?=>)", "", name.partition("(")[0]).replace(", ", ",")


def compiled(source: Path, arch: str, folder: Path) -> list[Kernel]:
    """The kernels of one file, by the flags of the build."""
    cubin = folder / f"{source.stem}.cubin"
    target = (f"-arch={arch}", "-cubin", "-Xptxas=-v", "-DDS_HESSIAN_BACKEND=cuda")
    command = [toolchain.find_nvcc(), *toolchain.CUDA, "-ccbin", toolchain.find_compiler()]
    said = printed([*command, *target, str(source), "-o", str(cubin)])
    figure = re.compile(
        r"entry function '(\w+)'[\s\S]*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r"[\s\S]*?Used (\d+) registers"
    )
    figures = {x[1]: (int(x[4]), int(x[2]) + int(x[3])) for x in figure.finditer(said)}
    code = dict[str, Instructions]()
    current: Instructions = []
    for line in printed([find_nvdisasm(), "-c", str(cubin)]).splitlines():
        if match := re.match(r"\.text\.(\S+):$", line):
            current = code.setdefault(match[1], [])
        elif match := re.match(r"(\.L_x_\d+):$", line):
            current.append((match[1], ""))
        elif match := re.match(r"\s+/\*\w+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);", line):
            current.append((match[1], match[2]))
    names = printed(["c++filt", *code]).splitlines()
    return [
        Kernel(plain(readable), *figures[name], code[name])
        for name, readable in zip(code, names, strict=True)
    ]


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def kernels(request, tmp_path_factory) -> dict[str, Kernel]:
    """All kernels of an architecture by name."""
    try:
        find_nvdisasm()
        toolchain.find_compiler()
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    if shutil.which("c++filt") is None:
        pytest.skip("no c++filt (binutils)")
    sources = sorted((toolchain.source_root() / "cuda").glob("*.cu"))
    folder = tmp_path_factory.mktemp(request.param)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        files = pool.map(lambda source: compiled(source, request.param, folder), sources)
        found = [kernel for file in files for kernel in file]
    return {kernel.name: kernel for kernel in found}


def resident(name: str) -> tuple[int, int]:
    """Threads of a block, and blocks that are to share a multiprocessor."""
    if match := re.match(r"fused_kernel<(\d+)", name):
        return 512, 2 if int(match[1]) <= 8 else 1
    if name.startswith("combine_kernel"):
        return 512, 2
    return 256, 2 if "Products<4>" in name else 3


def test_no_kernel_spills_registers(kernels) -> None:
    for name, kernel in kernels.items():
        opcodes = Counter(opcode for opcode, _ in kernel.code)
        assert kernel.spilled == 0, name
        assert not count(opcodes, "LDL") and not count(opcodes, "STL"), name


def test_registers_leave_room_for_the_blocks_that_share_a_multiprocessor(kernels) -> None:
    for name, kernel in kernels.items():
        threads, blocks = resident(name)
        granted = -(-kernel.registers // 8) * 8  # a warp is given them by the eight
        assert granted * threads * blocks <= REGISTERS, (name, kernel.registers)


# Of a kernel in its loop over whole vectors of eight elements: loads and stores of 16 bytes, and
# conversions to fp64. `displace` has them twice: three an element with v, two without.
VECTORS = {
    **{f"stream_kernel<Products<{pairs}>>": (4 * pairs, 0, 16 * pairs) for pairs in (1, 2, 3, 4)},
    "stream_kernel<Difference<false>>": (4, 2, 8),
    "stream_kernel<Difference<true>>": (6, 2, 32),
    "stream_kernel<Curvature>": (6, 0, 24),
    "stream_kernel<Normalize<float>>": (2, 4, 8),
    "stream_kernel<Normalize<bf16>>": (2, 3, 8),
    **{
        f"displace_kernel<Displace<{move},{w},{m}>>": (SIZES[w] // 2 + SIZES[m] // 2 + 2,)
        + (SIZES[w] // 2, 40)
        for move in ("true", "false")
        for w in SIZES
        for m in SIZES
    },
}


def test_vectors_are_moved_by_16_bytes_and_converted_once(kernels) -> None:
    for name, (loads, stores, conversions) in VECTORS.items():
        loop = kernels[name].loop("LDG.E.128")
        assert count(loop, "LDG") == count(loop, "LDG", ".128") == loads, name
        assert count(loop, "STG") == count(loop, "STG", ".128") == stores, name
        assert count(loop, "F2F.F64.F32") == conversions, name


@pytest.mark.parametrize("kind", ["Gaussian", "Rademacher"])
def test_four_variates_of_a_probe_are_one_store(kernels, kind) -> None:
    """And four single ones for the ends of a range."""
    opcodes = Counter(opcode for opcode, _ in kernels[f"fill_kernel<{kind}>"].code)
    assert count(opcodes, "STG", ".128") == 1
    assert count(opcodes, "STG") == 1 + 4


def test_updates_by_rows_are_stored_by_16_bytes(kernels) -> None:
    for kind in ("Subtract", "Combine"):
        for row in ("float", "bf16"):
            kernel = kernels[f"stream_kernel<{kind}<{row}>>"]
            loop = next(loop for loop in kernel.loops() if count(loop, "STG", ".128"))
            assert count(loop, "STG") == count(loop, "STG", ".128") == 2, kernel.name


def test_project_converts_w_once_for_eight_rows(kernels) -> None:
    """Of eight rows and columns of w: w by itself and each element, or each chain of eight."""
    for row, loads, conversions in (("float", 18, 72), ("bf16", 10, 8)):
        loop = kernels[f"project_kernel<true,{row}>"].loop("LDG.E.128")
        assert count(loop, "LDG", ".128") == loads
        assert count(loop, "F2F") == conversions


def test_rows_are_converted_once_and_16_bit_ones_by_the_chain(kernels) -> None:
    """Of the loop over a few rows of eight columns: the coefficients are a conversion each."""
    for kind in ("Subtract", "Combine"):
        for row, words, conversions in (("float", 2, 8), ("bf16", 1, 1)):
            loop = kernels[f"stream_kernel<{kind}<{row}>>"].loop("LDG.E.128")
            rows = count(loop, "LDG", ".128") // words
            assert rows > 0
            assert count(loop, "F2F") == conversions * rows, (kind, row)


def test_tiles_are_read_two_columns_at_a_time_and_converted_once(kernels) -> None:
    """Of fp32 rows each element is converted at each of its uses, of bf16 rows each chain is."""
    for name in (*FUSED, "combine_kernel<float>", "combine_kernel<bf16>"):
        kernel = kernels[name]
        opcodes = Counter(opcode for opcode, _ in kernel.code)
        assert not count(opcodes, "LDS.U16") and not count(opcodes, "LDS.S16"), name
        assert count(opcodes, "LDGSTS", ".128") == count(opcodes, "LDGSTS") > 0, name
        products = "DFMA" if "float" in name else "FFMA"
        few = kernel.loop(products)  # rows of two columns
        pairs = count(few, products) // (4 if "combine" in name else 2)
        converted = 2 * pairs if "float" in name else 0
        rounded = 2 * pairs if name == "combine_kernel<bf16>" else 0  # two coefficients each
        assert pairs > 0
        assert count(few, "F2F.F64.F32") == converted, name
        assert count(few, "F2F.F32.F64") == rounded, name


def test_the_fused_kernel_divides_no_integers(kernels) -> None:
    for name in FUSED:
        opcodes = Counter(opcode for opcode, _ in kernels[name].code)
        assert not count(opcodes, "I2F") and not count(opcodes, "MUFU.RCP"), name
