"""The settings of a job's optimizer on which the stability of its steps depends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer of a job when a measurement was made.

    Attributes:
        name: Its class, such as `"AdamW"`.
        learning_rate: The largest of its parameter groups.
        momentum: That of SGD; None for another optimizer.
        nesterov: Whether SGD's momentum is Nesterov's.
        dampening: The share of a gradient that SGD's momentum leaves out.
        beta1: That of Adam; None for another optimizer.
    """

    name: str
    learning_rate: float
    momentum: float | None = None
    nesterov: bool = False
    dampening: float = 0.0
    beta1: float | None = None

    @property
    def edge(self) -> float | None:
        """The largest eigenvalue of H with which SGD's steps are stable on a quadratic loss.

        It is `2 (1 + b) / lr` with momentum b, and `2 (1 + b) / ((1 + 2 b) lr)` with Nesterov's
        (Cohen et al., arXiv 2103.00065, appendix B); with dampening d, lr is (1 - d) lr. None for
        another optimizer, or without steps.
        """
        rate = self.learning_rate * (1 - self.dampening)
        if self.momentum is None or rate <= 0:
            return None
        damped = 1 + 2 * self.momentum if self.nesterov else 1.0
        return 2 * (1 + self.momentum) / (damped * rate)

    @property
    def preconditioned_edge(self) -> float | None:
        """That of the preconditioned Hessian for Adam: `2 (1 + b) / ((1 - b) lr)` with beta1 b.

        (Cohen et al., arXiv 2207.14484.) None for another optimizer, or without steps.
        """
        if self.beta1 is None or self.learning_rate <= 0:
            return None
        return 2 * (1 + self.beta1) / ((1 - self.beta1) * self.learning_rate)


ADAMS = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
"""Classes of torch, DeepSpeed, apex and Transformer Engine that step as Adam does. Others keep
moments of the same names, but step in another way (RAdam, NAdam, Lamb) or in another basis (SOAP).
"""


def is_one_of(optimizer: Any, names: tuple[str, ...]) -> bool:
    """Return whether an optimizer is of a class with such a name, or derived from one."""
    return any(kind.__name__ in names for kind in type(optimizer).__mro__)


def inside(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers inside of wrappers, of which those of megatron-core chain several."""
    parts = getattr(optimizer, "chained_optimizers", None)
    if parts is None:
        parts = [own_part(getattr(optimizer, "optimizer", None) or optimizer)]
    inner = [part for part in parts if part is not None and part is not optimizer]
    for part in inner:
        yield from inside(part)
    if not inner:
        yield optimizer


def own_part(optimizer: Any) -> Any:
    """Return the optimizer itself; of torch's `ZeroRedundancyOptimizer`, which shares its state out
    among the ranks by whole parameters, the one that steps those of this rank.
    """
    kinds = (kind.__name__ for kind in type(optimizer).__mro__)
    return optimizer.optim if "ZeroRedundancyOptimizer" in kinds else optimizer


def settings_of(optimizer: Any) -> Optimizer | None:
    """Return the settings of an optimizer, or of those inside of its wrappers; None without any.

    Of parameter groups with different settings, and of several optimizers, those with the largest
    learning rate count.
    """
    found = [
        (float(group["lr"]), inner, group)
        for inner in inside(optimizer)
        for group in getattr(inner, "param_groups", None) or ()
    ]
    if not found:
        return None
    rate, inner, group = max(found, key=lambda entry: entry[0])
    name = type(inner).__name__
    if is_one_of(inner, ADAMS):
        return Optimizer(name=name, learning_rate=rate, beta1=float(group["betas"][0]))
    if is_one_of(inner, ("SGD",)):
        momentum = float(group.get("momentum", 0.0))
        return Optimizer(
            name=name,
            learning_rate=rate,
            momentum=momentum,
            nesterov=bool(group.get("nesterov", False)),
            dampening=float(group.get("dampening", 0.0)) if momentum else 0.0,  # of it alone
        )
    return Optimizer(name=name, learning_rate=rate)
