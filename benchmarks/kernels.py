"""Bandwidth of the fused kernels, against a copy and against torch, on a CPU or a GPU.

For each kernel and dtype: the bytes that the kernel must move (each operand once per read and once
per write) over its time, as a share of the copy bandwidth measured in the same run with the same
threads; and how many times faster it is than the natural torch expression of the step and than
the chunked torch twin. The copy counts as one read and one write of its length and is the faster
of `Tensor.copy_` and the kernels' own; a copy that first reads the lines it overwrites
(write-allocate) moves half as much again, which is not counted, here or for the kernels.

    python benchmarks/kernels.py --threads 2 --elements 16000000
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_hessian import ops
from ds_hessian.ops import dispatch

Step = Callable[[], object]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One row: a kernel call, the bytes it must move, and the same step in plain torch."""

    name: str
    bytes: float
    kernel: Step
    natural: Step | None = None


class Timer:
    """Median and best time of a step, on the device that it runs on."""

    def __init__(
        self, device: torch.device, repeats: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self.repeats, self.clock = device, repeats, clock

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __call__(self, step: Step, repeats: int | None = None) -> float:
        """Median seconds of a call, after one that is not counted."""
        step()
        times = []
        for _ in range(repeats or self.repeats):
            self._wait()
            started = self.clock()
            step()
            self._wait()
            times.append(self.clock() - started)
        return statistics.median(times)


def alternately(timer: Timer, first: Step, second: Step, repeats: int) -> tuple[float, float]:
    """Median seconds of two steps, measured in turns: other programs come and go."""
    pairs = [(timer(first, 1), timer(second, 1)) for _ in range(repeats)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


class Vectors:
    """The operands: a few fp32 vectors and a basis of `m` rows per dtype, made on demand."""

    def __init__(self, n: int, m: int, device: torch.device) -> None:
        self.n, self.m, self.device = n, m, device
        self.a, self.b, self.c, self.d, self.e = (self._random() for _ in range(5))
        self.coefficients = torch.full((m,), 1e-4, dtype=torch.float64, device=device)

    def _random(self) -> Tensor:
        v = torch.empty(self.n, device=self.device)
        return ops.fill_gaussian(v, 0, 0).mul_(self.n**-0.5)

    def basis(self, dtype: torch.dtype) -> Tensor:
        """`(m, n)` in `dtype`."""
        basis = torch.empty(self.m, self.n, dtype=dtype, device=self.device)
        for row in basis:
            row.copy_(self.a)
        return basis


def streaming_cases(x: Vectors) -> list[Case]:
    """Kernels over fp32 vectors."""
    n, a, b, c, e = x.n, x.a, x.b, x.c, x.e

    def natural_difference() -> object:
        second = a + b - 2 * e
        torch.sub(a, b, out=a).mul_(0.5)
        return torch.dot(a, a), torch.dot(second, second)

    def natural_curvature() -> object:
        first, second = a - b, a + b - 2 * e
        return torch.dot(first, first), torch.dot(second, second)

    return [
        Case("dots, 1 pair", 8 * n, lambda: ops.dots([(a, b)], n), lambda: torch.dot(a, b)),
        Case(
            "dots, 3 pairs of 3 vectors",
            12 * n,
            lambda: ops.dots([(a, b), (a, c), (b, c)], n),
            lambda: (torch.dot(a, b), torch.dot(a, c), torch.dot(b, c)),
        ),
        Case(
            "difference",
            16 * n,
            lambda: ops.difference(a, b, 1.0, e, n),
            natural_difference,
        ),
        Case(
            "curvature_ratio",
            12 * n,
            lambda: ops.curvature_ratio(a, b, e, n),
            natural_curvature,
        ),
    ]


def dtype_cases(x: Vectors, name: str) -> list[Case]:
    """Kernels with an operand in a storage dtype."""
    n, dtype, size = x.n, DTYPES[name], DTYPES[name].itemsize
    w = x.a.to(dtype)
    row = torch.empty_like(w)
    old = torch.empty_like(w)

    def natural_displace() -> object:
        old.copy_(w)
        torch.add(x.b, x.c, alpha=1e-3, out=x.d)
        w.copy_(x.d)
        change = w.float().sub_(old)
        return torch.dot(change, x.c), torch.dot(change, change)

    def natural_normalize() -> object:
        torch.mul(x.a, 1.5, out=x.e)
        row.copy_(x.e)
        if dtype != torch.float32:
            x.e.copy_(row)
        return torch.dot(x.e, x.e)

    moved = 2 * size + 8
    return [
        Case(
            f"displace {name}",
            moved * n,
            lambda: ops.displace([w], [x.b], x.c, 1e-3, n),
            natural_displace,
        ),
        Case(
            f"restore {name}",
            (2 * size + 4) * n,
            lambda: ops.displace([w], [x.b], None, 0.0, n),
        ),
        Case(
            f"normalize_store {name}",
            (8 + size) * n,
            lambda: ops.normalize_store(x.a, 1.0, x.e, row, n),
            natural_normalize,
        ),
    ]


def probe_cases(x: Vectors) -> list[Case]:
    """The probes: arithmetic, not traffic, bounds them."""
    n, out = x.n, x.e
    return [
        Case("gaussian probe", 4 * n, lambda: ops.fill_gaussian(out, 1, 2), lambda: out.normal_()),
        Case(
            "rademacher probe",
            4 * n,
            lambda: ops.fill_rademacher(out, 1, 2),
            lambda: out.bernoulli_().mul_(2).sub_(1),
        ),
    ]


def basis_cases(x: Vectors, basis: Tensor, name: str) -> list[Case]:
    """Kernels over a basis of m rows."""
    n, m, size, c, a = x.n, x.m, basis.element_size(), x.coefficients, x.a
    out = torch.empty(2, n, device=x.device)
    weights = torch.full((2, m), 0.1, dtype=torch.float64, device=x.device)
    single = c.to(basis.dtype)
    matmul = basis.dtype == torch.float32

    def natural_project() -> object:
        return basis @ a

    def natural_subtract() -> object:
        return torch.addmv(a, basis.t(), single, alpha=-1, out=a), torch.dot(a, a)

    def natural_combine() -> object:
        return torch.matmul(weights.to(basis.dtype), basis, out=out)

    label = f"m={m} {name}"
    whole = m * size * n
    return [
        Case(
            f"project {label}",
            whole + 4 * n,
            lambda: ops.project(basis, a, n),
            natural_project if matmul else None,
        ),
        Case(
            f"subtract {label}",
            whole + 8 * n,
            lambda: ops.subtract(basis, a, c, n),
            natural_subtract if matmul else None,
        ),
        Case(
            f"subtract_project {label}",
            whole + 8 * n,
            lambda: ops.subtract_project(basis, a, c, n),
            (lambda: (natural_subtract(), natural_project())) if matmul else None,
        ),
        Case(
            f"combine k=2 {label}",
            whole + 8 * n,
            lambda: ops.combine(basis, weights, out),
            natural_combine if matmul else None,
        ),
    ]


def gram_schmidt_twice(basis: Tensor, w: Tensor, coupled: int | None = None) -> None:
    """CGS2: the basis is read three times, or twice if the first pass is against the last `coupled`
    vectors, as in a step of Lanczos.
    """
    n, m = w.shape[0], basis.shape[0]
    first = torch.zeros(m, dtype=torch.float64)
    at = m - (coupled or m)
    first[at:] = ops.project(basis[at:], w, n)
    second = ops.subtract_project(basis, w, first, n)
    ops.subtract(basis, w, second, n)


def peers_loop(basis: Tensor, w: Tensor) -> None:
    """One product and one update per basis vector, as the peers orthogonalise: one sweep."""
    for row in basis:
        w.add_(row, alpha=-float(torch.dot(row, w)))


def pyhessian_loop(basis: Tensor, w: Tensor) -> None:
    """The same sweep in the operations of PyHessian, with their temporaries."""
    for row in basis:
        w.add_(row * -float(torch.sum(row * w)))


def lanczos_step(x: Vectors, basis: Tensor) -> None:
    """The vector work of a Lanczos step between two gradients."""
    n, p = x.n, x.a
    ops.difference(p, x.b, 1.0, x.e, n)
    gram_schmidt_twice(basis, p, 2)
    ops.normalize_store(p, 1.0, x.d, basis[-1], n)
    ops.displace([x.b], [x.e], x.d, 1e-3, n)


def natural_lanczos_step(x: Vectors, basis: Tensor) -> None:
    """The same step as one writes it in torch, with two sweeps of the peers' loop."""
    p = x.a
    second = p + x.b - 2 * x.e
    torch.sub(p, x.b, out=p).mul_(0.5)
    torch.dot(p, p), torch.dot(second, second)
    peers_loop(basis, p)
    peers_loop(basis, p)
    torch.mul(p, 1.0, out=x.d)
    basis[-1].copy_(x.d)
    old = x.b.clone()
    torch.add(x.e, x.d, alpha=1e-3, out=x.b)
    change = x.b - old
    torch.dot(change, x.d), torch.dot(change, change)


def copy_bandwidth(x: Vectors, timer: Timer) -> float:
    """Bytes read and written per second by the faster of two copies."""
    fastest = min(timer(lambda: x.d.copy_(x.c)), timer(lambda: dispatch.copy(x.d, x.c)))
    return 8 * x.n / fastest


def measure(case: Case, x: Vectors, timer: Timer, twins: bool) -> str:
    """One line of the table. The copy is measured before and after: other programs come and go."""
    before = copy_bandwidth(x, timer)
    seconds = timer(case.kernel)
    reference = max(before, copy_bandwidth(x, timer))
    natural = timer(case.natural, 3) / seconds if case.natural else None
    twin = None
    if twins:
        with ops.implementation("torch"):
            twin = timer(case.kernel, 1) / seconds
    share = case.bytes / seconds / reference
    figures = [f"{case.bytes / seconds / 1e9:.1f}", f"{reference / 1e9:.1f}", f"{share:.0%}"]
    figures += ["" if ratio is None else f"{ratio:.1f}" for ratio in (natural, twin)]
    return f"| {case.name} | " + " | ".join(figures) + " |"


def compare_loops(x: Vectors, basis: Tensor, timer: Timer, name: str) -> None:
    """CGS2 and the whole Lanczos step, against the loops of the peers."""
    label = f"m={x.m} {name}"
    whole = basis.shape[0] * basis.element_size() * x.n

    def fused() -> object:
        return gram_schmidt_twice(basis, x.a)

    seconds, copied = alternately(timer, fused, lambda: dispatch.copy(x.d, x.c), 5)
    share = (3 * whole + 20 * x.n) / seconds / (8 * x.n / copied)
    print(f"CGS2 {label}: {seconds * 1e3:.0f} ms, {share:.0%} of the copy bandwidth")
    if basis.dtype != torch.float32:
        return
    seconds, loop = alternately(timer, fused, lambda: peers_loop(basis, x.a), 5)
    print(f"  loop of dot and axpy, one sweep: {loop / seconds:.2f}x; ", end="")
    print(f"two, as CGS2 orthogonalises: {2 * loop / seconds:.2f}x")
    seconds, loop = alternately(timer, fused, lambda: pyhessian_loop(basis, x.a), 3)
    print(f"  PyHessian's loop, one sweep: {loop / seconds:.2f}x; two: {2 * loop / seconds:.2f}x")
    step, plain = alternately(
        timer, lambda: lanczos_step(x, basis), lambda: natural_lanczos_step(x, basis), 3
    )
    print(f"Lanczos step {label}: {step * 1e3:.0f} ms, plain torch {plain * 1e3:.0f} ms, ", end="")
    print(f"{plain / step:.2f}x")


def processor() -> str:
    """Its name, for the heading."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--elements", type=int, default=16_000_000)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--basis-elements", type=int, default=14_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--no-twins", action="store_true", help="leave out the slow torch twins")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="with one thread, on a machine that others use: what they take is not counted",
    )
    options = parser.parse_args()
    if options.processor_time and (options.threads != 1 or options.device != "cpu"):
        parser.error("--processor-time adds up all threads: it takes --threads 1 on a CPU")
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    print(ops.report(), f"\n\n{name}, {options.threads} threads, torch {torch.__version__}\n")
    clock = time.process_time if options.processor_time else time.perf_counter
    timer, twins = Timer(device, options.repeats, clock), not options.no_twins
    head = "| kernel | GB/s | copy GB/s | share of copy | x natural torch | x torch twin |"
    print(f"{head}\n|---|---|---|---|---|---|")
    x = Vectors(options.elements, options.rows, device)
    cases = streaming_cases(x) + probe_cases(x)
    for dtype in options.dtypes:
        cases += dtype_cases(x, dtype)
    for case in cases:
        print(measure(case, x, timer, twins), flush=True)
    del cases, x
    x = Vectors(options.basis_elements, options.rows, device)
    for dtype in options.dtypes:
        basis = x.basis(DTYPES[dtype])
        for case in basis_cases(x, basis, dtype):
            print(measure(case, x, timer, twins), flush=True)
        del case
    print()
    for dtype in options.dtypes:
        compare_loops(x, x.basis(DTYPES[dtype]), timer, dtype)


if __name__ == "__main__":
    main()
