"""What ranks compare as they enter a call: which call it is, and what they give it alike.

Ranks that make different calls, or the same one with other settings, would take each other's
collectives for their own: gloo ends the processes then, and NCCL waits. So the all-reduce by which
ranks enter a call sums hashes too (`ds_hessian.ranks.imbalance`), and where these do not cancel all
ranks tell each other what they call.

Cost: no further all-reduce; a gather where calls differ.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.errors import ConfigError
from ds_hessian.ranks.agreement import agree, reduce
from ds_hessian.ranks.exchange import Shared, balanced, gather_objects, imbalance

Given = Callable[[], Mapping[str, object]]
"""Returns what ranks must give alike, by name; `alike` says how values are compared."""

SHOWN = 100
"""Characters of a value that a message shows."""


class CallsDiffer(ConfigError):
    """Ranks make different calls; raised on all of them."""


class Call(NamedTuple):
    """A call of one rank.

    Attributes:
        doing: Its action.
        given: The names and texts of what ranks must give alike; None where that cannot be said,
            since this rank has failed.
    """

    doing: str
    given: tuple[tuple[str, str], ...] | None = ()


def call_of(doing: str, given: Mapping[str, object]) -> Call:
    """Return a call with its values as texts, which all ranks can compare."""
    return Call(doing, tuple((name, alike(value)) for name, value in given.items()))


def alike(value: object) -> str:
    """Return a text of a value, the same for values that are equal on all ranks.

    Of a vector, whose size each rank has its own of, it says the dimensions before the last; of
    other objects the class.
    """
    if isinstance(value, Tensor):
        if value.dim():
            return f"a tensor ({', '.join(map(str, [*value.shape[:-1], '...']))})"
        value = value.item()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    if value is None or isinstance(value, (bool, str, numbers.Number)):
        return repr(value)
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{alike(k)}: {alike(v)}' for k, v in value.items())}}}"
    if isinstance(value, (list, tuple, range)):
        return f"[{', '.join(map(alike, value))}]"
    if isinstance(value, AbstractSet):
        return f"{{{', '.join(sorted(map(alike, value)))}}}"
    return f"a {type(value).__name__}"


def enter(call: Call, terms: Tensor, figure: float, device: torch.device | str) -> Tensor:
    """Meet all ranks at the entrance of a call.

    Args:
        call: The call of this rank.
        terms: What else is summed, `(2,)` fp64.
        figure: One more.
        device: The device of the tensors of the job's collectives.

    Returns:
        The sums of terms and figure, `(3,)` fp64.

    Raises:
        CallsDiffer: ranks make different calls.
        MeasurementError: some rank has failed in the call around it.

    Collective: one all-reduce of 40 bytes, at which ranks meet.
    """
    own = imbalance([Shared(call, dist.get_world_size(), dist.get_rank() == 0)])
    mine = torch.cat([terms, own, torch.tensor([figure], dtype=torch.float64)])
    said = reduce(mine.to(device))
    if not balanced(said[2:4]):
        _require_alike(call)
    return said[[0, 1, 4]]


def summed(doing: str, partial: Callable[[], float], device: torch.device | str = "cpu") -> float:
    """Return the sum of a figure of every rank, in a call of its own.

    Args:
        doing: The action, for a message.
        partial: Returns this rank's figure.
        device: The device of the tensors of the job's collectives.

    Raises:
        CallsDiffer: other ranks make another call.
        MeasurementError: `partial` raised on some rank; a `HessianError` as it is where it did.

    Collective: one all-reduce of 40 bytes.
    """
    error: BaseException | None = None
    try:
        mine = partial()
    except BaseException as caught:  # raised by agree, after the other ranks know of it
        error, mine = caught, math.nan
    if not (dist.is_available() and dist.is_initialized()):
        if error is not None:
            raise error
        return mine
    total = float(enter(Call(doing), torch.zeros(2, dtype=torch.float64), mine, device)[2])
    if math.isnan(total):
        agree(error, doing, device=device)
    return total


def _require_alike(call: Call) -> None:
    """Raise if ranks that have not failed make different calls.

    Collective: a gather.
    """
    found: list[Call] = gather_objects(call)
    said = {rank: each for rank, each in enumerate(found) if each.given is not None}
    if len(set(said.values())) < 2:
        return
    if len({each.doing for each in said.values()}) > 1:
        differ = _by_rank({rank: each.doing for rank, each in said.items()})
        raise CallsDiffer(
            f"the ranks make different calls: {differ}; all ranks must make the same calls in the "
            "same order"
        )
    values = {rank: dict(each.given or ()) for rank, each in said.items()}
    names = list(dict.fromkeys(name for each in values.values() for name in each))
    wrong = [
        f"{name}: {_by_rank(mine)}"
        for name in names
        if len(set((mine := {r: v.get(name, "not given") for r, v in values.items()}).values())) > 1
    ]
    raise CallsDiffer(
        f"the ranks differ in what they give for {next(iter(said.values())).doing}: "
        f"{'; '.join(wrong)}; all ranks must give the same"
    )


def _by_rank(said: Mapping[int, str]) -> str:
    """Return who says what: each text with the ranks that say it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in said.items():
        ranks.setdefault(text, []).append(rank)
    return ", ".join(f"{_short(text)} on {_ranks(who)}" for text, who in ranks.items())


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _ranks(ranks: Iterable[int]) -> str:
    first, *others = ranks
    if not others:
        return f"rank {first}"
    return (
        f"rank {first} and {len(others)} more" if len(others) > 1 else f"ranks {first}, {others[0]}"
    )
