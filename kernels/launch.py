"""Kernel launches: a launch as a value, its tables and memory, and repeated launches through kept handles.

A `LaunchCall` is a launch that has not happened yet. It can be launched directly, compiled without a launch, or turned
into a kept handle.

`kernel[grid](...)` binds and specializes every argument at each launch. With kept handles a launch costs the host a few
microseconds: a call is prepared once, as a `Repeat`. After that only its tensors change, and the compiled kernel is
called directly, as in the last line of `kernel[grid](...)` (`CompiledKernel.run`, the same in Triton 3.6 to 3.9). The
interpreter compiles nothing, so there a repeat runs the call itself.
Guarantees: a repeat launches the kernel that `call.run()` would launch, on the current device and stream, as long as
the tensors keep their dtypes, their shapes and the result of `layouts`. A new combination is compiled once. Triton's
launch hooks are not called.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Hashable, Sequence
from contextvars import Token
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime._allocation import _allocator  # `triton.set_allocator` sets it; no public function reads it
from triton.runtime.jit import JITFunction

# --- what Triton needs to launch ------------------------------------------------------------------------------------


def compiler_missing() -> str | None:
    """Return why Triton cannot build the C code with which it launches kernels, or None.

    Triton builds it when it first runs (from 3.7 on), or for each signature of a kernel (3.6), and keeps the result in
    its cache. It looks for a compiler as this function does.
    """
    if triton.knobs.build.impl is not None:
        return None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler (gcc or clang), with which Triton builds its launcher: install gcc, or set CC"
    # Debian's default scheme names a folder for packages of the user, which has no headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not header.exists():
        return f"no {header}, which Triton needs to build its launcher: install Python's headers (python3-dev)"
    return None


# --- global memory of a launch ---------------------------------------------------------------------------------------


DESCRIPTOR_BYTES = 128
"""The global memory of a tensor descriptor (CUDA driver API, CUtensorMap)."""

_counters: dict[tuple[int, int], Tensor] = {}


def counter_for(like: Tensor, stream: int) -> Tensor:
    """Return a counter of value 0 for a launch on the current stream `stream`; the launch leaves it at 0."""
    # A captured graph may be replayed concurrently with any other launch, so it gets a separate counter, set to 0.
    if capturing():
        return torch.zeros_like(like)
    # Launches on the same stream run one after another, so they can share a counter.
    key = like.get_device(), stream
    if key not in _counters:
        _counters[key] = torch.zeros_like(like)
    return _counters[key]


def capturing() -> bool:
    """Return whether the current stream is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Scratch:
    """A context in which launches of the current thread get memory from torch. Autograd threads need their own."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before: Token[Any] = _allocator.set(allocate)

    def __exit__(self, *_: object) -> None:
        _allocator.reset(self._before)


def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate `size` bytes that a launch on the current stream needs until it is enqueued; torch aligns to 512."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


# --- a launch as a value ---------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """Block sizes and compiler options. `block_m`: query rows; `block_n`: key rows; both powers of two from 16.

    `form`: how rows are loaded into the multiprocessor, one of `FORMS`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    form: str = "pointers"


FORMS = ("pointers", "descriptors", "gluon")
"""How rows are loaded. pointers: by each thread. descriptors: by tensor descriptors (TMA, from sm_90 on). gluon: by
descriptors in a producer warp, written in Gluon."""

DESCRIPTORS = {"descriptors": 2, "gluon": 3}
"""The tensor descriptors that a program of each form has in global memory at once. Gluon's backward has 4."""

VARYING = (
    "block_count", "slots", "batches", "section", "group", "first_kv_head",
    "lse_batch", "lse_head", "delta_batch", "delta_head", "seed_low", "seed_high", "threshold",
)  # fmt: skip
"""Integer arguments of the attention kernels on which Triton must not specialize. They change with the documents of a
step (seeds with every call), and a training run would stop to compile. Strides of q, k, v, out and their gradients stay
specialized, because their divisibility determines the width of loads."""

PLACES, POSITIONS = 4, 5
"""The number of columns of `Table.places` and of `Table.positions`."""

FIRST, LAST = 1, 2
"""Flags of a block: no earlier launch of the pass updates its rows; no later launch does."""


class BlockColumn:
    """The column numbers of `Table.blocks`. `END_ENTRY` is one past the last entry."""

    FIRST_ROW, ROW_STRIDE, ROWS, FIRST_HEAD, HEADS, FIRST_ENTRY, END_ENTRY, FLAGS = range(8)
    COUNT = 8


