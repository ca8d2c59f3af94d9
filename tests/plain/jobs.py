"""What runs on the ranks: plain modules, their products, and what training left behind."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ds_hessian
from ds_hessian.backends import Passes
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.errors import HessianError
from ds_hessian.krylov import slq
from ds_hessian.operators import FiniteDifferenceHessian
from tests.backends import jobs
from tests.nets import TinyGPT, batch

STEPS = 4


class Mixed(nn.Module):
    """Dropout, BatchNorm, a frozen parameter, and maybe a layer that not every step uses."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)
        self.odd = nn.Linear(7, 7) if odd else nn.Identity()
        self.norm, self.drop = nn.BatchNorm1d(7), nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.full((7,), 1.5), requires_grad=False)
        self.forwards, self.last = 0, torch.zeros(1)

    def forward(self, x: Tensor, y: Tensor, odd: bool = False) -> Tensor:
        """Mean cross entropy."""
        self.forwards += 1
        hidden = self.drop(torch.tanh(self.norm(self.up(x)))) * self.scale
        self.last = hidden.detach()
        if odd:
            hidden = hidden + self.odd(hidden)
        return functional.cross_entropy(self.down(hidden), y)


def data(number: int) -> tuple[Tensor, Tensor]:
    """A micro-batch of `Mixed`."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 5, generator=generator)
    return x, torch.randint(3, (8,), generator=generator)


def mixed(ddp: dict[str, Any] | None, odd: bool = False) -> nn.Module:
    """`Mixed`, the same in every call; in DDP unless that is None."""
    torch.manual_seed(0)
    module = Mixed(odd)
    return module if ddp is None else DistributedDataParallel(module, **ddp)


def coefficients(
    module: nn.Module, batches: list[Any], loss: Any = None, passes: Passes | None = None
) -> Any:
    """(alphas, betas) of a short run."""
    backend = ModuleBackend(module)
    objective = backend.objective(batches, loss)
    with backend.measuring(objective, passes or Passes()) as session:
        (run,) = slq(FiniteDifferenceHessian(session), backend.layout, 5, 1, seed=0)
    return run.alphas, run.betas


def _snapshot(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    entries: list[Any] = [torch.get_rng_state()]
    for _, p in module.named_parameters():
        entries += [p.detach().clone(), None if p.grad is None else p.grad.clone()]
        entries += [v for v in optimizer.state.get(p, {}).values() if torch.is_tensor(v)]
    entries += [b.clone() for b in module.buffers()]
    entries += [(m.forwards, m.last) for m in module.modules() if isinstance(m, Mixed)]
    return entries


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def trained(
    ddp: dict[str, Any] | None, measure: bool, accumulate: bool = False, odd: bool = False
) -> tuple[list[Any], list[float]]:
    """What training with or without measurements in between leaves behind, and its losses."""
    module = mixed(ddp, odd)
    torch.manual_seed(77 + (dist.get_rank() if dist.is_initialized() else 0))
    rank = dist.get_rank() if dist.is_initialized() else 0
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    backend, losses = ModuleBackend(module, optimizer), list[float]()
    batches = [(*data(900 + 10 * i + rank), odd) for i in range(2)]

    def look() -> None:
        if not measure:
            return
        for dropout in (False, True):
            passes = Passes(dropout=dropout)
            with backend.measuring(backend.objective(batches), passes) as session:
                operator = FiniteDifferenceHessian(session)
                v = operator.gradient / operator.space.norm(operator.gradient)
                operator.matvec(v)

    look()  # before the first forward too
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            here = accumulate and part == 0
            quiet = module.no_sync() if here and ddp is not None else contextlib.nullcontext()
            with quiet:
                loss = module(*data(100 * step + 10 * part + rank), odd and step % 2 == 1)
                loss.backward()
            losses.append(float(loss.detach()))
            look()  # between two backwards too
        optimizer.step()
        look()
    return _snapshot(module, optimizer), losses


def is_neutral(ddp: dict[str, Any] | None, **options: bool) -> bool:
    """Whether training with measurements in between is bitwise that without."""
    return _same(trained(ddp, False, **options), trained(ddp, True, **options))


def gpt(ddp: bool, total: int) -> Any:
    """Coefficients of TinyGPT on `total` micro-batches, dealt out to the ranks."""
    module = _gpt()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = [batch(500 + i, 0) for i in range(rank, total, ranks)]
    return coefficients(DistributedDataParallel(module) if ddp else module, batches)


def zero_0() -> Any:
    """The same on a ZeRO-0 engine."""
    engine = jobs.make_engine(_gpt(), zero={"stage": 0}, hessian=jobs.QUIET)
    hessian = engine.hessian.use(jobs.my_batches())
    spectrum = hessian.spectrum(num_matvecs=5, num_probes=1)
    engine.destroy()
    return spectrum.alphas[0], spectrum.betas[0]


def _gpt() -> nn.Module:
    torch.manual_seed(0)
    return TinyGPT(dropout=0.0)


def failing(rank: int) -> tuple[str, bool]:
    """The error of a loss that fails on one rank, and whether training state is as it was."""
    module = mixed({})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = _snapshot(module, optimizer)

    def loss(model: nn.Module, given: Any) -> Tensor:
        if dist.get_rank() == rank:
            raise OSError("on purpose")
        found = model(*given)
        assert isinstance(found, Tensor)
        return found

    try:
        coefficients(module, [data(1)], loss)
    except HessianError as error:
        return str(error), _same(before, _snapshot(module, optimizer))
    return "", False


def different_weights() -> str:
    """The refusal of a module that is another one on each rank."""
    torch.manual_seed(dist.get_rank())
    try:
        coefficients(Mixed(), [data(1)])
    except HessianError as error:
        return str(error)
    return ""


def different_steps() -> str:
    """The error of a spectrum of which each rank has another number of steps."""
    hessian = ds_hessian.attach(mixed(None)).use([data(0)])
    hessian.step = 3 + dist.get_rank()
    try:
        hessian.spectrum(num_matvecs=1)
    except HessianError as error:
        return str(error)
    return ""


def engine_for_inference() -> str:
    """What is said of an engine of DeepSpeed's that does not train."""
    import deepspeed

    engine = deepspeed.init_inference(mixed(None), dtype=torch.float32)
    try:
        ds_hessian.attach(engine)
    except HessianError as error:
        return str(error)
    return ""


