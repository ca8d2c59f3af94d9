"""A part of the sweep of faults, for the table of docs/reliability.md.

python -m tests.faults ZeRO-3 0 4 faults.jsonl     # the first of four parts
python -m tests.faults table faults.jsonl          # the table of all parts in the file
"""

from __future__ import annotations

import json
import sys
from collections import Counter

from tests.faults.sweep import OUTCOMES, plan, sweep
from tests.ranks import pools_of_ranks


def part(host: str, number: int, parts: int, file: str) -> int:
    """Run one part, add its counts to a file, and return how much was not as promised."""
    pools = pools_of_ranks()
    ranks = next(pools)
    counts, wrong = sweep(ranks, host, plan(ranks, host)[number::parts])
    pools.close()
    line = {"host": host, "part": f"{number}/{parts}", "wrong": wrong}
    cells = [[*key, count] for key, count in counts.items()]
    with open(file, "a") as out:
        out.write(json.dumps({**line, "counts": cells}) + "\n")
    return len(wrong)


def table(file: str) -> str:
    """Return the outcomes by host and phase, in markdown."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    with open(file) as lines:
        for line in map(json.loads, lines):
            for phase, outcome, count in line["counts"]:
                rows.setdefault((line["host"], phase), Counter())[outcome] += count
    text = [
        f"| host | phase | injected | {' | '.join(OUTCOMES)} |",
        "|---" * (3 + len(OUTCOMES)) + "|",
    ]
    for (host, phase), found in rows.items():
        cells = " | ".join(str(found[outcome]) for outcome in OUTCOMES)
        text.append(f"| {host} | {phase} | {sum(found.values())} | {cells} |")
    return "\n".join(text)


if __name__ == "__main__":
    if sys.argv[1] == "table":
        print(table(sys.argv[2]))
    else:
        sys.exit(bool(part(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
