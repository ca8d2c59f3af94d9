"""DeepSpeed engines in jobs of Megatron, as Megatron-DeepSpeed makes them: with an mpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.megatron import deepspeed_jobs as jobs
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_mesh_of_data_parallel_ranks_alone_changes_nothing(
    megatron_ranks: Ranks, stage: int
) -> None:
    """Bit for bit the spectrum without an mpu, and that of Megatron's own data parallelism, whose
    probes are others (by names), within the error bars.
    """
    for without, with_mesh, megatron in megatron_ranks(2).run(jobs.spectra, stage):
        assert (with_mesh.alphas == without.alphas).all()
        assert (with_mesh.betas == without.betas).all()
        assert with_mesh.n == megatron.n
        assert with_mesh.loss == pytest.approx(megatron.loss, rel=1e-6)
        assert with_mesh.gradient_norm == pytest.approx(megatron.gradient_norm, rel=1e-5)
        for of in ("eigenvalue_max", "eigenvalue_min"):
            found, expected = getattr(with_mesh, of), getattr(megatron, of)
            assert abs(found.value - expected.value) < found.error + expected.error


def test_a_mesh_with_tensor_parallel_ranks_is_refused(megatron_ranks: Ranks) -> None:
    for message in megatron_ranks(2).run(jobs.refused):
        assert message.startswith("ds_hessian does not support tensor or pipeline parallelism")
        assert "ds_hessian.megatron" in message
