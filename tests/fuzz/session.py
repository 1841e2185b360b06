"""Runs many seeds in processes that may die, and reports the failures.

Guarantees: a case that kills or hangs its process is reported by its seed; the same seed gives the same case.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from pprint import pformat
from typing import NamedTuple

from tests.fuzz.draw import USUAL, Case, draw, kind_of
from tests.fuzz.judge import error_of
from tests.fuzz.shrink import shrink
from tests.fuzz.workers import answers

ROOT = Path(__file__).parents[2]
HANG_S = 240.0
"""A case that takes longer has hung, because its own waits end earlier."""
SHRINK_S = 20.0


class Failure(NamedTuple):
    """A seed, its error, and a smaller case with the same kind of error."""

    seed: int
    error: str
    shrunk: Case | None = None
    shrunk_error: str = ""

    def __str__(self) -> str:
        lines = [f"seed={self.seed}: {self.error}", readable(draw(self.seed))]
        if self.shrunk is not None:
            lines += [f"shrunk: {self.shrunk_error}", readable(self.shrunk)]
        return "\n".join([*lines, f"again: python -m tests.fuzz seed={self.seed}"])


class Tally:
    """Counters of a session: cases by kind and ranks, calls by engine, schedule and layout, and the failures."""

    def __init__(self) -> None:
        self.cases = 0
        self.by: dict[str, Counter[str]] = {
            name: Counter() for name in ("engine", "schedule", "layout", "kind", "ranks")
        }
        self.failures: list[Failure] = []

    def count(self, case: Case) -> None:
        """Count one case."""
        self.cases += 1
        self.by["kind"][case["kind"]] += 1
        self.by["ranks"][str(case["ranks"])] += 1
        for call in case.get("calls", [case]):
            self.by["layout"][call["seq"]["layout"]] += 1
            if "options" in call:
                self.by["engine"][case["engine"]] += 1
                self.by["schedule"][call["options"].get("schedule", "auto")] += 1

    def __str__(self) -> str:
        rows = [f"{self.cases} cases, {len(self.failures)} failures"]
        for name, counts in self.by.items():
            rows.append(f"{name}: " + ", ".join(f"{key} {count}" for key, count in counts.most_common()))
        return "\n".join(rows)


def readable(case: Case) -> str:
    """Format a case as a Python literal over several lines."""
    return pformat(case, width=120, sort_dicts=False)


def run(
    seconds: float = 60.0,
    cases: int | None = None,
    start: int | None = None,
    kinds: Sequence[str] = USUAL,
    jobs: int = 1,
    most_failures: int = 1,
    report: Callable[[Tally, float], None] = lambda tally, elapsed_s: None,
) -> Tally:
    """Run seeds from `start` on until a limit of time, cases or failures is reached. Return the tally.

    `start`: None takes the first seed from the clock. `report` is called with the tally and the elapsed seconds.
    """
    if "triton" in kinds:
        os.environ["TRITON_INTERPRET"] = "1"
    first, tally, began = first_seed() if start is None else start, Tally(), 0.0

    def seeds() -> Iterator[tuple[int]]:
        nonlocal began
        began = time.monotonic()  # the processes have started
        for seed in islice((seed for seed in count(first) if kind_of(seed) in kinds), cases):
            if time.monotonic() - began >= seconds or len(tally.failures) >= most_failures:
                return
            yield (seed,)

    for (seed,), failure, reason in answers(examine, seeds(), jobs, HANG_S):
        tally.count(draw(seed))
        if failure := Failure(seed, reason) if reason else failure:
            tally.failures.append(failure)
        report(tally, time.monotonic() - began)
    return tally


def first_seed() -> int:
    """Return a seed from the clock, in milliseconds times 1000, so that sessions a second apart do not overlap."""
    return int(time.time() * 1000) % 10**9 * 1000


def seed_of_commit() -> int:
    """Return RINGATTN_FUZZ_SEED, or a seed from the files of the commit; 0 without git.

    So the tests of a commit draw the same cases wherever they run, and new cases after each change.
    """
    if seed := os.environ.get("RINGATTN_FUZZ_SEED"):
        return int(seed)
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD^{tree}"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(done.stdout, 16) % 10**9 * 1000


def examine(seed: int) -> Failure | None:
    """Run one seed in this process; return its failure, if any."""
    if not (error := error_of(draw(seed))):
        return None
    smaller = shrink(draw(seed), error, SHRINK_S)
    return Failure(seed, error, smaller, (smaller and error_of(smaller)) or "")
