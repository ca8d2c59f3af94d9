"""DeepSpeed's ZeRO engines. The only place (with `ds_hessian.engine`) that knows DeepSpeed."""

from ds_hessian.backends.zero.backend import ZeroBackend
from ds_hessian.backends.zero.support import refuse_unsupported

__all__ = ["ZeroBackend", "refuse_unsupported"]
