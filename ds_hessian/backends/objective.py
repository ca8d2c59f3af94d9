"""The loss whose Hessian is taken: fixed micro-batches, and how a model's loss is computed on them.

    L(w) = mean over micro-batches and data-parallel ranks of the micro-batch's own mean loss

as DeepSpeed averages it in training; where `loss_fn` returns a pair (sum, count), instead

    L(w) = (sum of all sums) / (sum of all counts)

over all micro-batches and ranks, as token-weighted training averages it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_hessian.backends.containers import Call, copied, leaves, mapped
from ds_hessian.backends.guard import kept_grad_mode
from ds_hessian.backends.loaders import kept_positions, parts_of, require_end
from ds_hessian.backends.random_states import kept_random_states
from ds_hessian.backends.state import given_to
from ds_hessian.defaults import defaults_of_job
from ds_hessian.errors import ConfigError, NumericsError
from ds_hessian.memory import NARROW
from ds_hessian.ranks import first_of, from_rank, together
from ds_hessian.vectors import VectorSpace

LossFn = Callable[[Any, Any], "Tensor | tuple[Tensor, Tensor | int | float]"]
"""`loss_fn(model, batch)` returns a scalar mean loss, or a pair (summed loss, count)."""


class MicroBatches:
    """This rank's micro-batches.

    Args:
        batches: Any iterable of micro-batches, read here.

    Attributes:
        batches: The list of micro-batches.
        num_micro_batches: Their number, the same on every rank.
        sides: The bytes that the sides of kinks took when they were last held; 0 before.
        outputs: As `Objective` has them.

    Raises:
        ConfigError: there is one micro-batch instead of an iterable of them, the iterable has no
            end, or a micro-batch holds an iterator.
    """

    def __init__(self, batches: Iterable[object]) -> None:
        if isinstance(batches, (Tensor, Mapping)) or not isinstance(batches, Iterable):
            raise ConfigError(
                f"batches must be a list (or loader) of micro-batches, got one {_kind(batches)}; "
                "pass [batch]"
            )
        require_end(batches)
        # What is made as it is read may be written over by the next micro-batch.
        made = not isinstance(batches, (list, tuple))
        self.batches = [copied(batch) for batch in batches] if made else list(batches)
        if once := [each for each in leaves(self.batches) if isinstance(each, Iterator)]:
            raise ConfigError(
                "micro-batches are read again at every evaluation, got one with a "
                f"{type(once[0]).__name__}, which is empty after the first; pass a list of what it "
                "yields"
            )
        self.num_micro_batches = len(self.batches)
        self.sides = 0
        self.outputs = dict[str | None, tuple[float, bool]]()

    def fingerprint(self) -> str:
        """Return a short hash of this rank's micro-batches, for provenance."""
        return _digest(self.batches)

    def digests(self) -> list[str]:
        """Return a hash of each micro-batch of this rank."""
        return [_digest([batch]) for batch in self.batches]


def code_of(loss: object) -> int:
    """Return what tells a loss from others of the process; a function that is made anew by the same
    code, as a lambda in a loop, is the same where the numbers and names that it is given are.
    """
    code = getattr(loss, "__code__", None)
    if code is None:
        return hash(id(loss))
    given = (v if isinstance(v, (int, float, str)) else None for v in given_to(loss))
    return hash((code, *given))


def _require_loss_fn(loss_fn: object) -> None:
    """Raise for what is no function of a model and a micro-batch.

    Raises:
        ConfigError: says what it is.
    """
    if isinstance(loss_fn, nn.modules.loss._Loss):
        given = f"the criterion {type(loss_fn).__name__}"
    elif loss_fn is not None and not callable(loss_fn):
        given = f"a {type(loss_fn).__name__}"
    else:
        return
    raise ConfigError(
        f"loss_fn is called as loss_fn(model, batch), got {given}: pass such a function, as "
        "lambda model, batch: criterion(model(batch[0]), batch[1])"
    )


