"""A few fixed seeds of the drawn training runs, and that the net bites."""

from __future__ import annotations

import pytest

from ringattn.errors import InputError
from ringattn.launch import folders
from ringattn.launch.train import checkpoints, loop
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


def found(kinds: tuple[str, ...], tries: int) -> bool:
    """Whether one of a few seeds finds what is wrong."""
    for seed in range(tries):
        try:
            judge.judge(draw(seed, kinds))
        except (judge.WrongError, InputError):
            return True
    return False


def test_a_checkpoint_that_is_not_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "check_files", lambda *_: None)
    assert found(("flipped",), 6)


def test_a_step_that_is_not_finite_and_taken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "isfinite", lambda number: True)
    assert found(("nan",), 3)


def test_two_runs_in_a_folder_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_taken", lambda file: True)
    assert found(("second run",), 2)
