"""How many products share a witness of their error: a third difference, or a trial above h."""

from __future__ import annotations

ALWAYS, SELDOM = 16, 16
"""One vector in SELDOM has a trial above h, and each but the first with ALWAYS micro-batches or
more, of which a trial costs little, where no third difference is a witness and the pilot is few of
them."""

SPENT = 0.25
"""Gradients that a product spends on its third difference on average, at most, while no such
difference is more than expected."""


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
    often = num_micro_batches >= ALWAYS and order <= 2 and not has_thirds(order, narrow)
    return 1 if often and pilot < num_micro_batches else SELDOM
