"""`python -m ds_hessian.cli`: the command `ds-hessian`."""

from ds_hessian.cli import main

if __name__ == "__main__":
    main()
