"""DeepSpeed's ZeRO engines: the only place that knows what is private to DeepSpeed."""

from ds_hessian.backends.zero.backend import ZeroBackend
from ds_hessian.backends.zero.host import of_first_tensor_rank, settings_of
from ds_hessian.backends.zero.support import refuse_unsupported

__all__ = ["ZeroBackend", "of_first_tensor_rank", "refuse_unsupported", "settings_of"]
