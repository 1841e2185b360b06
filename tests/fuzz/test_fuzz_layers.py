"""Some seconds of fresh layers, sequences, disagreements and processes, and seeds that once found something."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import session
from tests.fuzz.draw import draw

QUICK_S, SLOW_S = 5.0, 30.0
KINDS = ("layers", "sequences", "order", "disagree", "processes", "idle")


@pytest.mark.parametrize("default_s", [QUICK_S, pytest.param(SLOW_S, marks=pytest.mark.slow)])
def test_fresh_seeds(default_s: float) -> None:
    seconds = float(os.environ.get("RINGATTN_FUZZ_SECONDS", default_s))
    start = int(os.environ.get("RINGATTN_FUZZ_SEED", session.first_seed()))
    print(f"python -m tests.fuzz start={start} kinds={','.join(KINDS)} seconds={seconds:.0f}")
    tally = session.run(seconds, start=start, kinds=KINDS)
    print(tally)
    assert tally.cases
    assert not tally.failures, "\n".join(map(str, tally.failures))


# Backward in another order, a plan without steps, labels (2), inference mode between steps, float64 under autocast, a
# scale that differs in the last bits, a tensor as causal= on one rank.
@pytest.mark.parametrize("seed", [66, 165, 44, 231, 142, 193, 606, 42])
def test_a_seed_that_once_failed(seed: int) -> None:
    assert session.error_of(draw(seed)) is None
