"""A pytest plugin that skips tests whose inputs have not changed, and records the cost of each test.

Under `-m gpu` it also prints the reason of each failure at once, because a run may be cut off before its end.

A test that leaves variables of a job in the environment fails: rings of later tests in its process would read them.

This code is not in `conftest.py`, because `conftest.py` is part of the digests of `unchanged.py`. This code does not
affect what a test computes, so that a change of it must not change a digest.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unchanged import GROUPS, is_unchanged

BEFORE = pytest.StashKey[float]()
JOB = pytest.StashKey[dict[str, str]]()
JOB_NAMES = "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "RINGATTN_", "NCCL_", "GLOO_"
"""How the names of the environment variables begin that decide how a ring opens."""


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis draw the same examples in every run, unless an option names a profile."""
    if find_spec("hypothesis") is not None and not config.getoption("--hypothesis-profile", None):
        from hypothesis import settings

        settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze the millions of objects that imports create, so that garbage collection never scans them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of an unchanged group as slow, so that `make test` skips them."""
    for item in items:
        marker = item.get_closest_marker("unchanged")
        if marker and is_unchanged(marker.args[0]):
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the groups that are skipped because their sources have not changed since they last passed."""
    groups = [group for group in GROUPS if is_unchanged(group)]
    if groups and "not slow" in terminalreporter.config.option.markexpr:
        terminalreporter.write_line(
            f"left out, for nothing they read has changed since they passed: {', '.join(groups)}"
        )


FORKING = "tests.contract.processes", "tests.adapters.server"
"""Modules with a server process, which forks. They load torch, so they are not imported here."""


def core_s() -> float:
    """Return the core seconds of this process, of its children that have ended, and of its running fork servers."""
    usages = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    process_s = sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, usages))
    servers = (module.server_pid() for module in filter(None, map(sys.modules.get, FORKING)))
    return process_s + sum(server_core_s(pid) for pid in servers if pid is not None)


def server_core_s(pid: int) -> float:
    """Return the core seconds of a running process and of its children that have ended."""
    # The process name may contain anything. After it come the state and numbers; the 12th to 15th field are CPU times.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def job_variables() -> dict[str, str]:
    """Return the environment variables that decide how a ring opens."""
    return {name: value for name, value in os.environ.items() if name.startswith(JOB_NAMES)}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Record the core seconds and the variables of a job before the test, including its fixtures."""
    item.stash[BEFORE], item.stash[JOB] = core_s(), job_variables()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the reason of a failure under `-m gpu`."""
    report = yield
    if report.failed and item.config.option.markexpr == "gpu":
        print(f"\n{report.longreprtext}", flush=True)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Write the core seconds of the test to the JUnit file; restore the variables of a job, and fail if they changed.

    Unlike wall-clock time, core seconds do not grow on a busy machine.
    """
    try:
        yield
    finally:
        item.user_properties.append(("core_s", round(core_s() - item.stash[BEFORE], 3)))
        before, after = item.stash[JOB], job_variables()
        for name in after:
            del os.environ[name]
        os.environ.update(before)
    changed = sorted(name for name, _ in before.items() ^ after.items())
    assert not changed, f"the test changed {', '.join(changed)} in the environment of later tests"
