"""The state that every kind of measurement keeps to survive the end of its job.

Beside what a kind keeps of its own: the identity of the measurement, the state of step control, the
random states at the beginning, and the time and reductions so far.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hessian.backends.random_states import RandomState, has_plain_random_states, trackers
from ds_hessian.operators import Curvature
from ds_hessian.resume.identity import of_other_training, refuse_foreign
from ds_hessian.resume.store import Given, StateStore
from ds_hessian.vectors import Layout, VectorSpace


class SavedRun:
    """The state of one measurement in a folder.

    Args:
        folder: Folder of the state; see `StateStore`.
        layout: Layout of this rank's vectors.
        space: Space of the vectors.

    Attributes:
        seconds: Time of the measurement before this process began.
        all_reduces: All-reduces before this process began.

    Raises:
        ConfigError: the folder holds a state that cannot be read.

    Collective: the constructor, `resume` and `clear`.
    """

    operator: Curvature

    def __init__(self, folder: Path, layout: Layout, space: VectorSpace) -> None:
        self.layout, self.space = layout, space
        tracked = trackers() if has_plain_random_states() else ()
        self._random = RandomState(space.device, tracked)
        notes = {"random": _plain(self._random.get())}
        self._store = StateStore(folder, layout, space, notes)
        self._began, self._reduced = time.perf_counter(), space.all_reduces
        self._found = self._store.figures
        found = self._found or {"seconds": 0.0, "all_reduces": 0}
        self.seconds, self.all_reduces = float(found["seconds"]), int(found["all_reduces"])

    @property
    def products(self) -> int:
        """The number of products made before this process began."""
        return 0 if self._found is None else int(self._found["operator"]["cost"]["products"])

    @property
    def precision(self) -> str | None:
        """The precision of the passes in which it was begun; None if it begins now."""
        if self._found is None:
            return None
        return str(self._found["identity"]["settings"]["finite_difference"]["precision"])

    @contextmanager
    def random_states(self) -> Iterator[None]:
        """Run the body with the random states in which the measurement first began.

        On another layout the generators are left unchanged.
        """
        if self._store.notes is None:
            yield
            return
        here = self._random.get()
        *found, tracked = _random_states(self._store.notes["random"])
        same = len(tracked) == len(self._random.extra)  # trackers as then
        self._random.set((*found, tracked if same else ()))
        try:
            yield
        finally:
            self._random.set(here)

    def is_of_other_training(self, identity: Mapping[str, object], roundoff: float) -> bool:
        """Return whether the state is of the same measurement at other weights, or of other
        micro-batches; arguments as `resume` has them.
        """
        state = self._found
        return state is not None and of_other_training(state["identity"], identity, roundoff)

    def resume(self, operator: Curvature, identity: Mapping[str, object], roundoff: float) -> None:
        """Restore the operator's state from the folder.

        Args:
            operator: The Hessian at the weights.
            identity: The identity of this measurement, from `identity_of`.
            roundoff: Unit roundoff of the passes.

        Raises:
            ConfigError: the state is not of this measurement.
        """
        self.operator, self._identity = operator, identity
        if self._found is not None:
            refuse_foreign(self._found["identity"], identity, roundoff)
            operator.load_state_dict(self._found["operator"])

    def clear(self) -> None:
        """Remove the state: the measurement is complete."""
        self._store.clear()

    def close(self) -> None:
        """Let other jobs use the folder. Not collective."""
        self._store.close()

    def _keep(self, figures: Mapping[str, object], vectors: Mapping[str, Given]) -> None:
        """Save these figures and vectors with those of every measurement; see `StateStore.save`."""
        common = {
            "identity": self._identity,
            "operator": self.operator.state_dict(),
            "seconds": self.seconds + time.perf_counter() - self._began,
            "all_reduces": self.all_reduces + self.space.all_reduces - self._reduced,
        }
        self._store.save({**common, **figures}, vectors)


def _plain(states: tuple[Any, ...]) -> list[Any]:
    """Return the states of `RandomState.get()` as JSON values (python, numpy, torch, the
    accelerator, and those of each tracker by name).
    """
    python, numpy, cpu, accelerator, tracked = states
    return [
        python,
        [numpy[0], numpy[1].tolist(), *numpy[2:]],
        cpu.tolist(),
        None if accelerator is None else accelerator.tolist(),
        [{name: state.tolist() for name, state in each.items()} for each in tracked],
    ]


def _random_states(entry: list[Any]) -> tuple[Any, ...]:
    (version, words, gauss), numpy, cpu, accelerator, *rest = entry
    assert random.getstate()[0] == version
    tracked = rest[0] if rest else []  # of a run that began before these were kept
    return (
        (version, tuple(words), gauss),
        (numpy[0], np.array(numpy[1], dtype=np.uint32), *numpy[2:]),
        _bytes(cpu),
        None if accelerator is None else _bytes(accelerator),
        tuple({name: _bytes(state) for name, state in each.items()} for each in tracked),
    )


def _bytes(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)
