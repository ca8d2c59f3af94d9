"""The Hessian of a Megatron job: for training loops on megatron-core, and for `pretrain`.

from ds_hessian.megatron import hessian_spectrum

spectrum = hessian_spectrum(model, forward_step, batches, seq_length=..., micro_batch_size=...)
"""

from ds_hessian.integrations.megatron_pretrain import PretrainHook, hessian_arguments, with_hessian
from ds_hessian.megatron.hessian import MegatronHessian, hessian_spectrum

__all__ = [
    "MegatronHessian",
    "PretrainHook",
    "hessian_arguments",
    "hessian_spectrum",
    "with_hessian",
]
