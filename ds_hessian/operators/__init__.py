"""Operators: the Hessian as a matrix that is only ever multiplied with vectors."""

from ds_hessian.operators.finite_difference import FiniteDifferenceHessian, OperatorCost
from ds_hessian.operators.protocol import LinearOperator, Product

__all__ = ["FiniteDifferenceHessian", "LinearOperator", "OperatorCost", "Product"]
