"""Runs many seeds in processes that may die, and says what they found.

Guarantees: a case that kills or hangs its process is reported by its seed; the same seed gives the same case.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from tests.fuzz.draw import USUAL, Case, draw, kind_of

START_S = 120.0
"""For processes to start on a machine that has much else to do."""
HANG_S = 240.0
"""A case that takes longer hangs; its own waits end before."""


class Failure(NamedTuple):
    """A seed with what it found."""

    seed: int
    error: str
    case: Case
    shrunk: Case | None = None
    shrunk_error: str = ""

    def __str__(self) -> str:
        lines = [f"seed={self.seed}: {self.error}", readable(self.case)]
        if self.shrunk is not None:
            lines += [f"shrunk: {self.shrunk_error}", readable(self.shrunk)]
        return "\n".join([*lines, f"again: python -m tests.fuzz seed={self.seed}"])


class Tally:
    """What has run: cases, and calls by engine, schedule, layout and kind."""

    def __init__(self) -> None:
        self.cases = 0
        facts = "engine", "schedule", "layout", "kind", "ranks"
        self.by: dict[str, Counter[str]] = {name: Counter() for name in facts}
        self.failures: list[Failure] = []

    def count(self, case: Case) -> None:
        """One more case."""
        self.cases += 1
        self.by["kind"][case["kind"]] += 1
        self.by["ranks"][str(case["ranks"])] += 1
        for call in case.get("calls", [case]):
            self.by["layout"][call["seq"]["layout"]] += 1
            if "engine" in case:
                self.by["engine"][case["engine"]] += 1
                self.by["schedule"][call["options"].get("schedule", "auto")] += 1

    def add(self, other: Tally) -> None:
        """What another process has run."""
        self.cases += other.cases
        for name, counts in other.by.items():
            self.by[name].update(counts)
        self.failures += other.failures

    def __str__(self) -> str:
        rows = [f"{self.cases} cases, {len(self.failures)} failures"]
        for name, counts in self.by.items():
            rows.append(f"{name}: " + ", ".join(f"{key} {count}" for key, count in counts.most_common()))
        return "\n".join(rows)


def readable(case: Case) -> str:
    """A case over several lines; Python reads it again."""
    lines = []
    for key, value in case.items():
        if key == "calls":
            inner = ",\n".join(f"    {call!r}" for call in value)
            lines.append(f"  'calls': [\n{inner}],")
        else:
            lines.append(f"  {key!r}: {value!r},")
    return "\n".join(["{", *lines, "}"])


def run(
    seconds: float = 60.0,
    cases: int | None = None,
    start: int | None = None,
    kinds: Sequence[str] = USUAL,
    jobs: int = 1,
    most_failures: int = 1,
    told: Callable[[Tally, float], None] | None = None,
) -> Tally:
    """Seeds from `start` on (None: from the clock) until the time, the cases or the failures are reached."""
    start = first_seed() if start is None else start
    if "triton" in kinds:
        os.environ["TRITON_INTERPRET"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fuzz.judge"])  # torch is imported once
    tally, at = Tally(), start
    workers: dict[Connection, _Worker] = {}

    def hire() -> None:
        worker = _Worker(context)
        workers[worker.pipe] = worker

    for _ in range(jobs):
        hire()
    handed, began = 0, time.monotonic()
    while workers:
        ended = time.monotonic() - began >= seconds or len(tally.failures) >= most_failures
        for worker in list(workers.values()):
            if worker.seed is None:
                if ended or (cases is not None and handed >= cases):
                    worker.end()
                    del workers[worker.pipe]
                    continue
                while kind_of(at) not in kinds:
                    at += 1
                worker.give(at)
                at, handed = at + 1, handed + 1
        for ready in wait(list(workers), timeout=0.5) if workers else ():
            worker = workers[ready]  # type: ignore[index]
            report = worker.report()
            tally.add(report)
            if worker.dead:
                del workers[worker.pipe]
                hire()
        for worker in [one for one in workers.values() if one.hangs()]:
            tally.add(worker.report(f"no end after {HANG_S:.0f} s"))
            del workers[worker.pipe]
            hire()
        if told is not None:
            told(tally, time.monotonic() - began)
    return tally


def first_seed() -> int:
    """A fresh one: milliseconds of the clock, far apart for sessions a second apart."""
    return int(time.time() * 1000) % 10**9 * 1000


class _Worker:
    """A process that runs one seed after another."""

    def __init__(self, context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()
        if not self.pipe.poll(START_S) or self.pipe.recv() != "ready":
            raise TimeoutError(f"a process did not start in {START_S:.0f} s")
        self.seed: int | None = None
        self.dead = False
        self.since = time.monotonic()

    def give(self, seed: int) -> None:
        """The next seed."""
        self.seed, self.since = seed, time.monotonic()
        self.pipe.send(seed)

    def report(self, why: str | None = None) -> Tally:
        """What the seed gave. `why`: not to be waited for."""
        assert self.seed is not None
        seed, self.seed = self.seed, None
        try:
            if why is None:
                return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            why = f"the process ended with {self.process.exitcode}"
        self.dead = True
        self.process.kill()
        self.process.join()
        tally, case = Tally(), draw(seed)
        tally.count(case)
        tally.failures.append(Failure(seed, why, case))
        return tally

    def hangs(self) -> bool:
        """Whether the case takes too long."""
        return self.seed is not None and time.monotonic() - self.since > HANG_S

    def end(self) -> None:
        """No more seeds."""
        self.pipe.close()
        self.process.join(30)
        if self.process.exitcode is None:
            self.process.kill()


def _serve(pipe: Connection) -> None:
    """The life of a worker."""
    import torch

    from tests.fuzz import judge

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.setswitchinterval(1e-3)  # ranks that are threads wait for each other all the time
    pipe.send("ready")
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            judge.close()
            return
        pipe.send(one(seed))


def one(seed: int, shrink_s: float = 20.0) -> Tally:
    """One seed, in this process."""
    tally, case = Tally(), draw(seed)
    tally.count(case)
    if error := error_of(case):
        from tests.fuzz.shrink import shrunk

        smaller = shrunk(case, error, shrink_s) if shrink_s else None
        tally.failures.append(Failure(seed, error, case, smaller, error_of(smaller) or "" if smaller else ""))
    return tally


def error_of(case: Case) -> str | None:
    """What is wrong with a case, if anything."""
    from tests.fuzz import judge

    try:
        judge.check(case)
    except judge.Wrong as wrong:
        return str(wrong)
    return None
