"""Progress of a spectrum: a bar on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any, Self

from ds_hessian.krylov import LanczosState
from ds_hessian.show.style import MATRICES
from ds_hessian.table import on_terminal

logger = logging.getLogger(__name__)

LOG_LINES = 5
"""Lines for a whole measurement where stderr is not a terminal."""


class SpectrumProgress:
    """A display of products done, time left, and the extreme Ritz values; a context manager.

    Args:
        total: Products to make.
        enabled: False shows nothing (every rank but 0).
        operator: Name of the operator whose spectrum it is.
    """

    def __init__(self, total: int, enabled: bool = True, operator: str = "hessian") -> None:
        self.total, self.enabled = total, enabled
        self._title = f"{MATRICES[operator]} spectrum"
        self.done = 0
        self._bar: Any = None
        self._started = time.monotonic()
        self._extremes: dict[int, tuple[float, float]] = {}

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self.enabled and on_terminal(sys.stderr):
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=self.total, desc=self._title, unit="product")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, probe: int, state: LanczosState) -> None:
        """Count one more product of `probe`; the `progress` argument of `ds_hessian.krylov.slq`."""
        self.done += 1
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(self._eigenvalues(probe, state), refresh=False)
            self._bar.update()
        elif self.done * LOG_LINES // self.total > (self.done - 1) * LOG_LINES // self.total:
            spent = time.monotonic() - self._started
            logger.info(
                "%s: %d of %d products, %.0f s left, %s",
                self._title,
                self.done,
                self.total,
                spent / self.done * (self.total - self.done),
                self._eigenvalues(probe, state),
            )

    def _eigenvalues(self, probe: int, state: LanczosState) -> str:
        """Return smallest and largest Ritz value of all probes so far."""
        from scipy.linalg import eigh_tridiagonal  # type: ignore[import-untyped]

        ritz = eigh_tridiagonal(state.alphas, state.betas[: len(state.alphas) - 1], True)
        self._extremes[probe] = float(ritz[0]), float(ritz[-1])
        lows, highs = zip(*self._extremes.values(), strict=True)
        return f"eigenvalues {min(lows):.4g} .. {max(highs):.4g}"
