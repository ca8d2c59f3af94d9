"""Whether a change of the program changed a bit of its results.

    python -m tests.bits record before.json     # the tree that is on the path
    python -m tests.bits compare before.json after.json

The measurements are made on real engines of two gloo ranks, through the public face alone, so that
the same folder runs on trees of other structure: copied elsewhere as `bits`, `python -m bits
record` measures whichever `ds_hessian` the path has.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from pathlib import Path

from . import megatron, zero
from .figures import Figures
from .ranks import run

JOBS = {"zero": zero.measure, "megatron": megatron.measure}


def record(file: Path, jobs: list[str]) -> None:
    """Make all measurements of the jobs and write their figures."""
    found: dict[str, Figures] = {}
    for job in jobs:
        found |= run(JOBS[job], 2)
    file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} measurements, {sum(map(len, found.values()))} figures: {file}")


def compare(before: Path, after: Path, exempt: list[str]) -> list[str]:
    """A line for each figure that differs or is gone; figures that are new are no difference."""
    a, b = (json.loads(file.read_text()) for file in (before, after))
    lines, same = [], 0
    for measurement in a:
        for name, value in a[measurement].items():
            path, now = f"{measurement}: {name}", b.get(measurement, {}).get(name)
            if now == value:
                same += 1
            elif not any(fnmatch.fnmatchcase(path, pattern) for pattern in exempt):
                lines.append(f"{path}\n  before {value}\n  after  {now}")
    print(f"{same} figures of {len(a)} measurements are the same to the bit, {len(lines)} differ")
    return lines


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bits", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="make the measurements and write their figures")
    recording.add_argument("file", type=Path)
    recording.add_argument("--job", choices=JOBS, help="only these hosts")
    comparing = commands.add_parser("compare", help="exits with 1 if a figure differs")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument(
        "--exempt",
        action="append",
        default=[],
        metavar="PATTERN",
        help='figures that are meant to change, as "zero 3: cost.all_reduces" with * and ?',
    )
    given = parser.parse_args()
    if given.command == "record":
        record(given.file, [given.job] if given.job else list(JOBS))
        return 0
    lines = compare(given.before, given.after, given.exempt)
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
