"""Reading the micro-batches leaves training alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.errors import ConfigError, MeasurementError
from tests.backends import jobs
from tests.ranks import RankPool

DATA = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))


def loader(generator: torch.Generator | None) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)


@pytest.mark.parametrize("own", [False, True], ids=["torch's generator", "its own generator"])
def test_a_loader_that_shuffles_moves_no_generator(own: bool) -> None:
    backend = ModuleBackend(nn.Linear(3, 1))
    generator = torch.Generator().manual_seed(1) if own else torch.default_generator
    before, batches = generator.get_state(), loader(generator if own else None)
    objective = backend.objective(batches)
    assert objective.num_micro_batches == 3
    assert torch.equal(generator.get_state(), before)


def test_training_of_an_engine_is_the_same_after_a_loader_was_given(
    ranks: Callable[[int], RankPool],
) -> None:
    for moved in ranks(2).run(jobs.random_states_after_reading):
        assert not moved


def test_an_argument_of_another_host_is_refused_by_name() -> None:
    backend = ModuleBackend(nn.Linear(3, 1))
    with pytest.raises(ConfigError, match="seq_length is not an argument here"):
        backend.objective([torch.ones(2, 3)], seq_length=4)


def test_batches_that_cannot_be_read_are_an_error_and_move_no_generator() -> None:
    def broken() -> Iterator[Tensor]:
        yield torch.rand(2, 3)
        raise OSError("disk gone")

    backend, before = ModuleBackend(nn.Linear(3, 1)), torch.get_rng_state()
    with pytest.raises(MeasurementError, match="reading the batches.*disk gone"):
        backend.objective(broken())
    assert torch.equal(torch.get_rng_state(), before)
