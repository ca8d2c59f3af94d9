"""The settings of a job's optimizer on which the stability of its steps depends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer as TorchOptimizer


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


_SCHEDULED: tuple[str, ...] = ("lr", "betas")


class Stepped:
    """A hook of an optimizer: the rates and betas with which it has made its last step, which a
    scheduler may have changed since. A rate that is a tensor, changed in place, is as it is now.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def __call__(self, optimizer: TorchOptimizer, *_: object) -> None:
        """Note those of the groups that were stepped."""
        for group in optimizer.param_groups:
            noted = {name: group[name] for name in _SCHEDULED if name in group}
            self._made[id(group)] = group, noted  # the group itself, so that no other has its id

    def settings(self, group: dict[str, Any]) -> Mapping[str, Any]:
        """Return the settings of a group; the present ones where no step was seen."""
        return {**group, **self._made.get(id(group), (group, {}))[1]}


def follow_steps(optimizer: Any) -> None:
    """Note from now on with which settings an optimizer, or each inside of it, makes its steps; not
    of one that is around another in a way of its own, and has no hooks.
    """
    for inner in inside(optimizer):
        hooked = isinstance(inner, TorchOptimizer) and hasattr(inner, "_optimizer_step_post_hooks")
        if hooked and _stepped(inner) is None:
            inner.register_step_post_hook(Stepped())


def last_settings(optimizer: Any, group: dict[str, Any]) -> Mapping[str, Any]:
    """Return the settings with which an optimizer has made the last step of a parameter group; the
    present ones where it was not followed.
    """
    stepped = _stepped(optimizer)
    return group if stepped is None else stepped.settings(group)


def _stepped(optimizer: Any) -> Stepped | None:
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", None) or {}
    return next((hook for hook in hooks.values() if isinstance(hook, Stepped)), None)


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
