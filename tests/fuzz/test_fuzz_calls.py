"""Some seconds of fresh cases, and seeds that once failed."""

from __future__ import annotations

import os
import time

import pytest

from tests.fuzz import session
from tests.fuzz.draw import draw
from tests.fuzz.judge import error_of
from tests.fuzz.workers import answers

QUICK_S, SLOW_S = 5.0, 30.0
CALLS = ("attention", "dilated", "nan")
OTHERS = ("layers", "sequences", "order", "disagree", "processes", "idle")


@pytest.mark.parametrize("default_s", [QUICK_S, pytest.param(SLOW_S, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kinds", [CALLS, OTHERS], ids=",".join)
def test_fresh_seeds(kinds: tuple[str, ...], default_s: float) -> None:
    seconds = float(os.environ.get("RINGATTN_FUZZ_SECONDS", default_s))
    start = int(os.environ.get("RINGATTN_FUZZ_SEED", session.first_seed()))
    print(f"python -m tests.fuzz start={start} kinds={','.join(kinds)} seconds={seconds:.0f}")
    tally = session.run(seconds, start=start, kinds=kinds)
    print(tally)
    assert tally.cases
    assert not tally.failures, "\n".join(map(str, tally.failures))


# Of calls: causal dilated squares, a scale below 0, autocast (2), inference mode between calls, a hidden NaN, an empty
# batch, softcap=inf, a NaN in one detached branch, a reentrant region of which two sequences may be meant, float16
# below its normal numbers, heads of one column with batches innermost (2).
# Then: backward in another order, a plan without steps, labels (2), inference mode between steps, float64 under
# autocast, a scale that differs in the last bits, a tensor as causal= on one rank.
@pytest.mark.parametrize(
    "seed",
    [
        103,
        96,
        240,
        460,
        56,
        139,
        168,
        461,
        30001230,
        40000369,
        60003907,
        5711,
        8274,
        66,
        165,
        44,
        231,
        142,
        193,
        606,
        42,
    ],
)
def test_a_seed_that_once_failed(seed: int) -> None:
    assert error_of(draw(seed)) is None


def misbehaves(how: str) -> str:
    """A job that dies, hangs, raises or returns."""
    if how == "dies":
        os._exit(3)
    if how == "hangs":
        time.sleep(60)
    if how == "raises":
        raise KeyError(how)
    return how


def test_a_job_that_kills_or_hangs_its_process_is_reported() -> None:
    jobs = [(how,) for how in ("returns", "dies", "hangs", "raises", "returns")]
    found = {job: (answer, reason) for job, answer, reason in answers(misbehaves, iter(jobs), 1, 2.0)}
    assert found["returns",] == ("returns", "")
    assert found["dies",] == (None, "the process ended with 3") and found["hangs",] == (None, "no end after 2 s")
    assert "KeyError: 'raises'" in found["raises",][1]
