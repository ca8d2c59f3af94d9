"""Reading the micro-batches leaves training alone."""

from __future__ import annotations

import itertools
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from deepspeed.runtime.dataloader import RepeatingLoader
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
)

import ds_hessian
from ds_hessian.backends.containers import copied, mapped
from ds_hessian.backends.objective import MicroBatches, ModelObjective
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.errors import ConfigError, MeasurementError
from tests.backends import jobs
from tests.operators.nets import batches, loss_of, mlp, train
from tests.ranks import RankPool

QUIET = {"progress": False, "plot": False}
DATA = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))


def loader(generator: torch.Generator | None) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)


@pytest.mark.parametrize("own", [False, True], ids=["torch's generator", "its own generator"])
def test_a_loader_that_shuffles_moves_no_generator(own: bool) -> None:
    backend = ModuleBackend(nn.Linear(3, 1))
    generator = torch.Generator().manual_seed(1) if own else torch.default_generator
    before = generator.get_state()
    objective = backend.objective(loader(generator if own else None))
    assert objective.num_micro_batches == 3
    assert torch.equal(generator.get_state(), before)


class Epochs(Sampler[int]):
    """A sampler with another order in each epoch, which it counts itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch)
        self.epoch += 1
        return iter(order.sample(range(12), 12))


class Drawn(Dataset[Tensor]):
    """Rows with noise from a generator of its own."""

    def __init__(self) -> None:
        self.noise = np.random.default_rng(0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return DATA[index][0] + float(self.noise.standard_normal())


class Stream(IterableDataset[Tensor]):
    """Rows from where the last reader has stopped."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(12):
            self.position += 1
            yield torch.full((3,), float(self.position))


class Restarting:
    """A loader that is its own iterator, as DeepSpeed's is."""

    def __iter__(self) -> Restarting:
        self.rows = iter(torch.arange(12.0).split(2))
        return self

    def __next__(self) -> Tensor:
        return next(self.rows)


def prepared() -> Any:
    """A loader of Accelerate, which counts its epochs and says whether one has ended."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.data_loader.prepare_data_loader(
        DataLoader(DATA, batch_size=2, shuffle=True), use_seedable_sampler=True
    )


LOADERS: dict[str, Callable[[], Any]] = {
    "persistent workers": lambda: DataLoader(
        DATA, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "a sampler that counts": lambda: DataLoader(DATA, batch_size=2, sampler=Epochs()),
    "in batches": lambda: DataLoader(DATA, batch_sampler=BatchSampler(Epochs(), 2, False)),
    "a generator of the data": lambda: DataLoader(Drawn(), batch_size=2),
    "a stream": lambda: DataLoader(Stream(), batch_size=2),
    "its own iterator": Restarting,
    "accelerate": prepared,
}


@pytest.mark.parametrize("name", LOADERS)
def test_training_reads_on_where_it_was_in_a_loader(name: str) -> None:
    """Before the first epoch, in the middle of one, and in the next."""
    backend, seen = ModuleBackend(nn.Linear(3, 1)), list[list[Any]]()
    for reads in (False, True):
        torch.manual_seed(0)
        given, rows = LOADERS[name](), list[Any]()
        if reads:
            backend.objective(given)
        for _ in range(2):
            for number, row in enumerate(given):
                rows.append(row)
                if reads and number == 2:
                    assert backend.objective(given).num_micro_batches == 6
        seen.append([torch.cat(row) if isinstance(row, list) else row for row in rows])
    assert len(seen[0]) == len(seen[1]) == 12
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_read_from_an_iterator_is_gone(workers: int) -> None:
    rows = iter(DataLoader(DATA, batch_size=2, num_workers=workers))
    next(rows)
    assert ModuleBackend(nn.Linear(3, 1)).objective(rows).num_micro_batches == 5
    assert list(rows) == []


def test_training_of_an_engine_is_the_same_after_a_loader_was_given(
    ranks: Callable[[int], RankPool],
) -> None:
    for moved in ranks(2).run(jobs.random_states_after_reading):
        assert not moved


def test_an_argument_of_another_host_is_refused_by_name() -> None:
    backend = ModuleBackend(nn.Linear(3, 1))
    with pytest.raises(ConfigError, match="seq_length is not an argument here"):
        backend.objective([torch.ones(2, 3)], seq_length=4)


def test_what_is_no_count_of_a_loss_is_named() -> None:
    """A count that depends on the weights was taken for a constant, without a word."""
    hessian = ds_hessian.attach(nn.Linear(2, 1), None, {"progress": False})
    kinds: dict[str, Callable[[Tensor], Any]] = {
        "depends on the weights": lambda out: out.abs().sum(),
        r"got a tensor of shape \(3, 1\), requires_grad=False": lambda out: out.detach(),
        r"got a tensor of shape \(3, 1\), requires_grad=True": lambda out: out,
        "got dict as its count; leave it out": lambda out: {"logits": out},
    }
    for said, count in kinds.items():

        def loss_fn(model: Any, batch: Tensor, count: Any = count) -> Any:
            out = model(batch)
            return out.square().sum(), count(out)

        hessian.use([torch.ones(3, 2)], loss_fn)
        with pytest.raises(ds_hessian.HessianError, match=said):
            hessian.matvec(hessian.random_vector(seed=0))


def test_a_loader_without_an_end_is_refused() -> None:
    """It was read for ever."""
    data = [torch.ones(1, 2)]
    for endless in (RepeatingLoader(data), itertools.cycle(data), itertools.repeat(data[0])):
        with pytest.raises(ConfigError, match="no end.*pass a list"):
            ds_hessian.attach(nn.Linear(2, 1)).use(endless)
    hessian = ds_hessian.attach(nn.Linear(2, 1)).use(itertools.repeat(data[0], 2))
    assert hessian.batches is not None and len(hessian.batches) == 2


def test_a_micro_batch_that_can_be_read_once_is_refused() -> None:
    """Its second evaluation ended in an IndexError of the model's."""
    for batch in (iter([torch.ones(1, 2)]), {"x": [map(torch.ones, [2])]}):
        with pytest.raises(ConfigError, match="got one with a .*iterator|got one with a map"):
            ds_hessian.attach(nn.Linear(2, 1)).use([batch])


