"""What an answer costs: gradients until the five largest eigenvalues are right, by scheme and tool.

    OMP_NUM_THREADS=1 python benchmarks/answer.py            # one process a tool: ours and peers
    OMP_NUM_THREADS=1 deepspeed --num_accelerators 2 benchmarks/answer.py --stage 3    # ours

The peers are installed as for benchmarks/peers.py, whose GPT, data and tools these are. For each
tool and each level, 1 % and 0.1 %: the products until each of the five largest eigenvalues is
within that share of itself, and stays there; the gradients evaluated for them, the one at the
weights included; and the time of a run of so many products, in plain gradients that alternate with
such runs. Then the time of 40 steps for a density. Means over the seeds of the start vector.

True eigenvalues are those of 80 steps of Lanczos with products by double backward in fp64. On ranks
they are those of 80 steps with fourth-order differences, and their bars are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import peers
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_hessian.krylov import LanczosState, ritz
from ds_hessian.vectors import random_vector

LEVELS, TOP, STEPS, REFERENCE = (1e-2, 1e-3), 5, 40, 80
ROUNDS = 3
SCHEMES: dict[str, dict[str, Any]] = {
    "central": {"tolerance": None, "scheme": "central"},
    "forward": {"tolerance": None, "scheme": "forward"},
    "fourth order": {"tolerance": None, "scheme": "fourth_order"},
    "tolerance 1e-2": {"tolerance": 1e-2},
    "tolerance 1e-3": {"tolerance": 1e-3},
}
Array = NDArray[np.float64]


@dataclass
class Cost:
    """Of one tool: for each level, and for a density.

    Attributes:
        products: Until the eigenvalues are right; None where they never are.
        evaluated: Gradients evaluated; None for tools that evaluate something else.
        clock: Seconds in plain gradients.
        density: The same for 40 steps; None where the tool fails.
    """

    products: list[float | None] = field(default_factory=list)
    evaluated: list[float | None] = field(default_factory=list)
    clock: list[float | None] = field(default_factory=list)
    density: float | None = None


class Contender:
    """A tool whose Lanczos steps can be followed."""

    evaluates_gradients = True

    def __init__(self, tool: peers.Tool) -> None:
        self.tool = tool

    def follow(self, seed: int) -> tuple[list[Array], list[float]]:
        """The five largest Ritz values after each of 40 products, and the gradients until then."""
        raise NotImplementedError

    def answer(self, products: int, seed: int) -> None:
        """The tool's own way to the five largest, with so many products."""
        raise NotImplementedError

    def density(self) -> None:
        """40 steps, and the density."""
        raise NotImplementedError


class OfOurs(Contender):
    """ds_hessian with a scheme."""

    tool: peers.Ours

    def __init__(self, tool: peers.Ours, scheme: str) -> None:
        super().__init__(tool)
        self.settings = SCHEMES[scheme]

    def follow(self, seed: int, steps: int = STEPS) -> tuple[list[Array], list[float]]:
        backend = self.tool.hessian.backend
        tops, evaluated = list[Array](), list[float]()

        def fresh(number: int) -> torch.Tensor:
            return random_vector(backend.layout, backend.space, seed, number)

        with self.tool.hessian.measuring(**self.settings) as operator:
            state = LanczosState(operator, fresh(0), steps, fresh)
            while not state.done:
                state.step()
                found = ritz(state.run())
                tops.append(found.values[-TOP:])
                self.bars = found.errors[-TOP:]
                evaluated.append(1 + operator.cost.gradient_evaluations)
        return tops, evaluated

    def answer(self, products: int, seed: int) -> None:
        self.tool.hessian.spectrum(num_matvecs=products, seed=seed, **self.settings)

    def density(self) -> None:
        spectrum = self.tool.hessian.spectrum(num_matvecs=STEPS, **self.settings)
        spectrum.density(np.linspace(-10, 100, 1000))


