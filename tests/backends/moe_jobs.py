"""What runs on the ranks: engines with experts of `deepspeed.moe`, and the same model by hand."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from tests.backends.auto_tp_jobs import CONFIG, QUIET, compared, train
from tests.backends.jobs import full_weights

VOCABULARY, WIDTH, AUXILIARY = 11, 6, 0.3
GATES: dict[str, dict[str, Any]] = {
    "top 1": {"k": 1, "use_rts": False},
    "top 2": {"k": 2, "top2_2nd_expert_sampling": False},
    "top 3": {"k": 3},
    "dropless": {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False},
    "random": {"k": 1, "noisy_gate_policy": "RSample"},
    "sampled": {"k": 2, "noisy_gate_policy": "Jitter"},
}
"""Arguments of layers; the last two draw random numbers, from which the others are free."""
NUMBERS = (4, 2)
FACTOR, LEAST = 1.0, 1  # capacity: some tokens are dropped


def expert() -> nn.Module:
    """One expert."""
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH))


class ByHand(nn.Module):
    """A layer with the names of `MoE`, all experts in one process, in any dtype."""

    def __init__(
        self,
        experts: int,
        k: int,
        residual: bool,
        *,
        drop_tokens: bool = True,
        **_: Any,
    ) -> None:
        super().__init__()
        self.k, self.residual, self.drops = k, residual, drop_tokens
        self.deepspeed_moe: Any = nn.Module()
        self.deepspeed_moe.gate = nn.Module()
        self.deepspeed_moe.gate.wg = nn.Linear(WIDTH, experts, bias=False)
        self.deepspeed_moe.experts = nn.Module()
        several = nn.ModuleList([expert() for _ in range(experts)])
        self.deepspeed_moe.experts.deepspeed_experts = several
        if residual:
            self.mlp, self.coefficient = expert(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the output, the auxiliary loss, and nothing."""
        flat = x.reshape(-1, WIDTH)
        gates = self.deepspeed_moe.gate.wg(flat).softmax(-1)
        tokens, number = gates.shape
        first = functional.one_hot(gates.argmax(-1), number)
        capacity = max(math.ceil(tokens / number * FACTOR * self.k), LEAST)
        if self.k == 1:
            auxiliary = (gates.mean(0) * first.to(gates.dtype).mean(0)).sum() * number
            # Ties are broken by torch, as in a layer without random selection.
            chosen = torch.topk(first, min(capacity, tokens), dim=0).indices
            weights = gates * first * torch.zeros_like(first).scatter_(0, chosen, 1)
        elif self.k == 2:
            auxiliary = (gates.mean(0) * first.to(gates.dtype).mean(0)).mean() * number**2
            others = gates.masked_fill(first.bool(), -1.0)
            second = functional.one_hot(others.argmax(-1), number)
            places = second.cumsum(0) - 1 + first.sum(0)
            capacity = capacity if self.drops else 2 * tokens
            kept = first * (first.cumsum(0) - 1 < capacity) + second * (places < capacity)
            weights = gates * kept
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)
        else:
            top = torch.topk(gates, self.k, dim=1)
            mask = torch.zeros_like(gates).scatter(1, top.indices, 1.0)
            auxiliary = (gates.mean(0) * mask.mean(0)).mean() * number**2 / self.k
            chosen = torch.topk(gates * mask, min(capacity, tokens), dim=0).indices
            mask = mask * torch.zeros_like(mask).scatter(0, chosen, 1.0)
            weights = gates * mask
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)
        outputs = [e(flat) for e in self.deepspeed_moe.experts.deepspeed_experts]
        y = torch.einsum("se,sem->sm", weights, torch.stack(outputs, 1)).view_as(x)
        if self.residual:
            part = self.coefficient(x).softmax(-1)
            y = y * part[..., :1] + self.mlp(x) * part[..., 1:]
        return y, auxiliary, None


