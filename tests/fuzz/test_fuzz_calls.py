"""Some seconds of fresh attention calls, and seeds that once found something."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import session
from tests.fuzz.draw import draw

QUICK_S, SLOW_S = 5.0, 30.0


@pytest.mark.parametrize("default_s", [QUICK_S, pytest.param(SLOW_S, marks=pytest.mark.slow)])
def test_fresh_seeds(default_s: float) -> None:
    seconds = float(os.environ.get("RINGATTN_FUZZ_SECONDS", default_s))
    start = int(os.environ.get("RINGATTN_FUZZ_SEED", session.first_seed()))
    print(f"python -m tests.fuzz start={start} kinds=attention,dilated,nan seconds={seconds:.0f}")
    tally = session.run(seconds, start=start, kinds=("attention", "dilated", "nan"))
    print(tally)
    assert tally.cases
    assert not tally.failures, "\n".join(map(str, tally.failures))


# Causal dilated squares, a scale below 0, autocast (2), inference mode between calls, a hidden NaN, an empty batch,
# softcap=inf, a NaN in one detached branch, a reentrant region of which two sequences may be meant,
# float16 below its normal numbers, heads of one column with batches innermost (2).
@pytest.mark.parametrize("seed", [103, 96, 240, 460, 56, 139, 168, 461, 30001230, 40000369, 60003907, 5711, 8274])
def test_a_seed_that_once_failed(seed: int) -> None:
    assert session.error_of(draw(seed)) is None
