"""Kernel launches: a launch as a value, its tables and memory, and launches that are repeated by kept handles.

A `LaunchCall` is a launch before it happens: one value serves a plain launch, a compile without a launch
(`kernel.warmup`) and a kept handle.

`kernel[grid](...)` binds and specializes every argument at each launch. With kept handles the host's share of a launch
is a few microseconds: a call is described once, as a `Repeat`. From then on only its tensors change, and the compiled
kernel itself is called, as `kernel[grid](...)` does in its last line (`CompiledKernel.run`, the same in Triton 3.6 and
3.7). In the interpreter, which compiles nothing, a repeat runs the call itself.
Guarantees: a repeat launches the kernel that `call.run()` would launch, on the current device and stream, as long as
the tensors keep their dtypes and shapes and what `layouts` returns for them; an unknown combination is compiled once.
Triton's launch hooks are not called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextvars import Token
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime._allocation import _allocator  # `triton.set_allocator` sets it; no public function reads it
from triton.runtime.jit import JITFunction

# --- global memory of a launch ---------------------------------------------------------------------------------------


DESCRIPTOR_BYTES = 128
"""Of global memory, for a tensor descriptor (CUDA driver API, CUtensorMap)."""

_counters: dict[tuple[int, int], Tensor] = {}


def counter_for(like: Tensor, stream: int) -> Tensor:
    """A counter for a launch on `stream`, the current one, which leaves it at 0."""
    # A graph that is being captured may be replayed beside any other launch: it has its own, and sets it to 0.
    if capturing():
        return torch.zeros_like(like)
    # Launches of one stream follow each other.
    key = like.get_device(), stream
    if key not in _counters:
        _counters[key] = torch.zeros_like(like)
    return _counters[key]


def capturing() -> bool:
    """Whether the current stream is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Scratch:
    """While it is entered, launches of this thread and context get their memory here; autograd brings its own."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before: Token[Any] = _allocator.set(allocate)

    def __exit__(self, *_: object) -> None:
        _allocator.reset(self._before)


def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """`size` bytes for a launch on the current stream, until it is enqueued; torch aligns to 512 bytes."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


# --- a launch as a value ---------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """How a kernel is cut and compiled. `block_m`: query rows; `block_n`: key rows; both powers of two from 16.

    `form`: how rows reach the multiprocessor, one of `FORMS`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    form: str = "pointers"


FORMS = ("pointers", "descriptors", "specialized", "gluon")
"""By loads of each thread; by tensor descriptors (TMA, from sm_90 on); the same by a producer warp of its own, as
Triton's compiler splits the kernel or as it is written out in Gluon."""

DESCRIPTORS = {"descriptors": 2, "specialized": 3, "gluon": 3}
"""How many tensor descriptors a program of each form has at once, in global memory; of Gluon's backward 4."""

VARYING = (
    "block_count", "slots", "batches", "section", "group", "first_kv_head",
    "lse_batch", "lse_head", "delta_batch", "delta_head", "seed_low", "seed_high", "threshold",
)  # fmt: skip
"""Integer arguments of the attention kernels that Triton shall not specialize on, for they change with the documents of
a step, and a training run would stop to compile. Strides of q, k, v, out and their gradients stay specialized: what
divides them decides how wide their loads are. Seeds differ in each call."""

PLACES, POSITIONS = 4, 5
"""Columns of `Table.places` and `Table.positions`."""

FIRST, LAST = 1, 2
"""Flags of a query block: no earlier launch of the pass has met its rows, no later one will."""


class BlockColumn:
    """Numbers of the columns of `Table.blocks`; `END_ENTRY` is one past the last entry."""

    FIRST_ROW, ROW_STRIDE, ROWS, FIRST_HEAD, HEADS, FIRST_ENTRY, END_ENTRY, FLAGS = range(8)
    COUNT = 8


class EntryColumn:
    """Numbers of the columns of `Table.entries`; columns after `Q_HEADS` are zero.

    `FIRST_VISIBLE` .. `END_VISIBLE` and `FIRST_FULL` .. `END_FULL` count blocks of the entry's rows, ends excluded.
    """

    FIRST_ROW, ROW_STRIDE, ROWS, OWN_STEP, OTHER_STEP, LO, HI = range(7)
    FIRST_VISIBLE, FIRST_FULL, END_FULL, END_VISIBLE, FIRST_Q_HEAD, Q_HEADS = range(7, 13)
    COUNT = 16


class Table(NamedTuple):
    """What one launch works through, int32 on the kernel's device.

    `blocks` (blocks, 8), columns as in `BlockColumn`: first row, row stride, rows, first head, heads, first entry, one
    past the last entry, flags.
    `entries` (entries, 16), columns as in `EntryColumn`: the other side's first row, row stride and rows; the band
    own_step, other_step, lo, hi: row i of the block sees row j of the entry where
    lo <= i * own_step - j * other_step <= hi; of the entry's rows cut into blocks the first visible, first full, one
    past the last full and one past the last visible one; the first query head beyond own head * group, query heads;
    three zeros. `slots`: the most heads of any block.
    `places` (entries, 4), where positions matter beyond the band: the distance that ALiBi takes, of the block's first
    row less the entry's; the position strides of block and entry; the query head of the call that the buffer's head 0
    is. `positions` (entries, 5), for dropout: the position of the block's first row and the stride of its positions,
    the same two of the entry, and that head; the low 32 bits of each. `together`: 4 where keys follow each other and
    each block of them begins at a multiple of 4, else 1.
    """

    blocks: Tensor
    entries: Tensor
    slots: int
    places: Tensor | None = None
    positions: Tensor | None = None
    together: int = 1


class LaunchCall(NamedTuple):
    """`kernel[grid](*args, **meta)`, not yet done. `meta`: the compile-time constants, `num_warps`, `num_stages`.

    `persistent`: a grid of as many programs as run at once is faster, and does the same work. `counter`: of the
    arguments, the one element that programs count the items on that they take; 0 before a launch and after it.
    `seed_at`: which of the arguments is the lower half of dropout's seed; the upper one follows.
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
            self.kernel[self.grid](*self.args, **self.meta)


def padded(dim: int) -> int:
    """The power of two, at least 16, in which a matrix product holds a head dimension."""
    return max(16, 1 << (dim - 1).bit_length())


# --- launches by kept handles ----------------------------------------------------------------------------------------


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
