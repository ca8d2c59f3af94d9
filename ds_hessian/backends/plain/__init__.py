"""Plain torch: an `nn.Module` in one process, or in torch's `DistributedDataParallel`."""

from ds_hessian.backends.plain.backend import ModuleBackend
from ds_hessian.backends.plain.support import refuse_unsupported

__all__ = ["ModuleBackend", "refuse_unsupported"]
