"""megatron-core on CPU and gloo: what it computes is not changed, only where it insists on CUDA.

Tried with megatron-core 0.16.1. Every line stands for one place in it (paths below megatron/core).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_installed = False


_WATCHED = {torch.Tensor.cuda, torch.Tensor.type, torch.softmax}


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func not in _WATCHED:  # nearly all
            return func(*args)
        kwargs = dict(kwargs or {})
        # Schedules count tokens and p2p receives activations on device="cuda"
        # (pipeline_parallel/schedules.py, p2p_communication.py).
        if torch.device(kwargs.get("device") or CPU).type == "cuda":
            kwargs["device"] = CPU
        if func is torch.Tensor.cuda:
            return args[0]
        # Optimizers sort parameters by their type's name, "torch.cuda.FloatTensor"
        # (optimizer/optimizer.py, optimizer/distrib_optimizer.py).
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        # Routers round to fp32 in the middle (moe/moe_utils.py): a fp64 reference must not.
        if func is torch.softmax and args[0].dtype == torch.float64:
            kwargs.pop("dtype", None)
        return func(*args, **kwargs)


def _norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
    norm = torch.nn.LayerNorm(hidden_size, eps=eps)
    for p in norm.parameters():
        p.sequence_parallel = config.sequence_parallel
    return norm


def _add_weight_gradient(inputs: torch.Tensor, gradients: torch.Tensor, out: torch.Tensor) -> None:
    out.addmm_(gradients.reshape(-1, gradients.shape[-1]).t(), inputs.reshape(-1, inputs.shape[-1]))


class _Stream:
    """The only stream, and an event of it."""

    def __init__(self, device: Any = None) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def record_event(self) -> _Stream:
        """All of it is done."""
        return self

    def synchronize(self) -> None:
        """Nothing is under way."""


class _NoFP8:
    """The state of fp8, which is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """It is not."""
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        """There is none."""


def latent_attention() -> Any:
    """Return the local attention for multi-latent attention, whose queries, keys and values have
    `kv_channels` each (transformer/dot_product_attention.py takes no widths of their own).
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        """The same, with two more arguments."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            for width in ("k_channels", "v_channels"):
                kwargs.pop(width, None)
            super().__init__(*args, **kwargs)

    return Attention


def install() -> None:
    """Make this process' megatron-core run on CPU; once."""
    global _installed
    if _installed:
        return
    _installed = True
    warnings.filterwarnings("ignore")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU  # buffers are allocated there (param_and_grad_buffer.py)
    # Distinct functions: torch.compile's tables refuse the same object under two names.
    cuda.synchronize = lambda *a, **k: None  # after batched p2p (p2p_communication.py)
    cuda.empty_cache = lambda *a, **k: None
    # Reserved with several optimizer instances, used with overlap only
    # (distributed_data_parallel.py); the all-to-all dispatcher copies sizes to the CPU on one, and
    # skips it where it is the current one (moe/token_dispatcher.py).
    cuda.Stream = _Stream
    cuda.current_stream = lambda device=None: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    # The random tracker keeps the state of the CPU's generator instead (tensor_parallel/random.py).
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.manual_seed = lambda seed: torch.random.default_generator.manual_seed(int(seed))
    import megatron.core.tensor_parallel.random as tracker

    tracker._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    tracker._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    # What recomputes a part of a layer asks Transformer Engine for fp8 (it takes `fp8=False` for
    # True), and without it has no name for it.
    if not hasattr(tracker, "FP8GlobalStateManager"):
        tracker.FP8GlobalStateManager = _NoFP8
        tracker.activation_recompute_forward = lambda **_: contextlib.nullcontext()
        tracker.fp8_autocast = lambda **_: contextlib.nullcontext()
    # It warns that the CPU's state changes while it thinks it changes the GPU's.
    logging.getLogger(tracker.__name__).setLevel(logging.ERROR)
    # The plain norm refuses sequence parallelism, which only marks its parameters
    # (transformer/torch_norm.py; the fused norms do the same).
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    WrappedTorchNorm.__new__ = _norm
    # Without Transformer Engine the name is not defined (transformer/moe/moe_utils.py).
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # It hands sizes that are on the CPU already to the all-to-all as they are, as tensors.
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    dispatcher.maybe_move_tensor_to_cpu = lambda sizes, as_numpy=False, record_stream=False: (
        sizes.numpy() if as_numpy and isinstance(sizes, torch.Tensor) else sizes
    )
    # Multi-latent attention asks whether a layer is Transformer Engine's, without it no class
    # (transformer/multi_latent_attention.py).
    import megatron.core.transformer.multi_latent_attention as latent

    if not isinstance(latent.TELinear, type):
        latent.TELinear = type("TELinear", (), {})
    # The product of a CUDA extension (tensor_parallel/layers.py, utils.py).
    import megatron.core.tensor_parallel.layers as layers

    if not layers._grad_accum_fusion_available:
        fused = types.ModuleType("fused_weight_gradient_mlp_cuda")
        fused.wgrad_gemm_accum_fp32 = _add_weight_gradient  # type: ignore[attr-defined]
        sys.modules[fused.__name__] = fused
        layers.fused_weight_gradient_mlp_cuda = fused
        layers._grad_accum_fusion_available = True
    _OnCpu().__enter__()
