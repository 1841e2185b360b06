"""A pytest plugin that compiles the kernels of the GPU tests for sm_90 without a GPU (`make gpu-compile`).

Tensors that a test puts on a GPU stay on the CPU. Triton's driver is a stub: kernels are compiled for sm_90, and none
is launched. So all results are garbage, and failed comparisons are ignored. Every other error, such as an error of the
compiler, fails its test.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime import driver

import ringattn.engine.triton
from ringattn.bench.launch import StubDriver
from tests.gpu import kept

ARCHITECTURE = 90
H100 = {"max_shared_mem": 232_448, "max_num_regs": 65_536, "multiprocessor_count": 132}


class CudaOnCpu(TorchFunctionMode):
    """A mode in which every tensor is on the CPU but reports the first GPU as its device."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle a call of a torch function in this mode.

        If `function` asks for a tensor's device, return the first GPU. Otherwise call it, with the CPU instead of each
        cuda device in its arguments.
        """
        if function is Tensor.device.__get__:
            return torch.device("cuda", 0)
        if function is Tensor.is_cuda.__get__:
            return True
        if function is Tensor.get_device:
            return 0
        if function is Tensor.cuda:
            return args[0]
        return function(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


def _on_cpu(argument: Any) -> Any:
    is_device = isinstance(argument, str | torch.device) and str(argument).startswith("cuda")
    return "cpu" if is_device else argument


def pytest_configure() -> None:
    """Replace Triton's driver and torch's CUDA functions by stubs for the whole run."""
    stub = StubDriver(ARCHITECTURE)
    stub.properties, stub.registers = H100, 128
    driver.set_active(stub)
    replacements: dict[str, Any] = {
        "synchronize": None, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H200", "device": nullcontext(),
        "device_of": nullcontext(), "is_current_stream_capturing": False, "memory_allocated": 0,
        "max_memory_allocated": 0, "reset_peak_memory_stats": None,
    }  # fmt: skip
    for name, answer in replacements.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    ringattn.engine.triton.missing = lambda device: None  # type: ignore[assignment]
    ringattn.engine.triton.architecture = lambda device: ARCHITECTURE  # type: ignore[assignment]
    kept.keep = lambda *_: None  # type: ignore[assignment]
    from tests.gpu import test_engines  # imported after `kept.keep` is replaced, because the module binds the function

    test_engines.DEVICE = "cpu"
    CudaOnCpu().__enter__()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove the marks that would skip tests because there is no GPU."""
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if "CUDA device" not in str(mark.kwargs.get("reason"))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Run a test and ignore its failed assertions."""
    with suppress(AssertionError):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many compiled kernels are in Triton's cache."""
    cubins = list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))
    terminalreporter.write_line(f"{len(cubins)} kernels compiled for sm_{ARCHITECTURE}")
