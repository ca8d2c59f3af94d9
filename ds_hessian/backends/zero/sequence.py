"""Sequence parallelism (Ulysses): ranks that pass parts of the same sequences.

Weights are replicated, or sharded by ZeRO, over all ranks, and DeepSpeed adds the gradients of all
of them up. What it divides the sum by differs: stages 0, 1 and 2 by the number of data-parallel
ranks alone, stage 3 by all of them. Whether it should be divided by the ranks of a sequence too
depends on the user's loss: the mean of each rank's own tokens, or a total gathered by operations
whose backward adds up what all ranks have of it (`torch.distributed.nn.functional`), has a
derivative on each rank that is of the *sum* of all ranks' losses; a total whose backward takes the
rank's own part alone (as DeepSpeed's and Megatron's cross entropies of split sequences do) counts
once in the sum. Nothing declares which it is, so it is measured: the loss is evaluated on both
sides of w along the gradient; the factor is the one with which the gradient is its slope.
"""

from __future__ import annotations

from ds_hessian.errors import UnsupportedError


def factor_of_gradients(slope: float, norm: float, noise: float, ranks: int) -> float:
    """Return the factor with which the gradient is that of the loss, a power of `ranks`.

    Args:
        slope: Derivative of the measured loss along the unit vector of the gradient.
        norm: Norm of the gradient, with factor 1.
        noise: What rounding may have added to the slope.
        ranks: Number of ranks that share a sequence.

    Raises:
        UnsupportedError: it is none, or rounding leaves it open.
    """
    for power in (-1, 0, 1, 2):
        factor = float(ranks) ** power
        # They differ by a factor of 2 at least: halfway, on a logarithmic scale.
        if 0.5**0.5 <= slope / (factor * norm) < 2**0.5 and noise < 0.1 * slope:
            return factor
    raise UnsupportedError(
        f"ds_hessian cannot measure this loss under sequence parallelism: it changes by {slope:.3g}"
        f" (rounding: {noise:.1g}) for each unit along its gradient, whose norm over all ranks is "
        f"{norm:.3g}, or that times a power of {ranks}, the ranks of a sequence. Return the mean "
        "of the rank's own tokens, or a total that the gradients of all ranks add up to; where "
        'rounding is the reason, use finite_difference.precision "fp32"'
    )