def sharded_refusal(kind: str) -> str:
    """What is said of a module that FSDP or FSDP2 has sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    module: nn.Module = nn.Linear(4, 4)
    if kind == "FSDP":
        module = FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    else:
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    try:
        ModuleBackend(module)
    except HessianError as error:
        return str(error)
    return ""


def whole_run(folder: str) -> dict[str, Any]:
    """A training with a schedule; then Adam's sharpness, the self-test, a resumed spectrum."""
    module = DistributedDataParallel(_gpt())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    quiet = {"progress": False, "plot": False, "num_matvecs": 4, "output_path": folder}
    hessian: Any = ds_hessian.attach(module, optimizer, {**quiet, "interval": 2})
    for i in range(3):
        optimizer.zero_grad()
        module(*batch(i, dist.get_rank())).backward()
        optimizer.step()
        hessian.step()
    batches = [batch(i, dist.get_rank()) for i in range(2)]
    resume, calls = f"{folder}/state", 0
    # Not the loss of which the schedule's spectrum has taught.
    hessian.use(batches, lambda model, given: model(*given))
    whole = hessian.spectrum(num_matvecs=6)

    def preempted(model: nn.Module, given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 20 and dist.get_rank() == 1:
            raise OSError("preempted")
        found = model(*given)
        assert isinstance(found, Tensor)
        return found

    with contextlib.suppress(HessianError):
        hessian.spectrum(batches, preempted, num_matvecs=6, resume=resume)
    resumed = hessian.use(batches, lambda model, given: model(*given)).spectrum(
        num_matvecs=6, resume=resume
    )
    v = hessian.random_vector(seed=2)
    return {
        "steps": sorted(int(p.name[-6:]) for p in Path(folder).glob("step_*")),
        "layout": whole.provenance.layout,
        "resumed": bool((resumed.alphas == whole.alphas).all()) and calls >= 20,
        "sharpness": hessian.sharpness().preconditioned.value,
        "passed": hessian.self_test().passed,
        "gathered": torch.equal(hessian.scatter(hessian.gather(v)), v),
    }


def adam_shared_out() -> dict[str, Any]:
    """Adam's state and the optimizer of records where each rank keeps that of its own parameters,
    and where every rank keeps all.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found, given = dict[str, Any](), {"progress": False, "plot": False}
    for name, settings in {"whole": {}, "shared": {"optimizer_class": torch.optim.Adam}}.items():
        kind: Any = ZeroRedundancyOptimizer if settings else torch.optim.Adam
        module = mixed({})
        optimizer = kind(module.parameters(), lr=1e-2, eps=1e-7, **settings)
        torch.manual_seed(77)
        for step in range(3):
            optimizer.zero_grad()
            module(*data(10 * step + dist.get_rank())).backward()
            optimizer.step()
        hessian = ds_hessian.attach(module, optimizer, given).use([data(5)])
        sharpness = hessian.sharpness(max_matvecs=8)
        found[name] = *hessian.backend.adam(), sharpness.provenance.optimizer, sharpness.table()
    return found


def adam_of_others() -> str:
    """What is said where no rank's optimizer has one of the trained parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = mixed({})
    _, *others = (p for p in module.parameters() if p.requires_grad)
    optimizer: Any = ZeroRedundancyOptimizer(others, torch.optim.Adam, lr=1e-2)
    module(*data(5)).backward()
    optimizer.step()
    try:
        ds_hessian.attach(module, optimizer, {"progress": False}).backend.adam()
    except HessianError as error:
        return str(error)
    return ""


def adam_of_each() -> list[str]:
    """What is said where weights are those of all ranks, and Adam's state each rank's own; and of a
    job whose optimizer is around another, without hooks.
    """
    module = mixed({})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    around = Around(optimizer)
    hessian = ds_hessian.attach(module, around, {"progress": False}).use([data(5)])
    before = hessian.sharpness(preconditioned=False).eigenvalue_max.value
    for step in range(2):
        optimizer.zero_grad()
        with module.no_sync():
            module(*data(10 * step + dist.get_rank())).backward()
        around.step()
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            dist.all_reduce(tensor.data)
            tensor.data /= 2
    hessian = ds_hessian.attach(module, optimizer, {"progress": False}).use([data(5)])
    found = [str(before > 0), str(hessian.sharpness(preconditioned=False).eigenvalue_max.value > 0)]
    try:
        hessian.sharpness()
    except HessianError as error:
        found.append(str(error))
    return found


class Around(torch.optim.Optimizer):
    """An optimizer around another, which begins as none of torch's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        """The other's."""
        return self.inner.step(closure)
