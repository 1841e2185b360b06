"""Settings of the tests that run kernels in Triton's interpreter.

Triton decides on decoration whether a kernel is interpreted, so these tests need a separate process, which
tests/kernels/test_interpreted.py starts. Other processes do not collect them.
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
    """Let the interpreter round to bfloat16 and float8 as a GPU does."""
    # Imported here, because a process that collects no test of this folder must not load Triton's interpreter.
    from tests.kernels.interpreter.shims import corrected

    with corrected():
        yield
