"""`python -m tests.fuzz`: random uses of the public API, each compared with the reference.

seed=N       run one case and print it, and whether it holds
seconds=60   how long to run (overnight: seconds=3600)
cases=N      stop after N cases
start=SEED   the first seed; by default a fresh one
kinds=a,b    attention, dilated, layers, sequences, order, disagree, nan, processes, idle, states,
             functions, triton (only when named)
jobs=1       processes that run cases
failures=1   stop after this many failures
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time

# Set before torch loads: the ranks are threads or processes, and each gets one intra-op thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.fuzz import session
from tests.fuzz.draw import KINDS, LATER, USUAL, draw, kind_of
from tests.fuzz.judge import error_of

OPTIONS = ("seed", "seconds", "cases", "start", "kinds", "jobs", "failures")


def main(arguments: list[str]) -> int:
    """Run the fuzzer; return the exit code: 1 if a case does not hold."""
    options = dict(argument.partition("=")[::2] for argument in arguments)
    if set(options) - set(OPTIONS) or not all(options.values()):
        print(__doc__)
        return 2
    if "seed" in options:
        return replay(int(options["seed"]))
    kinds = options["kinds"].split(",") if "kinds" in options else list(USUAL)
    if unknown := set(kinds) - {*KINDS, *LATER}:
        print(f"no kind {', '.join(sorted(unknown))}; there are {', '.join((*KINDS, *LATER))}")
        return 2
    cases = int(options["cases"]) if "cases" in options else None
    seconds = float(options["seconds"]) if "seconds" in options else 60.0 if cases is None else 1e9
    start = int(options["start"]) if "start" in options else session.first_seed()
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
    tally = session.run(
        seconds, cases, start, kinds, int(options.get("jobs", 1)), int(options.get("failures", 1)), report
    )
    print(f"\n{tally}\n{time.monotonic() - began:.0f} s")
    return 1 if tally.failures else 0


def replay(seed: int) -> int:
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
