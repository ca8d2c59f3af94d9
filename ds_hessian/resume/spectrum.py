"""A spectrum that survives the end of its job: the state with which `slq` continues after any
product.

Kept after each product: the runs of finished probes, figures and basis vectors of the current one.
With a basis of two vectors, or of a window, that is all the disk holds; and another layout
continues from the same basis, where a repetition of Lanczos would in its rounding lead to another
one.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np

from ds_hessian.krylov import LanczosRun, LanczosState
from ds_hessian.records.fields import Json
from ds_hessian.resume.run import SavedRun
from ds_hessian.vectors import Layout, VectorSpace


class SavedSpectrum(SavedRun):
    """The state of one spectrum in a folder.

    Attributes:
        runs: Runs of the finished probes.

    Collective: also `restore` and `save`.
    """

    def __init__(self, folder: Path, layout: Layout, space: VectorSpace) -> None:
        super().__init__(folder, layout, space)
        self.runs = [_run(entry) for entry in (self._found or {"runs": []})["runs"]]

    def restore(self, state: LanczosState) -> None:
        """Restore the interrupted probe's run; the `restore` of `slq`."""
        if self._found is not None and self._found["lanczos"] is not None:
            prefix = f"p{len(self.runs)}-"
            state.load_state_dict(
                self._found["lanczos"], lambda name: self._store.vector(prefix + name)
            )

    def save(self, probe: int, state: LanczosState) -> None:
        """Save everything, after a product of `probe`.

        Raises:
            MeasurementError: some rank could not write.
        """
        if state.done:
            self.runs.append(state.run())
        figures = {
            "runs": [_plain_run(run) for run in self.runs],
            "lanczos": None if state.done else state.state_dict(),
        }
        self._keep(figures, {f"p{probe}-{name}": v for name, v in state.vectors().items()})


def _plain_run(run: LanczosRun) -> Json:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in asdict(run).items()}


def _run(entry: Json) -> LanczosRun:
    fields: Json = {k: np.array(v) if isinstance(v, list) else v for k, v in entry.items()}
    return LanczosRun(**fields)
