"""The paper's cost model and reported times beside those of `ds_hessian.planning`.

The paper (section 5, appendices B and C) writes, with n parameters on N ranks, L blocks, latency a,
and c the operations on a rank's part of a vector:

    gradient      operations / rate + (number of collectives) a + bytes / bandwidth     (section 5)
                  compute / N + c L a + c bytes / bandwidth                             (appendix B)
    product       2 gradients + c n / N + a                                             (35)
    Lanczos step  product + (c + c w) n / N + (c + c w) a, with a window of w vectors   (38, 39)
    spectrum      probes x steps x Lanczos step                                         (40)

It leaves the constants open. Those here are counted from its algorithm 1 and equations (36), (37):
three updates of the parameters and a difference of 12 bytes each for a product; two inner products
of 8 bytes, two updates of 12, and a norm and a scaling of 4 and 8 for a step; 8 and 12 for each
vector of the window. Its gradient has one message for each pass of each rank, as section 5 and
appendix C give no number, and its bytes are those of ZeRO-3, three times the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_hessian.analyses import Spectrum
from ds_hessian.config import HessianConfig
from ds_hessian.memory import shown
from ds_hessian.planning import ACCELERATOR, Job, Shape, plan, times, traffic

QWEN = Shape(
    *(28, 3584, 28, 152064, 1),
    **{"groups": 4, "ffn": 18944, "gated": True, "bias": False, "qkv_bias": True},
    **{"tied": False, "rms": True},
)
GPT_OSS = Shape(
    *(36, 2880, 64, 201088, 1),
    **{"groups": 8, "head_width": 64, "gated": True, "tied": False, "rms": True},
    **{"experts": 128, "active": 4, "expert_ffn": 2880},
)
MODELS = {
    "Qwen 1.5 B": replace(
        QWEN, hidden=1536, heads=12, groups=2, ffn=8960, vocabulary=151936, tied=True
    ),
    "R1-Distill-Qwen 7 B": QWEN,
    "Pythia 12 B": Shape(36, 5120, 40, 50688, 1, tied=False),
    "gpt-oss 20 B": replace(GPT_OSS, layers=24, experts=32),
    "gpt-oss 120 B": GPT_OSS,
}
"""From the models' own configuration files; attention sinks of gpt-oss are left out."""

TOKENS, MICRO_BATCHES, STEPS, RANKS = 2048, 8, 10, 64
FLOPS = 140e12
"""What an A100 reaches in training (Narayanan et al. 2021, arXiv 2104.04473, table 1)."""
MACHINE = replace(ACCELERATOR, network=25e9)
"""Eight ranks of a node have eight cards of 200 Gb/s (the same, section 5)."""

UPDATE, INNER = 12, 8
"""Bytes of a coordinate: two read and one written, two read."""
OF_PRODUCT = 4 * UPDATE
OF_STEP = 2 * INNER + 2 * UPDATE + 4 + 8
OF_WINDOW = UPDATE + INNER

SCALING = {1: 12.40, 2: 7.93, 4: 4.06, 8: 2.16}
"""The paper's table 3: seconds of a product by ranks of one node."""
NODES = 9.36, 5.20
"""Its table 4: seconds on one and two nodes of 8 ranks, the second with a batch of 72 for 64."""
OVERHEAD = {"R1-Distill-Qwen 7 B": (23.99, 24.30, 1), "Qwen 1.5 B": (71.26, 72.53, 8)}
"""Its table 2: seconds of a product and of a Lanczos step, and steps."""


@dataclass(frozen=True)
class Paper:
    """The paper's seconds of a gradient, of a product beside gradients, and of the rest of a step.

    Attributes:
        gradient: One gradient.
        product: One product.
        lanczos: The rest of a step.
    """

    gradient: float
    product: float
    lanczos: float


def of_paper(job: Job, window: int) -> Paper:
    """The paper's model of a job."""
    operations = times.operations(job, TOKENS) / FLOPS
    sent = traffic.of_micro_batch(job, TOKENS).far / MACHINE.network
    gradient = MICRO_BATCHES * (operations + sent) + MACHINE.latency
    second = job.share.n_local / MACHINE.bandwidth["accelerator"]
    product = 2 * gradient + OF_PRODUCT * second + MACHINE.latency
    lanczos = (OF_STEP + OF_WINDOW * window) * second + (2 + window) * MACHINE.latency
    return Paper(gradient, product, lanczos)


