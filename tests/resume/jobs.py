"""What runs on the ranks: runs that keep their state, on sharded vectors without any host."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.backends.plain.backend import ModuleBackend, ModuleSession
from ds_hessian.config import HessianConfig
from ds_hessian.errors import HessianError
from ds_hessian.krylov import (
    LanczosOptions,
    LanczosState,
    eigenpairs,
    hutch_plus_plus,
    hutchinson,
    slq,
    solve,
    xtrace,
)
from ds_hessian.operators import FiniteDifferenceHessian, LinearOperator, Product
from ds_hessian.resume import Journal, SavedSpectrum, StateStore, identity_of, store
from ds_hessian.resume.files import read_json, write_json
from ds_hessian.resume.generations import state_files
from ds_hessian.vectors import Fragment, Layout, VectorSpace, random_vector
from tests.krylov.matrices import SPECTRA, Matrix, layout_of
from tests.nets import TinyGPT, batch

PROBES, STEPS = 2, 12
LONG = 24  # steps of the run that is killed 20 times


class Sharded:
    """A module whose vectors are split over the ranks; the weights are whole on each."""

    def __init__(self, module: Any) -> None:
        self.whole = ModuleBackend(module)
        self.parameters = self.whole.parameters
        self.objective = self.whole.objective
        sizes = {name: shape.numel() for name, shape in self.parameters}
        self.layout = layout_of(sizes)
        self.space = VectorSpace(self.layout.n_local, self.layout.n_owned)
        starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self.places = [
            (slice(starts[f.name] + f.start, starts[f.name] + f.start + f.numel), part, f.owned)
            for f, part in self.layout
        ]

    def full(self, v: Tensor | None) -> Tensor:
        """The whole vector, on every rank; 0 for None."""
        full = torch.zeros(self.whole.layout.n_local)
        for place, part, owned in self.places:
            if v is not None and owned:
                full[place] = v[part]
        if dist.is_initialized():
            dist.all_reduce(full)
        return full

    @contextmanager
    def measuring(self, micro_batches: Any) -> Iterator[ShardedSession]:
        """Guard the whole module."""
        with self.whole.measuring(self.objective(micro_batches)) as session:
            yield ShardedSession(self, session)


class ShardedSession:
    """The session of the whole module, on shards of the vectors."""

    def __init__(self, backend: Sharded, whole: ModuleSession) -> None:
        self.backend, self.whole = backend, whole
        self.layout, self.space = backend.layout, backend.space
        self.num_micro_batches, self.unit_roundoff = whole.num_micro_batches, whole.unit_roundoff
        self.costly_runs = whole.costly_runs

    @property
    def gradient_scale(self) -> float | None:
        """That of the whole."""
        return self.whole.gradient_scale

    @property
    def loss(self) -> float:
        """That of the whole."""
        return self.whole.loss

    def displace(self, v: Tensor | None, h: float, across: bool = False) -> Tensor:
        """See `Session.displace`."""
        return self.whole.displace(self.backend.full(v), h, across)

    def realised(self) -> Tensor:
        """See `Session.realised`."""
        full, out = self.whole.realised(), self.space.zeros()
        for place, part, _ in self.backend.places:
            out[part] = full[place]
        return out

    def add_gradient(self, out: Tensor, micro_batches: range, factor: float = 1.0) -> None:
        """See `Session.add_gradient`."""
        full = self.backend.whole.space.zeros()
        self.whole.add_gradient(full, micro_batches, factor)
        for place, part, _ in self.backend.places:
            out[part] += full[place]

    @property
    def kinks(self) -> Any:
        """Those of the whole."""
        return self.whole.kinks

    def choices(self, micro_batches: range) -> Tensor:
        """There are none."""
        return torch.zeros(4, dtype=torch.float64)

    def weight_norm(self) -> float:
        """See `Session.weight_norm`."""
        w, v = torch.cat([m.float() for m in self.whole.weights.masters]), self.space.zeros()
        for place, part, _ in self.backend.places:
            v[part] = w[place]
        return self.space.norm(v)


class Stopped(Exception):
    """Ends a run after some of its products."""


def identity(
    backend: Sharded,
    operator: FiniteDifferenceHessian,
    batches: Any,
    config: HessianConfig,
    step: int,
) -> tuple[dict[str, Any], float]:
    """What a measurement is of, and the roundoff of its passes."""
    session, objective = operator.session, backend.objective(batches)
    here = identity_of(session, operator, objective, config, step, backend.parameters)
    return here, session.unit_roundoff


def spectrum(
    folder: str | None,
    stop: int | None = None,
    options: LanczosOptions | None = None,
    first_batch: int = 0,
    scale: float = 1.0,
    step: int = 0,
    **settings: Any,
) -> list[Any] | str:
    """Runs of a spectrum of TinyGPT; or of its first `stop` products, or the error."""
    torch.manual_seed(0)
    module = TinyGPT(dropout=0.0)
    with torch.no_grad():
        module.down.weight[0, 0] *= scale
    batches = [batch(first_batch + i, 0) for i in range(2)]
    backend = Sharded(module)
    config = HessianConfig.parse({"num_matvecs": STEPS, "num_probes": PROBES, **settings})
    made = 0

    def report(probe: int, state: LanczosState) -> None:
        nonlocal made
        if saved is not None:
            saved.save(probe, state)
        made += 1
        if made == stop:
            raise Stopped

    try:
        with ExitStack() as stack:
            saved = None
            if folder is not None:
                saved = SavedSpectrum(Path(folder), backend.layout, backend.space)
                stack.callback(saved.close)
                stack.enter_context(saved.random_states())
            session = stack.enter_context(backend.measuring(batches))
            operator = FiniteDifferenceHessian(session)
            if saved is not None:
                saved.resume(operator, *identity(backend, operator, batches, config, step))
            runs = slq(
                operator,
                backend.layout,
                config.num_matvecs,
                config.num_probes,
                config.seed,
                config.probe,
                report,
                options,
                saved.runs if saved else (),
                saved.restore if saved else None,
            )
        if saved is not None:
            saved.clear()
    except Stopped:
        return "stopped"
    except HessianError as error:
        return f"{type(error).__name__}: {error}"
    return [*map(vars, runs), vars(operator._controller), made]


def _solved(method: Any, preconditioned: bool = False) -> Any:
    def analysis(operator: LinearOperator, draw: Any) -> Any:
        diagonal = torch.full_like(draw(0), 2.0) if preconditioned else None
        return solve(operator, draw(9), [3.0, 40.0], draw, method, 1e-7, 8, diagonal)

    return analysis


ANALYSES: dict[str, Any] = {
    "eigenpairs": lambda h, draw: eigenpairs(h, draw(0), 2, draw, max_matvecs=20, basis_size=8),
    "Hutchinson": lambda h, draw: hutchinson(h, draw, 12),
    "Hutch++": lambda h, draw: hutch_plus_plus(h, draw, 12),
    "XTrace": lambda h, draw: xtrace(h, draw, 12),
    "CG": _solved("cg"),
    "MINRES": _solved("minres"),
    "preconditioned": _solved("minres", True),
}


class Interrupted:
    """An operator whose analysis is stopped after product number `stop`, whoever made them."""

    def __init__(self, operator: LinearOperator, cost: Any, stop: int | None) -> None:
        self.operator, self.space, self.cost, self.stop = operator, operator.space, cost, stop

    def matvec(self, v: Tensor) -> Product:
        """See `LinearOperator`."""
        product = self.operator.matvec(v)
        if self.cost().products == self.stop:
            raise Stopped
        return product


def analysis(
    kind: str,
    folder: str | None,
    stop: int | None = None,
    seed: int = 0,
    call: Any = None,
    scale: float = 1.0,
) -> Any:
    """(figures of an analysis of TinyGPT, state of the operator, products replayed), or the error.

    `seed`: of the vectors that a caller passes; `scale`: of a weight.
    """
    torch.manual_seed(0)
    module, batches = TinyGPT(dropout=0.0), [batch(i, 0) for i in range(2)]
    with torch.no_grad():
        module.down.weight[0, 0] *= scale
    backend = Sharded(module)

    def draw(number: int) -> Tensor:
        return random_vector(backend.layout, backend.space, seed, number)

    try:
        with ExitStack() as stack:
            journal = (
                None if folder is None else Journal(Path(folder), backend.layout, backend.space)
            )
            if journal is not None:
                stack.callback(journal.close)
            session = stack.enter_context(backend.measuring(batches))
            operator = FiniteDifferenceHessian(session)
            if journal is not None:
                here, roundoff = identity(backend, operator, batches, HessianConfig(), 0)
                journal.resume(operator, {**here, "call": call}, roundoff)
            interrupted = Interrupted(journal or operator, lambda: operator.cost, stop)
            found = {
                name: torch.stack([backend.full(v) for v in value])
                if torch.is_tensor(value)
                else value
                for name, value in vars(ANALYSES[kind](interrupted, draw)).items()
            }
        if journal is not None:
            journal.clear()
    except Stopped:
        return "stopped"
    except HessianError as error:
        return f"{type(error).__name__}: {error}"
    cost = {**vars(operator.cost), "gradient_seconds": 0, "product_seconds": 0}
    state = {**operator.state_dict(), "cost": cost}
    return found, state, 0 if journal is None else journal.replayed


def replay_of_a_vector_off_by(share: float, folder: str) -> Any:
    """A kept product's error, the products replayed, and the error of that at a vector which is off
    by a share of the first error.
    """
    torch.manual_seed(0)
    backend, batches = Sharded(TinyGPT(dropout=0.0)), [batch(i, 0) for i in range(2)]
    first, second, off = (random_vector(backend.layout, backend.space, 0, i) for i in range(3))
    scale = share * backend.space.norm(second) / backend.space.norm(off)
    errors = [0.0]
    for _ in range(2):
        journal = Journal(Path(folder), backend.layout, backend.space)
        with backend.measuring(batches) as session:
            operator = FiniteDifferenceHessian(session)
            journal.resume(operator, *identity(backend, operator, batches, HessianConfig(), 0))
            journal.matvec(first)
            errors.append(journal.matvec(second + errors[-1] * scale * off).error)
    return errors[1], journal.replayed, errors[2]


def rank(number: int, world_size: int, meeting: str, folder: str, out: str, kind: str) -> None:
    """One rank of a job of its own, which is killed or writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=number, world_size=world_size
    )
    if kind == "spectrum":
        found: Any = spectrum(folder, num_matvecs=LONG)
    else:
        found = analysis(kind, folder)
    assert not isinstance(found, str), found
    if number == 0:
        torch.save(found, out)
    dist.barrier()


