"""`python -m tests.launch.fuzz_train`: drawn training runs with a fault each.

runs=200     how many
seed=N       the first seed, each run has the next; else a fresh one
kinds=a,b    of these faults only, as kinds="nan,kill a rank"
failures=1   stop after so many
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from secrets import randbelow

# Before torch loads: ranks are threads or processes with one intra-op thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.launch.fuzz_train.draw import KINDS, draw
from tests.launch.fuzz_train.judge import judge

OPTIONS = ("runs", "seed", "kinds", "failures")


def main(words: list[str]) -> int:
    """The exit code: 1 where a run was lost or silently changed."""
    given = dict(word.partition("=")[::2] for word in words)
    kinds = tuple(given["kinds"].split(",")) if "kinds" in given else tuple(KINDS)
    if set(given) - set(OPTIONS) or not all(given.values()) or set(kinds) - set(KINDS):
        print(__doc__, "kinds:", ", ".join(KINDS))
        return 2
    first = int(given.get("seed") or randbelow(10**9))
    runs, allowed = int(given.get("runs", 200)), int(given.get("failures", 1))
    counts: Counter[tuple[str, str]] = Counter()
    failures, began, shown = 0, time.monotonic(), 0.0
    print(f"seeds from {first}", flush=True)
    for seed in range(first, first + runs):
        case = draw(seed, kinds)
        try:
            outcome = judge(case)
        except KeyboardInterrupt:
            break
        except BaseException as error:  # torch's own of checkpoints are no Exceptions
            outcome, failures = "wrong", failures + 1
            print(f"\nseed {seed}, {case.kind}: {type(error).__name__}: {error}\n{case}", flush=True)
        counts[case.kind, outcome] += 1
        elapsed_s = time.monotonic() - began
        if elapsed_s - shown > 10.0:
            shown = elapsed_s
            print(f"{elapsed_s:.0f} s, {counts.total()} runs, {failures} wrong", flush=True)
        if failures >= allowed:
            break
    print(table(counts), f"\n{time.monotonic() - began:.0f} s")
    return 1 if failures else 0


def table(counts: Counter[tuple[str, str]]) -> str:
    """A line for each kind of fault: how many runs, and what they came to."""
    outcomes = ("exact", "told", "refused", "wrong")
    lines = [f"{'fault':<18}{'runs':>6}" + "".join(f"{one:>9}" for one in outcomes)]
    for kind in (*KINDS, "all"):
        row = [sum(n for (of, how), n in counts.items() if kind in (of, "all") and how == one) for one in outcomes]
        if sum(row):
            lines.append(f"{kind:<18}{sum(row):>6}" + "".join(f"{n:>9}" for n in row))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
