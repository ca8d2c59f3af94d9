"""Products of tiny models of every architecture in transformers, beside double backwards in fp64.

    OMP_NUM_THREADS=1 python benchmarks/architectures.py causal masked seq2seq image audio
    OMP_NUM_THREADS=1 python benchmarks/architectures.py causal --only qwen3 mixtral

For each class of a task's auto model that can be built with a width of 32 and two layers, after six
steps of Adam: the error of three products (of a random vector, and of each product's direction)
with 4 micro-batches in fp32, beside the estimate. The reference is the double backward of a copy in
fp64, with eager attention and experts. Where that is not the derivative of training's gradient, nor
symmetric (a backward written by hand, a defect of torch's), differences of gradients in fp64 take
its place: these rows have a star. (Of a model that stops gradients it is symmetric, and the
differences are not.) What cannot be built so small, has no loss of plain inputs, or does not run in
fp64, is counted and left out; with `--all` it is listed with the reason. Nothing of ds_hessian was
chosen on these.
"""

from __future__ import annotations

import argparse
import copy
import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import ds_hessian

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
}
WIDTH, INNER, LAYERS, HEADS, WORDS, IMAGE = 32, 48, 2, 4, 99, 16
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim"), INNER),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **{"vocab_size": WORDS, "head_dim": 8, "d_kv": 8, "num_key_value_heads": 2, "rotary_dim": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "moe_num_experts": 4, "n_group": 1, "topk_group": 1},
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
    **{"v_head_dim": 8, "first_k_dense_replace": 1, "state_size": 8, "expand": 2, "n_groups": 1},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    **{"mamba_num_heads": 4, "attention_hidden_size": WIDTH, "sliding_window": 16},
    **{"image_size": IMAGE, "patch_size": 8, "encoder_stride": 8, "num_labels": 3},
    **{"depths": [1, 1], "embed_dim": 16, "window_size": 2, "hidden_sizes": [8, 16]},
    **{"conv_dim": (16,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
    **{"classifier_proj_size": 16, "apply_spec_augment": False},
}
"""What configurations call their sizes."""

LARGEST, SECONDS = 1_500_000, 150
"""Of models with more parameters, or that take longer, nothing is measured."""

Batch = dict[str, Tensor]


class TooSlow(BaseException):
    """A model has taken `SECONDS`; no error, so that what catches these lets it pass."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise `TooSlow` in a body that takes too long."""

    def ring(*_: object) -> None:
        raise TooSlow(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def configured(kind: type) -> Any:
    """A small configuration, without dropout."""
    names = {name: size for name, size in SIZES.items() if hasattr(kind(), name)}
    try:
        config = kind(**names)
    except Exception:  # each class has its own for a size of heads that does not fit its others
        config = kind(**{name: size for name, size in names.items() if name != "head_dim"})
    config.use_cache = False
    config._attn_implementation = config._experts_implementation = "eager"
    for name in dir(config):
        drops = any(part in name for part in ("drop", "_pdrop", "jitter"))
        if drops and isinstance(getattr(config, name, None), float):
            setattr(config, name, 0.0)
    return config


def inputs(task: str, number: int, config: Any) -> Batch:
    """Random tokens, pixels or sound, with labels."""
    generator = torch.Generator().manual_seed(number)
    few = torch.randint(0, 3, (2,), generator=generator)
    if task == "image":
        channels = getattr(config, "num_channels", 3)
        pixels = torch.randn(2, channels, IMAGE, IMAGE, generator=generator)
        return {"pixel_values": pixels, "labels": few}
    if task == "audio":
        return {"input_values": torch.randn(2, 1600, generator=generator), "labels": few}
    tokens = torch.randint(3, 90, (2, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def trained(model_class: Any, config_class: type, task: str) -> tuple[nn.Module, list[Batch]]:
    """A model after six steps, and four micro-batches."""
    config = configured(config_class)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters at least")
    torch.manual_seed(0)
    model = model_class(config).train()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(6):
        optimizer.zero_grad()
        model(**inputs(task, 150 + step, config)).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, [inputs(task, 100 + i, config) for i in range(4)]


STEPS = (1e-6, 1e-7)
"""Of differences in fp64, beside |w|: far from rounding. If one has passed a kink, they differ."""

APART = 1e-4
"""Relative difference from which on a double backward is no derivative of the gradient."""


ROUNDED = 1e-9
"""Relative asymmetry of a double backward that is rounding, in fp64, of nets of this size."""


class Wide(TorchFunctionMode):
    """What a model computes in fp32, whatever its weights are, in fp64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make a call with other types."""
        func = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        named = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        return func(*args, **named)


class Exact:
    """Products by double backward of a copy in fp64, or by differences of its gradients.

    Attributes:
        starred: Whether the two differ, and the first is not symmetric.
    """

    def __init__(self, model: nn.Module, batches: list[Batch]) -> None:
        self.model, self.batches = copy.deepcopy(model).double().train(), batches
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.weights = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.starred = False

    def __call__(self, v: Tensor) -> Tensor:
        """`(n,)` to `(n,)` fp64."""
        torch.set_default_dtype(torch.float64)
        try:
            with Wide():
                twice = self.twice(v)
                near, nearer = (self.slope(v, step) for step in STEPS)
                least = APART * float(nearer.norm())
                agree = float((near - nearer).norm()) < least
                if not agree or float((nearer - twice).norm()) < least:
                    return twice
                across, along = float(v.double() @ self.twice(nearer)), float(nearer @ twice)
        finally:
            torch.set_default_dtype(torch.float32)
        if abs(across - along) < ROUNDED * float(nearer.norm() * twice.norm()):
            return twice
        self.starred = True
        return nearer

    def slope(self, v: Tensor, step: float) -> Tensor:
        """A difference of gradients."""
        h = step * float(self.weights.norm() / v.norm())
        sides = [self.gradient(self.weights + side * h * v) for side in (1, -1)]
        self._set(self.weights)
        return (sides[0] - sides[1]) / (2 * h)

    def gradient(self, weights: Tensor) -> Tensor:
        """The gradient at other weights, `(n,)`."""
        self._set(weights)
        self.model.zero_grad()
        for batch in self.batches:
            (self.model(**_wide(batch)).loss / len(self.batches)).backward()
        found = (torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters)
        return torch.cat([g.reshape(-1) for g in found])

    def _set(self, weights: Tensor) -> None:
        parts = weights.split([p.numel() for p in self.parameters])
        with torch.no_grad():
            for p, part in zip(self.parameters, parts, strict=True):
                p.copy_(part.view_as(p))

    def twice(self, v: Tensor) -> Tensor:
        """The double backward."""
        parts = v.double().split([p.numel() for p in self.parameters])
        total = torch.zeros(len(v), dtype=torch.float64)
        for batch in self.batches:
            loss = self.model(**_wide(batch)).loss / len(self.batches)
            first = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
            pairs = zip(first, parts, strict=True)
            slope = sum((g.reshape(-1) @ part for g, part in pairs if g is not None))
            second = torch.autograd.grad(slope, self.parameters, materialize_grads=True)
            total += torch.cat([h.reshape(-1) for h in second])
        return total


def _wide(batch: Batch) -> Batch:
    return {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}


def products(model: nn.Module, batches: list[Batch]) -> tuple[bool, list[tuple[float, float]]]:
    """Whether the row has a star; errors and estimates of three products."""
    exact, found = Exact(model, batches), list[tuple[float, float]]()
    hessian = ds_hessian.attach(model, config={"progress": False, "plot": False}).use(batches)
    v = hessian.random_vector(seed=0)
    with hessian.measuring() as operator:
        for _ in range(3):
            product, truth = operator.matvec(v), exact(v)
            error = float((product.vector.double() - truth).norm() / truth.norm())
            found.append((error, product.error))
            v = product.vector / product.norm
    return exact.starred, found


def main() -> None:
    """Print a row for each architecture, and how good the estimates are of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks", nargs="+", choices=MAPPINGS)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--all", action="store_true", help="list those left out")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from transformers.models.auto import modeling_auto
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    ratios, left_out, measured = list[float](), 0, 0
    for task in args.tasks:
        print(f"| {task} | parameters | error / estimate |\n|---|---|---|", flush=True)
        for config_class, classes in getattr(modeling_auto, MAPPINGS[task]).items():
            name = config_class.model_type
            if args.only and name not in args.only:
                continue
            try:
                with limited():
                    model_class = classes[0] if isinstance(classes, tuple) else classes
                    model, batches = trained(model_class, config_class, task)
                    starred, found = products(model, batches)
            except ds_hessian.HessianError:
                raise
            except (Exception, TooSlow) as error:  # what transformers raises has no common class
                left_out += 1
                if args.all:
                    print(f"| {name} | | {type(error).__name__}: {str(error)[:60]!r} |", flush=True)
                continue
            measured += 1
            ratios += [estimate / error for error, estimate in found]
            size = sum(p.numel() for p in model.parameters())
            shown = ", ".join(f"{error:.1e} / {estimate:.1e}" for error, estimate in found)
            print(f"| {name}{'*' * starred} | {size:,} | {shown} |", flush=True)
    within = torch.tensor(ratios)
    good = float(((within > 1 / 3) & (within < 3)).double().mean())
    print(f"\n{measured} architectures, {left_out} left out; {len(ratios)} products: ", end="")
    print(f"estimates within 3x of the error {good:.0%}, below a fifth ", end="")
    print(f"{int((within < 0.2).sum())}, least {float(within.min()):.2f}")


if __name__ == "__main__":
    main()
