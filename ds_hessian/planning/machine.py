"""The machine of one rank, in bytes a second and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ds_hessian.memory import Tier


@dataclass(frozen=True)
class Machine:
    """Bandwidths and latency of one rank's machine.

    Attributes:
        bandwidth: Bytes a second from each tier to where the rank computes.
        latency: Seconds of a small message or collective.
        network: Bytes a second that a rank sends to other nodes; infinite where it is not counted.
        node_network: Bytes a second that it sends inside of its node.
    """

    bandwidth: Mapping[Tier, float]
    latency: float
    network: float = math.inf
    node_network: float = math.inf


ACCELERATOR = Machine({"accelerator": 2e12, "host": 20e9, "disk": 2e9}, latency=50e-6)
"""An A100 or better, its PCIe and a local NVMe drive."""

CPU = Machine({"accelerator": 8e9, "host": 8e9, "disk": 1e9}, latency=300e-6)
"""A rank that has one core, and gloo."""