class ModelObjective(MicroBatches):
    """Micro-batches and the loss on each, of a model that one call evaluates.

    Args:
        batches: This rank's micro-batches. A batch is a mapping (passed as keywords), a tuple or
            list (positional) or a tensor; tensors are moved to the model's device when used.
        loss_fn: A function of (model, batch), as `LossFn` describes; None where the model
            returns its loss: a scalar tensor, a tuple that begins with one, or an output with a
            `loss`.

    Raises:
        ConfigError: there is no micro-batch, or `loss_fn` is no such function.
    """

    def __init__(self, batches: Iterable[object], loss_fn: LossFn | None = None) -> None:
        super().__init__(batches)
        if not self.batches:
            raise ConfigError("batches is empty: at least one micro-batch is needed on every rank")
        _require_loss_fn(loss_fn)
        self.loss_fn, self.loss_code = loss_fn, code_of(loss_fn)

    def loss(
        self,
        model: Callable[..., object],
        index: int,
        device: torch.device,
        widen: bool = False,
        first: bool = True,
    ) -> tuple[Tensor, float | None]:
        """Return the loss of micro-batch `index` and, for a summed loss, its count (else None).

        Args:
            model: The model.
            index: The number of the micro-batch.
            device: The model's device.
            widen: Whether bf16 and fp16 tensors of the micro-batch are passed as fp32.
            first: Whether it is evaluated at the weights. Elsewhere a loss that is not finite has
                gradients that are not, from which a displacement is found to be too large.

        Raises:
            ConfigError: no scalar loss can be read from what the model or `loss_fn` returned.
            NumericsError: the loss at the weights is not finite, and gradients are taken of it.
        """
        batch = _to(self.batches[index], device, widen)
        loss: object
        count: float | None = None
        with kept_grad_mode():
            if self.loss_fn is not None:
                result = self.loss_fn(model, batch)
                if isinstance(result, tuple):
                    result, count = _summed(result)
                loss = result
            else:
                loss = _loss_of(_call(model, batch))
        graph = isinstance(loss, Tensor) and (loss.requires_grad or not torch.is_grad_enabled())
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and graph):
            raise ConfigError(
                "a micro-batch must give one scalar loss that requires gradients, got "
                f"{_kind(loss)}; pass loss_fn(model, batch) that returns it"
            )
        if first and torch.is_grad_enabled() and not torch.isfinite(loss.detach()).item():
            raise NumericsError(
                f"the loss of micro-batch {index} is {loss.item()} at the weights: look at its "
                'data, or, of a model in fp16, set finite_difference.precision to "fp32"'
            )
        return loss.reshape(()), count


@contextmanager
def reading(batches: Iterable[object], device: torch.device) -> Iterator[None]:
    """Read batches in the body, on all ranks or on none, leaving all random states, and where
    training is in a loader, unchanged.

    Iterating a `DataLoader` draws the seed of its shuffle and of its workers from torch's
    generator, or from one of its own.

    Args:
        batches: The iterable that is read.
        device: The device of the job's collectives.

    Raises:
        MeasurementError: the body raised on some rank.

    Collective.
    """
    with together("reading the batches", device=device):
        parts = parts_of(batches)
        values = (value for part in parts for value in vars(part).values())
        drawn = kept_random_states(device, *values)
        with drawn, kept_positions(parts), defaults_of_job():
            yield


def common_number(mine: int, space: VectorSpace) -> int:
    """Return the number of micro-batches, on which all ranks that have some must agree.

    Raises:
        ConfigError: they have different numbers, which it names with two ranks, or none has any.

    Collective: one all-reduce.
    """
    figures = torch.tensor([mine > 0, mine, mine**2], dtype=torch.float64)
    having, total, squares = map(int, space.reduce(figures).tolist())
    if having and having * squares == total**2:  # as Cauchy and Schwarz have it
        return total // having
    few = first_of(0 < mine * having < total, space.device)
    many = first_of(mine * having > total, space.device)
    named = [rank for rank in (few, many) if rank is not None]
    found = [f"{from_rank(mine, rank, space.device)} on rank {rank}" for rank in named]
    raise ConfigError(
        "every rank that reads data needs the same number of micro-batches, at least 1, got "
        f"{' and '.join(found) or 0}; pass lists of equal length"
    )


