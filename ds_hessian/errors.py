"""Everything that ds_hessian raises on purpose.

A `HessianError` is raised on every rank of the job or on none: whoever raises one has agreed on it
with the other ranks first (`ds_hessian.ranks.agreement`). What is not one, `LockstepError` of
`ds_hessian.ranks.agreement`, says that a rank cannot reach the others, and the job must end.
"""


class HessianError(Exception):
    """Base of all errors of this package."""


class ConfigError(HessianError, ValueError):
    """A setting is unknown, contradictory, of the wrong type or impossible."""


class UnsupportedError(HessianError, NotImplementedError):
    """The job uses a feature on which a product would be wrong; nothing was touched."""


class NumericsError(HessianError, ArithmeticError):
    """A value that no result may contain: NaN, Inf, a zero vector where a direction is needed."""


class MeasurementError(HessianError, RuntimeError):
    """The user's batches, model or loss failed in the middle; the training state is restored.

    On the rank that failed, `__cause__` is the original exception; elsewhere the message names the
    rank and quotes it.
    """


class KernelError(HessianError, TypeError):
    """A kernel was called with tensors that it cannot take; nothing was written."""


class ResultError(HessianError, ValueError):
    """A stored result is missing, damaged or of another version, or a record contradicts itself."""
