"""The plugin of every test run finds a test that changes the environment of later tests."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ("pytester",)

PROGRAM = """
import os

def test_one():
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

def test_two(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
"""


def test_a_test_that_leaves_variables_of_a_job_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PROGRAM)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "tests.running")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines("*the test changed TORCHELASTIC_USE_AGENT_STORE in the environment of later tests*")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
