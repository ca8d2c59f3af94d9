"""What runs on the ranks: blocks of a Megatron GPT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.megatron import job
from tests.megatron.job import Job


def blocks(layout: Job, choices: Sequence[str]) -> list[Any]:
    """(n, names, alphas and betas) of the spectrum of each block."""
    with job.running(layout) as chunks:
        hessian = job.hessian_of(chunks, layout)
        found = []
        for choice in choices:
            spectrum = hessian.spectrum(num_matvecs=3, parameters=choice)
            owned = hessian.backend.space.n
            assert owned == sum(shape.numel() for _, shape in hessian.backend.parameters)
            projected = np.concatenate([spectrum.alphas[0], spectrum.betas[0]])
            found.append((spectrum.n, spectrum.provenance.parameters, projected))
        return found
