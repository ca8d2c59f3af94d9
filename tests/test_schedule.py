"""When automatic measurements are due, and what they capture of training."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import ds_hessian
from ds_hessian import schedule
from ds_hessian.config import HessianConfig
from ds_hessian.errors import MeasurementError
from ds_hessian.hessian import Hessian
from ds_hessian.schedule import Capture, Measurements, due

EVERY_3_AND_2 = {"interval": 3, "sharpness_interval": 2}
CASES = [
    ({"interval": 3}, {3: ["spectrum"], 6: ["spectrum"]}),
    ({"sharpness_interval": 4}, {4: ["sharpness"]}),
    ({"curvature_interval": 3}, {3: ["curvatures"], 6: ["curvatures"]}),
    (
        EVERY_3_AND_2,
        {2: ["sharpness"], 3: ["spectrum"], 4: ["sharpness"], 6: ["spectrum", "sharpness"]},
    ),
    ({**EVERY_3_AND_2, "start_step": 4}, {4: ["sharpness"], 6: ["spectrum", "sharpness"]}),
    ({}, {}),
    ({"steps": [0, 2]}, {2: ["spectrum"]}),
    ({"steps": [2], "interval": 5, "start_step": 4}, {2: ["spectrum"], 5: ["spectrum"]}),
    ({"steps": [6], "sharpness_interval": 3}, {3: ["sharpness"], 6: ["spectrum", "sharpness"]}),
    ({"interval": "log"}, {step: ["spectrum"] for step in (1, 2, 3, 6)}),
]


@pytest.mark.parametrize(("section", "expected"), CASES)
def test_measurements_are_due_at_multiples_from_the_start_step_on(
    section: dict[str, int], expected: dict[int, list[str]]
) -> None:
    config = HessianConfig.parse(section)
    assert {step: due(config, step) for step in range(1, 8) if due(config, step)} == expected


def test_logarithmic_steps_are_four_in_each_decade() -> None:
    config = HessianConfig.parse({"interval": "log"})
    found = [step for step in range(1, 10_001) if due(config, step)]
    assert found[:9] == [1, 2, 3, 6, 10, 18, 32, 56, 100] and len(found) == 17
    assert found == sorted({round(10 ** (k / 4)) for k in range(17)})


def test_step_zero_is_due_where_it_is_listed_only() -> None:
    for section in ({"interval": 1}, {"interval": "log"}, {"steps": [1]}):
        assert due(HessianConfig.parse(section), 0) == []
    assert due(HessianConfig.parse({"steps": [0]}), 0) == ["spectrum"]


def test_a_default_is_the_interval_of_spectra_without_one() -> None:
    assert due(HessianConfig(), 4, default=2) == ["spectrum"]
    assert due(HessianConfig.parse({"interval": 3}), 4, default=2) == []
    assert due(HessianConfig.parse({"steps": [3]}), 4, default=2) == []


class Square(nn.Module):
    """A model that is its own engine."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, scale: dict[str, Tensor]) -> Tensor:
        """A loss."""
        return (x * self.w * scale["by"]).square().mean()


def test_captured_are_the_first_calls_of_training_as_they_were() -> None:
    engine = Square()
    captured, x, by = Capture(engine, engine, 2), torch.randn(4, 3), torch.randn(3)
    before = x.clone(), by.clone()
    engine.eval()
    engine(x, scale={"by": by})  # a validation
    engine.train()
    engine(x, scale={"by": by})
    assert len(captured.calls) == 1 and not captured.full
    x.zero_(), by.zero_()  # the next micro-batch takes their place
    for _ in range(3):
        engine(x, scale={"by": by})
    assert captured.full and len(captured.calls) == 2
    first = captured.calls[0]
    assert torch.equal(first.args[0], before[0])
    assert torch.equal(first.kwargs["scale"]["by"], before[1])


def test_the_passes_of_a_measurement_are_not_captured() -> None:
    """They run in train mode, as those of training do."""
    engine = Square()
    captured = Capture(engine, engine, 2)
    hessian = ds_hessian.attach(engine, config={"progress": False, "plot": False})
    batch = {"x": torch.randn(4, 3), "scale": {"by": torch.randn(3)}}
    hessian.use([batch]).spectrum(num_matvecs=2)
    assert captured.calls == []
    engine(**batch)
    assert len(captured.calls) == 1


class Raising(logging.Handler):
    """A handler of the user's that cannot write."""

    def handle(self, record: logging.LogRecord) -> bool:
        raise RuntimeError("no space left")


def test_a_report_that_fails_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone makes it: the others would wait for it."""
    monkeypatch.setattr(schedule.logger, "handlers", [Raising()])
    measurements, failure = Measurements(), MeasurementError("no batches")

    def ready() -> Hessian:
        raise failure

    config = HessianConfig(steps=[0])
    measurements.warn_of_start(config, 0)
    measurements.take(
        "spectrum", 3, torch.device("cpu"), config, ready, lambda record, picture: None
    )
    assert measurements.failures == {3: failure}
