"""What bounds each CUDA kernel on three GPUs: estimates, nothing of which is measured.

    python benchmarks/roofline.py

prints the table of docs/kernels.md: for each element of a kernel's largest operand the bytes that
must move, and the time of its slowest arithmetic unit as a share of the time that those bytes take
at the device's peak bandwidth. Below 1 memory is the limit. Latency, launches and the tail of a
grid are not in it, nor that the two may overlap badly where both are near 1.

All is counted in the sources of csrc/cuda: conversions and fp64 operations exactly, instructions to
about a quarter.
"""

from __future__ import annotations

from dataclasses import dataclass

INSTRUCTIONS = 128
"""Instructions of threads that a multiprocessor issues in a clock: four warps."""


@dataclass(frozen=True)
class Device:
    """Peak bandwidth in bytes a second, multiprocessors, boost clock in Hz, and what one of them
    does in a clock: fp64 operations, and conversions from and to 64-bit types.

    Sources: the data sheets, and the table of throughputs in the CUDA C++ Programming Guide.
    """

    name: str
    bandwidth: float
    multiprocessors: int
    clock: float
    doubles: int
    conversions: int


DEVICES = (
    Device("H100 SXM, 3.35 TB/s", 3.35e12, 132, 1.98e9, 64, 16),
    Device("A100 80 GB, 2.04 TB/s", 2.039e12, 108, 1.41e9, 32, 16),
    Device("RTX 4090, 1.01 TB/s", 1.008e12, 128, 2.52e9, 2, 2),
)


@dataclass(frozen=True)
class Kernel:
    """Work for each element."""

    name: str
    bytes: float
    conversions: float
    doubles: float
    instructions: float

    def share(self, device: Device) -> float:
        """Time of the slowest unit over the time of the bytes.

        Devices with two fp64 units a multiprocessor are taken to convert with the same two.
        """
        converting, computing = self.conversions / device.conversions, self.doubles / device.doubles
        shared = device.doubles == device.conversions
        slowest = converting + computing if shared else max(converting, computing)
        clocks = max(slowest, self.instructions / INSTRUCTIONS)
        seconds = clocks / device.multiprocessors / device.clock
        return seconds / (self.bytes / device.bandwidth)


# An element of bf16 rows shares the conversion and the addition that end a chain of eight.
KERNELS = (
    Kernel("`dots`, one pair", 8, 2, 1, 3.6),
    Kernel("`difference`", 16, 4, 5, 12),
    Kernel("`curvature_ratio`", 12, 3, 6, 10),
    Kernel("`displace` fp32", 16, 3, 3, 9),
    Kernel("`displace` bf16", 12, 3, 3, 16),
    Kernel("`normalize_store` bf16", 10, 1, 1, 10),
    Kernel("`project` fp32", 4, 1 + 1 / 8, 1, 2.6),
    Kernel("`project` bf16", 2, 1 / 8, 1 / 8, 2.6),
    Kernel("`subtract` fp32", 4, 1, 1, 2.6),
    Kernel("`subtract` bf16", 2, 2 / 8, 1 / 8, 2.8),
    Kernel("`subtract_project` fp32", 4, 2, 2, 6.2),
    Kernel("`subtract_project` bf16", 2, 2 / 8, 2 / 8, 6.2),
    Kernel("`combine`, 2 outputs, fp32", 4, 1, 2, 4.8),
    Kernel("`combine`, 2 outputs, bf16", 2, 1 + 2 / 8, 2 / 8, 5.8),
    Kernel("`fill_gaussian`", 4, 2.5, 55, 100),
    Kernel("`fill_rademacher`", 4, 0, 0, 26),
)


def table() -> str:
    """The table in Markdown."""
    head = f"| kernel | bytes | {' | '.join(device.name for device in DEVICES)} |"
    lines = [head, "|---" * (2 + len(DEVICES)) + "|"]
    for kernel in KERNELS:
        shares = " | ".join(f"{kernel.share(device):.2f}" for device in DEVICES)
        lines.append(f"| {kernel.name} | {kernel.bytes:g} | {shares} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
