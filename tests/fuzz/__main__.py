"""`python -m tests.fuzz`: drawn uses of the public face, each against the reference.

seed=N       one case, printed, and whether it holds
seconds=60   how long to run (an hour's night: seconds=3600)
cases=N      stop after so many
start=SEED   the first seed; else a fresh one
kinds=a,b    attention, dilated, layers, sequences, order, disagree, nan, processes, idle, triton (only when named)
jobs=1       processes that run cases
failures=1   stop after so many
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time

# Before torch loads: the ranks are threads or processes, each with one intra-op thread of its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.fuzz import session
from tests.fuzz.draw import KINDS, USUAL, draw, kind_of
from tests.fuzz.judge import error_of

OPTIONS = ("seed", "seconds", "cases", "start", "kinds", "jobs", "failures")


def main(arguments: list[str]) -> int:
    """The exit code: 1 where a case does not hold."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    if set(given) - set(OPTIONS) or not all(given.values()):
        print(__doc__)
        return 2
    if "seed" in given:
        return replayed(int(given["seed"]))
    kinds = given["kinds"].split(",") if "kinds" in given else list(USUAL)
    if unknown := set(kinds) - {*KINDS}:
        print(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
        return 2
    cases = int(given["cases"]) if "cases" in given else None
    seconds = float(given["seconds"]) if "seconds" in given else 60.0 if cases is None else 1e9
    start = int(given["start"]) if "start" in given else session.first_seed()
    print(f"seeds from {start}, kinds {','.join(kinds)}", flush=True)
    last, shown = 0.0, 0

    def report(tally: session.Tally, elapsed_s: float) -> None:
        nonlocal last, shown
        for failure in tally.failures[shown:]:
            print(f"\n{failure}", flush=True)
        shown = len(tally.failures)
        if elapsed_s - last >= 10.0 or last == 0.0:
            last = elapsed_s
            rate = tally.cases / elapsed_s
            print(f"{elapsed_s:.0f} s, {tally.cases} cases, {rate:.1f} a second, {shown} failures", flush=True)

    began = time.monotonic()
    tally = session.run(seconds, cases, start, kinds, int(given.get("jobs", 1)), int(given.get("failures", 1)), report)
    print(f"\n{tally}\n{time.monotonic() - began:.0f} s")
    return 1 if tally.failures else 0


def replayed(seed: int) -> int:
    """Replay one case in this process; return the exit code."""
    faulthandler.enable()
    if kind_of(seed) == "triton":
        os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    print(session.readable(draw(seed)), flush=True)
    error = error_of(draw(seed))
    print(f"seed={seed}: {error}" if error else f"seed={seed} holds")
    return int(error is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
