"""The kinds of curvature that can be measured."""

from __future__ import annotations

from typing import Literal

from ds_hessian.backends.protocol import Session
from ds_hessian.config import FiniteDifferenceConfig
from ds_hessian.operators.finite_difference import FiniteDifferenceHessian
from ds_hessian.operators.protocol import Curvature

CurvatureName = Literal["hessian"]


def curvature(
    session: Session, settings: FiniteDifferenceConfig, name: CurvatureName = "hessian"
) -> Curvature:
    """Return the curvature of that name at the session's weights.

    Args:
        session: The measurement.
        settings: The settings of the differences of gradients.
        name: `"hessian"`, by finite differences.

    Raises:
        NumericsError: the gradient at the weights is not finite.

    Collective: it evaluates the gradient once.
    """
    return {"hessian": FiniteDifferenceHessian}[name](
        session, settings.displacement, settings.scheme
    )
