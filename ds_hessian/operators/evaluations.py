"""The average number of gradients and runs in a product, from plain figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ds_hessian.config import OUTPUT_MATRICES, OperatorName
from ds_hessian.operators.displacement.schemes import SCHEMES, SchemeName
from ds_hessian.operators.displacement.sides import CHECKED
from ds_hessian.operators.displacement.witnesses import (
    has_thirds,
    keeps_pilots,
    products_of_a_third,
    products_of_a_trial_above,
)
from ds_hessian.operators.finite_difference import SEARCHED
from ds_hessian.operators.gradients import pilot_of
from ds_hessian.operators.outputs.residual import MEASURED, OF_ROUNDING

FIRST = {"auto": 4.0, "fixed": 2.5}
"""Average number of discarded trials of the first vector; with a fixed displacement they only
estimate the error."""

OTHERS = 0.06
"""Average number of discarded trials of a later vector, beside the one above h if that is due."""

BY_OUTPUTS = 5 / 3
"""Gradients of a product of a Gauss-Newton matrix whose loss is known in the outputs."""

OF_OUTPUTS, ANEW = 7.0, 0.15
"""Its discarded trials of one micro-batch each: of the first two vectors, with that of the
backward's noise; and of each other vector on average."""

FIRST_OF_SIDES, DOUBTED = 2.0, 0.2
"""With a tolerance that one-sided differences reach: discarded trials of the first two vectors; and
the share of the products with a trial on both sides of the pilot."""

HEARD = 0.4
"""Share of the runs in fp32 in which the noise of all micro-batches is measured, as it is in all of
16 bits."""

REPEATED = 0.02
"""Share of the products that are repeated, if the pilot is not all micro-batches."""


@dataclass(frozen=True)
class Evaluations:
    """What a product evaluates on average, trials included.

    Attributes:
        gradients: Gradients, of all micro-batches.
        runs: Runs of the host over some of them: of the pilot and of the rest, at each point, or
            one at each point where runs are costly. Each has a reduction of its own, and in a
            pipeline waits for its stages.
    """

    gradients: float
    runs: float


def expected_evaluations(
    num_products: int,
    num_micro_batches: int,
    scheme: SchemeName = "central",
    displacement: float | Literal["auto"] = "auto",
    operator: OperatorName = "hessian",
    *,
    one_sided: bool = False,
    narrow: bool = False,
    costly_runs: bool = False,
) -> Evaluations:
    """Return what a product evaluates on average.

    With `one_sided`, as for a tolerance that one-sided differences reach; where they do not, a
    product takes those of central ones, as it does with `narrow`, for passes in 16 bits. With
    `costly_runs`, those of a host of which products make few (`Session.costly_runs`).

    The averages are those of small nets (tests/test_timing.py) and of benchmarks/plan.py; a net
    whose curvature changes much from vector to vector takes more.
    """
    count = num_micro_batches
    if operator in OUTPUT_MATRICES:
        trials = (OF_OUTPUTS if displacement == "auto" else 3) / num_products + ANEW
        gradients = BY_OUTPUTS * (1 + trials / count)
        return Evaluations(gradients, gradients * count)  # one micro-batch after another
    formula = SCHEMES[scheme]
    nodes, pilot = len(formula.nodes), pilot_of(count) / count
    few = costly_runs and not keeps_pilots(formula.one_sided, narrow, one_sided)
    if few and pilot < 1 and num_products > SEARCHED:
        # The first ones as ever; the others as if all micro-batches were one.
        first = expected_evaluations(SEARCHED, count, scheme, displacement, operator)
        every = products_of_a_third(1.0) if has_thirds(formula.order, narrow) else math.inf
        other = nodes * (1 + OTHERS) + 1 / every
        share = SEARCHED / num_products
        return Evaluations(
            share * first.gradients + (1 - share) * other, share * first.runs + (1 - share) * other
        )
    parts = 2 if pilot < 1 else 1

    def evaluations(whole: float, pilots: float) -> Evaluations:
        """Return those of gradients of all micro-batches, and of the pilot alone."""
        return Evaluations(whole + pilot * pilots, parts * whole + pilots)

    if one_sided and not narrow:
        both = math.ceil(num_products / (CHECKED + 1)) / num_products
        least = evaluations(1 + both, 2 * FIRST_OF_SIDES / num_products + DOUBTED)
        if pilot < 1:
            return least
        # The other side costs as much as the product: it depends on the net which ones have it.
        most = expected_evaluations(num_products, count, scheme, displacement, operator)
        return Evaluations((least.gradients + most.gradients) / 2, (least.runs + most.runs) / 2)
    of_trial = 2 if formula.one_sided else nodes
    auto = displacement == "auto"
    thrown, repeated = FIRST["auto" if auto else "fixed"], 0.0
    if auto:
        every = products_of_a_trial_above(formula.order, narrow, pilot_of(count), count)
        thrown += OTHERS * num_products + math.ceil((num_products - 1) / every)
        repeated = REPEATED if pilot < 1 else 0.0
    # The far side of a one-sided formula's trial is no part of the product.
    extra = thrown * of_trial / num_products + (of_trial - nodes)
    if operator == "residual":
        extra += OF_ROUNDING * min(MEASURED, num_products) / num_products
    if narrow:  # the rounding of the first trial's gradient
        extra += 1 / num_products
    of_slice = 0.0  # the first product's third difference of all micro-batches, and their noise
    if formula.order == 2 and pilot < 1:
        of_slice = 1 / num_products if narrow else (1 + HEARD) / num_products
    if has_thirds(formula.order, narrow):
        extra += 1 / products_of_a_third(pilot)
    return evaluations(nodes * (1 + repeated) + of_slice, extra)
