"""A plugin of pytest: tests that are left out because nothing they read has changed, and what each test takes.

What is not in `conftest.py` changes no outcome, and therefore no digest of `unchanged.py`.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from tests.unchanged import is_unchanged

LEFT_OUT = pytest.StashKey[Counter[str]]()
"""Of each group: how many tests are left out."""
BEFORE = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    """Nothing is left out yet."""
    config.stash[LEFT_OUT] = Counter()


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


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what is left out as unchanged; what runs alone belongs to a run of its own."""
    for item in items:
        expression, alone = item.config.option.markexpr, item.get_closest_marker("alone") is not None
        marker = item.get_closest_marker("unchanged")
        if marker and "not slow" in expression and ("not alone" in expression) != alone:
            item.config.stash[LEFT_OUT][marker.args[0]] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist hands its count on; each has collected all tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the count of a worker."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what is not run again because its sources are those it last passed with."""
    if left_out := terminalreporter.config.stash[LEFT_OUT]:
        groups = ", ".join(f"{group} ({count})" for group, count in left_out.items())
        terminalreporter.write_line(f"left out, for nothing they read has changed since they passed: {groups}")


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