def killed_while_writing(folder: str, number: int) -> None:
    """A spectrum on one rank, which is killed before it renames file `number` that it wrote."""
    rename, renamed = os.rename, 0

    def killing(source: Path, target: Path) -> None:
        nonlocal renamed
        if renamed == number:
            os.kill(os.getpid(), signal.SIGKILL)
        renamed += 1
        rename(source, target)

    os.rename = killing  # type: ignore[assignment]
    torch.set_num_threads(1)
    spectrum(folder)


def matrix_run(folder: str, stop: int | None, steps: int = 25) -> Any:
    """alphas and betas of an exact operator, through a store alone."""
    operator = Matrix.of(SPECTRA["spiked"])
    store = StateStore(Path(folder), operator.layout, operator.space, {})
    state = LanczosState(operator, operator.fresh()(0), steps, operator.fresh())
    if store.figures is not None:
        state.load_state_dict(store.figures, store.vector)
    resumed = state.steps
    while state.steps < (stop or steps):
        state.step()
        store.save(state.state_dict(), state.vectors())
    return resumed, np.array(state.alphas), np.array(state.betas)


def unwritten(folder: str) -> tuple[str, int]:
    """The error of a save in which a vector of rank 1 cannot be had, and the states there are."""
    layout = Layout([Fragment(f"w{dist.get_rank()}", 0, 8, torch.Size([8]))])
    saved = StateStore(Path(folder), layout, VectorSpace(layout.n_local, layout.n_owned), {})

    def vector() -> Tensor:
        if dist.get_rank() == 1:
            raise OSError("no space left")
        return torch.zeros(8)

    error = ""
    try:
        saved.save({}, {"v": vector})
    except HessianError as found:
        error = str(found)
    states = len(state_files(Path(folder)))
    saved.clear()
    return error, states


