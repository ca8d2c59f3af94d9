"""A job restricted to some of its parameters, whose curvatures are P H P.

P selects the coordinates of the chosen parameters. Weights of other parameters never move, and of a
gradient only the chosen part is kept, so that every curvature of the restriction is exactly the
block of the whole one. Vectors have the chosen coordinates alone: dimension, probes, traces,
densities, error estimates and the choice of the displacement are those of the block.

Cost: the passes are those of the whole model. Memory per rank: one vector over all parameters in
the passes; all others are as short as the block.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_hessian.backends.protocol import (
    DEFAULT_PASSES,
    AdamState,
    Backend,
    Description,
    Objective,
    Passes,
    Precision,
    Session,
)
from ds_hessian.backends.weights import Weight
from ds_hessian.errors import ConfigError
from ds_hessian.memory import FP32, Item, tier_of
from ds_hessian.vectors import Layout, VectorSpace

Choice = str | Sequence[str]
"""Parameters: a regular expression that is searched in their names, or the names themselves."""

SHOWN = 8
"""Names that a message lists."""


def chosen(names: Sequence[str], choice: Choice) -> list[str]:
    """Return the chosen ones of the parameters' names, in their order.

    Raises:
        ConfigError: the expression is none or matches nothing, or a name is unknown; the message
            lists near misses.
    """
    if isinstance(choice, str):
        try:
            found = [name for name in names if re.search(choice, name)]
        except re.error as error:
            raise ConfigError(f"parameters: {choice!r} is no regular expression: {error}") from None
        if not found:
            raise ConfigError(
                f"parameters: the regular expression {choice!r} matches none of the "
                f"{len(names)} trainable parameters; {_near(choice, names)}"
            )
        return found
    wanted = list(choice)
    unknown = [name for name in wanted if name not in set(names)]
    if unknown or not wanted:
        what = f"there is no trainable {', '.join(map(repr, unknown[:SHOWN]))}"
        raise ConfigError(
            f"parameters: {what if wanted else 'an empty list'}; "
            f"{_near(unknown[0] if unknown else '', names)}"
        )
    return [name for name in names if name in set(wanted)]


def _near(text: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(text, names, n=SHOWN, cutoff=0.5)
    if close:
        return f"did you mean {', '.join(close)}?"
    more = ", ..." if len(names) > SHOWN else ""
    return f"they are {', '.join(names[:SHOWN])}{more}"


def restricted(backend: Backend, choice: Choice | None) -> Backend:
    """Return the backend's restriction to the chosen parameters; itself with None.

    Raises:
        ConfigError: nothing is chosen, or something that there is not.
    """
    if choice is None:
        return backend
    found = chosen([name for name, _ in backend.parameters], choice)
    if not any(shape.numel() for name, shape in backend.parameters if name in found):
        raise ConfigError(f"parameters: {', '.join(found[:SHOWN])} have no elements: choose others")
    return Restricted(backend, found)


def names_of(backend: Backend) -> tuple[str, ...]:
    """Return the names of the parameters to which a backend is restricted; empty for all."""
    return backend.names if isinstance(backend, Restricted) else ()


class Restricted:
    """The `Backend` of a job restricted to some of its parameters.

    Args:
        whole: The backend of the job.
        names: The names of the chosen parameters.

    Attributes:
        whole: The backend of the job.
    """

    def __init__(self, whole: Backend, names: Collection[str]) -> None:
        self.whole = whole
        self.parameters: Sequence[tuple[str, torch.Size]] = [
            (name, shape) for name, shape in whole.parameters if name in names
        ]
        kept = [(fragment, part) for fragment, part in whole.layout if fragment.name in names]
        self.layout = Layout([fragment for fragment, _ in kept])
        self.parts = [part for _, part in kept]
        self.space = VectorSpace(
            self.layout.n_local,
            self.layout.n_owned,
            whole.space.device,
            whole.space.group,
            n=sum(shape.numel() for _, shape in self.parameters),
        )
        self.modules: Sequence[nn.Module] = whole.modules
        self.precisions = whole.precisions

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the chosen parameters."""
        return tuple(name for name, _ in self.parameters)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which training's passes compute."""
        return self.whole.compute_dtype

    @property
    def step(self) -> int:
        """The number of optimizer steps made so far."""
        return self.whole.step

    # ---- vectors

    def select(self, v: Tensor) -> Tensor:
        """Return the chosen coordinates of vectors `(..., n_local of the whole)`.

        Raises:
            ConfigError: they have another length.
        """
        wanted = self.whole.space.n_local
        if v.shape[-1] != wanted:
            raise ConfigError(
                f"vectors have {wanted} coordinates on this rank, those of all parameters; got "
                f"{v.shape[-1]}"
            )
        out = v.new_empty((*v.shape[:-1], self.space.n_local))
        for part, (_, own) in zip(self.parts, self.layout, strict=True):
            out[..., own] = v[..., part]
        return out

    def embed(self, v: Tensor) -> Tensor:
        """Return vectors `(..., n_local)` over all parameters, zero outside of the chosen ones."""
        out = v.new_zeros((*v.shape[:-1], self.whole.space.n_local))
        for part, (_, own) in zip(self.parts, self.layout, strict=True):
            out[..., part] = v[..., own]
        return out

    # ---- the job

    def objective(
        self,
        batches: Iterable[object],
        loss: Callable[..., Any] | None = None,
        *,
        like: Objective | None = None,
        apart: bool = False,
        **sizes: int | None,
    ) -> Objective:
        """Read the micro-batches and check them on all ranks, as the job does."""
        return self.whole.objective(batches, loss, like=like, apart=apart, **sizes)

    def require_measurable(self) -> None:
        """Require the job to be as it was."""
        self.whole.require_measurable()

    @contextmanager
    def measuring(
        self, objective: Objective, passes: Passes = DEFAULT_PASSES
    ) -> Iterator[RestrictedSession]:
        """Guard the training state while the yielded session is in use."""
        with self.whole.measuring(objective, passes) as session:
            yield RestrictedSession(self, session)

    def describe(self) -> Description:
        """Describe the job."""
        return self.whole.describe()

    def adam(self) -> AdamState:
        """Return the chosen coordinates of the state of the job's Adam optimizer."""
        denominator, step = self.whole.adam()
        return AdamState(self.select(denominator), self.select(step))

    def weights(self) -> Iterable[Weight]:
        """Return the chosen weights of two dims."""
        names = set(self.names)
        return [weight for weight in self.whole.weights() if weight.name in names]

    def memory(self, precision: Precision = "model") -> list[Item]:
        """Return what a session of the job holds, and one vector over all parameters."""
        tier, size = tier_of(self.space.device), FP32 * self.whole.space.n_local
        vector = Item("direction or gradient over all parameters", tier, size, ("passes",))
        return [*self.whole.memory(precision), vector]


