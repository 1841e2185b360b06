"""Compile a launch to machine code for a GPU that is not present, and find the resources that the code needs per SM.

Guarantees: the code is compiled by the ordinary launch path, with a driver that launches nothing. Files stay only in
the folder of Triton's cache, which the caller can set.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.runtime import driver

from ringattn.bench.launch import StubDriver
from ringattn.kernels.launch import LaunchCall

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS = 65_536
SHARED_BYTES = {80: 167_936, 86: 102_400, 89: 102_400, 90: 233_472, 100: 233_472, 120: 102_400}
"""Shared memory per SM, with `RESERVED_BYTES` of each block; CUDA C Programming Guide, "Technical Specifications"."""
RESERVED_BYTES = 1024
"""Shared memory reserved for each thread block."""
THREADS = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}


class KernelCode(NamedTuple):
    """The machine code of a kernel and the resources of a thread block.

    `listing` is the output of nvdisasm with encodings. `registers` is the number per thread at the start of the kernel.
    """

    listing: str
    registers: int
    shared_bytes: int
    threads: int
    tensor_columns: int
    ptx: str

    def resident(self, arch: int) -> int:
        """Return how many thread blocks an SM holds at once."""
        registers = REGISTERS // (-(-self.registers // 8) * 8 * self.threads)
        shared = SHARED_BYTES[arch] // (self.shared_bytes + RESERVED_BYTES)
        return max(1, min(registers, shared, THREADS[arch] // self.threads))


def code_of(call: LaunchCall, arch: int) -> KernelCode:
    """Compile a launch for sm_`arch`. This replaces Triton's driver by a stub, which remains active."""
    driver.set_active(StubDriver(arch))
    call.kernel.device_caches.clear()  # keyed by device number, which is 0 for every stubbed GPU
    return read(call.warmup())


def read(kernel: Any) -> KernelCode:
    """Read the machine code of a kernel that Triton has compiled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        listing = _tool("nvdisasm", "-c", "-hex", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    return KernelCode(
        listing, int(registers[1]), kernel.metadata.shared, 32 * kernel.metadata.num_warps,
        getattr(kernel.metadata, "tmem_size", 0) or 0, kernel.asm["ptx"],
    )  # fmt: skip


def _tool(name: str, *args: str) -> str:
    return subprocess.run([TOOLS / name, *args], capture_output=True, text=True, check=True).stdout