class EntryColumn:
    """The column numbers of `Table.entries`. Columns after `Q_HEADS` are zero.

    `FIRST_VISIBLE` .. `END_VISIBLE` and `FIRST_FULL` .. `END_FULL` are ranges of blocks of the entry's rows; ends are
    excluded.
    """

    FIRST_ROW, ROW_STRIDE, ROWS, OWN_STEP, OTHER_STEP, LO, HI = range(7)
    FIRST_VISIBLE, FIRST_FULL, END_FULL, END_VISIBLE, FIRST_Q_HEAD, Q_HEADS = range(7, 13)
    COUNT = 16


class Table(NamedTuple):
    """The work of a launch, int32 on the kernel's device.

    - `blocks` (blocks, 8), columns as in `BlockColumn`: first row, row stride, rows, first head, heads, first entry,
      one past the last entry, flags.
    - `entries` (entries, 16), columns as in `EntryColumn`: the other side's first row, row stride and rows; the band
      own_step, other_step, lo, hi, by which row i of the block sees row j of the entry if
      lo <= i * own_step - j * other_step <= hi; in blocks of the entry's rows, the first visible, the first full, one
      past the last full and one past the last visible; the first query head, counted from own head * group, and the
      number of query heads; three zeros.
    - `slots`: the largest number of heads of any block.
    - `places` (entries, 4), for ALiBi: the distance between the block's first row and the entry's; the position strides
      of the block and of the entry; the query head of the call that is head 0 of the buffer.
    - `positions` (entries, 5), for dropout: the position of the block's first row and the position stride, the same for
      the entry, and the query head of the call that is head 0 of the buffer; the low 32 bits of each number.
    - `together`: 4 if positions of keys are consecutive and each block of keys starts at a multiple of 4, else 1.
    """

    blocks: Tensor
    entries: Tensor
    slots: int
    places: Tensor | None = None
    positions: Tensor | None = None
    together: int = 1


COMPILED = {"enable_fp_fusion": True}
"""The compiler's keywords of every launch. Triton 3.10 will fuse multiplication and addition only if asked to."""


class LaunchCall(NamedTuple):
    """The launch `kernel[grid](*args, **meta)`. `meta`: the compile-time constants, `num_warps`, `num_stages`.

    `persistent`: the grid may be limited to the programs that run at once, which is faster and does the same work.
    `counter`: the argument with which programs count the items that they take, a tensor of one element that is 0 before
    and after a launch. `seed_at`: the index of the argument for the lower half of dropout's seed; the upper half
    follows.
    """

    kernel: Any
    grid: tuple[int]
    args: tuple[Any, ...]
    meta: dict[str, Any]
    persistent: bool = False
    counter: Tensor | None = None
    seed_at: int | None = None

    def run(self) -> None:
        """Launch on the current device and stream."""
        with Scratch():
            self.kernel[self.grid](*self.args, **self.meta, **COMPILED)

    def warmup(self) -> Any:
        """Compile for the current device without a launch, and return Triton's compiled kernel."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.meta, **COMPILED)


def padded(dim: int) -> int:
    """Return the power of two, at least 16, to which matrix products pad a head dimension."""
    return max(16, 1 << (dim - 1).bit_length())


# --- launches by kept handles ----------------------------------------------------------------------------------------


Operands = Sequence[Tensor | None]
"""The tensors that change from call to call; None for optional ones that are missing."""


def layouts(operands: Operands) -> Hashable:
    """Return the properties of the tensors' memory on which a prepared call depends: strides and 16-byte alignment."""
    return tuple([None if x is None else (x.stride(), x.data_ptr() % 16) for x in operands])


class Handle(NamedTuple):
    """A loaded kernel: `run(x, y, z, stream, function, packed, None, None, None, *args, *constants)` launches it.

    `resident`: the number of its blocks that fit on a multiprocessor at once. `scratch`: the bytes of global memory per
    program. `kernel`: Triton's compiled kernel; from Triton 3.9 on, it unloads the function when it is freed.
    """

    run: Callable[..., None]
    function: Any
    packed: Any
    constants: tuple[Any, ...]
    resident: int
    scratch: int
    kernel: Any


