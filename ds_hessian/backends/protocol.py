"""The whole contract that a host of ds_hessian fulfils.

A host is a way of training: DeepSpeed's engines, megatron-core's chunks, a plain module. For each
there is one `Backend`, which lists the job's parameters and guards measurements of it, and
one kind of `Session`, which lives as long as a measurement. Everything else in the package is
written against these two.

A measurement goes like this, on every rank:

    objective = backend.objective(batches, loss)           the function whose Hessian is taken
    with backend.measuring(objective, Passes()) as session:
        session.displace(v, h)                             the weights are now w + h v
        session.add_gradient(out, range(session.num_micro_batches))

A host author writes a folder of `ds_hessian.backends` with these two classes and adds a line to
`ds_hessian.hosts`. `ds_hessian.backends.sharded` displaces and restores weights, whatever holds
them; `ds_hessian.backends.guard` saves and restores what is common to all hosts;
`ds_hessian.ranks.lockstep` makes a failure on one rank an error on all of them. docs/extending.md
walks through a whole host.

What a host promises:

* One function. All evaluations in a session are of the same function of the weights: the same
  micro-batches, random states, buffers and discrete choices (`ds_hessian.backends.function`),
  whatever the order of the calls. It is training's, but for what `Passes` switches.
* Nothing is left behind. After a session every bit that training could notice is as it was, also
  when the body or an evaluation raised.
* Ranks stay together. An exception on one rank is raised on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hessian.backends.weights import Weight
from ds_hessian.memory import Item
from ds_hessian.optimizer import Optimizer
from ds_hessian.vectors import Layout, VectorSpace

Precision = Literal["model", "fp32"]
Kinks = Literal["held", "crossed"]


@dataclass(frozen=True)
class Passes:
    """The mode of the forward and backward passes of a measurement: training's, but for these.

    Attributes:
        dropout: Whether training drops as it does, with one fixed set of masks for each
            micro-batch; else nothing is dropped.
        precision: `"model"`, as training runs, or `"fp32"`, on fp32 copies of the master weights.
        batch_statistics: Whether layers normalise by statistics of the micro-batch, as in training;
            else by their running statistics.
        kinks: `"held"`, where elements stay on the sides of kinks on which they are at the weights,
            or `"crossed"`, where they pass them.
        reserved: Bytes of the vectors' memory that a rank needs for other things than these sides.
    """

    dropout: bool = False
    precision: Precision = "model"
    batch_statistics: bool = False
    kinks: Kinks = "held"
    reserved: int = 0


DEFAULT_PASSES = Passes()


@dataclass(frozen=True)
class Description:
    """The description of a job that a record stores.

    Attributes:
        layout: The host and its parallel layout, such as `"ZeRO-3, 8 ranks"`.
        model_dtype: The dtype of the weights, such as `"bfloat16"`.
        versions: `{package: version}` of the host; those of torch and Python are known.
        optimizer: The settings of its optimizer; None where they are not known.
    """

    layout: str
    model_dtype: str
    versions: dict[str, str]
    optimizer: Optimizer | None = None


class AdamState(NamedTuple):
    """State of an Adam optimizer, in the coordinates of the space.

    Attributes:
        denominator: Adam divides by it: `sqrt(v / (1 - beta2^t)) + eps`, `(n_local,)` fp32.
        last_step: Adam's last step without weight decay, `(n_local,)` fp32, with the learning rate
            of that step; with the present one where the host has seen none.
    """

    denominator: Tensor
    last_step: Tensor


class Objective(Protocol):
    """The function whose Hessian is taken: this rank's micro-batches and the loss on each.

    Attributes:
        num_micro_batches: Micro-batches as the user counts them, the same on every rank.
        batches: This rank's micro-batches.
        sides: The bytes that the sides of kinks took in its last measurement; 0 before.
        outputs: What measurements of the outputs have found of them, by the name of their module,
            None if it was found: entries for each row of a micro-batch, and whether the loss in
            them is known.
        loss_code: Of the function that computes the loss, to tell it from others of the process.
    """

    num_micro_batches: int
    batches: list[Any]
    sides: int
    outputs: dict[str | None, tuple[float, bool]]
    loss_code: int

    def fingerprint(self) -> str:
        """Return a short hash of this rank's micro-batches, for provenance."""
        ...

    def digests(self) -> list[str]:
        """Return a hash of each micro-batch of this rank, to check the data of a resumed run."""
        ...


