"""A sharpness that is killed is resumed where it began, and ends no later measurement."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.hessian import Hessian
from ds_hessian.operators import FiniteDifferenceHessian
from ds_hessian.records import HessianSharpness
from ds_hessian.resume import Journal
from tests.operators.nets import batches, loss_of, mlp
from tests.tiers import cells

DATA = batches(2)


class Killed(Exception):
    """Ends a measurement, as a kill would."""


@dataclass
class Training:
    """A net with its Adam and its Hessian."""

    optimizer: torch.optim.Optimizer
    hessian: Hessian

    @classmethod
    def start(cls, **settings: Any) -> Training:
        """After three steps."""
        net = mlp()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        hessian = Hessian(ModuleBackend(net, optimizer), HessianConfig(**settings))
        training = cls(optimizer, hessian.use(DATA, loss_of))
        for _ in range(3):
            training.step()
        return training

    def step(self) -> None:
        """One step of Adam."""
        self.optimizer.zero_grad()
        (net,) = self.hessian.modules
        loss_of(net, DATA[0]).backward()
        self.optimizer.step()
        self.hessian.step += 1


def killed_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """Have journals end the measurement after so many products of this process."""
    matvec, made = Journal.matvec, 0

    def stopping(self: Journal, v: torch.Tensor) -> Any:
        nonlocal made
        if made == count:
            raise Killed
        made += 1
        return matvec(self, v)

    patch.setattr(Journal, "matvec", stopping)


def count_products(patch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each product that is made, not replayed."""
    matvec, made = FiniteDifferenceHessian.matvec, list[int]()

    def counting(self: FiniteDifferenceHessian, v: torch.Tensor) -> Any:
        made.append(1)
        return matvec(self, v)

    patch.setattr(FiniteDifferenceHessian, "matvec", counting)
    return made


def same(a: HessianSharpness, b: HessianSharpness) -> bool:
    names = ("eigenvalue_max", "preconditioned", "gradient_curvature", "update_curvature", "warm")
    return all(getattr(a, n) == getattr(b, n) for n in names) and a.cost.products == b.cost.products


@pytest.mark.parametrize("warm", cells([False, True], [True]))
def test_it_is_resumed_by_a_new_process_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    def measured(resume: Path | None, killed: bool) -> HessianSharpness:
        training = Training.start(resume=resume)
        if warm:
            training.hessian.sharpness(resume=None)
            training.step()
        if killed:
            with monkeypatch.context() as patch, pytest.raises(Killed):
                killed_after(2, patch)
                training.hessian.sharpness()
            training.hessian._followed.clear()  # a new process has none
        return training.hessian.sharpness()

    whole = measured(None, killed=False)
    found = measured(tmp_path, killed=True)
    assert whole.warm is warm and same(found, whole)
    assert list((tmp_path / "sharpness").iterdir()) == []


def test_a_schedule_retires_the_state_of_another_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training.start(resume=tmp_path)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_after(2, patch)
        training.hessian.sharpness()
    training.step()
    with pytest.raises(ConfigError, match="optimizer steps"):  # not on request
        training.hessian.sharpness()
    with training.hessian.retiring():
        with pytest.raises(ConfigError, match="seed"):  # nor that of other settings
            training.hessian.sharpness(seed=3)
        with caplog.at_level(logging.WARNING):
            found = training.hessian.sharpness()
    assert "optimizer step 3, which was not finished" in caplog.text
    fresh = Training.start()
    fresh.step()
    assert same(found, fresh.hessian.sharpness())


def test_a_schedule_begins_anew_where_training_has_come_to_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As it does with other dropout masks, or kernels that are not deterministic: the step that a
    kill had interrupted was not measured.
    """

    def start(**settings: Any) -> Training:
        training = Training.start(**settings)
        with torch.no_grad():
            next(iter(training.hessian.modules[0].parameters())).mul_(1.001)
        return training

    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_after(2, patch)
        Training.start(resume=tmp_path).hessian.sharpness()
    training = start(resume=tmp_path)
    with pytest.raises(ConfigError, match="norm of the weights"):  # not on request
        training.hessian.sharpness()
    with training.hessian.retiring(), caplog.at_level(logging.WARNING):
        found = training.hessian.sharpness()
    assert "other weights or micro-batches of this optimizer step" in caplog.text
    assert same(found, start().hessian.sharpness())
    assert list((tmp_path / "sharpness").iterdir()) == []


def test_the_state_of_this_step_is_resumed_by_a_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training.start(resume=tmp_path)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_after(3, patch)
        training.hessian.sharpness()
    with monkeypatch.context() as patch:
        made = count_products(patch)
        with training.hessian.retiring():
            found = training.hessian.sharpness()
    whole = Training.start().hessian.sharpness()
    assert same(found, whole) and len(made) == whole.cost.products - 3
