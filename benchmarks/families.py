"""How good displacements and error estimates are, family by family of models: docs/numerics.md.

    python benchmarks/families.py                 # reporting families, half an hour on one core
    python benchmarks/families.py --calibration   # those that constants were chosen on
    python benchmarks/families.py lora moe --all  # all numbers of micro-batches, not one a row
    python benchmarks/families.py saddle --known  # what one reaches who knows each vector's errors

Each family is a net of at most 3000 parameters. Its products by finite differences are compared
with an fp64 double backward, in fp32, in bf16 with fp32 masters (free, and such as bf16 holds), and
in fp32 passes of weights that bf16 holds; with 1, 4, 8 and 16 micro-batches; for a random vector
and the Krylov vectors after it (one operator), and for the gradient (an operator of its own).
"""

from __future__ import annotations

import argparse
import copy
import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_hessian.backends import Passes, Session
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.operators import FiniteDifferenceHessian
from ds_hessian.vectors import random_vector

Batch = tuple[Tensor, ...]
EXAMPLES, VECTORS = 8, 9
ARITHMETICS = ("fp32", "bf16", "bf16 masters in bf16", "fp32 passes")
COUNTS = (1, 4, 8, 16)
PER_DECADE, DECADES = 3, {"fp32": 7.5, "bf16": 6}
"""Constant displacements that are tried, downwards from 3 |w|."""


@dataclass(frozen=True)
class Family:
    """A net and where its micro-batches come from.

    Attributes:
        net: Makes the module; its `forward` gives the loss of a batch.
        batch: Draws a micro-batch.
        steps: Of Adam, before measuring.
        calibration: Whether constants may be chosen on it.
        memorised: Whether it is trained on the micro-batches that are measured.
    """

    net: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    steps: int = 60
    calibration: bool = False
    memorised: bool = False


class Classifier(nn.Module):
    """Mean cross entropy of a net of logits, times a factor."""

    def __init__(self, logits: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.logits, self.factor = logits, factor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Of tokens `(b, t)` or features; labels `(b,)` or `(b, t)`."""
        dtype = next(self.parameters()).dtype
        logits = self.logits(x.to(dtype) if x.is_floating_point() else x)
        wide = logits if dtype == torch.float64 else logits.float()
        return self.factor * functional.cross_entropy(wide.flatten(0, -2), y.flatten())


class Regression(nn.Module):
    """Mean squared error."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Both `(b, d)`."""
        dtype = next(self.parameters()).dtype
        out = self.net(x.to(dtype))
        wide = out if dtype == torch.float64 else out.float()
        return functional.mse_loss(wide, y.to(wide.dtype))


class Block(nn.Module):
    """One head of causal attention and an MLP, with or without layer normalisation."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) if norm else nn.Identity() for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        """`(b, t, width)`."""
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.out(scores.masked_fill(mask, -math.inf).softmax(-1) @ v)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Language(nn.Module):
    """Logits of tokens."""

    def __init__(self, width: int, blocks: int, norm: bool, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.position = nn.Parameter(torch.randn(6, width) * 0.3)
        self.blocks = nn.Sequential(*(Block(width, norm) for _ in range(blocks)))
        self.head = nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """`(b, t)` to `(b, t, 16)`."""
        return self.head(self.blocks(self.embedding(x) + self.position))


class Recurrence(nn.Module):
    """A tanh recurrence over tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, width), nn.Linear(width, 16)
        self.inner = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, t)` to `(b, t, 16)`."""
        inputs, states = self.embedding(x), list[Tensor]()
        state = torch.zeros_like(inputs[:, 0])
        for i in range(x.shape[1]):
            state = torch.tanh(self.inner(torch.cat([inputs[:, i], state], -1)))
            states.append(state)
        return self.head(torch.stack(states, 1))


class Experts(nn.Module):
    """Experts chosen by a fixed projection of the input, mixed by a trained gate."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(10, width), nn.SiLU(), nn.Linear(width, 3))
            for _ in range(experts)
        )
        self.gate = nn.Linear(10, experts)
        self.register_buffer("router", torch.randn(experts, 10))

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)` to `(b, 3)`: the two experts of each row are functions of x alone."""
        chosen = (x.double() @ self.router.double().T).topk(2).indices
        weight = self.gate(x).gather(1, chosen).softmax(-1)
        out = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = out.gather(1, chosen[..., None].expand(-1, -1, 3))
        return (weight[..., None] * mixed).sum(1)


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of rank 3, zero at first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, inputs) / math.sqrt(inputs))
        self.b = nn.Parameter(torch.zeros(outputs, 3))

    def forward(self, x: Tensor) -> Tensor:
        """`(b, inputs)` to `(b, outputs)`."""
        return self.frozen(x) + x @ self.a.T @ self.b.T


class Scaled(nn.Module):
    """A linear layer whose stored weight is `factor` times the effective one."""

    def __init__(self, inputs: int, outputs: int, factor: float) -> None:
        super().__init__()
        self.factor, layer = factor, nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(layer.weight.detach() * factor)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, inputs)` to `(b, outputs)`."""
        return functional.linear(x, self.weight / self.factor)


