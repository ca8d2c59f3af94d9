"""ds_hessian beside the other tools: one GPT, the same data, weights and vectors, in one run.

    pip install --no-deps curvlinops-for-pytorch hessian-eigenthings pyhessian einconv einops \
        backpack-for-pytorch unfoldNd
    OMP_NUM_THREADS=1 python benchmarks/peers.py

(--no-deps, since one of them asks for torchvision, which must fit the torch that there is.)

Every tool is measured in a process (or two, as ranks) of its own: the time of a product and of a
Lanczos run of ten steps in plain gradients of that process, the peak memory over that of plain
gradients, and the error of two products against exact ones, by double backward in fp64: that of a
random vector, and that of the first product's direction, which is rich in outliers. A tool that
fails says so in its row.

The exact products in bf16 are those at the rounded weights. Peers get attention by torch's plain
kernel, since the fused one has no second derivative; the gradient they are compared with is that
of the fused one, as training runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from measuring import Vectors, exact_product, norm, peak_bytes, plain_gradient, relative_error
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, LAYERS, CONTEXT, MICRO_BATCHES = 128, 4, 64, 8
STEPS = 10
Batch = list[Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Files:
    """What all processes share: weights, micro-batches, and two vectors with their products."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights: Vectors = torch.load(folder / "weights.pt")
        self.batches: list[Batch] = torch.load(folder / "batches.pt")

    def net(self) -> nn.Module:
        """The trained GPT, fp32, in eval mode; its logits where its loss is `cross_entropy`."""
        from train_gpt import GPT

        net = GPT(WIDTH, LAYERS, 4, CONTEXT, 0.0).eval()
        net.load_state_dict(self.weights)
        return net

    def exact(self) -> list[tuple[Vectors, Vectors]]:
        """Vectors and their products: the weights, and so the Hessian, are those of both dtypes."""
        found: list[tuple[Vectors, Vectors]] = torch.load(self.folder / "exact.pt")
        return found


