"""The package flash-attn-4 without a GPU: its kernels compiled for sm_90a, and the calls of them.

A compiled function first compares its arguments with what it was compiled for, and then asks the CUDA runtime for a
device, which fails without a driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

VARIABLES = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
KERNELS = [
    "FlashAttentionForwardSm90", "FlashAttentionBackwardPreprocess", "FlashAttentionBackwardSm90",
    *["FlashAttentionBackwardPostprocess"] * 3,
]  # fmt: skip
CUDA_DEVICE = 2  # kDLCUDA of DLPack


class Call(NamedTuple):
    """A call of a compiled kernel. `kernel` is the object that was compiled to `function`."""

    kernel: Any
    function: Any
    arguments: tuple[Any, ...]


@contextmanager
def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Record the calls of compiled kernels instead of making them. Skips the test if that is not possible."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    interface = pytest.importorskip("flash_attn.cute.interface", reason="the package flash-attn-4 is not installed")
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("with a CUDA driver, the compiled kernels would be launched on memory of the host")
    except OSError:
        pass
    recorded: list[Call] = []
    compile_kernel = interface.cute.compile

    def record(kernel: Any, *arguments: Any, **options: Any) -> Any:
        function = compile_kernel(kernel, *arguments, **options)
        return lambda *arguments: recorded.append(Call(kernel, function, arguments))

    monkeypatch.setattr(interface.cute, "compile", record)
    monkeypatch.setattr(interface, "is_fake_mode", lambda: False)  # in fake mode, the package does not call kernels
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())  # needs a torch with CUDA
    caches = [function.compile_cache for function in vars(interface).values() if hasattr(function, "compile_cache")]
    for cache in caches:
        cache.clear()
    yield recorded
    for cache in caches:
        cache.clear()


def fake_rows(rows: int, heads: int, dim: int, other_heads: int) -> Tensor:
    """Return a fake CUDA tensor (1, heads, rows, dim). In memory, a row has `other_heads` more heads."""
    row = (heads + other_heads) * dim
    return torch.empty_strided((1, heads, rows, dim), (rows * row, dim, row, 1), dtype=torch.bfloat16, device="cuda")


def labelled_as_cuda(x: Tensor) -> Any:
    """Return a tensor on the host with the shape, strides and dtype of `x` that says that it is on a CUDA device."""
    capsule = to_dlpack(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu"))
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    data_bytes = ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_int.from_address(pointer_of(capsule, b"dltensor") + data_bytes).value = CUDA_DEVICE
    return import_module("tvm_ffi").from_dlpack(capsule)


def launch(call: Call, replacements: dict[int, Tensor] | None = None) -> None:
    """Call the compiled function. `replacements` has other arguments by their position."""
    arguments = [(replacements or {}).get(index, argument) for index, argument in enumerate(call.arguments)]
    call.function(*(labelled_as_cuda(x) if isinstance(x, Tensor) else x for x in arguments))