@dataclass(frozen=True)
class Head:
    """Where the outputs of a model are, from which on the loss is a known function.

    Attributes:
        modules: The modules that the passes call, as hooks see them.
        name: The name of the module of the outputs where the host knows it; None where it is to be
            found among `modules`, which are then the same on every rank.
        module: That module; None on ranks that have none.
        classes: Where the module's last dimension is split over ranks: how many there are in all.
        group: The ranks over which they are split; None if they are not.
        per_unit: Forward passes of the module in one unit of the session.
        further: Whether the model may have further heads.
    """

    modules: Sequence[nn.Module]
    name: str | None = None
    module: nn.Module | None = None
    classes: int = 0
    group: dist.ProcessGroup | None = None
    per_unit: int = 1
    further: bool = False


class SidesOfKinks(Protocol):
    """What became of the kinks of the loss on this rank; `Decisions` is one.

    Attributes:
        holds: Whether elements stay on the sides of kinks on which they are at the weights.
        held: The bytes that this takes.
        over: Whether it would take more than is allowed, so that kinks are crossed.
    """

    holds: bool
    held: int
    over: bool

    @property
    def smooth(self) -> bool:
        """Return whether the loss has no kinks near the weights but such that are held, as far as
        the functions tell that this rank has called in its evaluations there.
        """
        ...

    def release(self) -> None:
        """Cross all kinks from now on. Not collective, but for all ranks to do together, before
        weights are displaced.
        """
        ...


class Session(Protocol):
    """One measurement: the job as a function from weights to gradients.

    Attributes:
        layout: The fragments that this rank stores, in the order of its vectors.
        space: Inner products over all ranks.
        num_micro_batches: The number of units of the objective that can be evaluated alone, the
            same on every rank. Where a schedule runs groups of micro-batches, a unit is a group,
            unless the objective has them apart.
        unit_roundoff: Half of `torch.finfo(dtype).eps`, with the dtype in which the passes compute.
        costly_runs: Whether a call of `add_gradient` costs much more than its units do, as where it
            waits for the stages of a pipeline. Products then make few calls.
        gradient_scale: The factor from the sum of the terms of `add_gradient` to the gradient of
            the loss; None until every unit has been evaluated once.
        loss: The mean loss at the weights; NaN until every unit has been evaluated once.
        kinks: What became of the kinks of the loss on this rank.
        backward: Where a unit is a group of micro-batches, the number of the present backward,
            which is of one of them. A layer's backwards of a micro-batch follow each other.
        head: Where the model's outputs are. It, `forward` and `cotangent_scale` are for operators
            of the loss in the outputs.
        cotangent_scale: The factor from derivatives of the loss, as hooks see them in a backward,
            to terms of `add_gradient`, which are then their sum over all ranks. It is known during
            a backward, but for the first one of a session, and may depend on its units.
    """

    layout: Layout
    space: VectorSpace
    num_micro_batches: int
    unit_roundoff: float
    costly_runs: bool
    gradient_scale: float | None
    loss: float
    kinks: SidesOfKinks
    backward: int
    head: Head
    cotangent_scale: float

    def displace(self, v: Tensor | None, h: float, across: bool = False) -> Tensor:
        """Make the weights of all ranks `w + h v` (`w` with None), rounded once from the masters.

        Args:
            v: `(n_local,)` fp32.
            h: The displacement, in units of the parameters for a unit vector.
            across: The weights are now `w - h v`. Where they can hold the masters exactly, 2h v is
                added to them instead: the roundings of w + h v and w - h v from the same exact
                weights are opposite, so that no second difference shows them, and twice as large.

        Returns:
            `(2,)` fp64: this rank's partial `<change, v>` and `<change, change>`, where `change` is
            the difference that the call made to the stored weights; see `ds_hessian.ops.displace`.

        Collective.
        """
        ...

    def realised(self) -> Tensor:
        """Return what this rank's weights are displaced by, `(n_local,)` fp32: the stored weights
        less the masters.
        """
        ...

    def masters(self) -> Tensor:
        """Return the values that this rank's weights are rounded from, `(n_local,)` fp32."""
        ...

    def add_gradient(self, out: Tensor | None, micro_batches: range, factor: float = 1.0) -> None:
        """Add the gradient terms of these units at the current weights to `out`.

        The gradient of the loss is `gradient_scale` times the sum over all units.

        Args:
            out: `(n_local,)` fp32; None where hooks on the passes are all that is wanted: gradients
                that need not be reduced are not.
            micro_batches: The same range on every rank.
            factor: The loss is multiplied by it before the backward, and the gradient divided
                afterwards: the same terms, otherwise rounded.

        Raises:
            MeasurementError: the model, the loss or the backward raised on some rank.
            NumericsError: a loss is not finite at the weights.
            ConfigError: no scalar loss can be read from what the model or the loss returned.

        Collective.
        """
        ...

    def forward(self, micro_batches: range) -> None:
        """Run the forward of these units at the current weights, without a graph.

        Every unit must have been evaluated once by `add_gradient`. Raises what that raises.

        Args:
            micro_batches: The same range on every rank.

        Collective.
        """
        ...

    def weight_norm(self, names: Collection[str] | None = None) -> float:
        """Return `|w|` over all ranks, or that of the parameters of these names.

        Collective: one all-reduce.
        """
        ...

    def choices(self, micro_batches: range) -> Tensor:
        """Return `(4,)` fp64: how many discrete choices of the model the last evaluation of each of
        these units has held on this rank, and how many of them it would have made otherwise; the
        same of the elements that are held on their sides of kinks. Not collective.
        """
        ...


