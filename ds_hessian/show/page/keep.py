"""The page of a run, kept up to date while the run goes on."""

from __future__ import annotations

import atexit
import logging
import time
from pathlib import Path

from ds_hessian.ranks import report
from ds_hessian.show.page.run import page_of, run_in
from ds_hessian.show.page.write import write_page

logger = logging.getLogger(__name__)

SHARE = 0.05
"""Share of the time that writing pages may take; a page that waits is written at the next
measurement after that, or when the process ends."""


class PageKeeper:
    """Writes the page of a run's folder after its measurements.

    Nothing that goes wrong ends the training: the page is made of the records, and `ds-hessian
    page` makes it again.
    """

    def __init__(self) -> None:
        self._waiting: Path | None = None
        self._next = -float("inf")
        self._registered = False

    def update(self, folder: Path) -> None:
        """Write the page of a folder now, or later if that has just taken long. One rank calls it.

        The page is replaced in one step, so that a reader sees the old one or the new one.
        """
        folder = folder.resolve()
        if self._waiting not in (None, folder):
            self.finish()
        self._waiting = folder
        if not self._registered:
            atexit.register(self.finish)
            self._registered = True
        if time.monotonic() >= self._next:
            self.finish()

    def finish(self) -> None:
        """Write the page that waits, if one does."""
        folder, self._waiting = self._waiting, None
        if folder is None:
            return
        began = time.monotonic()
        try:
            write_page(run_in(folder), page_of(folder))
        except Exception:  # one rank alone is here, and the others go on training
            report(logger.exception, "no page of %s; the records are there", folder)
        spent = time.monotonic() - began
        self._next = time.monotonic() + spent / SHARE