class RestrictedSession:
    """The `Session` of a restricted job: the gradient as a function of the chosen weights.

    What evaluations change is that of the whole job at every moment: a hook of a pass may read it.

    Args:
        restricted: The restriction.
        whole: The session of the job.
    """

    unit_roundoff: float
    gradient_scale: float | None
    cotangent_scale: float
    loss: float
    backward: int

    def __init__(self, restricted: Restricted, whole: Session) -> None:
        self.restricted, self.whole = restricted, whole
        self.layout, self.space = restricted.layout, restricted.space
        self.num_micro_batches, self.head = whole.num_micro_batches, whole.head
        self.kinks = whole.kinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def forward(self, micro_batches: range) -> None:
        """Run the forward of these units at the current weights, without a graph."""
        self.whole.forward(micro_batches)

    def displace(self, v: Tensor | None, h: float, across: bool = False) -> Tensor:
        """Displace the chosen weights; all others are as they were."""
        return self.whole.displace(None if v is None else self.restricted.embed(v), h, across)

    def realised(self) -> Tensor:
        """Return what the chosen weights are displaced by."""
        return self.restricted.select(self.whole.realised())

    def masters(self) -> Tensor:
        """Return what the chosen weights are rounded from."""
        return self.restricted.select(self.whole.masters())

    def weight_norm(self, names: Collection[str] | None = None) -> float:
        """Return the norm of the chosen weights."""
        return self.whole.weight_norm(self.restricted.names if names is None else names)

    def choices(self, micro_batches: range) -> Tensor:
        """Return the discrete choices of the whole model, and how many would have changed."""
        return self.whole.choices(micro_batches)

    def add_gradient(self, out: Tensor | None, micro_batches: range, factor: float = 1.0) -> None:
        """Add the chosen coordinates of these units' gradients to `out`."""
        if not micro_batches:
            return
        gradient = None if out is None else self.whole.space.zeros()
        self.whole.add_gradient(gradient, micro_batches, factor)
        if out is None or gradient is None:
            return
        for part, (_, own) in zip(self.restricted.parts, self.layout, strict=True):
            out[own] += gradient[part]
