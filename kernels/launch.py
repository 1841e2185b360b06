"""Launches compiled kernels by kept handles, so that the host's share of a launch is a few microseconds.

`kernel[grid](...)` binds and specializes every argument anew each time. A `Kept` does it once for each set of facts
that a specialization can rest on, and from then on calls the compiled kernel itself, as `kernel[grid](...)` does in its
last line (`CompiledKernel.run`, the same in Triton 3.6 and 3.7).
Promises: the kernel that `call.run()` would have launched, on the current device and stream; what was never seen is
compiled, once. Triton's launch hooks are not called.
Does not know: any kernel, the interpreter (which compiles nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime import driver

from ringattn.kernels.launch_call import LaunchCall

MOST_HANDLES = 4096
"""Sets of facts kept; one more and all are forgotten, which costs a look into Triton's own cache for each."""


class Handle(NamedTuple):
    """A loaded kernel: `run(x, y, z, stream, function, packed, None, None, None, *args, *constants)` launches it."""

    run: Callable[..., None]
    function: Any
    packed: Any
    constants: tuple[Any, ...]


class Kept:
    """The handles of the kernels launched so far in this process, each for the device that was current then."""

    def __init__(self) -> None:
        self._handles: dict[Hashable, Handle] = {}

    def compile(self, call: LaunchCall) -> Handle:
        """The handle of a call, compiled and loaded if need be, and not launched."""
        key = _key(call, driver.active.get_current_device())
        if key not in self._handles:
            if len(self._handles) == MOST_HANDLES:
                self._handles.clear()
            self._handles[key] = _compiled(call)
        return self._handles[key]

    def launch(self, call: LaunchCall) -> None:
        """Launch on the current device and stream."""
        active = driver.active
        device = active.get_current_device()
        handle = self._handles.get(_key(call, device)) or self.compile(call)
        stream = active.get_current_stream(device)
        handle.run(
            call.grid[0], 1, 1, stream, handle.function, handle.packed, None, None, None, *call.args, *handle.constants
        )


def _key(call: LaunchCall, device: int) -> Hashable:
    """All that Triton specializes on: constants, the dtypes and 16-byte alignment of tensors, integers, other types."""
    # An integer stands for itself, since to sort out which ones Triton tells apart takes longer. Its wrapper gives a
    # kernel's constants in the same order each time.
    facts = [
        x if type(x) is int else (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else type(x)
        for x in call.args
    ]
    return (call.kernel.fn, device, *facts, *call.meta.values())


def _compiled(call: LaunchCall) -> Handle:
    """Compile and load; the constants follow the other arguments, as in every kernel's signature here."""
    kernel = call.kernel.warmup(*call.args, grid=call.grid, **call.meta)
    constants = tuple(call.meta[name] for name in call.kernel.arg_names[len(call.args) :])
    run = kernel.run  # loads the kernel, so that `function` is there
    return Handle(run, kernel.function, kernel.packed_metadata, constants)
