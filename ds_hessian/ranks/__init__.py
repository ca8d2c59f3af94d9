"""The ranks of a job together: agreement on failures, lockstep through collectives."""

from ds_hessian.ranks.agreement import agree, checkpoint, gather_objects, reduce, together
from ds_hessian.ranks.calls import collective

__all__ = ["agree", "checkpoint", "collective", "gather_objects", "reduce", "together"]
