"""Operators of the loss as a function of the model's outputs: Gauss-Newton, residual, Fisher."""
