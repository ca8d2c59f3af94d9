"""Backends: the shards of a training job, host by host."""

from ds_hessian.backends.protocol import ShardBackend

__all__ = ["ShardBackend"]
