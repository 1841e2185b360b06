"""Jobs in processes that die: each is run once, and the dead ones are named."""

from __future__ import annotations

import os
from pathlib import Path

from ringattn.bench.crash_proof import run_all


def job(folder: str, number: int) -> None:
    """Leaves a mark; every third dies, every fourth raises."""
    with Path(folder, str(number)).open("a") as file:
        file.write("x")
    if number % 3 == 0:
        os._exit(134)
    if number % 4 == 0:
        raise ValueError("said by nobody")


def test_every_job_is_run_once_and_deaths_are_told(tmp_path: Path) -> None:
    ended = dict(run_all(job, [(str(tmp_path), number) for number in range(8)], workers=2))
    assert ended == {number: number % 3 != 0 for number in range(8)}
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {str(number): "x" for number in range(8)}


def test_no_jobs() -> None:
    assert list(run_all(job, [], workers=4)) == []