class Backend(Protocol):
    """One training job, on this rank.

    Every method is collective unless it says otherwise.

    Attributes:
        layout: The fragments that this rank stores, in the order of its vectors.
        space: Inner products over all ranks; its `device` is where vectors live.
        parameters: `(checkpoint name, unsharded shape)` of the trainable parameters of the whole
            model, the same on every rank.
        modules: The modules that hold this rank's weights.
        precisions: The values of `Passes.precision` that this host supports.
    """

    layout: Layout
    space: VectorSpace
    parameters: Sequence[tuple[str, torch.Size]]
    modules: Sequence[nn.Module]
    precisions: tuple[Precision, ...]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype in which training's passes compute. Not collective."""
        ...

    @property
    def step(self) -> int:
        """Return the number of optimizer steps made so far. Not collective."""
        ...

    def objective(
        self,
        batches: Iterable[object],
        loss: Callable[..., Any] | None = None,
        *,
        like: Objective | None = None,
        apart: bool = False,
        **sizes: int | None,
    ) -> Objective:
        """Read the micro-batches and check them on all ranks.

        The batches are read with the random states guarded: a loader that shuffles leaves training
        alone.

        Args:
            batches: This rank's micro-batches; all of them count.
            loss: `loss_fn(model, batch)` (DeepSpeed, torch) or `forward_step` (Megatron).
            like: An objective from which arguments that are None are taken.
            apart: Whether each micro-batch must be a unit of its sessions, also where a schedule
                runs groups of them, and at the cost of a group.
            sizes: `seq_length` and `micro_batch_size` (Megatron); other hosts refuse them by name.

        Raises:
            ConfigError: no batches, different numbers of them on different ranks, or an argument
                that is not valid.
            MeasurementError: the iterable raised on some rank.
        """
        ...

    def require_measurable(self) -> None:
        """Require the job to be as it was when the backend was made. Not collective.

        Raises:
            UnsupportedError: it has become one that is not supported.
            ConfigError: other parameters are trained.
        """
        ...

    def measuring(
        self, objective: Objective, passes: Passes = DEFAULT_PASSES
    ) -> AbstractContextManager[Session]:
        """Guard the training state while the yielded session is in use.

        Args:
            objective: From `objective` of the same backend.
            passes: How the passes run.

        Raises:
            UnsupportedError: the passes cannot run as asked; nothing was touched.
        """
        ...

    def describe(self) -> Description:
        """Return the description that a record stores. Not collective."""
        ...

    def adam(self) -> AdamState:
        """Return the state of the job's Adam optimizer.

        Raises:
            ConfigError: the optimizer is not Adam, or has not made a step yet.
            UnsupportedError: the host's optimizer cannot be read.
        """
        ...

    def weights(self) -> Iterable[Weight]:
        """Return the weights of two dims, with the modules that this rank has. Not collective.

        Raises:
            UnsupportedError: it is not known how they are split.
        """
        ...

    def memory(self, precision: Precision = "model") -> list[Item]:
        """Return what this rank holds in a session beyond training's memory. Not collective.

        Args:
            precision: The precision of the passes.
        """
        ...
