"""A job of two ranks that ends in one of several ways, with a spectrum behind it or not.

Run by torchrun: `ending_script.py HOW`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_hessian

SETTINGS = {"progress": False, "plot": False, "num_matvecs": 2}


def main(how: str) -> None:
    """End as is asked for; nothing is closed."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank() if how == "refused" else 0)
    net: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    if how == "compiled":
        net = torch.compile(net, backend="eager")  # type: ignore[assignment]
    if how != "refused":  # the weights of the ranks differ
        net = DistributedDataParallel(net)
    hessian = ds_hessian.attach(net, None, SETTINGS)
    data = [torch.randn(3, 4) for _ in range(2)]
    hessian.use(data, lambda model, x: model(x).square().mean())
    if how == "alone" and dist.get_rank() == 1:
        hessian.use(data, lambda model, x: model(x))  # no scalar, on this rank
    hessian.spectrum()
    if how == "leaving":
        with hessian.measuring():
            raise RuntimeError("in the body of the script")


if __name__ == "__main__":
    main(sys.argv[1])
