"""The spectrum of a language model at its published size, on two ranks of two cores.

    deepspeed --num_accelerators 2 benchmarks/real.py --check 3
    deepspeed --num_accelerators 2 benchmarks/real.py --model pythia --dtype bf16 --basis bf16 disk

The models are the classes of transformers: GPT-2 small (124 M parameters) and Pythia-160M's shape,
under ZeRO-3 in fp32, or in bf16 with passes in fp32. They are trained a little on the source of
Python's standard library, with a tokenizer that is trained on it. `--model small` is the GPT of
`cost.py`, on bytes, to compare with.

Prints, for each place of the basis: the memory plan; the minutes; a gradient as training makes it
and as a product does; the share of the spectrum that is not passes; the peak of memory beyond
training's, beside the plan; the largest Ritz values with their bars. After the first of them, with
`--messages` the collectives of a gradient and of a product; with `--check`, so many products beside
a double backward on rank 0 (fp32, eager attention, all micro-batches of all ranks). With
`--output`, spectra and their pictures are written there. One engine takes 20 GB at most.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from measuring import (
    exact_product,
    give_back_freed_memory,
    peak_bytes,
    peak_since_here,
    plain_gradient,
    relative_error,
)
from torch import Tensor, nn
from train_gpt import GPT, sample, standard_library

import ds_hessian
from ds_hessian import HessianSpectrum
from ds_hessian.backends.zero.backend import ZeroSession
from ds_hessian.memory import Item, MemoryPlan
from tests.backends.exchange_jobs import counted

BASES: dict[str, dict[str, Any]] = {
    "memory": {},
    "bf16": {"dtype": "bf16"},
    "disk": {"device": "disk"},
}
MODELS = ("gpt2", "pythia", "small")


def model_of(name: str) -> nn.Module:
    """The model, with random weights."""
    torch.manual_seed(0)
    if name == "small":
        return GPT(256, 6, 4, 64, 0.1)
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(use_cache=False)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        use_cache=False,
    )
    return transformers.GPTNeoXForCausalLM(config)


def text_of(name: str, model: nn.Module) -> Tensor:
    """The text in the model's tokens: bytes, or those of a tokenizer with as many as the model has,
    if the text has as many. From rank 0, collective.
    """
    text = standard_library(10**9)
    if name == "small":
        return text
    tokens = [None]
    if dist.get_rank() == 0:
        from tokenizers import ByteLevelBPETokenizer

        words, tokenizer = bytes(text.tolist()).decode(errors="replace"), ByteLevelBPETokenizer()
        size = model.config.vocab_size
        tokenizer.train_from_iterator([words], vocab_size=size, show_progress=False)
        tokens = [torch.tensor(tokenizer.encode(words).ids)]
        print(f"{len(tokens[0]):,} tokens, {tokenizer.get_vocab_size():,} different; {size:,} rows")
    dist.broadcast_object_list(tokens)
    assert tokens[0] is not None
    return tokens[0]


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration of DeepSpeed."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.size,
        "gradient_accumulation_steps": args.micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": args.lr, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 50_000_000},
        "hessian": {"progress": False, "num_matvecs": args.num_matvecs},
    }
    if args.dtype != "fp32":
        config[args.dtype] = {"enabled": True}
    return config


class Passes:
    """Seconds in the passes of a measurement, and how many micro-batches they evaluated."""

    def __init__(self) -> None:
        self.seconds, self.evaluated = 0.0, 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time those of the body."""
        add_gradient = ZeroSession.add_gradient

        def timing(session: ZeroSession, out: Tensor, micro_batches: range) -> None:
            began = time.perf_counter()
            add_gradient(session, out, micro_batches)
            self.seconds += time.perf_counter() - began
            self.evaluated += len(micro_batches)

        setattr(ZeroSession, "add_gradient", timing)  # noqa: B010
        try:
            yield
        finally:
            setattr(ZeroSession, "add_gradient", add_gradient)  # noqa: B010


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def gigabytes(size: float) -> str:
    """A number of bytes as text."""
    return f"{size / 1e9:.2f} GB"


def messages(engine: Any, batches: list[Any], products: int = 3) -> None:
    """Print the collectives of a gradient as training makes it, and of products after the first."""
    hessian, passes = engine.hessian.use(batches), Passes()
    with counted() as plain:
        plain_gradient(engine, batches)
    with hessian.measuring(displacement=1e-2):
        hessian.matvec(hessian.random_vector(seed=0))
        with counted() as found, passes.timed():
            for seed in range(products):
                hessian.matvec(hessian.random_vector(seed=seed))
    each, gradients = found.total() / products, passes.evaluated / products / len(batches)
    rest = each - gradients * plain.total()
    say(f"collectives of a gradient: {plain.total()}; {dict(plain)}")
    say(
        f"of a product: {each:.1f} with {gradients:.2f} gradients, "
        f"{rest:.1f} more than these; {dict(found)}"
    )