def _dense(
    activation: Callable[[], nn.Module], widths: Sequence[int] = (10, 20, 16, 3)
) -> nn.Sequential:
    layers = list[nn.Module]()
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


def _zeroed(net: nn.Sequential) -> nn.Sequential:
    for p in net[-1].parameters():
        nn.init.zeros_(p)
    return net


def _shrunk(net: nn.Module, factor: float) -> nn.Module:
    for p in net.parameters():
        p.data.mul_(factor)
    return net


def points(generator: torch.Generator) -> Batch:
    """Three overlapping kinds in ten dimensions."""
    kinds = torch.randn(3, 10, generator=torch.Generator().manual_seed(7))
    y = torch.randint(3, (EXAMPLES,), generator=generator)
    return kinds[y] + torch.randn(EXAMPLES, 10, generator=generator), y


def halves(generator: torch.Generator) -> Batch:
    """The same of two kinds."""
    x, y = points(generator)
    return x, y % 2


def targets(generator: torch.Generator) -> Batch:
    """A smooth function of ten numbers, with noise."""
    x = torch.randn(EXAMPLES, 10, generator=generator)
    y = torch.stack([torch.sin(x[:, 0] + x[:, 1]), x[:, 2] * x[:, 3], x[:, 4]], 1)
    return x, y + 0.3 * torch.randn(y.shape, generator=generator)


def images(generator: torch.Generator) -> Batch:
    """Noisy 6 x 6 pictures of five kinds."""
    kinds = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(7))
    y = torch.randint(5, (EXAMPLES,), generator=generator)
    return kinds[y] + 1.2 * torch.randn(EXAMPLES, 1, 6, 6, generator=generator), y


def tokens(generator: torch.Generator) -> Batch:
    """Walks over 16 tokens; a label is the token that follows."""
    steps = torch.randint(1, 4, (4, 7), generator=generator)
    walk = (steps.cumsum(1) + torch.randint(16, (4, 1), generator=generator)) % 16
    return walk[:, :-1], walk[:, 1:]


def _convolutional(activation: Callable[[], nn.Module], pool: nn.Module, norm: bool) -> nn.Module:
    body = [nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6) if norm else nn.Identity()]
    return nn.Sequential(*body, activation(), pool, nn.Flatten(), nn.Linear(54, 5))


def _sigmoid_head() -> nn.Module:
    return _zeroed(nn.Sequential(nn.Linear(10, 2)))


