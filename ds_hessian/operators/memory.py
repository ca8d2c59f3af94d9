"""The memory of curvatures; counted from the operators' own tensors."""

from __future__ import annotations

from ds_hessian.config import OUTPUT_MATRICES, OperatorName
from ds_hessian.memory import FP32, Item, Tier
from ds_hessian.operators.displacement.schemes import SCHEMES, SchemeName
from ds_hessian.operators.gradients import pilot_of
from ds_hessian.operators.outputs.planned import Outputs


def memory_of_operator(
    n_local: int,
    tier: Tier,
    scheme: SchemeName = "central",
    operator: OperatorName = "hessian",
    outputs: Outputs | None = None,
) -> list[Item]:
    """Return the items of a curvature.

    A residual also holds the cotangents of all micro-batches, as wide as fp32 at most, and those of
    the pilot at other weights in the passes of its first products.

    Args:
        n_local: Coordinates on this rank.
        tier: The memory that holds its vectors.
        scheme: The difference formula.
        operator: The curvature.
        outputs: The model's outputs, which a Gauss-Newton or Fisher matrix and a residual hold;
            None where they are not foreseen.
    """
    outputs = outputs or Outputs()
    if operator in OUTPUT_MATRICES:
        return _of_gauss_newton(FP32 * n_local, tier, outputs)
    formula, vector = SCHEMES[scheme], FP32 * n_local
    held = [
        Item("cotangents at the weights", tier, outputs.count * outputs.size),
        Item("cotangents of the pilot", tier, pilot_of(outputs.count) * outputs.size, ("passes",)),
    ]
    # A trial is compared with the one before; several differences need one more to be added up.
    compared = 2 if len(formula.differences) == 1 else 3
    return [
        Item("gradients of a trial", tier, len({*formula.nodes, -1}) * vector),
        Item("gradients at the weights", tier, 2 * vector),
        Item("trial before, or product made again", tier, vector, ("passes",)),
        Item("trials being compared", tier, compared * vector, ("trials",)),
        Item("product", tier, vector, ("orthogonalization", "storing")),
        *(held if operator == "residual" else []),
    ]


def _of_gauss_newton(vector: int, tier: Tier, outputs: Outputs) -> list[Item]:
    return [
        Item("gradient at the weights", tier, vector),
        Item("product", tier, vector, ("passes",)),
        Item("trial before, or outputs", tier, outputs.peak(vector), ("passes",)),
        Item("samples of the cotangents", tier, outputs.cotangents(vector)),
        Item("product", tier, vector, ("trials", "orthogonalization", "storing")),
    ]


def memory_of_sweep(n_local: int, tier: Tier) -> list[Item]:
    """Return the items of `sweep`, beside its operator's and the direction."""
    vector = FP32 * n_local
    # In passes the last product is in the memory of the trial before, which a sweep does not have.
    return [
        Item("product before", tier, vector, ("orthogonalization", "storing")),
        Item("difference of the products", tier, vector, ("orthogonalization",)),
    ]