_open: StateStore | None = None


def keep_open(folder: str | None) -> str:
    """Open the state of a run and keep it open in this process; with None, close it."""
    global _open
    if folder is None:
        assert _open is not None
        _open.close()
        _open = None
        return "closed"
    operator = Matrix.of(SPECTRA["spiked"])
    _open = StateStore(Path(folder), operator.layout, operator.space, {})
    return "open"


def listed(folder: str, stop: int) -> tuple[set[str], list[str]]:
    """Folders that a spectrum lists on this rank, and the layouts of ranks that it reads."""
    names, read, scandir, listdir = set[str](), list[str](), os.scandir, os.listdir

    def listing(function: Any) -> Any:
        def call(path: Any = ".") -> Any:
            if str(path).startswith(folder):
                names.add(str(path).removeprefix(folder).strip("/"))
            return function(path)

        return call

    def reading(path: Path) -> Any:
        if path.name == "layout.json":
            read.append(path.parent.name)
        return read_json(path)

    os.scandir, os.listdir = listing(scandir), listing(listdir)
    store.read_json = reading
    try:
        spectrum(folder, stop)
    finally:
        os.scandir, os.listdir, store.read_json = scandir, listdir, read_json
    return names, read


def vectors_without_files(folder: str) -> list[bool]:
    """Whether the vectors of a state are those of its run, when their files are gone."""
    operator = Matrix.of(SPECTRA["spiked"])
    store = StateStore(Path(folder), operator.layout, operator.space, {})
    state = LanczosState(operator, operator.fresh()(0), 25, operator.fresh())
    while state.steps < 5:
        state.step()
    operator.space.reduce(torch.zeros(1, dtype=torch.float64))  # all ranks have taken it up
    for path in Path(folder).glob("*/*/*.safetensors"):
        path.unlink(missing_ok=True)
    near = 64 * 2.0**-24
    return [
        bool((store.vector(name) - v()).abs().max() < near) for name, v in state.vectors().items()
    ]


def random_states(folder: str) -> bool:
    """Whether a resumed run finds the random states of its beginning, and leaves the others."""
    backend = Sharded(TinyGPT())

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    saved = SavedSpectrum(Path(folder), backend.layout, backend.space)
    saved._store.save({"runs": [], "seconds": 0.0, "all_reduces": 0}, {})
    first = draw()
    draw()  # training continues
    second = SavedSpectrum(Path(folder), backend.layout, backend.space)
    before = torch.get_rng_state()
    with second.random_states():
        again = draw()
    return first == again and torch.equal(before, torch.get_rng_state()) and draw() != first


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Change the content of a file of the state, with a checksum that fits."""
    content = json.loads(path.read_text())["content"]
    change(content)
    write_json(path, content)


def newest(folder: Path) -> tuple[int, Path | None]:
    """Generation of the newest state on disk, and its file."""
    found = []
    for path in folder.glob("state.*.json"):
        try:
            found.append((json.loads(path.read_text())["content"]["generation"], path))
        except (FileNotFoundError, ValueError):  # replaced, or removed, while we look
            continue
    return max(found, default=(0, None))