def refuse_sizes(sizes: Mapping[str, object]) -> None:
    """Raise for arguments that only Megatron's schedules take.

    Raises:
        ConfigError: names the first.
    """
    given = [name for name, value in sizes.items() if value is not None]
    if given:
        raise ConfigError(
            f"{given[0]} is not an argument here: only Megatron's schedules need seq_length and "
            "micro_batch_size; leave it out"
        )


class Totals:
    """Losses and counts of the micro-batches evaluated so far, on this rank."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.counts: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self.losses)

    def add(self, index: int, loss: float, count: float | None) -> None:
        """Record the first evaluation of a micro-batch."""
        if index not in self.losses:
            self.losses[index] = loss
            if count is not None:
                self.counts[index] = count

    def reduce(self, space: VectorSpace, roundoff: float) -> tuple[float, float, float]:
        """Return the factor for the sum of rank-averaged gradients, the mean loss, and the largest
        unit roundoff of the ranks, of which this one's is given.

        Raises:
            ConfigError: some micro-batches have counts and others have none, or all counts are 0.

        Collective: one all-reduce.
        """
        mine = [len(self.losses), len(self.counts), sum(self.losses.values())]
        mine.append(sum(self.counts.values()))
        roundoffs = [0.0] * space.world_size
        roundoffs[space.rank] = roundoff
        found = space.reduce(torch.tensor([*mine, *roundoffs], dtype=torch.float64)).tolist()
        (terms, counted, loss, count), largest = found[:4], max(found[4:])
        if counted == 0:
            return space.world_size / terms, loss / terms, largest
        if counted < terms or count <= 0:
            raise ConfigError(
                "loss_fn must return a pair (summed loss, count) for every micro-batch or for "
                f"none, and a positive count in all: {int(counted)} of {int(terms)} micro-batches "
                f"had one, their sum was {count}"
            )
        return space.world_size / count, loss / count, largest


def _call(model: Callable[..., object], batch: object) -> object:
    if isinstance(batch, Call):
        return model(*batch.args, **batch.kwargs)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def _loss_of(output: object) -> object:
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    loss: object = getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    return output


def _summed(pair: tuple[Tensor, Tensor | int | float]) -> tuple[Tensor, float]:
    wanted = "loss_fn must return a loss or a pair (summed loss, count)"
    if len(pair) != 2:
        raise ConfigError(f"{wanted}, got {len(pair)} values")
    if isinstance(pair[1], Tensor) and pair[1].requires_grad and pair[1].numel() == 1:
        raise ConfigError(
            f"{wanted}, got a count that depends on the weights, of which no gradient would be "
            "taken: detach it, or return a quotient as the loss"
        )
    try:
        count = float(pair[1])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{wanted}, got {_kind(pair[1])} as its count; leave it out") from error
    if not count >= 0:
        raise ConfigError(f"loss_fn returned the count {count}; it must be at least 0")
    return pair[0], count


def _to(value: Any, device: torch.device, widen: bool) -> Any:
    """Return nested containers with their tensors on `device`; the containers are new, tensors
    that are on the device already are not copied.
    """

    def moved(tensor: Tensor) -> Tensor:
        dtype = torch.float32 if widen and tensor.dtype in NARROW else tensor.dtype
        # Another object: that a pass differentiates by it, or asks for that, is not the caller's.
        return tensor.to(device, dtype).detach().requires_grad_(tensor.requires_grad)

    return mapped(value, moved)


def _digest(batches: Sequence[object]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for each in leaves(batches):
        if isinstance(each, Tensor):
            digest.update(str((each.dtype, tuple(each.shape))).encode())
            raw = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.numpy().tobytes())
        elif isinstance(each, np.ndarray) and each.dtype != object:
            digest.update(str((each.dtype, each.shape)).encode() + each.tobytes())
        elif isinstance(each, (bool, int, float, complex, str, bytes)):
            digest.update(repr(each).encode())
    return digest.hexdigest()


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    return type(value).__name__