class OfEigenthings(Contender):
    """hessian-eigenthings; its differences evaluate two gradients a product."""

    tool: peers.Eigenthings

    def __init__(self, tool: peers.Eigenthings) -> None:
        super().__init__(tool)
        self.evaluates_gradients = tool.operator.method == "finite_difference"

    def follow(self, seed: int) -> tuple[list[Array], list[float]]:
        operator = self.tool.operator
        start = torch.randn(operator.size, generator=torch.Generator().manual_seed(seed))
        with sdpa_kernel(SDPBackend.MATH):
            found = self.tool.peer.lanczos_tridiagonal(operator, start, STEPS)
        return _tops(found.alphas.double(), found.betas.double()), [2.0 * (m + 1) for m in _all()]

    def answer(self, products: int, seed: int) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            self.tool.peer.lanczos(
                self.tool.operator, k=TOP, max_iter=products, which="LA", seed=seed
            )

    def density(self) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            self.tool.peer.spectral_density(self.tool.operator, num_runs=1, lanczos_steps=STEPS)


class Searching(Contender):
    """A tool that is asked for eigenvalues to a tolerance, and made to try smaller ones."""

    evaluates_gradients = False
    tolerances = (1e-1, 1e-2, 1e-3, 1e-4)

    def search(self, tolerance: float, seed: int) -> tuple[Array, int]:
        """The five largest that it finds, ascending, and its products."""
        raise NotImplementedError


class OfCurvlinops(Searching):
    """curvlinops by SciPy's `eigsh`, as its documentation has it."""

    tool: peers.Curvlinops

    def search(self, tolerance: float, seed: int) -> tuple[Array, int]:
        from scipy.sparse.linalg import LinearOperator, eigsh

        inner, count = self.tool.operator.to_scipy(), [0]

        def product(v: Array) -> Array:
            count[0] += 1
            found: Array = inner @ v.astype(np.float32)
            return found

        start = np.random.default_rng(seed).standard_normal(inner.shape[0])
        counted = LinearOperator(inner.shape, matvec=product, dtype=np.float32)
        with sdpa_kernel(SDPBackend.MATH):
            values = eigsh(
                counted, TOP, which="LA", tol=tolerance, v0=start, return_eigenvectors=False
            )
        return np.sort(values), count[0]

    def density(self) -> None:
        from curvlinops.papyan2020traces.spectrum import fast_lanczos

        with sdpa_kernel(SDPBackend.MATH):
            fast_lanczos(self.tool.operator, STEPS)


class OfPyHessian(Searching):
    """PyHessian's power iteration with deflation."""

    tool: peers.PyHessian

    def search(self, tolerance: float, seed: int) -> tuple[Array, int]:
        torch.manual_seed(seed)
        inner, count = self.tool.tool.dataloader_hv_product, [0]

        def product(v: Any) -> Any:
            count[0] += 1
            return inner(v)

        self.tool.tool.dataloader_hv_product = product
        try:
            with sdpa_kernel(SDPBackend.MATH):
                values, _ = self.tool.tool.eigenvalues(100, tolerance, TOP)
        finally:
            self.tool.tool.dataloader_hv_product = inner
        return np.sort(values), count[0]

    def density(self) -> None:
        raise RuntimeError("it calls torch.eig, which torch no longer has")


def _all() -> range:
    return range(STEPS)


def _tops(alphas: torch.Tensor, betas: torch.Tensor) -> list[Array]:
    a, b = alphas.numpy(), betas.numpy()
    return [eigh_tridiagonal(a[: m + 1], b[:m], eigvals_only=True)[-TOP:] for m in range(len(a))]


def _right(found: Array, true: Array, level: float) -> bool:
    return len(found) == TOP and bool((abs(found - true) <= level * abs(true)).all())


def contender(files: peers.Files, name: str) -> Contender:
    """A tool in this process."""
    if name.startswith("ds_hessian"):
        tool, scheme = peers.Ours(files, "fp32", 0), name.removeprefix("ds_hessian, ")
        return OfOurs(tool, scheme)
    made = peers.TOOLS[name][1](files, "fp32")
    if isinstance(made, peers.Eigenthings):
        return OfEigenthings(made)
    kind = OfCurvlinops if isinstance(made, peers.Curvlinops) else OfPyHessian
    return kind(made)


