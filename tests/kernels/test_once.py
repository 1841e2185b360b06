"""What several test processes need is computed once in a run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tests.kernels.once import once


class Folders:
    """Those of one process of a test run."""

    def __init__(self, base: Path) -> None:
        self.base = base
        base.mkdir()

    def getbasetemp(self) -> Path:
        return self.base

    def mktemp(self, name: str) -> Path:
        folder = self.base / name
        folder.mkdir()
        return folder


def asked(folders: list[Any], make: Any) -> list[Any]:
    """What each of the processes gets, all asking at once."""
    together = Barrier(len(folders))

    def ask(own: Any) -> Any:
        together.wait()
        return once(own, "something", make)

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(ask, folders))


def test_workers_of_a_run_compute_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a folder of its own inside that of the run."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    made: list[Path] = []

    def make(folder: Path) -> dict[str, int]:
        made.append(folder)
        return {"nth": len(made)}

    workers: list[Any] = [Folders(tmp_path / f"popen-gw{at}") for at in range(4)]
    assert asked(workers, make) == [{"nth": 1}] * 4 and len(made) == 1
    assert asked(workers, make) == [{"nth": 1}] * 4 and len(made) == 1


def test_runs_without_workers_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run computes anew, though its folder lies beside that of the first."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    runs: list[Any] = [Folders(tmp_path / f"pytest-{at}") for at in range(2)]
    made: list[Path] = []
    for run in runs:
        for _ in range(2):
            once(run, "something", lambda folder: made.append(folder))
    assert made == [run.base / "something" for run in runs]


def test_what_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    workers: list[Any] = [Folders(tmp_path / f"popen-gw{at}") for at in range(2)]

    def failing(folder: Path) -> None:
        raise OSError(folder.name)

    with pytest.raises(OSError, match="something"):
        once(workers[0], "something", failing)
    assert once(workers[1], "something", lambda _: 5) == 5 == once(workers[1], "something", failing)
