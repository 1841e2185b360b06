"""The tests of tests/kernels/interpreter_rows for the compiled projection, row and quantization kernels on a GPU.

`make gpu-first` runs them. They use torch's default device, which is the GPU here.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from tests.kernels.interpreter_rows.canary import canaries

pytest.importorskip("triton")

__all__ = ["canaries"]

pytestmark = pytest.mark.gpu

SUITES = ("packing", "qkv", "quantize", "rows")

for suite in SUITES:
    tests = vars(import_module(f"tests.kernels.interpreter_rows.test_{suite}"))
    globals().update({f"{name}__{suite}": tests[name] for name in tests if name.startswith("test_")})


@pytest.fixture(autouse=True)
def _on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    callspec = getattr(request.node, "callspec", None)
    if callspec and torch.float8_e4m3fn in callspec.params.values() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has float8_e4m3fn from sm_89 on")
    with torch.device("cuda"):
        yield
