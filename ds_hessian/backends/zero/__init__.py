"""DeepSpeed's ZeRO engines. The only place (with `ds_hessian.engine`) that knows DeepSpeed."""

from ds_hessian.backends.zero.backend import ZeroBackend
from ds_hessian.backends.zero.host import of_first_tensor_rank
from ds_hessian.backends.zero.support import refuse_unsupported

__all__ = ["ZeroBackend", "of_first_tensor_rank", "refuse_unsupported"]