def cost_model() -> str:
    """Both models, for the paper's models on the same machine."""
    lines = [
        f"{STEPS} products without reorthogonalisation (as the paper's largest), ZeRO-3 in bf16 on "
        f"{RANKS} ranks, {MICRO_BATCHES} micro-batches of {TOKENS} tokens:",
        "",
        "| model | parameters | gradient, paper | ours | of it, latency of blocks | product, paper "
        "| ours | rest of a step, paper | ours | spectrum, paper | ours | memory, paper | ours |",
        "|---" * 13 + "|",
    ]
    config = HessianConfig().with_overrides(
        num_micro_batches=MICRO_BATCHES, num_matvecs=STEPS, mode="none", precision="model"
    )
    for name, shape in MODELS.items():
        shape = replace(shape, sequence=TOKENS)
        job = Job(shape.parameters, RANKS, shape=shape)
        paper = of_paper(job, 0)
        run = times.run_of(job, MACHINE)
        each = times.micro_batch(job, TOKENS, FLOPS, MACHINE).seconds
        blocks = traffic.of_micro_batch(job, TOKENS).messages * MACHINE.latency * MICRO_BATCHES
        gradient = run.over(MICRO_BATCHES, each)
        ours = times.plan_time(gradient, job.share, MACHINE, config, STEPS, run)
        memory = plan(Spectrum(), job.share, config).peak("accelerator")
        spectrum = STEPS * (paper.product + paper.lanczos)
        cells = [
            name,
            f"{shape.parameters / 1e9:.2f} B",
            *(f"{s:.2f} s" for s in (paper.gradient, ours.gradient, blocks)),
            *(f"{s:.2f} s" for s in (paper.product, ours.product)),
            *(f"{1e3 * s:.1f} ms" for s in (paper.lanczos, ours.lanczos)),
            *(f"{s:.0f} s" for s in (spectrum, ours.total)),
            shown(3 * 4 * job.share.n_local),
            shown(memory),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def scaling() -> str:
    """The paper's tables 3 and 4 beside both models, each fitted to one and two ranks."""
    alone, two = SCALING[1], SCALING[2]
    constant = two - alone / 2

    def paper(ranks: int) -> float:
        return alone / ranks + (constant if ranks > 1 else 0.0)

    def ours(ranks: int) -> float:
        # A rank has 1 / N of the micro-batches, and sends (N - 1) / N of the weights for each.
        return alone / ranks + 4 * constant * traffic.ring(ranks) / ranks

    lines = [
        "Seconds of a product (the paper's table 3), from those of one and two ranks:",
        "",
        "| ranks | reported | appendix B | ratio | ours | ratio |",
        "|---" * 6 + "|",
    ]
    for ranks, seconds in SCALING.items():
        b, o = paper(ranks), ours(ranks)
        lines.append(
            f"| {ranks} | {seconds:.2f} | {b:.2f} | {b / seconds:.2f} | {o:.2f} | "
            f"{o / seconds:.2f} |"
        )
    first, second = NODES
    lines.append(
        f"| 8 to 16 (table 4), speedup | {first / second:.2f} | {paper(8) / paper(16):.2f} | | "
        f"{ours(8) / ours(16):.2f} | |"
    )
    return "\n".join(lines)


def overhead() -> str:
    """The paper's table 2 beside both models, for the least and the most ranks of a node."""
    lines = [
        "The rest of a Lanczos step beside a product (the paper's table 2), on 1 and on 8 ranks:",
        "",
        "| model | product, reported | rest, reported | section 5 | ours |",
        "|---" * 5 + "|",
    ]
    for name, (product, step, steps) in OVERHEAD.items():
        shape = replace(MODELS[name], sequence=TOKENS)
        config = HessianConfig().with_overrides(
            num_matvecs=steps, mode="full" if steps > 1 else "none", precision="model"
        )
        found: list[tuple[float, float]] = []
        for ranks in (1, 8):
            job = Job(shape.parameters, ranks, shape=shape)
            window = (steps - 1) / 2 if steps > 1 else 0
            ours = times.plan_time(product / 2, job.share, MACHINE, config, steps)
            found.append((of_paper(job, round(window)).lanczos, ours.lanczos))
        cells = [" - ".join(f"{pair[i] / product:.2%}" for pair in found[::-1]) for i in (0, 1)]
        lines.append(
            f"| {name}, {steps} step{'s' * (steps > 1)} | {product:.2f} s | "
            f"{(step - product) / product:.1%} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def tables() -> list[str]:
    """All of it."""
    return [cost_model(), scaling(), overhead()]