def check(engine: Any, name: str, batches: list[Any], count: int) -> None:
    """Print errors and estimates of products: of a random vector, of its product, and so on."""
    hessian = engine.hessian.use(batches)
    weights = {}
    for parameter_name, parameter in engine.module.named_parameters():
        whole = deepspeed.utils.safe_get_full_fp32_param(parameter)
        if dist.get_rank() == 0:
            weights[parameter_name] = whole.clone()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, batches)
    every = [batch for mine in everywhere for batch in mine]
    say("| vector | error | estimate | estimate / error |\n|---|---|---|---|")
    v, title = hessian.random_vector(seed=1), "random"
    with hessian.measuring():
        for _ in range(count):
            product = hessian.matvec(v)
            full, found = hessian.gather(v), hessian.gather(product.vector)
            if full is not None and found is not None:
                net = model_of(name).eval()
                net.load_state_dict(weights, strict=False)
                if hasattr(net, "set_attn_implementation"):
                    net.set_attn_implementation("eager")
                off = relative_error(found, exact_product(net, every, full))
                say(f"| {title} | {off:.1e} | {product.error:.1e} | {product.error / off:.2f} |")
            v, title = product.vector / product.norm, "its product"


def measure(engine: Any, batches: list[Any], basis: dict[str, Any]) -> HessianSpectrum:
    """Measure a spectrum, and print its plan, cost and figures."""
    plan, passes = engine.hessian.use(batches).memory_plan(**basis), Passes()
    say(str(plan.table()))
    before = peak_since_here()
    gradients = [plain_gradient(engine, batches) for _ in range(2)]
    # Passes in fp32 of a model in 16 bits hold twice as much.
    wide = 1 + (engine.bfloat16_enabled() and "fp32" in str(plan.passes))
    training = Item("a pass", "host", wide * (peak_bytes() - before), ("passes",))
    before = peak_since_here()
    with passes.timed():
        spectrum: HessianSpectrum = engine.hessian_spectrum(batches, **basis)
    measured = peak_bytes() - before
    gradients += [plain_gradient(engine, batches) for _ in range(2)]
    cost, evaluated = spectrum.cost, passes.evaluated / len(batches)
    whole = MemoryPlan.of(plan.items, [training]).peak("host")
    say(
        f"spectrum                {cost.seconds_total / 60:7.1f} minutes\n"
        f"products                {cost.products:7}\n"
        f"gradients of each       {cost.gradients_per_product:7.2f}\n"
        f"product                 {cost.seconds_per_product:7.2f} s\n"
        f"gradient in training    {fmean(gradients):7.2f} s\n"
        f"gradient in a product   {passes.seconds / evaluated:7.2f} s\n"
        f"not passes              {100 * (1 - passes.seconds / cost.seconds_total):7.2f} %\n"
        f"memory beyond training's: planned {gigabytes(plan.peak('host'))}, with a pass "
        f"{gigabytes(whole)}; measured {gigabytes(measured)}: {whole / measured:.2f}\n"
        f"loss {spectrum.loss:.3f}, {spectrum.provenance.arithmetic}, {spectrum.provenance.layout}"
    )
    values, errors = spectrum.ritz_values[0], spectrum.ritz_errors[0]
    order = values.argsort()
    for i in [*order[::-1][:5], *order[:2][::-1]]:
        say(f"{values[i]:12.6g} ± {errors[i]:.2g}")
    return spectrum


def main() -> None:
    """Train, measure, check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--basis", choices=BASES, nargs="+", default=["memory"])
    parser.add_argument("--size", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--micro_batches", type=int, default=2, help="on each rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--num_matvecs", type=int, default=20)
    parser.add_argument("--check", type=int, default=0, help="products beside a double backward")
    parser.add_argument("--messages", action="store_true", help="count collectives")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    give_back_freed_memory()
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", verbose=False)
    model = model_of(args.model)
    text = text_of(args.model, model)
    engine, *_ = ds_hessian.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(args)
    )
    generator = torch.Generator().manual_seed(dist.get_rank())

    def drawn() -> list[Any]:
        found: list[Any] = []
        for _ in range(args.micro_batches):
            tokens, targets = sample(text, args.size, args.context, generator)
            both = {"input_ids": tokens, "labels": tokens}  # which transformers shifts itself
            found.append([tokens, targets] if args.model == "small" else both)
        return found

    for _ in range(args.steps):
        plain_gradient(engine, drawn(), step=True)
    batches = drawn()
    engine.module.eval()  # without dropout, as the measurement
    plain_gradient(engine, batches)
    n = engine.hessian.backend.space.n
    say(f"{n:,} parameters; a rank in training: {gigabytes(peak_bytes())}")
    for basis in args.basis:
        say(f"\n## basis: {basis}")
        spectrum = measure(engine, batches, BASES[basis])
        if args.output is not None and dist.get_rank() == 0:
            spectrum.save(args.output / basis)
            spectrum.plot(args.output / basis / "spectrum.png")
        if args.messages and basis == args.basis[0]:
            messages(engine, batches)
        if args.check and basis == args.basis[0]:
            check(engine, args.model, batches, args.check)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
