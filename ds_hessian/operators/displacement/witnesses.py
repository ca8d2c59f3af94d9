"""How many products share a witness of their error: a third difference, or a trial above h."""

from __future__ import annotations

ALWAYS, SELDOM = 16, 16
"""Micro-batches from which on each vector but the first has a trial above h, of which it costs
little, where no third difference is a witness; one vector in SELDOM has one where there are any."""

SPENT = 0.125
"""Gradients that a product spends on its witness on average, at most, while none is more than
expected."""


def products_of_a_third(pilot: float) -> int:
    """Return how many products share a third difference, from the pilot's share of the slice.

    At least two: what one of them shows holds for the next, and a surprise has one of its own.
    """
    return max(2, round(pilot / SPENT))


def has_thirds(order: int, narrow: bool) -> bool:
    """Return whether third differences are the witnesses of a formula of that order.

    In 16 bits they are rounding, of other weights than those of the product.
    """
    return order == 2 and not narrow


def keeps_pilots(one_sided: bool, narrow: bool, tolerated: bool) -> bool:
    """Return whether trials stay those of a pilot where runs are costly.

    In 16 bits only trials above h show truncation, and those of a pilot are worth their runs. With
    a tolerance (`tolerated`) one of a pilot decides whether all need a second side, and of a
    one-sided formula the far side is no part of the product.
    """
    return one_sided or narrow or tolerated


def products_of_a_trial_above(order: int, narrow: bool, pilot: int, num_micro_batches: int) -> int:
    """Return how many products share a trial above h."""
    # What extrapolation removes tells more in each trial, and third differences tell as much.
    if order > 2 or has_thirds(order, narrow):
        return SELDOM
    often = num_micro_batches >= ALWAYS and pilot < num_micro_batches
    return 1 if often else 2 * products_of_a_third(pilot / num_micro_batches)  # twice its cost
