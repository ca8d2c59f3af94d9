"""The learning rate and the momentum with which an optimizer makes its steps."""

from __future__ import annotations

from typing import Any, NamedTuple


class Stepping(NamedTuple):
    """The settings of an optimizer on which the stability of its steps depends.

    Attributes:
        name: Class of the optimizer that makes the steps: `"AdamW"`.
        learning_rate: The largest of its parameter groups.
        momentum: That of SGD; None for another optimizer.
        nesterov: Whether SGD's momentum is Nesterov's.
        beta1: That of Adam; None for another optimizer.
    """

    name: str
    learning_rate: float
    momentum: float | None = None
    nesterov: bool = False
    beta1: float | None = None


def stepping(optimizer: Any) -> Stepping | None:
    """Return the settings of an optimizer, or of the one inside of its wrappers; None without any.

    Of parameter groups with different settings, those with the largest learning rate count.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not groups:
        return None
    inner = optimizer
    while getattr(inner, "optimizer", None) is not None and inner.optimizer is not inner:
        inner = inner.optimizer
    name = type(inner).__name__
    group = max(groups, key=lambda group: float(group["lr"]))
    rate = float(group["lr"])
    if "adam" in name.lower() and "betas" in group:
        return Stepping(name, rate, beta1=float(group["betas"][0]))
    if "sgd" in name.lower():
        momentum = float(group.get("momentum", 0.0))
        return Stepping(name, rate, momentum, bool(group.get("nesterov", False)))
    return Stepping(name, rate)
