"""A plugin of pytest: tests that are left out because nothing they read has changed, and what each test takes.

What is not in `conftest.py` changes no outcome, and therefore no digest of `unchanged.py`.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Generator

import pytest

from tests.unchanged import GROUPS, is_unchanged

BEFORE = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The millions of objects that are imported stay: no search for garbage looks at them, now or in a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what need not run again."""
    for item in items:
        marker = item.get_closest_marker("unchanged")
        if marker and is_unchanged(marker.args[0]):
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the groups that are not run again because their sources are those that they last passed with."""
    groups = [group for group in GROUPS if is_unchanged(group)]
    if groups and "not slow" in terminalreporter.config.option.markexpr:
        terminalreporter.write_line(
            f"left out, for nothing they read has changed since they passed: {', '.join(groups)}"
        )


def core_s() -> float:
    """Seconds of a core that this process, its children that ended and what it had forked have taken."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    forking = sys.modules.get("tests.contract.processes")  # it loads torch
    own = sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, whose))
    return own + (forking.core_s() if forking else 0.0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test begins with its fixtures."""
    item.stash[BEFORE] = core_s()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """What it took goes into the JUnit file; other than its time, it is not more where others use the machine too."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("core_s", round(core_s() - item.stash[BEFORE], 3)))
