"""The slice of data that automatic measurements are of, kept with the results.

    <output_path>/micro_batches/rank<r>/batches.pt    a rank's micro-batches, and their fingerprint

A job that is resumed reads other data first than it did at its beginning, so that figures of before
and after would differ in data too. It finds its micro-batches here. Where it cannot, or where the
user gives others, the log says so before the first measurement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hessian.backends.containers import copied, formed, leaves, plain
from ds_hessian.backends.objective import MicroBatches
from ds_hessian.hessian import Hessian
from ds_hessian.ranks import collective, first_of, from_rank, report, together
from ds_hessian.records.files import opened, replacing
from ds_hessian.vector_files import Output
from ds_hessian.vectors import VectorSpace

logger = logging.getLogger(__name__)

FOLDER = "micro_batches"
UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError),
    UnpicklingError,
)
"""What `torch.load` raises for a file that is damaged, or none of its own."""


def settled(
    space: VectorSpace, output: Path, batches: list[Any], resumed: bool, given: bool = False
) -> list[Any]:
    """Return the micro-batches to be measured: those kept by the job that this one resumes, or
    these, which are then kept.

    Args:
        space: The space of the vectors.
        output: The folder of the results.
        batches: This rank's micro-batches.
        resumed: Whether training began before this process.
        given: Whether the user has chosen these micro-batches, which then are measured in any case.

    Raises:
        MeasurementError: some rank could not write.

    Collective.
    """
    path = output / FOLDER / f"rank{space.rank}" / "batches.pt"
    mine = MicroBatches(batches).fingerprint()
    if resumed:
        kept = _read(path, space, batches)
        without = first_of(kept.batches is None, space.device)
        if not given and without is None and kept.batches is not None:
            if space.rank == 0:
                logger.info("the micro-batches in %s are measured again", path.parent.parent)
            return kept.batches
        other = first_of(kept.fingerprint != mine, space.device)
        if other is not None:
            here, there = from_rank((mine, kept.fingerprint), other, space.device)
            if space.rank == 0:
                logger.warning(
                    "the measured micro-batches are not those of before the job was resumed "
                    "(fingerprint %s of rank %d; before: %s): figures of before and after differ "
                    "in data too",
                    here,
                    other,
                    there,
                )
    with together(f"keeping the micro-batches in {path.parent.parent}", device=space.device):
        _write(path, mine, None if given else batches, space)
    return batches


def use_settled(
    hessian: Hessian,
    use: Callable[[list[Any]], object],
    captured: list[Any],
    resumed: bool,
    error: Exception | None = None,
    given: bool = False,
) -> list[Any]:
    """Give a Hessian the micro-batches that are `settled`, unless the user has given it others.

    Args:
        hessian: The Hessian of the job.
        use: Gives it micro-batches.
        captured: This rank's micro-batches of training.
        resumed: Whether training began before this process.
        error: Why they could not be captured.
        given: Whether the user has chosen them.

    Returns:
        The micro-batches of this rank.

    Raises:
        ConfigError: another job uses the `output_path`.
        MeasurementError: some rank could not capture, use or write its micro-batches.

    Collective.
    """
    space, output = hessian.backend.space, hessian.output.folder
    with collective("choosing the micro-batches", space.device):
        hessian.output.claim()  # those that another job keeps in it stay
        if not resumed and space.rank == 0:
            _warn_of_earlier(hessian.output)
        if hessian.batches is not None:
            return settled(space, output, hessian.batches, resumed, given=True)
        if error is not None:
            raise error
        found = settled(space, output, captured, resumed, given)
        use(found)
        return found


def _warn_of_earlier(output: Output) -> None:
    """Warn where a run that begins anew has the folder of an earlier one, whose steps remain."""
    names = output.earlier()
    if names:
        shown = ", ".join(names[:3]) + f", ... ({len(names)} in all)" * (len(names) > 3)
        text = (
            "%s has records of an earlier run (%s): tables and the page show those that this run "
            "does not replace beside its own; remove them, or name another output_path"
        )
        report(logger.warning, text, output.folder, shown)


class _Kept(NamedTuple):
    """What a file holds: a fingerprint, or why there is none; and the micro-batches."""

    fingerprint: str
    batches: list[Any] | None


def _read(path: Path, space: VectorSpace, now: list[Any]) -> _Kept:
    """Return what a file holds; micro-batches in containers of the kinds that those of now have,
    whose classes it does not name.
    """
    if not path.exists():
        return _Kept(f"none in {path.parent}", None)

    def home(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(space.device)

    try:
        # No code in the file is executed.
        with opened(path) as file:
            found = torch.load(file, map_location=home, weights_only=True)
        if found["world_size"] != space.world_size:
            return _Kept(f"those of {found['world_size']} ranks", None)
        kept = None if found["batches"] is None else formed(found["batches"], now)
        fingerprint = found["fingerprint"]
        if kept is not None and MicroBatches(kept).fingerprint() != fingerprint:
            return _Kept(f"damaged in {path}", None)
        return _Kept(str(fingerprint), kept)
    except UNREADABLE as error:
        return _Kept(f"unreadable in {path}: {type(error).__name__}", None)


def _write(path: Path, fingerprint: str, batches: list[Any] | None, space: VectorSpace) -> None:
    other = next((each for each in leaves(batches) if not _is_kept(each)), None)
    if other is not None:
        logger.warning(
            "the measured micro-batches are not kept for a resumed job: they hold a %s",
            type(other).__name__,
        )
    kept = None if batches is None or other is not None else copied(plain(batches))
    content = {"fingerprint": fingerprint, "world_size": space.world_size, "batches": kept}
    with replacing(path) as file:
        torch.save(content, file)


def _is_kept(value: object) -> bool:
    return value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str)
