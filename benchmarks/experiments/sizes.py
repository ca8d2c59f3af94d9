"""Models of several sizes side by side: what h and parts of the data do to each ("deviations at
scale", section 7.1).

    OMP_NUM_THREADS=1 python benchmarks/experiments/sizes.py

GPTs are trained alike. Of each: the spectrum at "auto" and at constants, of all micro-batches, of
half, of a quarter, and of others; and how far the extremes go from those of the first row.
"""

from __future__ import annotations

import argparse
from typing import Any

from common import PICTURES, QUIET, micro_batches, size_of, table, trained

import ds_hessian
from ds_hessian.records import Comparison, HessianSpectrum

SIZES = {"0.15 M": (64, 2), "0.87 M": (128, 4), "4.9 M": (256, 6)}
"""Width and layers."""
MATVECS = 12


def main() -> None:
    """Print and draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=list(SIZES)[:2], choices=list(SIZES))
    given = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    data, others = micro_batches(8, 2), micro_batches(8, 3)
    cases: dict[str, tuple[list[Any], Any]] = {
        "8 micro-batches, auto": (data, "auto"),
        "h = 1e-3": (data, 1e-3),
        "h = 0.1": (data, 0.1),
        "h = 1": (data, 1.0),
        "4 micro-batches": (data[:4], "auto"),
        "2 micro-batches": (data[:2], "auto"),
        "8 others": (others, "auto"),
    }
    kept, rows = dict[str, HessianSpectrum](), []
    for name in given.sizes:
        model = trained(*SIZES[name])
        hessian = ds_hessian.attach(model, config={**QUIET, "num_matvecs": MATVECS})
        for case, (batches, h) in cases.items():
            found = hessian.spectrum(batches, displacement=h)
            first = kept.setdefault(f"{size_of(model):,}", found)
            changes = [
                f"{100 * (mine.value / other.value - 1):+.2g} %"
                for mine, other in (
                    (found.eigenvalue_max, first.eigenvalue_max),
                    (found.eigenvalue_min, first.eigenvalue_min),
                )
            ]
            rows.append(
                [f"{size_of(model):,}", case, f"{found.loss:.3f}"]
                + [found.eigenvalue_max, changes[0], found.eigenvalue_min, changes[1]]
            )
            print(*rows[-1], sep=" | ", flush=True)
    head = ["parameters", "", "loss", "largest", "change", "smallest", "change"]
    print(f"\n{table(head, rows)}")
    Comparison(kept).plot(PICTURES / "sizes.png")


if __name__ == "__main__":
    main()
