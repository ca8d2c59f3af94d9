"""The kinds of curvature that can be measured."""

from __future__ import annotations

from ds_hessian.backends.protocol import Session
from ds_hessian.config import FiniteDifferenceConfig, OperatorName
from ds_hessian.operators.finite_difference import FiniteDifferenceHessian
from ds_hessian.operators.outputs.gauss_newton import GaussNewton
from ds_hessian.operators.outputs.residual import residual
from ds_hessian.operators.protocol import Curvature


def curvature(
    session: Session,
    settings: FiniteDifferenceConfig,
    operator: OperatorName = "hessian",
    outputs: str | None = None,
) -> Curvature:
    """Return a curvature at the session's weights. One session may have several.

    Args:
        session: The measurement.
        settings: The settings of the differences.
        operator: `"hessian"`; `"ggn"`, its Gauss-Newton part; `"residual"`, the rest; `"fisher"`,
            the empirical Fisher matrix of tokens.
        outputs: The name of the module that returns the model's outputs; None to find it. The
            Hessian has no need of it.

    Raises:
        ConfigError: the outputs cannot be found.
        NumericsError: the gradient at the weights is not finite.
        UnsupportedError: the outputs or the loss have no such curvature.

    Collective: it evaluates the gradient once.
    """
    if operator == "hessian":
        return FiniteDifferenceHessian(
            session, settings.displacement, settings.formula, settings.tolerance
        )
    if operator == "residual":
        return residual(
            session, settings.displacement, settings.formula, outputs, settings.tolerance
        )
    return GaussNewton(session, settings.displacement, outputs, operator)
