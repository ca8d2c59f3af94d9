"""What runs on the ranks: measurements with a fault on one of them, and what is left afterwards."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_hessian.errors import HessianError
from ds_hessian.ranks import gather_objects
from ds_hessian.records import HessianSpectrum
from tests.backends.jobs import same
from tests.faults.hosts import HOSTS, Host
from tests.faults.tracer import Site, Tracer

_host: Host | None = None
_expected: Any = None
_folder: tempfile.TemporaryDirectory[str] | None = None


def begin(name: str) -> dict[Site, int]:
    """Make a job, and count the calls of a measurement on this rank."""
    global _host, _expected
    if _host is not None:
        _host.close()
    _host = HOSTS[name]()
    _expected = measurement()
    with Tracer() as tracer:
        measurement()
    return dict(tracer.sites)


def here() -> Host:
    """The job."""
    assert _host is not None
    return _host


def folder() -> Path:
    """The folder of the first rank, for all."""
    global _folder
    _folder = _folder or tempfile.TemporaryDirectory(prefix="ds_hessian_faults")
    return Path(gather_objects(_folder.name)[0])


def measurement(place: Path | None = None) -> Any:
    """Attach; a short spectrum that is resumed; its record and a vector on disk, and read again.

    Returns what of it must be bitwise the same.
    """
    place = place or folder()
    hessian = here().attach()
    found = hessian.spectrum(num_matvecs=2, resume=place / "state")
    hessian.save(found, place / "out")
    path = hessian.save_vectors(hessian.random_vector()[None], place / "vector.safetensors")
    norm = hessian.dot(*2 * [hessian.load_vectors(path)[0]])
    return found.ritz_values[0].tolist(), found.weights[0].tolist(), found.loss, norm


UNFOLLOWED = "another stage waits for what this rank was to send or receive; end the job"
"""What a rank says that has failed amid an exchange of two stages of a pipeline."""


def readable() -> bool:
    """Whether there is a record, the old one or the new one."""
    return HessianSpectrum.load(folder() / "out").n > 0


def fail(site: Site, number: int, kind: str, rank: int) -> tuple[str, bool, bool, bool, bool]:
    """A measurement in which a call fails on one rank.

    Returns the error ("" for none), whether it was raised at all on this rank, whether training's
    state is as before on all, whether the record can be read, and whether the next measurement, if
    there is one, is the right one.
    """
    before, error, place = here().state(), "", folder()
    with Tracer((site, number, kind) if dist.get_rank() == rank else None) as tracer:
        try:
            measurement(place)
        except BaseException as caught:
            error = f"{name_of(caught)}: {caught}"
            if UNFOLLOWED in error:
                raise  # and the launcher ends the others
    kept = all(gather_objects(same(before, here().state())))
    return error, tracer.raised, kept, readable(), not kept or measurement() == _expected


def name_of(error: BaseException) -> str:
    """The class of an error as the user catches it."""
    return "KeyboardInterrupt" if isinstance(error, KeyboardInterrupt) else type(error).__name__


# ---- training inside of a measurement


def train_inside(what: str) -> tuple[str, bool, bool]:
    """Do in a measurement on rank 1 what a handler of preemption would.

    Returns the error, whether training's state is as before, and whether it can be done afterwards.
    """
    before, error, hessian = here().state(), "", here().attach()
    try:
        with hessian.measuring(displacement=1e-2):  # without trials
            hessian.matvec(hessian.random_vector(seed=0))
            if dist.get_rank() == 1:
                call(what)
            hessian.matvec(hessian.random_vector(seed=1))
    except HessianError as caught:
        error = str(caught)
    kept = same(before, here().state())
    if what == "state_dict":
        call(what)
    return error, kept, not hasattr(getattr(here().module, what, None), "what")


def call(what: str) -> Any:
    """Step the optimizer, or call a method of what training calls."""
    host = here()
    if what == "optimizer.step":
        return host.optimizer.step()
    arguments = () if what in ("state_dict", "sharded_state_dict") else ("nowhere",)
    return getattr(host.module, what)(*arguments)


def preempted(action: str) -> tuple[str, list[Any], bool]:
    """Rank 1 gets SIGTERM amid a spectrum; its handler saves the weights, or ends the job.

    Returns the error, what the handler saw: whether the weights were training's, and whether the
    state is as before.
    """
    host, seen, error = here(), list[Any](), ""
    before, hessian = host.state(), host.attach()
    weights = [p.detach().clone() for p in host.module.parameters()]

    def handler(number: int, frame: Any) -> None:
        now = list(host.module.parameters())
        training = all(torch.equal(a, b) for a, b in zip(weights, now, strict=True))
        seen.append(training and bool(host.module.state_dict()))
        if action == "exit":
            raise SystemExit(3)

    old = signal.signal(signal.SIGTERM, handler)
    try:
        with hessian.measuring():
            hessian.matvec(hessian.random_vector(seed=0))
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            hessian.matvec(hessian.random_vector(seed=1))
    except BaseException as caught:
        error = f"{name_of(caught)}: {caught}"
    finally:
        signal.signal(signal.SIGTERM, old)
    return error, seen, same(before, host.state())


# ---- single failures around the measurement


def around(what: str) -> tuple[str, bool, bool]:
    """A failure on rank 1 where no measurement is under way; see `POINTS`.

    Returns the error, whether training's state is as before, and whether the next measurement is
    the right one.
    """
    before, error, place = here().state(), "", folder()
    owner, name, number = POINTS[what]()
    inner, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and dist.get_rank() == 1:
            raise MemoryError("full")
        return inner(*args, **kwargs)

    setattr(owner, name, failing)
    try:
        measurement(place)
    except HessianError as caught:
        error = str(caught)
    finally:
        setattr(owner, name, inner)
    return error, same(before, here().state()), measurement() == _expected


def _points() -> dict[str, Callable[[], tuple[Any, str, int]]]:
    from ds_hessian import vector_files
    from ds_hessian.analyses import base, measurement
    from ds_hessian.backends.objective import MicroBatches
    from ds_hessian.backends.zero.backend import ZeroBackend
    from ds_hessian.job_measuring import JobMeasuring
    from ds_hessian.records import HessianSpectrum
    from ds_hessian.resume import run

    return {
        "attaching": lambda: (ZeroBackend, "_map", 1),
        "the settings": lambda: (JobMeasuring, "_subject", 1),
        "planning": lambda: (base, "share_of", 1),
        "the state before": lambda: (run, "_plain", 1),
        "a digest of the data": lambda: (MicroBatches, "digests", 1),
        "the fingerprint": lambda: (MicroBatches, "fingerprint", 1),
        "the versions": lambda: (measurement, "Provenance", 1),
        "the record": lambda: (HessianSpectrum, "from_runs", 1),
        "beginning to save": lambda: (vector_files, "save_record", 1),
        "collecting a parameter": lambda: (vector_files, "collected", 3),
        "distributing a parameter": lambda: (vector_files, "distribute", 2),
    }


POINTS = _points()
