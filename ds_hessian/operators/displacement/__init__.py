"""The displacement of a difference: formulas, belief about its errors, control of its length."""