def prepare(folder: Path, products: int = 2) -> None:
    """Train the net, and take so many exact products."""
    from train_gpt import GPT, sample, standard_library

    torch.manual_seed(0)
    text, generator = standard_library(), torch.Generator().manual_seed(0)
    net = GPT(WIDTH, LAYERS, 4, CONTEXT, 0.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(150):
        optimizer.zero_grad()
        net(*sample(text, 8, CONTEXT, generator)).backward()
        optimizer.step()
    batches = [sample(text, 4, CONTEXT, generator) for _ in range(MICRO_BATCHES)]
    # Weights that bf16 can hold.
    weights = {name: w.bfloat16().float() for name, w in net.state_dict().items()}
    torch.save(weights, folder / "weights.pt")
    torch.save(batches, folder / "batches.pt")
    exact = []
    v = {n: torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    for _ in range(products):
        v = scaled(v, 1 / norm(v))
        product = exact_product(Files(folder).net().double(), batches, v)
        exact.append((v, product))
        v = {name: part.float() for name, part in product.items()}
    torch.save(exact, folder / "exact.pt")


def scaled(v: Vectors, factor: float) -> Vectors:
    """`factor v`."""
    return {name: factor * part for name, part in v.items()}


# ---- the tools; each gives a plain gradient, a product of vectors by name, and Lanczos


class Tool:
    """One contender in this process.

    Attributes:
        gradient: One plain gradient over this rank's micro-batches.
        product: `H v` from and to parameters by name.
        lanczos: Ten steps.
        close: Leave the job.
    """

    gradient: Callable[[], None]
    product: Callable[[Vectors], Vectors]
    lanczos: Callable[[], None]

    def seconds_of_products(self, v: Vectors, count: int) -> list[float]:
        """Of `count` products in a row."""
        return [seconds(self.product, v) for _ in range(count)]

    def close(self) -> None:
        """Nothing to leave."""


class Peer(Tool):
    """A single-process tool, with or without other ranks."""

    def __init__(self, files: Files, dtype: str) -> None:
        self.net = files.net().to(DTYPES[dtype])
        self.dtype = DTYPES[dtype]
        self.batches = files.batches

    def gradient(self) -> None:
        self.net.zero_grad()
        for batch in self.batches:
            self.net(*batch).backward()
        self.net.zero_grad()

    def flat(self, v: Vectors) -> Tensor:
        """In the order of the parameters."""
        return torch.cat([v[n].flatten().to(self.dtype) for n, _ in self.net.named_parameters()])

    def named(self, v: Tensor) -> Vectors:
        """The reverse of `flat`."""
        shapes = {name: p.shape for name, p in self.net.named_parameters()}
        parts = v.detach().split([shape.numel() for shape in shapes.values()])
        return {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}


def mean_loss(net: nn.Module, batch: Any) -> Tensor:
    """As hessian-eigenthings takes it."""
    loss: Tensor = net(*batch)
    return loss


class Logits(nn.Module):
    """The GPT with logits for an output, `(tokens, 256)`: curvlinops and PyHessian add the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        """`(batch, time)` to logits."""
        kept = []
        hook = self.net.head.register_forward_hook(lambda *call: kept.append(call[2]))
        self.net(tokens, torch.zeros_like(tokens))
        hook.remove()
        return kept[0].flatten(0, 1)


class Eigenthings(Peer):
    """hessian-eigenthings."""

    def __init__(self, files: Files, dtype: str, method: str, ranks: int = 1) -> None:
        import hessian_eigenthings as peer

        super().__init__(files, dtype)
        self.peer = peer
        kind, self.parallel = peer.HessianOperator, None
        if ranks > 1:
            torch.distributed.init_process_group("gloo")
            self.batches = self.batches[torch.distributed.get_rank() :: ranks]
            kind = peer.DDPHessianOperator
            self.parallel = nn.parallel.DistributedDataParallel(self.net)
        self.operator = kind(self.net, self.batches, mean_loss, method=method)

    def gradient(self) -> None:
        if self.parallel is None:
            return super().gradient()
        self.net.zero_grad()
        with self.parallel.no_sync():
            for batch in self.batches[:-1]:
                self.parallel(*batch).backward()
        self.parallel(*self.batches[-1]).backward()
        self.net.zero_grad()

    def product(self, v: Vectors) -> Vectors:
        with sdpa_kernel(SDPBackend.MATH):
            return self.named(self.operator.matvec(self.flat(v)))

    def lanczos(self) -> None:
        start = torch.randn(self.operator.size, dtype=self.dtype)
        with sdpa_kernel(SDPBackend.MATH):
            self.peer.lanczos_tridiagonal(self.operator, start, STEPS)

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class Curvlinops(Peer):
    """curvlinops."""

    def __init__(self, files: Files, dtype: str) -> None:
        import curvlinops

        super().__init__(files, dtype)
        data = [(tokens, targets.flatten()) for tokens, targets in self.batches]
        self.operator = curvlinops.HessianLinearOperator(
            Logits(self.net),
            nn.CrossEntropyLoss(),
            list(self.net.parameters()),
            data,
            check_deterministic=False,
            batch_size_fn=len,
        )

    def product(self, v: Vectors) -> Vectors:
        with sdpa_kernel(SDPBackend.MATH):
            return self.named(self.operator @ self.flat(v))

    def lanczos(self) -> None:
        from curvlinops.papyan2020traces.spectrum import fast_lanczos

        with sdpa_kernel(SDPBackend.MATH):
            fast_lanczos(self.operator, STEPS)


class PyHessian(Peer):
    """PyHessian."""

    def __init__(self, files: Files, dtype: str) -> None:
        from pyhessian import hessian

        super().__init__(files, dtype)
        data = [(tokens, targets) for tokens, targets in self.batches]

        def criterion(logits: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(logits, targets.flatten())

        with sdpa_kernel(SDPBackend.MATH):
            self.tool = hessian(Logits(self.net), criterion, dataloader=data, cuda=False)
            for tokens, targets in data[:1]:  # its list of parameters is those with a gradient
                criterion(self.tool.model(tokens), targets).backward()
        self.tool.params = list(self.net.parameters())

    def product(self, v: Vectors) -> Vectors:
        parts = [v[n].to(self.dtype) for n, _ in self.net.named_parameters()]
        with sdpa_kernel(SDPBackend.MATH):
            found = self.tool.dataloader_hv_product(parts)[1]
        return dict(zip(v, found, strict=True))

    def lanczos(self) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            try:
                self.tool.density(iter=STEPS, n_v=1)
            except (RuntimeError, AttributeError) as failure:
                if "eig" not in str(failure):  # torch.eig is gone; the ten steps are made
                    raise


class Ours(Tool):
    """ds_hessian on a live engine."""

    def __init__(self, files: Files, dtype: str, stage: int, precision: str = "model") -> None:
        import deepspeed

        import ds_hessian

        deepspeed.utils.logger.setLevel("ERROR")
        deepspeed.init_distributed("gloo", verbose=False)
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.batches = files.batches[rank::ranks]
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": len(self.batches),
            "steps_per_print": 10**9,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "hessian": {
                "progress": False,
                "plot": False,
                "finite_difference": {"precision": precision},
            },
        }
        if dtype != "fp32":
            config[dtype] = {"enabled": True}
        net = files.net()
        self.engine, *_ = ds_hessian.initialize(
            model=net, model_parameters=net.parameters(), config=config
        )
        self.engine.module.eval()
        self.hessian = self.engine.hessian.use(self.batches)

    def gradient(self) -> None:
        plain_gradient(self.engine, self.batches)

    def seconds_of_products(self, v: Vectors, count: int) -> list[float]:
        with self.hessian.measuring() as operator:  # one gradient at the weights for all
            shards = self.hessian.scatter(v)
            return [seconds(operator.matvec, shards) for _ in range(count)]

    def product(self, v: Vectors) -> Vectors:
        found = self.hessian.gather(self.hessian.matvec(self.hessian.scatter(v)).vector)
        return found or {}

    def lanczos(self) -> None:
        self.spectrum = self.hessian.spectrum(num_matvecs=STEPS)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


TOOLS: dict[str, tuple[int, Callable[[Files, str], Tool]]] = {
    "ds_hessian, stage 0": (1, lambda f, d: Ours(f, d, 0)),
    "ds_hessian, ZeRO-3": (1, lambda f, d: Ours(f, d, 3)),
    "ds_hessian, stage 0, 2 ranks": (2, lambda f, d: Ours(f, d, 0)),
    "ds_hessian, ZeRO-3, 2 ranks": (2, lambda f, d: Ours(f, d, 3)),
    "ds_hessian, ZeRO-3, 2 ranks, fp32 passes": (2, lambda f, d: Ours(f, d, 3, "fp32")),
    "hessian-eigenthings, autograd": (1, lambda f, d: Eigenthings(f, d, "autograd")),
    "hessian-eigenthings, differences": (1, lambda f, d: Eigenthings(f, d, "finite_difference")),
    "hessian-eigenthings, autograd, DDP, 2 ranks": (
        2,
        lambda f, d: Eigenthings(f, d, "autograd", 2),
    ),
    "hessian-eigenthings, differences, DDP, 2 ranks": (
        2,
        lambda f, d: Eigenthings(f, d, "finite_difference", 2),
    ),
    "curvlinops": (1, Curvlinops),
    "PyHessian": (1, PyHessian),
}


def seconds(of: Callable[..., Any], *arguments: Any) -> float:
    """Wall-clock of one call."""
    started = time.perf_counter()
    of(*arguments)
    return time.perf_counter() - started


def work(files: Files, name: str, dtype: str) -> dict[str, Any]:
    """Measure one tool in this process."""
    torch.manual_seed(0)
    tool = TOOLS[name][1](files, dtype)
    exact = files.exact()
    for _ in range(2):
        tool.gradient()
    trained, gradients, products = peak_bytes(), list[float](), list[float]()
    found = [(tool.product(v), expected) for v, expected in exact]
    errors = [relative_error(product, expected) if product else None for product, expected in found]
    for _ in range(3):  # they take turns: a machine's speed changes
        gradients += [seconds(tool.gradient) for _ in range(2)]
        products += tool.seconds_of_products(exact[0][0], 2)
    gradients.append(seconds(tool.gradient))
    gradient = fmean(gradients)
    lanczos = seconds(tool.lanczos)
    figures = {
        "gradient": gradient,
        "product": fmean(products) / gradient,
        "lanczos": lanczos / gradient,
        "memory": [trained, peak_bytes()],
        "errors": errors,
    }
    tool.close()
    return figures


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment by which a launcher tells a process which rank it is."""
    return {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run(folder: Path, name: str, dtype: str) -> dict[str, Any]:
    """Measure one tool in processes of its own."""
    port = free_port()
    ranks, out = TOOLS[name][0], folder / "out.json"
    out.unlink(missing_ok=True)
    workers = []
    for rank in range(ranks):
        environment = {**os.environ, **place(rank, ranks, port)}
        command = [sys.executable, __file__, "--folder", str(folder)]
        command += ["--tool", name, "--dtype", dtype]
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe))
    said = [w.communicate()[1].decode() for w in workers]
    if out.exists():
        return dict(json.loads(out.read_text()))
    return {"failure": said[0].strip().splitlines()[-1][:90]}


def row(name: str, dtype: str, found: dict[str, Any]) -> str:
    """One line of the table."""
    if "failure" in found:
        return f"| {name} | {dtype} | | | | | {found['failure']} |"
    trained, most = (size / 2**20 for size in found["memory"])
    errors = " | ".join(f"{e:.1e}" for e in found["errors"])
    return (
        f"| {name} | {dtype} | {found['product']:.2f} | {found['lanczos']:.1f} | "
        f"{most - trained:.0f} of {most:.0f} | {errors} |"
    )


def main() -> None:
    """Measure all tools, or one as a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tool", choices=TOOLS)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--only", default="", help="tools whose name contains this")
    args = parser.parse_args()
    if args.tool is not None:
        found = work(Files(args.folder), args.tool, args.dtype)
        if os.environ.get("RANK", "0") == "0":
            (args.folder / "out.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        n = sum(w.numel() for w in Files(Path(folder)).weights.values())
        print(f"GPT of {n:,} parameters, {MICRO_BATCHES} micro-batches of 4 x {CONTEXT} tokens\n")
        print(
            "| tool | dtype | product, gradients | 10 Lanczos steps, gradients | MB more, of | "
            "error, random v | error, its product |"
        )
        print("|---|---|---|---|---|---|---|", flush=True)
        for dtype in DTYPES:
            for name in TOOLS:
                if args.only in name and not (dtype == "fp32" and "fp32 passes" in name):
                    print(row(name, dtype, run(Path(folder), name, dtype)), flush=True)


if __name__ == "__main__":
    main()
