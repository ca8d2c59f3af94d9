"""The record of a self-test, which says whether a job's Hessian can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ds_hessian.records.base import Record
from ds_hessian.records.provenance import Provenance


@dataclass(frozen=True)
class Check:
    """One check of a self-test.

    Attributes:
        name: Name of the check.
        value: The measured figure; small is good.
        limit: The largest value that passes.
        meaning: What the value says, and what to do if it is too large.
    """

    name: str
    value: float
    limit: float
    meaning: str

    @property
    def passed(self) -> bool:
        """True if the value is within the limit; NaN is not."""
        return self.value <= self.limit


@dataclass(frozen=True, eq=False)
class SelfTest(Record):
    """The result of `Hessian.self_test`, the same on every rank.

    Attributes:
        checks: In the order in which they were made.
        error: Estimated relative error of a product of a random vector.
        displacement: Its h.
        suggestions: Settings to change, each in a sentence; empty where all is well.
        provenance: The model, the data and the settings that it was made with.
    """

    kind: ClassVar[str] = "self_test"

    checks: tuple[Check, ...]
    error: float
    displacement: float
    suggestions: tuple[str, ...]
    provenance: Provenance

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(check.passed for check in self.checks)

    def derived(self) -> dict[str, object]:
        """Return the verdict, for readers of the file."""
        return {"passed": self.passed}
