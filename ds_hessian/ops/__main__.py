"""`python -m ds_hessian.ops`: print which kernels run here, and why."""

from ds_hessian.ops.report import report

if __name__ == "__main__":
    print(report())