FAMILIES = {
    # chosen on
    "attention": Family(lambda: Classifier(Language(8, 1, norm=True)), tokens, 150, True),
    "convolution": Family(
        lambda: Classifier(_convolutional(nn.SiLU, nn.AvgPool2d(2), True)), images, 60, True
    ),
    "regression": Family(lambda: Regression(_dense(nn.Tanh)), targets, 100, True),
    "logistic at 0": Family(lambda: Classifier(_sigmoid_head()), halves, 0, True),
    "relu": Family(lambda: Classifier(_dense(nn.ReLU)), points, 60, True),
    "badly scaled": Family(
        lambda: Classifier(
            nn.Sequential(Scaled(10, 20, 1e2), nn.GELU(), Scaled(20, 16, 1e-2), nn.Tanh(),
                          nn.Linear(16, 3))
        ), points, 60, True,
    ),
    "memorised": Family(lambda: Classifier(_dense(nn.GELU)), points, 500, True, True),
    "tiny loss": Family(lambda: Classifier(_dense(nn.Tanh), 1e-6), points, 60, True),
    # reported on
    "attention, no norm": Family(lambda: Classifier(Language(8, 2, norm=False)), tokens, 100),
    "recurrence": Family(lambda: Classifier(Recurrence(16)), tokens, 150),
    "moe": Family(lambda: Classifier(Experts(12, 4)), points, 60),
    "zero head": Family(lambda: Classifier(_zeroed(_dense(nn.GELU))), points, 0),
    "tied": Family(lambda: Classifier(Language(10, 1, norm=True, tied=True)), tokens, 60),
    "lora": Family(
        lambda: Classifier(nn.Sequential(LowRank(10, 20), nn.Tanh(), LowRank(20, 3))), points, 30
    ),
    "huge loss": Family(
        lambda: Classifier(_convolutional(nn.GELU, nn.AvgPool2d(2), False), 1e5), images, 30
    ),
    "saddle": Family(
        lambda: Regression(_shrunk(_dense(nn.Identity, (10, 12, 12, 3)), 0.2)), targets, 0
    ),
    "nearly linear": Family(
        lambda: Regression(_shrunk(_dense(nn.Softplus, (10, 12, 3)), 0.05)), targets, 0
    ),
    "sigmoid head": Family(
        lambda: Classifier(_zeroed(_dense(nn.SiLU, (10, 16, 2)))), halves, 0
    ),
    "uneven scales": Family(
        lambda: Regression(nn.Sequential(Scaled(10, 16, 1e-2), nn.SiLU(), Scaled(16, 3, 1e2))),
        targets, 60,
    ),
    "max pooling": Family(
        lambda: Classifier(_convolutional(nn.LeakyReLU, nn.MaxPool2d(2), False)), images, 60
    ),
}  # fmt: skip

KINKED = ("relu", "max pooling")
"""Their gradient jumps, but where kinks are held."""


