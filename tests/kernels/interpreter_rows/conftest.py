"""Settings of the tests that run kernels in Triton's interpreter.

Triton decides when a kernel is decorated whether it is interpreted, so these tests need a process of their own:
tests/kernels/test_interpreted.py starts it. Anywhere else they are not collected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kernels.interpreter_rows.canary import canaries

__all__ = ["canaries"]

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def narrow_floats() -> Iterator[None]:
    """The interpreter with the bfloat16 and the float8 of a GPU."""
    # Not above: a process that collects nothing here must not load triton's interpreter.
    from tests.kernels.interpreter.shims import corrected

    with corrected():
        yield
