"""A pytest plugin that writes what each test measured into the JUnit file.

The property `error` is the largest error of a test: of its comparisons with `torch.testing.assert_close`, and of its
assertions `error <= 1e-9`. The property `refusal` is the last error of ringattn whose message the test read.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest
import torch
from _pytest.assertion import rewrite
from torch import Tensor

from ringattn.errors import InputError
from tests.adapters.processes import worst_error

_BOUNDED = re.compile(r"(?<![\w.])(\d[\d.]*(?:e[+-]?\d+)?) <=? \d[\d.]*e-\d+")
rewrite.PYC_TAIL = f".measured{rewrite.PYC_TAIL}"  # modules compiled without the hook stay in their files
_errors: list[float] = []
_refusals: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Observe comparisons and the errors of ringattn, in all threads of this process."""
    assert_close, text_of = torch.testing.assert_close, InputError.__str__

    def compare(actual: Any, expected: Any, *args: Any, **options: Any) -> None:
        assert_close(actual, expected, *args, **options)
        if isinstance(actual, Tensor) and actual.dtype in (torch.float32, torch.float64) and actual.numel():
            _errors.append(worst_error([(actual.detach(), expected.detach())], floor=1.0))

    def read(self: InputError) -> str:
        _refusals.append(text_of(self))
        return _refusals[-1]

    torch.testing.assert_close = compare
    # Tests read the message of an error that they expect. Creation is not observed, because torch.compile traces it.
    InputError.__str__ = read  # type: ignore[method-assign]


def pytest_assertion_pass(item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
    """Record the left numbers of an assertion such as `error <= 1e-9`."""
    _errors.extend(map(float, _BOUNDED.findall(expl)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Add the properties after the test."""
    _errors.clear()
    _refusals.clear()
    try:
        return (yield)
    finally:
        if _errors:
            item.user_properties.append(("error", max(_errors)))
        if _refusals:
            item.user_properties.append(("refusal", _refusals[-1]))