class Exact:
    """fp64 products by double backward."""

    def __init__(self, net: nn.Module, batches: Sequence[Batch]) -> None:
        net = copy.deepcopy(net).double()
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        loss = torch.stack([net(*batch) for batch in batches]).mean()
        parts = torch.autograd.grad(loss, self.parameters, create_graph=True)
        self.gradient = torch.cat([part.reshape(-1) for part in parts])

    def __call__(self, v: Tensor) -> Tensor:
        """`(n,)` to `(n,)`."""
        if not self.gradient.requires_grad:
            return torch.zeros_like(self.gradient)
        inner = self.gradient @ v.double()
        parts = torch.autograd.grad(
            inner, self.parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([part.reshape(-1) for part in parts])

    def krylov(self, start: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The first Lanczos vectors, fp32, each with its product; ends where the space does."""
        basis, largest = [start], 0.0
        for _ in range(count):
            truth = self(basis[-1])
            yield basis[-1], truth
            w, largest = truth.clone(), max(largest, float(truth.norm()))
            for q in (*basis, *basis):
                w -= (q.double() @ w) * q.double()
            if float(w.norm()) < 1e-5 * largest:
                return
            basis.append((w / w.norm()).float())


@dataclass
class Row:
    """Figures of one net, arithmetic and number of micro-batches; one entry a product.

    Attributes:
        best: Smallest relative error of a constant displacement, for each vector.
        best_h: That displacement.
        error: Relative error with the automatic displacement.
        estimate: What it was said to be.
        h: The automatic displacement.
        cost: Gradients of each product beyond those of its formula.
        alone: How many of the last products are of an operator of their own.
    """

    family: str
    arithmetic: str
    count: int
    best: list[float] = field(default_factory=list)
    best_h: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    estimate: list[float] = field(default_factory=list)
    h: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    alone: int = 0

    @property
    def extra(self) -> float:
        """Extra gradients a product, of the vectors after one another in a run of 20."""
        return extra_in_a_run(self.cost[: len(self.cost) - self.alone])


def extra_in_a_run(costs: Sequence[float]) -> float:
    """Return the extra gradients of a product in a run of 20, from the first ones of a run: all but
    two are like the third and those after it.
    """
    rest = costs[2:] or costs[1:] or costs
    return float((sum(costs[:2]) + (20 - len(costs[:2])) * np.mean(rest)) / 20)


@dataclass
class Problem:
    """A net in one arithmetic, its micro-batches, and vectors with their products."""

    exact: Exact
    backend: ModuleBackend
    batches: list[Batch]
    passes: Passes
    vectors: list[tuple[Tensor, Tensor]]
    alone: tuple[Tensor, Tensor] | None

    def dense(self) -> Tensor:
        """The Hessian, `(n, n)` fp64."""
        rows = torch.stack([self.exact(e) for e in torch.eye(self.backend.space.n)])
        return (rows + rows.T) / 2

    @contextmanager
    def measuring(self) -> Iterator[Session]:
        """A session on its micro-batches."""
        objective = self.backend.objective(self.batches, lambda module, batch: module(*batch))
        with self.backend.measuring(objective, self.passes) as session:
            yield session


def problem(name: str, arithmetic: str, count: int, seed: int = 0) -> Problem:
    """A family's net, trained, with `count` micro-batches."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    net, generator = family.net(), torch.Generator().manual_seed(seed + 1)
    batches = [family.batch(generator) for _ in range(count)]
    others = batches if family.memorised else [family.batch(generator) for _ in range(32)]
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=5e-3)
    for i in range(family.steps):
        optimizer.zero_grad()
        net(*others[i % len(others)]).backward()
        optimizer.step()
    if arithmetic in ("bf16 masters in bf16", "fp32 passes"):
        net = net.bfloat16().float()
    exact, masters = Exact(net, batches), None
    if arithmetic != "fp32":
        masters = [p.detach().clone() for p in net.parameters() if p.requires_grad]
        net = copy.deepcopy(net).to(torch.float16 if arithmetic == "fp16" else torch.bfloat16)
    backend = ModuleBackend(net, masters=masters)
    passes = Passes(precision="fp32" if arithmetic == "fp32 passes" else "model")
    start = random_vector(backend.layout, backend.space, seed=seed)
    g = exact.gradient.detach()
    alone = None
    if float(g.norm()) > 0:
        v = (g / g.norm()).float()
        alone = v, exact(v)
    return Problem(exact, backend, batches, passes, list(exact.krylov(start, VECTORS)), alone)


def relative(product: Tensor, truth: Tensor) -> float:
    """`|product - truth| / |truth|`."""
    return float((product.double() - truth).norm() / truth.norm())


def best_constants(p: Problem, arithmetic: str) -> list[tuple[float, float]]:
    """Least error and its displacement for each vector, the one alone last."""
    found, decades = [], DECADES[arithmetic[:4]]
    pairs = p.vectors + ([p.alone] if p.alone else [])
    with p.measuring() as session:
        operator = FiniteDifferenceHessian(session, 1.0)
        largest = 3 * session.weight_norm() or 1.0
        grid = [largest * 10 ** (-k / PER_DECADE) for k in range(int(PER_DECADE * decades) + 1)]
        for v, truth in pairs:
            errors = [relative(operator.product_at(v, h).vector, truth) for h in grid]
            i = int(np.nanargmin(errors))
            found.append((errors[i], grid[i]))
    return found


def measure(row: Row, p: Problem, best: list[tuple[float, float]], scheme: str = "central") -> Row:
    """Fill in a row."""
    row.alone = int(p.alone is not None)
    pairs = [(p.vectors, best)] if p.alone is None else [(p.vectors, best[:-1])]
    if p.alone is not None:
        pairs.append(([p.alone], best[-1:]))
    with p.measuring() as session:
        for vectors, constants in pairs:
            operator = FiniteDifferenceHessian(session, "auto", scheme)
            for (v, truth), (least, h) in zip(vectors, constants, strict=True):
                before = operator.cost.gradient_evaluations
                product = operator.matvec(v)
                row.cost.append(operator.cost.gradient_evaluations - before)
                row.cost[-1] -= len(operator.scheme.nodes)
                row.best.append(least)
                row.best_h.append(h)
                row.error.append(relative(product.vector, truth))
                row.estimate.append(product.error or 0.0)
                row.h.append(product.displacement)
    return row


def measure_known(row: Row, p: Problem, best: list[tuple[float, float]]) -> Row:
    """Fill in a row by displacements at which each vector's true errors are least, smoothed over h:
    noise differs by factors between neighbouring h, of which the best constant has the luckiest.
    """
    pairs, steps = p.vectors + ([p.alone] if p.alone else []), np.linspace(-1.6, 1.6, 17)
    with p.measuring() as session:
        operator = FiniteDifferenceHessian(session, 1.0)

        def error(v: Tensor, truth: Tensor, h: float) -> float:
            return relative(operator.product_at(v, h).vector, truth)

        for (v, truth), (least, h) in zip(pairs, best, strict=True):
            errors = [error(v, truth, h * math.exp(step)) for step in steps]
            smooth = np.polyval(np.polyfit(steps, np.log(errors), 4), steps)
            found = h * math.exp(steps[int(smooth.argmin())])
            for near in (0.93, 0.97, 1.03, 1.08):  # not one of those that were fitted
                row.best.append(least)
                row.error.append(error(v, truth, near * found))
                row.estimate.append(row.error[-1])
    row.cost = [0.0]
    return row


def cases(names: Sequence[str], everything: bool) -> Iterator[tuple[str, str, int]]:
    """(family, arithmetic, micro-batches); unless everything, each row one number of the latter."""
    for i, name in enumerate(names):
        for j, arithmetic in enumerate(ARITHMETICS):
            counts = COUNTS if everything else (COUNTS[(i + j) % 4],)
            for count in counts:
                yield name, arithmetic, count


HEADER = "| | products | within 2x of best | estimate within 3x | least estimate / error | extra |"


def line(name: str, rows: Sequence[Row]) -> str:
    """Figures of these rows together."""
    ratio, told = shares(rows)
    extra = np.mean([row.extra for row in rows])
    return (
        f"| {name} | {len(ratio)} | {np.mean(ratio <= 2):.0%} (worst {ratio.max():.1f}) | "
        f"{np.mean((told > 1 / 3) & (told < 3)):.0%} | {told.min():.2f} | {extra:.2f} |"
    )


def shares(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Error / best error and estimate / error of all products."""
    ratio = np.array([e / b for row in rows for e, b in zip(row.error, row.best, strict=True)])
    told = np.array([s / e for row in rows for s, e in zip(row.estimate, row.error, strict=True)])
    return ratio, told


def print_products(row: Row) -> None:
    """Each product's figures."""
    print(f"{row.family}, {row.arithmetic}, {row.count}: extra {row.extra:.2f}")
    columns = zip(row.best, row.error, row.estimate, row.best_h, row.h, row.cost, strict=True)
    for best, error, told, best_h, h, cost in columns:
        print(
            f"   best {best:.1e} error {error:.1e} told {told:.1e} | best h {best_h:.1e} "
            f"h {h:.1e} | extra {cost:.2f}"
        )


def _cached(path: Path | None, key: str, make: Callable[[], object]) -> object:
    if path is None:
        return make()
    file = path / f"{key.replace(' ', '_').replace(',', '')}.pickle"
    if not file.exists():
        file.write_bytes(pickle.dumps(make()))
    return pickle.loads(file.read_bytes())


def main() -> None:
    """Print the tables in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--calibration", action="store_true")
    parser.add_argument("--all", action="store_true", help="all numbers of micro-batches")
    parser.add_argument("--cache", type=Path, help="folder in which best constants are kept")
    parser.add_argument("--known", action="store_true", help="by the true errors of each vector")
    parser.add_argument("--products", action="store_true", help="each product's figures")
    parser.add_argument("--scheme", default="central")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.families or [n for n, f in FAMILIES.items() if f.calibration == args.calibration]
    rows, spent = list[Row](), time.process_time()
    for name, arithmetic, count in cases(names, args.all):
        p = problem(name, arithmetic, count, args.seed)
        key = f"{name}-{arithmetic}-{count}-{args.seed}"
        best = _cached(args.cache, key, lambda p=p, a=arithmetic: best_constants(p, a))
        row = Row(name, arithmetic, count)
        rows.append(
            measure_known(row, p, best) if args.known else measure(row, p, best, args.scheme)
        )
        if args.products:
            print_products(rows[-1])
    print(f"{HEADER}\n{'|---' * 6}|")
    for name in names:
        print(line(name, [row for row in rows if row.family == name]))
    for arithmetic in ARITHMETICS:
        print(line(arithmetic, [row for row in rows if row.arithmetic == arithmetic]))
    for count in COUNTS:
        print(line(f"{count} micro-batches", [row for row in rows if row.count == count]))
    if smooth := [row for row in rows if row.family not in KINKED]:
        print(line("without kinks", smooth))
    print(line("all", rows))
    print(f"\n{time.process_time() - spent:.0f} s of CPU time")


if __name__ == "__main__":
    main()
