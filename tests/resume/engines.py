"""What runs on the ranks with real ZeRO engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ds_hessian.errors import HessianError
from ds_hessian.records import HessianEigenpairs, HessianSpectrum
from tests.backends.jobs import QUIET, make_engine, my_batches
from tests.resume.jobs import newest


def measure(
    folder: str | None, stop: int | None = None, number: int = 0, kind: str = "spectrum"
) -> Any:
    """A spectrum, or eigenpairs, with dropout; with `stop`, of a job that fails once so many
    products are kept.

    `number`: of the process, whose random states are its own.
    """
    zero = {"stage": 3 if kind == "spectrum" else 1}
    engine = make_engine(zero=zero, hessian={**QUIET, "dropout": True, "resume": folder})
    torch.manual_seed(number)

    def loss_fn(model: Any, b: Any) -> Any:
        if stop is not None and newest(Path(str(folder)) / kind)[0] >= stop:
            raise RuntimeError("on purpose")
        return model(*b)

    random = torch.get_rng_state()
    try:
        record: HessianSpectrum | HessianEigenpairs
        if kind == "spectrum":
            record = engine.hessian_spectrum(my_batches(), loss_fn, num_matvecs=4, num_probes=2)
        else:
            record = engine.hessian.use(my_batches(), loss_fn).eigenpairs(1, max_matvecs=6)
        return record, torch.equal(random, torch.get_rng_state())
    except HessianError as error:
        return str(error)
    finally:
        engine.destroy()
