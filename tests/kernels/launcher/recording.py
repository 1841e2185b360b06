"""Launch kernels through kept handles and Triton's own launcher over a stub of libcuda, and record the launches.

`python -m tests.kernels.launcher.recording FILE CASE ...` writes its findings to FILE. LD_LIBRARY_PATH and
TRITON_LIBCUDA_PATH must name the folder with the stub (`build_stub`). Expected parameters are computed from the call
and from the parameters that the PTX declares, not from Triton's launcher.
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from ringattn.kernels import launch
from ringattn.kernels.attention_options import seed_words
from ringattn.kernels.launch import Kept, LaunchCall, Repeat
from tests.kernels.compile_gate.cases import arch_of, call_of

SCRATCH: list[Tensor] = []
"""The scratch memory of the launches, in order."""
STREAMS = threading.local()
INCLUDES = Path(triton.__file__).parent / "backends" / "nvidia" / "include"


def build_stub(folder: Path) -> None:
    """Compile the stub of libcuda into a folder."""
    command = ["cc", "-shared", "-fPIC", "-w", f"-I{INCLUDES}", "-Wl,-soname,libcuda.so.1", "-lpthread"]
    source = Path(__file__).with_name("cuda.c")
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1"), str(source)], check=True)


class Launch(ctypes.Structure):
    """A launch as the stub records it; see cuda.c."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("attributes", ctypes.c_uint), ("cluster", ctypes.c_uint), ("stream", ctypes.c_uint64),
        ("function", ctypes.c_uint64), ("thread", ctypes.c_uint64), ("bytes", ctypes.c_uint64),
        ("parameters", ctypes.c_ubyte * 1024),
    ]  # fmt: skip


class Stub:
    """The loaded stub."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.stub_launches.restype = ctypes.c_uint

    def expect(self, sizes: Sequence[int]) -> None:
        """Forget all launches. Kernels that are launched from now on have parameters of these sizes."""
        self.library.stub_sizes(len(sizes), (ctypes.c_uint * len(sizes))(*sizes))

    def launches(self) -> list[Launch]:
        """Return the launches so far."""
        first = ctypes.POINTER(Launch)()
        count = self.library.stub_launches(ctypes.byref(first))
        return [Launch.from_buffer_copy(first[index]) for index in range(count)]


def activate(arch: int) -> None:
    """Make Triton's CUDA driver active, for sm_`arch`. Each thread has its own stream."""
    cuda = CudaDriver()
    cuda.get_current_target = lambda: GPUTarget("cuda", arch, 32)
    cuda.get_current_device = lambda: 0
    cuda.get_current_stream = lambda device: getattr(STREAMS, "number", 7)
    driver.set_active(cuda)
    launch.allocate = allocate  # type: ignore[assignment]


def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate scratch memory on the host, and keep it."""
    SCRATCH.append(torch.empty(size, dtype=torch.uint8))
    return SCRATCH[-1]


def declared(ptx: str) -> list[str]:
    """Return the types of a kernel's parameters, as PTX declares them."""
    head = re.search(r"\.entry [^(]*\((.*?)\n\)", ptx, re.DOTALL)
    assert head, ptx[:500]
    return re.findall(r"\.param \.(\w+)", head[1])


def expected(compiled: Any, args: Sequence[Any], types: Sequence[str], scratch: int) -> bytes:
    """Return the bytes of a launch's parameters: those of `args` that are no constants, and two scratch pointers."""
    passed = [x for index, x in enumerate(args) if (index,) not in compiled.src.constants]
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in (*passed, scratch, 0)]
    assert len(values) == len(types), (len(values), len(types))
    formats = {"u64": "Q", "b64": "Q", "s64": "q", "u32": "I", "b32": "I", "s32": "i", "f32": "f"}
    encoded = b""
    for x, kind in zip(values, types, strict=True):
        code = formats[kind]
        encoded += struct.pack("<" + ("f" if type(x) is float else code.lower() if x < 0 else code), x)
    return encoded


def operands_of(call: LaunchCall) -> list[Tensor]:
    """Return the distinct tensors of a call, without its counter."""
    return [x for x in call.args if isinstance(x, Tensor) and x is not call.counter]


def copies(operands: Sequence[Tensor]) -> list[Tensor]:
    """Return other tensors of the same shapes, strides and alignment."""
    return [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype) for x in operands]


def check(name: str, stub: Stub) -> dict[str, Any]:
    """Launch a case three times by a kept handle, then from four threads. Return what is wrong, and the facts."""
    call = call_of(name)
    compiled = call.warmup()
    types = declared(compiled.asm["ptx"])
    stub.expect([8 if kind.endswith("64") else 4 for kind in types])
    kept = Kept()
    repeat = kept.repeat(call, operands_of(call), sm_margin=8)
    (handle,) = kept.handles()
    wrong = list[str]()
    for turn in range(3):
        wrong += [f"turn {turn}: {fault}" for fault in one_launch(call, repeat, handle, compiled, types, stub, turn)]
    wrong += in_threads(call, repeat, compiled, types, stub)
    return {"wrong": wrong, "parameters": len(types), "scratch": handle.scratch}


