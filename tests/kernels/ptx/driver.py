"""A driver for Triton that runs compiled kernels in the PTX interpreter instead of on a GPU.

Guarantees: kernels are specialized, compiled and launched by the product's own path up to the call of Triton's
launcher. The driver sees the arguments that a launcher gets, and the PTX that ptxas would get.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from ringattn.bench.launch import StubDriver
from tests.kernels.ptx.machine import Code, Launch
from tests.kernels.ptx.memory import GlobalMemory
from tests.kernels.ptx.program import Program
from tests.kernels.ptx.rules import STRICT, Rules


class Function:
    """A loaded kernel. `code`: its instructions, as soon as a hook of Triton has found its PTX."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = ""
        self._code: Code | None = None

    @property
    def code(self) -> Code:
        """Return the parsed and compiled PTX."""
        if self._code is None:
            self._code = Code(Program(self.text))
        return self._code


class InterpreterDriver(StubDriver):
    """A driver of a GPU, sm_90 at first. Every launch runs in the interpreter, in an order that `rng` decides.

    `late`: copies land as late as possible. `rules`: those of PTX that launches must obey. `rules_of`: those of some
    kernels, by name. `ran`: the kernels that were launched.
    """

    def __init__(self) -> None:
        """Become ready to be Triton's driver; `activated` makes it so."""
        super().__init__(90)
        self.rng, self.late, self.rules = Random(0), False, STRICT
        self.rules_of: dict[str, Rules] = {}
        self.ran: list[Function] = []
        self.changed: Callable[[Function], Code] | None = None
        """If set, returns the code to run instead of that of a function."""
        self.properties = {"max_shared_mem": 232_448, "max_num_regs": 1 << 16, "multiprocessor_count": 2}
        self.utils.load_binary = lambda name, binary, shared, device: (1, Function(name), 168, 0, 1024)
        self.utils.get_device_properties = lambda device: self.properties

    def activated(self) -> InterpreterDriver:
        """Make this Triton's driver for the rest of the process, and return it.

        Kernels are compiled to PTX only: ptxas takes more time than all else, and the compile gate runs it.
        """
        driver.set_active(self)
        CUDABackend.make_cubin = lambda *_: b""
        triton.knobs.runtime.kernel_load_end_hook = _found_ptx
        return self

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return the function that launches a compiled kernel."""
        kinds = list(source.signature.values())

        def launch(x: int, y: int, z: int, stream: int, function: Function, *rest: Any) -> None:
            # Before the kernel's arguments come its packed metadata, that of the launch, and two hooks.
            arguments = rest[4:]
            assert (y, z) == (1, 1) and len(arguments) == len(kinds)
            values = [(kind, value) for kind, value in zip(kinds, arguments, strict=True) if kind != "constexpr"]
            self._run(x, function, [value for _, value in values], metadata)

        return launch

    def _run(self, blocks: int, function: Function, arguments: list[Any], metadata: Any) -> None:
        memory, parameters = GlobalMemory(), list[int | float]()
        for index, value in enumerate(arguments):
            if isinstance(value, Tensor):
                memory.add(f"argument {index}", value)
                value = value.data_ptr()
            parameters.append(value)
        # The launcher of Triton allocates scratch memory and passes it after the arguments, with that of a profiler.
        scratch = torch.zeros(blocks * metadata.global_scratch_size // 8 + 16, dtype=torch.int64)
        scratch = scratch[-scratch.data_ptr() % 128 // 8 :]
        memory.add("scratch", scratch)
        code = function.code if self.changed is None else self.changed(function)
        parameters += [scratch.data_ptr(), 0]
        self.ran.append(function)
        rules = self.rules_of.get(function.name, self.rules)
        Launch(code, blocks, metadata.shared, parameters, memory, self.rng, self.late, rules).run()


def _found_ptx(module: Any, function: Function, name: str, files: dict[str, str], digest: str) -> None:
    """Read the PTX of a kernel that Triton has just loaded; Triton calls this hook."""
    function.text = Path(files[f"{name}.ptx"]).read_text(encoding="utf-8")