class Repeat:
    """A prepared call, which launches with new tensors of the same dtypes, shapes and `layouts`."""

    def __init__(
        self, call: LaunchCall, operands: Operands, handle: Handle | None, device: int, most: int | None
    ) -> None:
        """Prepare the call.

        `operands`: the tensors among `call.args` that change, all distinct objects. `most`: the largest number of
        programs; None for no limit.
        """
        self._call, self._handle, self._device = call, handle, device
        self._programs = call.grid[0] if most is None else min(call.grid[0], most)
        self.scratch_bytes = 0 if handle is None else self._programs * handle.scratch
        """The bytes that a launch allocates from torch and frees again."""
        order = {id(x): index for index, x in enumerate(operands) if x is not None}
        self._places = [(index, order[id(x)]) for index, x in enumerate(call.args) if id(x) in order]
        self._args: list[Any] = [None if id(x) in order else x for x in call.args]
        self._counter = next((index for index, x in enumerate(call.args) if x is call.counter is not None), None)

    def __call__(self, operands: Operands, seed: tuple[int, int] | None = None) -> None:
        """Launch on the current stream. The current device must be the device for which the call was prepared.

        `seed`: the arguments at `seed_at`, if the call has one.
        """
        args = self._args.copy()
        if self._call.seed_at is not None:
            assert seed is not None
            args[self._call.seed_at : self._call.seed_at + 2] = seed
        for index, which in self._places:
            args[index] = operands[which]
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
    """A cache of the kernels that this process has launched, by device."""

    def __init__(self) -> None:
        self._handles: dict[Hashable, Handle] = {}

    def repeat(self, call: LaunchCall, operands: Operands, sm_margin: int = 0) -> Repeat:
        """Prepare the call, whose `operands` will change, for repeated launches on the current device.

        `sm_margin`: the multiprocessors to leave free. The grid then has as many programs as fit on the others at once,
        and these share the work. With 0 there is a program for each item of work, unless the call is persistent.
        """
        if not isinstance(call.kernel, JITFunction):
            return Repeat(call, operands, None, 0, None)
        device, handle = driver.active.get_current_device(), self.compile(call)
        bounded = sm_margin or call.persistent
        return Repeat(call, operands, handle, device, usable(device, sm_margin) * handle.resident if bounded else None)

    def compile(self, call: LaunchCall) -> Handle:
        """Return the handle of a call without launching it; compile and load the kernel if necessary."""
        key = _key(call, driver.active.get_current_device())
        if key not in self._handles:
            self._handles[key] = _compiled(call)
        return self._handles[key]

    def handles(self) -> list[Handle]:
        """Return all handles."""
        return list(self._handles.values())

    def clear(self) -> None:
        """Remove all handles from the cache. Prepared calls keep theirs."""
        self._handles.clear()


def _key(call: LaunchCall, device: int) -> Hashable:
    """Return the properties on which Triton specializes, so that there is one handle per compiled kernel.

    These are the constants; a tensor's dtype and 16-byte alignment; whether an integer is 1, a multiple of 16, and
    32 bits wide, or only its width if the kernel lists it in `do_not_specialize`; and the type of other arguments.
    """
    parts: list[Any] = []
    for x, parameter in zip(call.args, call.kernel.params, strict=False):  # the constants follow in `meta`
        if type(x) is int:
            width = x.bit_length() // 32
            parts.append(width if parameter.do_not_specialize else (x == 1, x % 16 == 0, width))
        else:
            parts.append((x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else type(x))
    # The wrapper of a kernel always passes the constants in the same order.
    return (call.kernel.fn, device, *parts, *call.meta.values())


def _compiled(call: LaunchCall) -> Handle:
    """Compile and load the kernel. In every kernel's signature here the constants follow the other arguments."""
    kernel = call.warmup()
    constants = tuple(call.meta[name] for name in call.kernel.arg_names[len(call.args) :])
    run = kernel.run  # loads the kernel, which sets `function` and `n_regs`
    scratch = kernel.metadata.global_scratch_size * kernel.metadata.num_ctas
    return Handle(run, kernel.function, kernel.packed_metadata, constants, _resident(kernel), scratch, kernel)


def _resident(kernel: Any) -> int:
    """Return how many blocks of a loaded kernel fit on a multiprocessor, by registers, threads and shared memory."""
    properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
    threads = kernel.metadata.num_warps * 32
    registers = properties["max_num_regs"] // (max(kernel.n_regs, 1) * threads)
    reserved = 1024  # bytes reserved per block in addition (CUDA C Programming Guide, shared memory)
    shared = (properties["max_shared_mem"] + reserved) // (kernel.metadata.shared + reserved)
    return max(1, min(registers, shared, 2048 // threads))


def usable(device: int, sm_margin: int) -> int:
    """Return the number of multiprocessors that `sm_margin` leaves for the kernel, at least one."""
    return max(1, driver.active.utils.get_device_properties(device)["multiprocessor_count"] - sm_margin)
