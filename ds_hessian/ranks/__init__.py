"""The ranks of a job together: agreement on failures, lockstep through collectives."""

from ds_hessian.ranks.agreement import agree, checkpoint, reduce, report, together
from ds_hessian.ranks.calls import collective, left_together
from ds_hessian.ranks.entrance import Given, summed
from ds_hessian.ranks.exchange import (
    Shared,
    balanced,
    count_on_nodes,
    device_of_collectives,
    first_of,
    from_rank,
    gather_integers,
    gather_objects,
    imbalance,
    largest,
    most_on_a_node,
    union,
)

__all__ = [
    "Given",
    "Shared",
    "agree",
    "balanced",
    "checkpoint",
    "collective",
    "count_on_nodes",
    "device_of_collectives",
    "first_of",
    "from_rank",
    "gather_integers",
    "gather_objects",
    "imbalance",
    "largest",
    "left_together",
    "most_on_a_node",
    "reduce",
    "report",
    "summed",
    "together",
    "union",
]