def arguments_of(
    call: LaunchCall, operands: Sequence[Tensor], new: Sequence[Tensor], stream: int, seed: tuple[int, int]
) -> list[Any]:
    """Return the arguments of a launch with `new` in place of `operands`."""
    by_id = {id(x): y for x, y in zip(operands, new, strict=True)}
    args = [by_id.get(id(x), x) for x in call.args]
    if call.counter is not None:
        args = [launch.counter_for(x, stream) if x is call.counter else x for x in args]
    if call.seed_at is not None:
        args[call.seed_at : call.seed_at + 2] = seed
    return args


def one_launch(
    call: LaunchCall, repeat: Repeat, handle: Any, compiled: Any, types: Sequence[str], stub: Stub, turn: int
) -> list[str]:
    """Launch with new tensors and compare every field that the driver received."""
    operands = operands_of(call)
    new, seed = copies(operands), seed_words((5 + turn) << 32 | 2**31 + turn)
    SCRATCH.clear()
    repeat(new, seed if call.seed_at is not None else None)
    recorded = stub.launches()[-1]
    scratch = SCRATCH[-1] if SCRATCH else None
    programs = min(call.grid[0], (132 - 8) * handle.resident)
    args = arguments_of(call, operands, new, 7, seed)
    fields = {
        "grid": (list(recorded.grid), [programs, 1, 1]),
        "block": (list(recorded.block), [32 * compiled.metadata.num_warps, 1, 1]),
        "shared": (recorded.shared, compiled.metadata.shared),
        "stream": (recorded.stream, 7),
        "attributes": (recorded.attributes, 0),
        "function": (recorded.function, handle.function),
        "scratch": (0 if scratch is None else scratch.numel(), programs * handle.scratch),
        "parameters": (
            bytes(recorded.parameters[: recorded.bytes]),
            expected(compiled, args, types, 0 if scratch is None else scratch.data_ptr()),
        ),
        "count": (len(stub.launches()), turn + 1),
    }
    return [f"{field}: {value!r}, not {right!r}" for field, (value, right) in fields.items() if value != right]


def in_threads(
    call: LaunchCall, repeat: Repeat, compiled: Any, types: Sequence[str], stub: Stub, turns: int = 20
) -> list[str]:
    """Launch from four threads at once, each with its own stream and tensors. Autograd uses such threads."""
    operands = operands_of(call)
    by_stream = {stream: copies(operands) for stream in range(100, 104)}
    begin, threads = threading.Barrier(4), dict[int, int]()

    def work(stream: int) -> None:
        STREAMS.number, threads[stream] = stream, threading.get_ident()
        begin.wait()
        for _ in range(turns):
            repeat(by_stream[stream], (1, stream) if call.seed_at is not None else None)

    stub.expect([8 if kind.endswith("64") else 4 for kind in types])
    running = [threading.Thread(target=work, args=(stream,)) for stream in by_stream]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    recorded, wrong = stub.launches(), list[str]()
    for stream, new in by_stream.items():
        of_stream = [x for x in recorded if x.stream == stream]
        args = arguments_of(call, operands, new, stream, (1, stream))
        right = expected(compiled, args, types, 0)[:-16]
        if len(of_stream) != turns or {x.thread for x in of_stream} != {threads[stream]}:
            wrong.append(f"stream {stream}: {len(of_stream)} launches of threads {[x.thread for x in of_stream]}")
        if any(bytes(x.parameters[: x.bytes - 16]) != right for x in of_stream):
            wrong.append(f"stream {stream}: parameters of another thread")
    return wrong


@triton.jit
def fill(out, value, SIZE: triton.language.constexpr):
    triton.language.store(out + triton.language.arange(0, SIZE), value)


def check_cluster(stub: Stub) -> dict[str, Any]:
    """Launch a kernel of two thread blocks per cluster through Triton's launcher."""
    out = torch.zeros(256)
    compiled = fill.warmup(out, 2.5, SIZE=256, grid=(3,), num_ctas=2)
    types = declared(compiled.asm["ptx"])
    stub.expect([8 if kind.endswith("64") else 4 for kind in types])
    call = LaunchCall(fill, (3,), (out, 2.5), {"SIZE": 256, "num_ctas": 2})
    Kept().repeat(call, [out])([out])
    recorded = stub.launches()[-1]
    facts = {"grid": recorded.grid[0], "cluster": recorded.cluster, "attributes": recorded.attributes}
    return {"wrong": [] if facts == {"grid": 6, "cluster": 2, "attributes": 2} else [str(facts)]}


def main(file: str, *names: str) -> None:
    """Check the cases and write the findings."""
    stub = Stub()
    activate(arch_of(names[0]))
    findings = {name: check(name, stub) for name in names} | {"cluster": check_cluster(stub)}
    Path(file).write_text(json.dumps(findings), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
