"""Spectra of blocks against those of the dense Hessian's diagonal blocks, and their distances."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ds_hessian
from ds_hessian.errors import ConfigError
from ds_hessian.records import HessianBlockSpectra
from ds_hessian.records.block_spectra import distance
from tests.operators.nets import Exact, batches, dense, loss_of, mlp, train
from tests.records.makers import PROVENANCE, spectrum_of

QUIET = {"progress": False, "plot": False}


@pytest.fixture(scope="module")
def hessian() -> Any:
    net = train(mlp(), batches(), 40)
    return ds_hessian.attach(net, config=QUIET).use(batches(2), loss_of)


def test_spectra_of_layers_are_those_of_the_dense_blocks(hessian: Any, tmp_path: Path) -> None:
    blocks = {"first": r"^0\.", "bias": r"4\.bias"}
    found = hessian.block_spectra(blocks, num_matvecs=12, num_probes=2)
    assert found.names == ("first", "other", "bias") and found.sizes.tolist() == [220, 384, 3]
    net = hessian.modules[0]
    exact = Exact(net, batches(2))
    matrix = dense(exact, 607)
    for i, part in enumerate((slice(0, 220), slice(220, 604), slice(604, 607))):
        values = torch.linalg.eigvalsh(matrix[part, part]).numpy()
        assert abs(found.largest[i] - values[-1]) <= found.largest_errors[i]
        assert abs(found.smallest[i] - values[0]) <= found.smallest_errors[i]
        assert abs(found.traces[i] - values.sum()) <= 4 * found.trace_errors[i] + 1e-4 * values[-1]
    # A block of three coordinates has three Ritz values; its probes have the rest of the row empty.
    assert np.isfinite(found.ritz_values[2]).sum() == 6 and not found.weights[2, :, 3:].any()
    assert np.allclose(found.weights.sum(-1), 1)
    assert np.allclose(found.distances, found.distances.T) and not found.distances.diagonal().any()
    assert found.num_matvecs == found.cost.products == 2 * (12 + 12 + 3)
    assert HessianBlockSpectra.load(hessian.save(found, tmp_path)) == found
    assert found.plot(tmp_path / "blocks.png").stat().st_size > 1000
    assert "block bias" in found.table()


@pytest.mark.full
def test_blocks_of_a_choice_are_in_it(hessian: Any) -> None:
    found = hessian.block_spectra("parameters", num_matvecs=3, parameters="^0")
    assert found.names == ("0.weight", "0.bias") == found.provenance.parameters
    with pytest.raises(ConfigError, match='blocks must be "layers" or "parameters"'):
        hessian.block_spectra("modules")


def test_distances_are_jensen_and_shannons() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.5, 0.5])
    assert distance(p, p) == 0 and distance(p, q) == distance(q, p)
    assert distance(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1
    # KL to the mean: half of the mass is 0.5 against 0.25 (1 bit), half is the same (0 bits).
    assert distance(p, q) == pytest.approx(math.sqrt(0.5))


def test_equal_spectra_are_within_the_floor_and_scaled_ones_are_not() -> None:
    values = np.linspace(0.1, 2.0, 300)
    blocks = {"a": values, "b": values, "scaled": 30 * values}
    spectra = {
        name: spectrum_of(v, 20, probes=4, seed=i) for i, (name, v) in enumerate(blocks.items())
    }
    found = HessianBlockSpectra.of(spectra, PROVENANCE)
    assert found.distances[0, 1] <= found.floors.max() < 0.2
    assert found.distances[0, 2] > 0.8
    alone = HessianBlockSpectra.of({"a": spectrum_of(values, 20)}, PROVENANCE)
    assert np.isnan(alone.floors).all() and math.isnan(alone.heterogeneity)


@pytest.mark.full
def test_memory_is_that_of_the_largest_block(hessian: Any) -> None:
    whole = hessian.memory_plan(num_matvecs=100).peak("host")
    largest = hessian.memory_plan(num_matvecs=100, parameters=r"^2\.").peak("host")
    analysis = hessian.memory_plan("block_spectra", num_matvecs=100)
    assert largest < whole and analysis.peak("host") <= whole