def cost(found: Contender, true: Array, seeds: Sequence[int], rounds: int) -> Cost:
    """Of a tool."""
    if isinstance(found, Searching):
        return _cost_of_search(found, true, seeds[0])
    result = Cost()
    runs = [found.follow(seed) for seed in seeds]
    for level in LEVELS:
        products, evaluated = list[int](), list[float]()
        for tops, gradients in runs:
            wrong = [m for m, top in enumerate(tops) if not _right(top, true, level)]
            first = wrong[-1] + 1 if wrong else 0
            if first == len(tops):
                break
            products.append(first + 1)
            evaluated.append(gradients[first])
        if len(products) < len(seeds):
            for column in (result.products, result.evaluated, result.clock):
                column.append(None)
            continue
        result.products.append(fmean(products))
        result.evaluated.append(fmean(evaluated) if found.evaluates_gradients else None)
        made = [lambda n=n, s=s: found.answer(n, s) for n, s in zip(products, seeds, strict=True)]
        result.clock.append(_in_gradients(found.tool, made, rounds))
    result.density = _in_gradients(found.tool, [found.density], 1)
    return result


def _cost_of_search(found: Searching, true: Array, seed: int) -> Cost:
    result, rest = Cost(), iter(found.tolerances)
    values, products, tolerance = np.empty(0), 0, 0.0
    for level in LEVELS:
        while not _right(values, true, level):
            tolerance = next(rest, 0.0)
            if not tolerance:
                break
            values, products = found.search(tolerance, seed)
        reached = bool(tolerance)
        result.products.append(products if reached else None)
        result.evaluated.append(None)
        made = [lambda t=tolerance: found.search(t, seed)]
        result.clock.append(_in_gradients(found.tool, made, 1) if reached else None)
    try:
        result.density = _in_gradients(found.tool, [found.density], 1)
    except RuntimeError:
        result.density = None
    return result


def _in_gradients(tool: peers.Tool, made: Sequence[Callable[[], object]], rounds: int) -> float:
    """Mean seconds of these runs, in plain gradients before, between and after them."""
    gradients, runs = [peers.seconds(tool.gradient) for _ in range(2)], list[float]()
    for _ in range(rounds):
        for each in made:
            runs.append(peers.seconds(each))
            gradients += [peers.seconds(tool.gradient) for _ in range(3)]
    return fmean(runs) / fmean(gradients)


