"""A few fixed seeds of the drawn training runs, and that the net bites."""

from __future__ import annotations

import pytest

from tests.launch.fuzz_train import judge
from tests.launch.fuzz_train.draw import KINDS, OF_PROCESSES, draw

IN_PROCESS = tuple(kind for kind in KINDS if kind not in OF_PROCESSES)


@pytest.mark.parametrize("kind", IN_PROCESS)
def test_a_drawn_run_is_exact_or_told(kind: str) -> None:
    assert judge.judge(draw(7, (kind,))) in ("exact", "told")


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_PROCESSES)
def test_a_drawn_run_of_processes_goes_on(kind: str) -> None:
    assert judge.judge(draw(7, (kind,))) == "exact"


def test_a_seed_is_one_case() -> None:
    assert str(draw(11)).partition("dice")[0] == str(draw(11)).partition("dice")[0]
    assert {draw(seed).kind for seed in range(120)} == set(KINDS)