class Net(nn.Module):
    """Two layers of experts between replicated ones; returns its loss.

    Args:
        gate: One of `GATES`.
        ep: Ranks that share the experts of each layer; None for the model by hand.
        variant: "" for layers of 4 and 2 experts, the second with a residual; "tied" for two with
            the same 4 experts; "starved" for one expert that no token chooses; "frozen" for the
            fourth expert of the first layer without gradients.
    """

    def __init__(self, gate: str, ep: tuple[int, int] | None, variant: str = "") -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        layers: list[Any] = []
        for i, number in enumerate((4, 4) if variant == "tied" else NUMBERS):
            given = {**GATES[gate], "k": min(GATES[gate]["k"], number)}
            residual = i == 1 and variant != "tied"
            if ep is None:
                layers.append(ByHand(number, residual=residual, **given))
            else:
                given |= {"capacity_factor": FACTOR, "min_capacity": LEAST}
                layers.append(MoE(WIDTH, expert(), number, ep[i], use_residual=residual, **given))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.fill(ep or (1, 1))
        if variant == "tied":
            layers[1].deepspeed_moe.experts = layers[0].deepspeed_moe.experts
        if variant == "frozen" and (ep is None or dist.get_rank() % ep[0] == ep[0] - 1):
            layers[0].deepspeed_moe.experts.deepspeed_experts[-1].requires_grad_(False)
        if variant == "starved":
            rows = layers[0].deepspeed_moe.gate.wg.weight.data
            rows[3] = rows[:2].mean(0)

    @torch.no_grad()
    def fill(self, ep: tuple[int, int]) -> None:
        """Set the weights to functions of their names, experts numbered in the layer."""
        for name, p in self.named_parameters():
            before, found, after = name.partition("deepspeed_experts.")
            if found:
                mine, _, rest = after.partition(".")
                layer: Any = self.layers[int(before.split(".")[1])]
                of_each = len(layer.deepspeed_moe.experts.deepspeed_experts)
                share = dist.get_rank() % ep[int(before.split(".")[1])] if max(ep) > 1 else 0
                name = f"{before}{found}{int(mine) + share * of_each}.{rest}"
            digest = hashlib.sha256(name.encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
            p.copy_(0.6 * torch.randn(p.shape, generator=generator))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, and the routers' own losses."""
        # Of equal tokens rounding would decide which one is dropped.
        place = torch.linspace(0, 0.5, tokens.numel(), dtype=self.embed.weight.dtype)
        x = torch.tanh(self.mix(self.embed(tokens) + place.view(*tokens.shape, 1)))
        auxiliary = torch.zeros((), device=x.device)
        for layer in self.layers:
            y, own, _ = layer(x)
            x, auxiliary = x + y, auxiliary + own
        logits = self.head(x).flatten(0, 1)
        if logits.dtype == torch.bfloat16:
            logits = logits.float()
        return functional.cross_entropy(logits, targets.flatten()) + AUXILIARY * auxiliary


def by_hand(gate: str, variant: str = "") -> Net:
    """The model in one process."""
    return Net(gate, None, variant)


def micro_batches(number: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and targets."""
    generator = torch.Generator().manual_seed(3)
    shape = number, 2, 2, 7
    return [(t[0], t[1]) for t in torch.randint(0, VOCABULARY, shape, generator=generator)]


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The model's own loss."""
    loss: Tensor = model(*batch)
    return loss


def make(
    stage: int, ep: int | tuple[int, int], gate: str, variant: str = "", **config: Any
) -> tuple[Any, list[Any]]:
    """An engine and this rank's micro-batches."""
    net = Net(gate, (ep, ep) if isinstance(ep, int) else ep, variant)
    engine = deepspeed.initialize(
        model=net, config={**CONFIG, "zero_optimization": {"stage": stage}, **config}
    )[0]
    torch.manual_seed(50 + dist.get_rank())  # what routers draw
    return engine, micro_batches()[dist.get_rank() :: dist.get_world_size()]


def measured(
    stage: int,
    ep: int | tuple[int, int],
    gate: str,
    precision: str = "model",
    variant: str = "",
    **config: Any,
) -> Any:
    """(weights, v, product, spectrum, names, whether products repeat bitwise); whole, on rank 0."""
    engine, batches = make(stage, ep, gate, variant, **config)
    settings = {**QUIET, "finite_difference": {"precision": precision}}
    hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(settings))
    engine.hessian = hessian.use(batches, loss_of)
    weights = full_weights(engine)
    v = hessian.random_vector(seed=5)
    with hessian.measuring(displacement=2e-2):
        product, again = hessian.matvec(v).vector, hessian.matvec(v).vector
    spectrum = hessian.spectrum(num_matvecs=3)
    vectors = hessian.gather(v), hessian.gather(product)
    names = [name for name, _ in hessian.backend.parameters]
    engine.destroy()
    return weights, *vectors, spectrum, names, torch.equal(product, again)


def reference(
    weights: dict[str, Tensor],
    v: dict[str, Tensor],
    gate: str,
    variant: str = "",
    batches: list[Any] | None = None,
) -> dict[str, Tensor]:
    """H v by double backward in fp64 of the model in one process, at these weights."""
    model = by_hand(gate, variant).double()
    model.load_state_dict(weights, strict=False)
    losses = [loss_of(model, batch) for batch in batches or micro_batches()]
    named = {name: p for name, p in model.named_parameters() if name in v}
    gradient = torch.autograd.grad(
        torch.stack(losses).mean(), list(named.values()), create_graph=True
    )
    along = [v[name].double() for name in named]
    products = torch.autograd.grad(gradient, list(named.values()), along)
    return dict(zip(named, products, strict=True))


def compare_training(stage: int, ep: int, gate: str, **config: Any) -> tuple[list[bool], list[str]]:
    """Training of experts."""
    return compared(lambda measure: train(*make(stage, ep, gate, **config), loss_of, measure))


def frozen(kind: str) -> Any:
    """(names, weights, v, product) with frozen experts; or the message of a refusal."""
    one = kind == "on one rank"
    variant = "frozen" if kind == "before" else ""
    engine, batches = make(0 if one else 1, 1 if one else 2, "top 1", variant)
    experts = engine.module.layers[0].deepspeed_moe.experts.deepspeed_experts
    last = dist.get_rank() == dist.get_world_size() - 1
    if kind == "after" and last:
        experts[1].requires_grad_(False)  # the layer's fourth, which the optimizer has
    if one and not last:
        experts[2][0].bias.requires_grad_(False)
    try:
        hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(QUIET))
        v = hessian.use(batches, loss_of).random_vector(seed=5)
        engine.hessian = hessian
        product = hessian.gather(hessian.matvec(v).vector)
        names = [name for name, _ in hessian.backend.parameters]
        return names, full_weights(engine), hessian.gather(v), product
    except ds_hessian.HessianError as error:
        return str(error)
    finally:
        engine.destroy()


