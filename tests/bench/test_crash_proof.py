"""Jobs in processes that die, hang or raise: each is run once, and those without a result are named."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ringattn.bench.crash_proof import Budget, JobFailed, Worker, run_all


def job(folder: str, number: int) -> int:
    """Leaves a mark; every third dies, every fourth raises."""
    with Path(folder, str(number)).open("a") as file:
        file.write("x")
    if number % 3 == 0:
        os._exit(134)
    if number % 4 == 0:
        raise ValueError(f"number {number}\nand more")
    return number * number


@pytest.mark.slow
def test_every_job_is_run_once_and_deaths_are_told(tmp_path: Path) -> None:
    given = [(str(tmp_path), number) for number in range(5)]
    ended = {index: str(found) for index, found in run_all(job, given, 2, 60.0, Budget(60.0))}
    died, raised = "its process ended with exit code 134", "ValueError: number 4"
    assert ended == {0: died, 1: "1", 2: "4", 3: died, 4: raised}
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {str(number): "x" for number in range(5)}


def test_no_jobs() -> None:
    assert list(run_all(job, [], 4, 1.0, Budget(1.0))) == []


def test_a_job_that_hangs_is_ended_and_the_next_one_has_a_process() -> None:
    with Worker() as worker:
        first = worker.ask(os.getpid, limit_s=60.0)
        assert worker.ask(os.getpid, limit_s=60.0) == first != os.getpid()
        began = time.monotonic()
        with pytest.raises(JobFailed, match="no answer within 0 s"):
            worker.ask(time.sleep, 1000, limit_s=0.2)
        assert time.monotonic() - began < 10
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert worker.ask(os.getpid, limit_s=60.0) not in (first, os.getpid())


def test_a_process_whose_job_raised_does_no_other() -> None:
    """Its CUDA context may be broken."""
    with Worker() as worker:
        first = worker.ask(os.getpid, limit_s=60.0)
        with pytest.raises(JobFailed, match=r"^ValueError: invalid literal"):
            worker.ask(int, "x", limit_s=60.0)
        assert worker.ask(os.getpid, limit_s=60.0) != first


def test_nothing_is_begun_when_the_budget_is_spent(tmp_path: Path) -> None:
    spent = Budget(0.0)
    (found,) = run_all(job, [(str(tmp_path), 1)], 1, 60.0, spent)
    assert str(found[1]) == "not tried: the 0 s of budget_s are spent" and not list(tmp_path.iterdir())
    assert Budget(50.0).limit(20.0) == 20.0 and 29.0 < Budget(30.0).limit(60.0) <= 30.0