def reference(files: peers.Files) -> Array:
    """The five largest eigenvalues in fp64, ascending."""
    net, generator = files.net().double(), torch.Generator().manual_seed(99)
    shapes = {name: p.shape for name, p in net.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    q = torch.randn(sum(sizes), generator=generator).double()
    basis, alphas, betas = [q / q.norm()], list[float](), list[float]()
    for _ in range(REFERENCE):
        parts = basis[-1].split(sizes)
        v = {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}
        product = peers.exact_product(net, files.batches, v)
        w = torch.cat([product[n].flatten() for n in shapes])
        alphas.append(float(basis[-1] @ w))
        for _ in range(2):
            for each in basis:
                w -= (each @ w) * each
        betas.append(float(w.norm()))
        basis.append(w / betas[-1])
    values, vectors = eigh_tridiagonal(alphas, betas[:-1])
    residuals = betas[-1] * abs(vectors[-1, -TOP:])
    assert (residuals < 1e-2 * min(LEVELS) * values[-TOP:]).all(), residuals
    return np.asarray(values[-TOP:])


def row(name: str, found: Cost) -> str:
    """One line of the table."""
    cells = [name]
    for products, evaluated, clock in zip(
        found.products, found.evaluated, found.clock, strict=True
    ):
        cells += [_figure(products, ".1f"), _figure(evaluated, ".1f"), _figure(clock, ".1f")]
    cells.append(_figure(found.density, ".1f"))
    return "| " + " | ".join(cells) + " |"


def _figure(value: float | None, shape: str) -> str:
    return "" if value is None else format(value, shape)


def head() -> str:
    """The table's first lines."""
    levels = [f"{level:.1%}".replace(".0", "") for level in LEVELS]
    cells = ["tool"]
    for level in levels:
        cells += [f"{level}: products", "gradients", "by the clock"]
    cells.append(f"{STEPS} steps")
    return "| " + " | ".join(cells) + " |\n" + "|---" * len(cells) + "|"


NAMES = [
    *(f"ds_hessian, {scheme}" for scheme in SCHEMES),
    "hessian-eigenthings, differences",
    "hessian-eigenthings, autograd",
    "curvlinops",
    "PyHessian",
]
PEERS = ("hessian-eigenthings", "curvlinops-for-pytorch", "pyhessian", "torch", "deepspeed")


def versions() -> str:
    """Of all that took part."""
    found = list[str]()
    for name in PEERS:
        try:
            found.append(f"{name} {version(name)}")
        except ModuleNotFoundError:
            found.append(f"{name} missing")
    return ", ".join(found)


def on_ranks(args: argparse.Namespace) -> None:
    """Our schemes on the ranks of the launcher, each with all micro-batches of its own share."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    peers.WIDTH, peers.LAYERS = args.width, args.layers
    folder = Path(tempfile.gettempdir()) / f"ds_hessian_answer_{args.width}_{args.layers}"
    if rank == 0 and not (folder / "batches.pt").exists():
        folder.mkdir(exist_ok=True)
        peers.prepare(folder, products=0)
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    dist.barrier()
    tool = peers.Ours(peers.Files(folder), "fp32", args.stage)
    exact = OfOurs(tool, "fourth order")
    true = exact.follow(99, REFERENCE if args.reference is None else args.reference)[0][-1]
    lines = [
        f"{tool.hessian.backend.space.n:,} parameters, stage {args.stage}, "
        f"{dist.get_world_size()} ranks, {peers.MICRO_BATCHES} micro-batches, seeds {args.seeds}; "
        f"{versions()}",
        f"five largest: {true[::-1]}, bars {exact.bars[::-1]}\n",
        head(),
    ]
    if rank == 0:
        print("\n".join(lines), flush=True)
    for scheme in SCHEMES:
        if args.only in scheme:
            found = cost(OfOurs(tool, scheme), true, args.seeds, args.rounds)
            if rank == 0:
                print(row(scheme, found), flush=True)
    dist.barrier()
    tool.close()


def work(folder: Path, name: str, seeds: Sequence[int], rounds: int) -> None:
    """Measure one tool in this process."""
    true = np.load(folder / "true.npy")
    tool = contender(peers.Files(folder), name)
    for _ in range(2):
        tool.tool.gradient()
    found = cost(tool, true, seeds, rounds)
    (folder / "out.json").write_text(json.dumps(asdict(found)))
    tool.tool.close()


def main() -> None:
    """Measure all tools, or one as a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--folder", type=Path, help="keeps net, data and true eigenvalues")
    parser.add_argument("--tool", choices=NAMES)
    parser.add_argument("--only", default="", help="tools whose name contains this")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--width", type=int, default=peers.WIDTH)
    parser.add_argument("--layers", type=int, default=peers.LAYERS)
    parser.add_argument("--reference", type=int, help="steps of the reference on ranks")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    if args.tool is not None:
        work(args.folder, args.tool, args.seeds, args.rounds)
        return
    if "RANK" in os.environ:
        on_ranks(args)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        if not (folder / "true.npy").exists():
            peers.prepare(folder)
            np.save(folder / "true.npy", reference(peers.Files(folder)))
        true = np.load(folder / "true.npy")
        n = sum(w.numel() for w in peers.Files(folder).weights.values())
        print(f"GPT of {n:,} parameters, {peers.MICRO_BATCHES} micro-batches, seeds {args.seeds}")
        print(f"{versions()}; five largest: {true[::-1]}\n\n{head()}", flush=True)
        for name in NAMES:
            if args.only in name:
                print(_measured(folder, name, args), flush=True)


def _measured(folder: Path, name: str, args: argparse.Namespace) -> str:
    """A line of the table, from a process of its own."""
    (folder / "out.json").unlink(missing_ok=True)
    environment = {**os.environ, **peers.place(0, 1, peers.free_port())}
    command = [sys.executable, __file__, "--folder", str(folder), "--tool", name]
    command += ["--rounds", str(args.rounds), "--seeds", *map(str, args.seeds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if not (folder / "out.json").exists():
        return f"| {name} | {done.stderr.strip().splitlines()[-1][:90]} |"
    return row(name, Cost(**json.loads((folder / "out.json").read_text())))


if __name__ == "__main__":
    main()
