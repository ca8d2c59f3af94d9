"""Training and checkpointing are refused while an engine's weights are displaced."""

from __future__ import annotations

from typing import NoReturn

from ds_hessian.backends.guard import Attributes
from ds_hessian.backends.zero.host import Engine
from ds_hessian.errors import MeasurementError

REFUSED = ("step", "save_checkpoint", "save_16bit_model", "load_checkpoint")
"""Methods of an engine that write weights, to the optimizer's masters or to the disk."""


def refuse_training(engine: Engine, attributes: Attributes) -> None:
    """Make these methods of the engine raise, until `attributes.restore()`."""
    for name in REFUSED:
        if hasattr(engine, name):
            attributes.set(engine, name, _Refused(name))


class _Refused:
    """A stand-in for a method, which raises."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise MeasurementError(
            f"engine.{self.name}() was called inside of measuring(), where the weights are "
            "displaced: leave the measurement first, which puts them back"
        )
