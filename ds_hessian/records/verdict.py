"""Whether a job's Hessian can be trusted: the record of a self-test."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One thing tested.

    Attributes:
        name: What.
        value: What was measured; small is good.
        limit: The most that is good.
        meaning: What the value is, and what to do where it is too large.
    """

    name: str
    value: float
    limit: float
    meaning: str

    @property
    def passed(self) -> bool:
        """Whether the value is within the limit (NaN is not)."""
        return self.value <= self.limit


@dataclass(frozen=True)
class SelfTest:
    """What `HessianEngine.self_test` found; the same on every rank.

    Attributes:
        checks: In the order in which they were made.
        error: Estimated relative error of a product of a random vector.
        displacement: Its h.
        suggestions: Settings to change, each in a sentence; empty where all is well.
    """

    checks: tuple[Check, ...]
    error: float
    displacement: float
    suggestions: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def table(self) -> str:
        """The verdict in a dozen lines of text."""
        failed = sum(not check.passed for check in self.checks)
        verdict = "all is well" if not failed else f"{failed} of {len(self.checks)} checks failed"
        lines = [f"Hessian self-test: {verdict}"]
        for check in self.checks:
            mark = "ok    " if check.passed else "FAILED"
            lines.append(f"  {mark} {check.name:<14}{check.value:9.1e}  (limit {check.limit:.1e})")
            if not check.passed:
                lines.append(f"         {check.meaning}")
        lines.append(
            f"  products of random vectors: error {self.error:.1e} at h = {self.displacement:.2e}"
        )
        lines += [f"  suggestion: {text}" for text in self.suggestions]
        return "\n".join(lines)
