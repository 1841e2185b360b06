"""Launches compiled kernels by kept handles, so that the host's share of a launch is a few microseconds.

`kernel[grid](...)` binds and specializes every argument anew each time. Here a call is described once, as a `Repeat`:
from then on only its tensors change, and the compiled kernel itself is called, as `kernel[grid](...)` does in its last
line (`CompiledKernel.run`, the same in Triton 3.6 and 3.7).
Guarantees: the kernel that `call.run()` would have launched, on the current device and stream, as long as the tensors
keep their dtypes and shapes and what `layouts` gives for them; what was never seen is compiled, once. Triton's launch
hooks are not called.
In the interpreter, which compiles nothing, a repeat runs the call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ringattn.kernels.launch_call import LaunchCall
from ringattn.kernels.scratch import Scratch, counter_for

Operands = Sequence[Tensor | None]
"""The tensors that a caller brings anew each time, some left out."""


def layouts(operands: Operands) -> Hashable:
    """What of the tensors' memory a described call rests on: strides and alignment to 16 bytes."""
    return tuple([None if x is None else (x.stride(), x.data_ptr() % 16) for x in operands])


class Handle(NamedTuple):
    """A loaded kernel: `run(x, y, z, stream, function, packed, None, None, None, *args, *constants)` launches it.

    `resident`: how many of its blocks a multiprocessor holds at once. `scratch`: bytes of global memory that it asks
    for, a program. `spills`: instructions' worth of registers that did not fit. `name`: the kernel's.
    """

    run: Callable[..., None]
    function: Any
    packed: Any
    constants: tuple[Any, ...]
    resident: int
    scratch: int
    spills: int
    name: str


class Repeat:
    """A call described once, to launch with other tensors of the same dtypes, shapes and `layouts`."""

    def __init__(
        self, call: LaunchCall, operands: Operands, handle: Handle | None, device: int, most: int | None
    ) -> None:
        """`operands`: the tensors among `call.args` that change, no two the same object. `most`: programs at most."""
        self._call, self._handle, self._device = call, handle, device
        self._programs = call.grid[0] if most is None else min(call.grid[0], most)
        self.scratch_bytes = 0 if handle is None else self._programs * handle.scratch
        """What a launch takes from torch's allocator and gives back."""
        order = {id(x): at for at, x in enumerate(operands) if x is not None}
        self._places = [(at, order[id(x)]) for at, x in enumerate(call.args) if id(x) in order]
        self._args: list[Any] = [None if id(x) in order else x for x in call.args]
        self._counter = next((at for at, x in enumerate(call.args) if x is call.counter is not None), None)

    def __call__(self, operands: Operands, seed: tuple[int, int] | None = None) -> None:
        """Launch on the current device, which is the one it was described on, and the current stream.

        `seed`: where the call has a `seed_at`, the arguments there.
        """
        args = self._args.copy()
        if self._call.seed_at is not None:
            assert seed is not None
            args[self._call.seed_at : self._call.seed_at + 2] = seed
        for at, which in self._places:
            args[at] = operands[which]
        handle = self._handle
        if handle is None:
            self._call._replace(args=tuple(args), grid=(self._programs,)).run()
        elif self._programs:
            stream = driver.active.get_current_stream(self._device)
            if self._counter is not None:
                args[self._counter] = counter_for(args[self._counter], stream)
            launch = (self._programs, 1, 1, stream, handle.function, handle.packed, None, None, None)
            if handle.scratch:
                with Scratch():
                    handle.run(*launch, *args, *handle.constants)
            else:
                handle.run(*launch, *args, *handle.constants)


class Kept:
    """The handles of the kernels launched so far in this process, each for the device that was current then."""

    def __init__(self) -> None:
        self._handles: dict[Hashable, Handle] = {}

    def repeat(self, call: LaunchCall, operands: Operands, sm_margin: int = 0) -> Repeat:
        """The call, whose `operands` will change, ready to be repeated on the current device.

        `sm_margin`: multiprocessors to leave to others: the grid is then as large as the rest holds at once, and its
        programs share the work. 0 leaves none, and makes a program for each piece of work unless it is persistent.
        """
        if not isinstance(call.kernel, JITFunction):
            return Repeat(call, operands, None, 0, None)
        device, handle = driver.active.get_current_device(), self.compile(call)
        bounded = sm_margin or call.persistent
        return Repeat(call, operands, handle, device, usable(device, sm_margin) * handle.resident if bounded else None)

    def compile(self, call: LaunchCall) -> Handle:
        """The handle of a call, compiled and loaded if need be, and not launched."""
        key = _key(call, driver.active.get_current_device())
        if key not in self._handles:
            self._handles[key] = _compiled(call)
        return self._handles[key]

    def handles(self) -> list[Handle]:
        """All of them."""
        return list(self._handles.values())

    def clear(self) -> None:
        """Forget them; calls that were described keep theirs."""
        self._handles.clear()


def _key(call: LaunchCall, device: int) -> Hashable:
    """What Triton specializes on, so that there are no more handles than kernels.

    Constants; the dtype and 16-byte alignment of a tensor; whether an integer is 1, a multiple of 16 and of 32 bits,
    the last alone where the kernel says `do_not_specialize`; of other arguments the type.
    """
    known: list[Any] = []
    for x, parameter in zip(call.args, call.kernel.params, strict=False):  # the constants follow in `meta`
        if type(x) is int:
            words = x.bit_length() // 32
            known.append(words if parameter.do_not_specialize else (x == 1, x % 16 == 0, words))
        else:
            known.append((x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else type(x))
    # A kernel's wrapper gives its constants in the same order each time.
    return (call.kernel.fn, device, *known, *call.meta.values())


def _compiled(call: LaunchCall) -> Handle:
    """Compile and load; the constants follow the other arguments, as in every kernel's signature here."""
    kernel = call.kernel.warmup(*call.args, grid=call.grid, **call.meta)
    constants = tuple(call.meta[name] for name in call.kernel.arg_names[len(call.args) :])
    run = kernel.run  # loads the kernel, so that `function` and `n_regs` are there
    scratch = kernel.metadata.global_scratch_size * kernel.metadata.num_ctas
    return Handle(
        run, kernel.function, kernel.packed_metadata, constants, _resident(kernel), scratch, kernel.n_spills,
        call.kernel.fn.__name__,
    )  # fmt: skip


def _resident(kernel: Any) -> int:
    """Blocks of a loaded kernel that a multiprocessor holds: by its registers, threads and shared memory."""
    properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
    threads = kernel.metadata.num_warps * 32
    registers = properties["max_num_regs"] // (max(kernel.n_regs, 1) * threads)
    reserved = 1024  # bytes that each block takes beside its own (CUDA C Programming Guide, shared memory)
    shared = (properties["max_shared_mem"] + reserved) // (kernel.metadata.shared + reserved)
    return max(1, min(registers, shared, 2048 // threads))


def usable(device: int, sm_margin: int) -> int:
    """Multiprocessors that `sm_margin` leaves, at least one."""
    return max(1, driver.active.utils.get_device_properties(device)["multiprocessor_count"] - sm_margin)