def test_batches_that_cannot_be_read_are_an_error_and_move_no_generator() -> None:
    def broken() -> Iterator[Tensor]:
        yield torch.rand(2, 3)
        raise OSError("disk gone")

    backend, before = ModuleBackend(nn.Linear(3, 1)), torch.get_rng_state()
    with pytest.raises(MeasurementError, match="reading the batches.*disk gone"):
        backend.objective(broken())
    assert torch.equal(torch.get_rng_state(), before)


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Given:
    """A micro-batch as collators make it, with a part that is no tensor."""

    x: Tensor
    y: Tensor
    name: str = "a"


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping whose entries are attributes too, as transformers' are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Pair(list):  # type: ignore[type-arg]
    """A list with names."""

    @property
    def x(self) -> Tensor:
        """The first."""
        return self[0]

    @property
    def y(self) -> Tensor:
        """The second."""
        return self[1]


KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "named tuple": Named,
    "frozen dataclass": Given,
    "mapping": lambda x, y: Encoding(x=x, y=y),
    "list": lambda x, y: Pair([x, y]),
    "nested": lambda x, y: Given(Encoding(inner=[x]), {"y": (y,)}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", KINDS)
def test_containers_stay_what_they_are_and_their_tensors_are_moved(name: str) -> None:
    x, y = torch.randn(3, 2, dtype=torch.bfloat16), torch.arange(3)
    batch, seen = KINDS[name](x, y), list[Any]()

    def loss(model: Any, given: Any) -> Tensor:
        seen.append(given)
        return model.weight.sum()

    objective = ModelObjective([batch], loss)
    for widen in (False, True):
        objective.loss(nn.Linear(2, 1), 0, torch.device("cpu"), widen)
        assert type(seen[-1]) is type(batch) and seen[-1] is not batch
        found = _first(seen[-1])
        assert found.dtype == (torch.float32 if widen else torch.bfloat16)
        assert torch.equal(found, x.to(found.dtype))
    assert _first(batch) is x
    copies = copied(batch)
    x.zero_()
    assert type(copies) is type(batch) and _first(copies).any()


def _first(given: Any) -> Tensor:
    found: Tensor = given.x if isinstance(given.x, Tensor) else given.x.inner[0]
    return found


def test_packed_sequences_are_moved_too() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]).to(torch.bfloat16)
    moved = mapped(packed, lambda t: t.float())
    assert moved.data.dtype == torch.float32 and not moved.batch_sizes.is_cuda


def test_fingerprints_tell_whatever_a_micro_batch_holds() -> None:
    x = torch.ones(2)
    kinds: list[Any] = [
        *([x, 1], [x, 2], [x, "a"], [x, "b"], [x, np.ones(2)], [x, np.zeros(2)]),
        *([x, {"k": 1.5}], [x, None], Given(x, x), Given(x, x + 1), Given(x, x, "b")),
    ]
    found = [MicroBatches([each]).fingerprint() for each in kinds]
    assert len(set(found)) == len(found)


def test_a_loader_may_read_each_micro_batch_into_the_same_memory() -> None:
    def read() -> Any:
        memory = torch.empty(2)
        for number in range(3):
            yield [memory.fill_(number)]

    assert [float(b[0][0]) for b in MicroBatches(read()).batches] == [0, 1, 2]


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "device"),
    [(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")],
)
def test_the_defaults_of_the_job_are_its_own(dtype: torch.dtype, device: str) -> None:
    """Figures are those of fp32 on the host, and the job's code makes what it makes in training."""
    net, entries = train(mlp(), batches(), 5), batches(3)
    made = set[tuple[torch.dtype, str, str]]()

    def make() -> None:
        new = torch.zeros(())
        made.add((new.dtype, new.device.type, np.geterr()["under"]))

    def loss(model: nn.Module, entry: Any) -> Tensor:
        make()
        return loss_of(model, entry)

    def figures(given: Any) -> list[float]:
        hessian: Any = ds_hessian.attach(net, config=QUIET).use(given(), loss)
        spectrum = hessian.spectrum(num_matvecs=4, num_probes=2, sampling=True)
        trace, pairs = hessian.trace("hutch++", num_matvecs=6), hessian.eigenpairs(k=1)
        with hessian.measuring() as operator:
            make()
            product = hessian.matvec(hessian.random_vector()).vector
            assert operator.gradient.dtype == product.dtype == torch.float32
        hessian.scatter(hessian.gather(product))
        factors = hessian.kronecker(["kfac"], basis=2, probes=2, extremes=0).cosines
        hessian.block_spectra(num_matvecs=2)  # whose densities underflow far from eigenvalues
        figures = spectrum.alphas, spectrum.ritz_errors, trace.value, trace.error, pairs.values
        return [x for f in (*figures, factors, product) for x in np.ravel(np.asarray(f)).tolist()]

    def given() -> Any:
        for entry in entries:
            make()
            yield entry

    expected = figures(given)
    made.clear()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        with np.errstate(all="raise"):
            found = figures(given)
            assert np.geterr() == dict.fromkeys(("divide", "over", "under", "invalid"), "raise")
        assert torch.get_default_dtype() == dtype and torch.get_default_device().type == device
        assert made == {(dtype, device, "raise")}
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert np.array_equal(found, expected, equal_nan=True)
