"""What runs on the ranks: ZeRO++ engines that quantize what they communicate.

DeepSpeed's kernels for it exist on GPUs alone. In their place are the same functions in torch, as
coarse as theirs; all else is DeepSpeed's. They count their calls in measurements.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
from torch import Tensor

from ds_hessian.backends.function import FixedFunction
from tests.backends.auto_tp_jobs import QUIET, compared, train
from tests.backends.jobs import FEW, full_weights, make_engine, my_batches
from tests.nets import TinyGPT, batch

WIDTH = 16  # whose shards have whole groups of eight


class Quantizer:
    """Symmetric quantization of groups to 4 or 8 bits, as `deepspeed.ops.op_builder.quantizer`.

    Attributes:
        calls: Calls in training, and in measurements.
    """

    Symmetric = 0

    def __init__(self) -> None:
        self.calls = [0, 0]

    def quantize(self, x: Tensor, groups: int, bits: int, _: int) -> tuple[Tensor, Tensor]:
        """Return int8 values (two of 4 bits in one) and a scale for each group."""
        self.calls[FixedFunction.is_evaluated()] += 1
        rows, most = x.detach().float().view(groups, -1), 2 ** (bits - 1) - 1
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-20) / most
        values = (rows / scale).round().to(torch.int8).view(x.shape)
        if bits == 4:
            low, high = values.view(-1, 2).unbind(1)
            values = (low + 8) | ((high + 8) << 4)
        return values, scale.view(-1)

    def dequantize(self, values: Tensor, scale: Tensor, groups: int, bits: int, _: int) -> Tensor:
        """Return half-precision values."""
        self.calls[FixedFunction.is_evaluated()] += 1
        if bits == 4:
            values = torch.stack([(values & 15) - 8, ((values >> 4) & 15) - 8], -1).view(-1)
        return (values.float().view(groups, -1) * scale.view(-1, 1)).view(values.shape).half()

    def swizzle_quant(self, x: Tensor, groups: int, bits: int, kind: int, *_: int) -> Any:
        """Quantize gradients in the order in which nodes of one device send them."""
        return self.quantize(x, groups, bits, kind)

    def quantized_reduction(self, values: Tensor, scale: Tensor, *_: int) -> Any:
        """Add up over the one device of a node."""
        return values, scale


def make(config: dict[str, Any]) -> tuple[Any, Quantizer]:
    """An engine on ranks that count as a node each, since gradients are quantized between nodes."""
    os.environ["LOCAL_SIZE"] = "1"
    quantizer = Quantizer()
    CUDAQuantizer.quantizer_cuda_module = quantizer
    coalesced_collectives.quantizer_module = quantizer
    torch.manual_seed(0)
    config = dict(config)
    zero = {"stage": 3, **config.pop("zero", {})}
    return make_engine(TinyGPT(WIDTH), zero=zero, **config), quantizer


def product(config: dict[str, Any], precision: str) -> Any:
    """(weights, v, product, layout, calls of the quantizer in training and measurements)."""
    engine, quantizer = make({**config, "hessian": QUIET})
    for k in range(2):
        engine.backward(engine(*batch(k, dist.get_rank())))
        engine.step()
    hessian = engine.hessian.use(my_batches(FEW))
    v = hessian.random_vector(seed=5)
    with hessian.measuring(displacement=1e-2, precision=precision):
        made = hessian.matvec(v).vector
    found = full_weights(engine), hessian.gather(v), hessian.gather(made)
    layout = hessian.spectrum(num_matvecs=1).provenance.layout
    engine.destroy()
    return *found, layout, quantizer.calls


def compare_training(config: dict[str, Any], number: int) -> tuple[list[bool], list[str]]:
    """Training with spectra after every `number` steps, and with those that fail on one rank,
    against without.
    """

    def run(measure: str) -> tuple[list[Any], list[str]]:
        batches = [batch(k, dist.get_rank()) for k in range(number)]
        return train(make(config)[0], batches, lambda model, b: model(*b), measure)

    with mock.patch.dict(os.environ):
        return compared(run)
