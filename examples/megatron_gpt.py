"""Train a byte-level GPT on megatron-core, TP=2 on two CPU ranks, and watch its Hessian spectrum.

On CPU megatron-core needs the tests' shim (tests/megatron/shim.py), which is all that ties this
script to it: on GPUs drop the two lines that are marked, and use "nccl". Where training is
Megatron-LM's own `pretrain_gpt.py`, examples/megatron_pretrain.py is all that is needed, and
examples/megatron.slurm the job of a cluster.

    torchrun --nproc_per_node 2 examples/megatron_gpt.py
"""

from __future__ import annotations

import argparse
import logging
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.megatron import MegatronHessian
from tests.megatron import shim  # CPU only

shim.install()  # CPU only

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

logger = logging.getLogger(__name__)


def standard_library(limit: int = 4_000_000) -> Tensor:
    """The first `limit` bytes of the standard library's sources, in the order of their names."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in paths)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Batches:
    """Endless micro-batches at random places of the text, the same on all ranks of a TP group."""

    def __init__(self, text: Tensor, size: int, context: int, seed: int) -> None:
        self.text, self.size, self.context = text, size, context
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, Tensor]:
        last = len(self.text) - self.context - 1
        starts = torch.randint(last, (self.size,), generator=self.generator)
        rows = torch.stack([self.text[s : s + self.context + 1] for s in starts]).long()
        return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def forward_step(data_iterator: Any, model: Any) -> Any:
    """As Megatron's schedules take it: the output, and the loss of it."""
    batch = next(data_iterator)
    size, context = batch["tokens"].shape
    positions = torch.arange(context, device=batch["tokens"].device).expand(size, -1)
    causal = torch.ones(1, 1, context, context, dtype=torch.bool, device=positions.device).triu(1)
    losses = model(batch["tokens"], positions, causal, labels=batch["labels"])

    def loss_func(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return losses, loss_func


def build(args: argparse.Namespace) -> tuple[Any, Any]:
    """The DDP-wrapped model and its optimizer."""
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=4,
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=args.tensor_parallel,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 256, args.context)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunk = DistributedDataParallel(config, ddp, model)
    config.finalize_model_grads_func = finalize_model_grads
    options = OptimizerConfig(
        optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=True
    )
    return chunk, get_megatron_optimizer(options, [chunk], use_gloo_process_groups=False)


def main() -> None:
    """Train, and take a spectrum every `--interval` steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--interval", type=int, default=40)
    parser.add_argument("--num-matvecs", type=int, default=20)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--output", default="hessian_out_megatron")
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(args.tensor_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    model, optimizer = build(args)
    config = {"num_matvecs": args.num_matvecs, "output_path": args.output, "progress": False}
    hessian = MegatronHessian(model, config)

    batches = Batches(
        standard_library(), 4, args.context, seed=parallel_state.get_data_parallel_rank()
    )
    sizes = {"seq_length": args.context, "micro_batch_size": 4}
    hessian.use([next(batches) for _ in range(4)], forward_step, **sizes)
    for step in range(1, args.steps + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        (logs,) = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=1,
            forward_only=False,
            **sizes,
        )
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            logger.info("step %4d  loss %.3f", step, logs["loss"].item())
        if step % args.interval == 0:
            hessian.step = step
            spectrum = hessian.spectrum()
            folder = hessian.save(spectrum)
            if dist.get_rank() == 0:
                logger.info("%s\nwritten to %s", spectrum.table(), folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