def around_a_checkpoint(folder: str, stage: int) -> tuple[bool, bool]:
    """Whether a product is the same when repeated, and after training on and loading back."""
    engine, batches = make(stage, 2, "top 2")
    hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(QUIET))
    v = hessian.use(batches, loss_of).random_vector(seed=5)
    first, second = hessian.matvec(v).vector, hessian.matvec(v).vector
    engine.save_checkpoint(folder)
    for batch in batches:
        engine.backward(loss_of(engine, batch))
        engine.step()
    moved = hessian.matvec(v).vector
    engine.load_checkpoint(folder)
    after = hessian.matvec(v).vector
    engine.destroy()
    found = torch.equal(first, second) and not torch.equal(first, moved)
    return found, torch.equal(first, after)


def of_other_kinds(ep: int, variant: str) -> Any:
    """`other_kinds`, and Kronecker factors of the layers that have some."""
    engine, batches = make(1, ep, "top 2", variant)
    hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(QUIET))
    hessian.use(batches, loss_of)
    found = *other_kinds(hessian), factors(hessian, None)
    engine.destroy()
    return found


def other_kinds(hessian: Any) -> tuple[Any, Any]:
    """Spectra of a block with one expert, and of the Gauss-Newton matrix."""
    block = hessian.spectrum(num_matvecs=3, parameters=r"layers\.0\..*experts\.3\.")
    return block, hessian.spectrum(num_matvecs=3, operator="ggn")


def factors(hessian: Any, layers: Any) -> Any:
    """The record of Kronecker factors of some layers."""
    return hessian.kronecker(["kfac", "shampoo"], layers, basis=4, probes=2, extremes=0)


def uneven(stage: int) -> Any:
    """(weights, v, product) where the micro-batches of one rank have fewer tokens."""
    engine, _ = make(stage, 2, "dropless")
    batches = uneven_batches()[dist.get_rank() :: dist.get_world_size()]
    hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(QUIET))
    engine.hessian = hessian.use(batches, loss_of)
    v = hessian.random_vector(seed=5)
    found = full_weights(engine), hessian.gather(v), hessian.gather(hessian.matvec(v).vector)
    engine.destroy()
    return found


def uneven_batches() -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of which every second one is short."""
    lengths = 7, 4, 7, 4
    return [(x[:, :n], y[:, :n]) for n, (x, y) in zip(lengths, micro_batches(), strict=True)]
