"""The command line `ds-hessian`: measure checkpoints, look at results, plan, check and test.

Every command ends with exit status 0, or with 2 and one line on stderr where its input is broken.
`doctor` and `self-test` end with 1 where they find something wrong, `plan` where it does not fit.
"""

from ds_hessian.cli.main import main

__all__ = ["main"]
