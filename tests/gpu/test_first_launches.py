"""The first launches of `make gpu-first` as tests, so that `make gpu-compile` compiles their kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.gpu.first_launches import NAMES, errors_of, right

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", NAMES)
def test_a_first_launch_is_right(name: str) -> None:
    errors = errors_of(name, "cuda")
    assert errors and right(errors), errors
