"""DeepSpeed's ZeRO engines. The only place (with `ds_hessian.engine`) that knows DeepSpeed."""

from ds_hessian.backends.zero.stage3 import ZeroStage3Backend
from ds_hessian.backends.zero.support import refuse_unsupported

__all__ = ["ZeroStage3Backend", "refuse_unsupported"]
