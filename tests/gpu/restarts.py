"""Run GPU tests so that a hung test loses only its own result: `python -m tests.gpu.restarts RECORD [OPTION ...]`.

A test that exceeds `--limit` seconds ends its process, because nothing else ends a hung call of the CUDA driver. The
tests behind it then run in a new process. RECORD is a file that names every started test. This module is the plugin
as well as the command, and needs no other plugin than those of pytest.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

FINISHED = "finished"
"""The last line of a record: the process has reported all its tests."""
LIMIT_S = 200.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--limit", type=float, default=LIMIT_S, help="seconds after which a test ends its process")
    parser.addoption("--record", help="a file with the names of the tests that have started, which do not run again")


@pytest.hookimpl(trylast=True)  # after the part of the tests has been selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that have started in an earlier process."""
    started = _lines(Path(config.option.record))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in started])
    items[:] = [item for item in items if item.nodeid not in started]


class Limits:
    """The part of the plugin that limits each test."""

    def __init__(self, config: pytest.Config) -> None:
        self.limit_s, self.record = config.option.limit, Path(config.option.record)
        # While a test runs, pytest captures standard error, so that a report there would be lost.
        self.report = os.fdopen(os.dup(2), "w")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record the test and run it. If it exceeds the limit, print the stacks of all threads and end the process."""
        with self.record.open("a", encoding="utf-8") as record:
            record.write(f"{item.nodeid}\n")
        faulthandler.dump_traceback_later(self.limit_s, exit=True, file=self.report)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Record that all reports have been printed."""
        with self.record.open("a", encoding="utf-8") as record:
            record.write(f"{FINISHED}\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Limits(config))


def _lines(record: Path) -> list[str]:
    return record.read_text(encoding="utf-8").splitlines() if record.exists() else []


def main(record: Path, options: list[str]) -> int:
    """Run pytest until all tests have started or a process starts none. Return 0 if all have passed, else 1."""
    record.unlink(missing_ok=True)
    failed = 0
    while True:
        before = _lines(record)
        command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.restarts", f"--record={record}", *options]
        status = subprocess.run(command).returncode
        after = _lines(record)
        # Status 5: no test is left.
        failed = failed or int(status not in (0, 5) or not after)
        if after[-1:] == [FINISHED] or after == before:
            return failed
        print(f"HUNG or died with status {status}: {after[-1]}; the tests behind it run in a new process", flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
