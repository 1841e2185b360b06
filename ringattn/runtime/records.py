"""Packed records: how a content lies in a flat buffer, and the copies into and out of it.

Wire order has head part after part, in each rows outermost, then batches, heads, and the values beside each other, as
K and V; padding and scalars follow, as the scales of eight bits or the lse of an output (see `plan.RecordLayout`).
Every view is row-first, (rows, batch, heads, dim), and strided: nothing here allocates, but for quantizing and
restoring without a kernel, and merging.
Guarantees: a block is rounded when it is packed to eight bits, and what is relayed is copied bit by bit, so every
reader of a block restores the same values. A kernel that moves rows does what copies of runs do, bit for bit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import EIGHT_BIT, FLOATS
from ringattn.engine.base import KV, merge_
from ringattn.errors import PlanError, RingError
from ringattn.planner.plan import RecordLayout
from ringattn.schedule.content import Content, HeadRows, Overlap

TORCH_DTYPE = {name: getattr(torch, name) for name in (*FLOATS, *EIGHT_BIT)}
# The largest number of each code: the largest of a record is mapped onto it.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: division is defined for zeros and accurate for tiny values."""


class Rows(NamedTuple):
    """One of a record's values for some rows: x (rows, batch, heads, dim), with its scalars, (rows, batch, heads) each.

    In eight bits x are codes, and their only scalar is the scale.
    """

    x: Tensor
    scalars: tuple[Tensor, ...] = ()

    def take(self, at: slice) -> Rows:
        """Some of the rows."""
        return Rows(self.x[at], tuple(one[at] for one in self.scalars))

    @property
    def coded(self) -> bool:
        """Whether x are codes of eight bits."""
        return self.x.dtype in LARGEST


class PackedBuffer:
    """A buffer's flat tensor with views of the values of each head part of its content."""

    def __init__(self, flat: Tensor, content: Content, batch: int, form: RecordLayout, dtype: torch.dtype) -> None:
        """`flat`: contiguous, as many elements as the content has records; bytes where they have scalars."""
        self.flat, self.content, self.form, self.dtype, self.batch = flat, content, form, dtype, batch
        self.lists: dict[Any, Tensor] = {}
        """Lists of rows on the device, see `_row_list`."""
        self.parts: dict[StridedRange, tuple[Rows, ...]] = {}
        self._records: dict[StridedRange, Tensor] = {}
        records = sum(part.row_count * part.heads.count for part in content) * batch
        # A record is one row, batch and head: its width in elements follows from the flat size.
        width = flat.numel() // records if records else 0
        at = 0
        for part in content:
            count = part.row_count * batch * part.heads.count * width
            # One head part after the other; rows outermost, so a range of rows is one contiguous slice:
            #    flat  | part 0: row 0 (batch, head, K|V) . row 1 . ... | part 1: row 0 . row 1 . ... |
            block = flat[at : at + count].view(part.row_count, batch, part.heads.count, width)
            self._records[part.heads] = block
            self.parts[part.heads] = _values(block, form, dtype)
            at += count

    def part(self, heads: StridedRange) -> KV:
        """K and V of one head part."""
        k, v = self.parts[heads]
        # The first head of the part, by which the engine finds a head of the tiles in these tensors.
        return KV(k.x, v.x, heads.start)

    def flattened(self) -> tuple[Rows, ...]:
        """All values as rows of one head, (rows times heads, batch, 1, dim). Only where every part has one head."""
        # With one head in every part, part after part is row after row.
        rows = sum(part.row_count for part in self.content)
        return _values(self.flat.view(rows, self.batch, 1, -1), self.form, self.dtype)

    def spots(self, part: HeadRows) -> Iterator[list[Overlap]]:
        """Where the rows of a part lie here, range by range."""
        # A content has one part for each range of heads.
        return next(mine for mine in self.content if mine.heads == part.heads).locate(part.rows)

    def zero(self, rows: Content) -> None:
        """Set some packed rows of its head parts to zero."""
        for heads, runs in rows:
            for run in runs:
                self._records[heads][run.start : run.stop : run.stride].zero_()

    def rows(self, heads: StridedRange, packed: StridedRange) -> tuple[Rows, ...]:
        """The values of some packed rows of one head part."""
        return tuple(one.take(slice(packed.start, packed.stop, packed.stride)) for one in self.parts[heads])


def _values(block: Tensor, form: RecordLayout, dtype: torch.dtype) -> tuple[Rows, ...]:
    """The values in records (rows, batch, heads, width), with their scalars."""
    # With scalars the record is bytes:  | values of the dtype | padding | scalars |
    values = block if not form.scalars else block[..., : sum(form.dims) * dtype.itemsize].view(dtype)
    xs = values.split(form.dims, -1)
    if not form.scalars:
        return tuple(map(Rows, xs))
    # Scalars stand at the end of the record, those of the first value first.
    scalars = block.view(TORCH_DTYPE[form.scalar_dtype])[..., -len(xs) * form.scalars :].unbind(-1)
    return tuple(Rows(x, scalars[n * form.scalars : (n + 1) * form.scalars]) for n, x in enumerate(xs))


class LocalTensors:
    """The rank's own tensors of one kind, row-first views of the caller's, addressed like `PackedBuffer`."""

    def __init__(self, *values: Tensor, scalars: Sequence[Tensor] = ()) -> None:
        """`values`: (rows, batch, heads, dim) each, as K and V; `scalars`: (rows, batch, heads) each, of one value."""
        self.values = tuple(Rows(x, tuple(scalars)) for x in values)

    def part(self, heads: StridedRange) -> KV:
        """All rows of K and V of some heads."""
        k, v = (one.x[:, :, heads.start : heads.stop] for one in self.values)
        return KV(k, v, heads.start)

    def spots(self, part: HeadRows) -> Iterator[list[Overlap]]:
        """Where the rows of a part lie here, range by range: where they say."""
        # All rows are here at their own number, so a range is an overlap with itself.
        return ([Overlap(StridedRange(0, run.count), run)] for run in part.rows)

    def rows(self, heads: StridedRange, packed: StridedRange) -> tuple[Rows, ...]:
        """The values of some rows and heads."""
        rows, some = slice(packed.start, packed.stop, packed.stride), slice(heads.start, heads.stop)
        return tuple(
            Rows(one.x[rows, :, some], tuple(each[rows, :, some] for each in one.scalars)) for one in self.values
        )


BufferRef = PackedBuffer | LocalTensors


def pack(source: BufferRef, into: PackedBuffer) -> None:
    """Gather `into`'s content out of `source`: copied, converted, quantized to eight bits or restored from them."""
    # A gather by one kernel in place of a copy for each range; it knows no scalars.
    if isinstance(source, LocalTensors) and not into.form.scalars and kernel_is_faster(into, into.flat.device):
        gather_by_kernel(source, into)
        return
    for have, want in _pairs(source, into, into.content):
        # Same coding on both sides is a plain copy, scales included: a forwarded block keeps its bits.
        if have.coded and not want.coded:
            restore(have.x, have.scalars[0], want.x)
        elif want.coded and not have.coded:
            quantize(have.x, want.x, want.scalars[0])
        else:
            want.x.copy_(have.x)
            for mine, theirs in zip(have.scalars, want.scalars, strict=True):
                theirs.copy_(mine)


def add(part: PackedBuffer, into: BufferRef, first: bool = False) -> None:
    """Add a content into the same rows of `into`; merge it where its values are outputs beside their lse.

    `first`: these rows are unset, and get it.
    """
    if isinstance(into, LocalTensors) and not part.form.scalars and kernel_is_faster(part, part.flat.device):
        add_by_kernel(part, into, first)
        return
    for have, want in _pairs(part, into, part.content):
        if have.scalars:
            # A packed lse is (rows, batch, heads); the merge wants (batch, heads, rows).
            lse, part_lse = (one.scalars[0].permute(1, 2, 0) for one in (want, have))
            merge_(want.x, lse, have.x, part_lse)
        elif first:
            want.x.copy_(have.x)
        else:
            want.x.add_(have.x)


def _pairs(source: BufferRef, into: BufferRef, content: Content) -> Iterator[tuple[Rows, Rows]]:
    """The same rows of both, where they are evenly spaced in both; one of them holds `content` and nothing else."""
    for part in content:
        for ours, theirs in zip(source.spots(part), into.spots(part), strict=True):
            for one in ours:
                for other in theirs:
                    # Rows held by both are evenly spaced on either side, so each overlap is one strided copy:
                    #    source  overlap 0..4 at packed 10..14     into  overlap 2..9 at rows 0..7
                    #    common  2..4: packed 12..14 -> rows 0..2
                    if both := one.common_rows(other):
                        yield from zip(source.rows(part.heads, both[0]), into.rows(part.heads, both[1]), strict=True)


def from_row(kv: KV, row: int, step: int = 1) -> KV:
    """The same block from `row` on, every `step`-th row."""
    # Views: the tiles of the call count their rows from here.
    return KV(kv.k[row::step], kv.v[row::step], kv.first_head) if row or step > 1 else kv


def quantize(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """x (rows, batch, heads, dim) as `values`, alike in int8 or float8_e4m3fn, times `scales` (rows, batch, heads).

    What `ringattn.kernels.rows` does and promises about errors: by its kernel on CUDA, elsewhere in plain torch
    with the same bits.
    """
    if _kernel_serves(x.device, values.dtype):
        from ringattn.kernels.rows import quantize_call

        quantize_call(x, values, scales).run()
        return
    full = x.float()
    # One scale for each record (row, batch, head); clamped so that rows of zeros divide by a normal number.
    scale = (full.abs().amax(-1) / LARGEST[values.dtype]).clamp_min(SMALLEST_SCALE)
    scale += (full * 0.0).sum(-1)  # NaN where a value is not finite
    steps = full / scale[..., None]
    # int8 would truncate, so round half up; float8 rounds in the copy.
    values.copy_(torch.floor(steps + 0.5) if values.dtype == torch.int8 else steps)
    scales.copy_(scale)


def restore(values: Tensor, scales: Tensor, x: Tensor) -> None:
    """The inverse of `quantize`: x gets values * scales, rounded to its own dtype."""
    if _kernel_serves(x.device, values.dtype):
        from ringattn.kernels.rows import restore_call

        restore_call(values, scales, x).run()
        return
    x.copy_(values.float() * scales[..., None])


@lru_cache
def _kernel_serves(device: torch.device, code: torch.dtype) -> bool:
    """Triton is optional, and its float8_e4m3fn needs sm_89."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return code == torch.int8 or torch.cuda.get_device_capability(device) >= (8, 9)


# --- packing by one kernel per value, on CUDA devices ----------------------------------------------------------------


class Side(NamedTuple):
    """A value in the rank's own tensor and in the records, (rows, batch, heads, dim) each, and which rows these hold.

    `rows`: int64 indices into `own`, one for each row of `packed`.
    """

    own: Tensor
    packed: Tensor
    rows: Tensor


def kernel_is_faster(records: PackedBuffer, device: torch.device) -> bool:
    """Whether the kernel is faster: several runs on a CUDA device, with Triton there."""
    # One range is one strided copy already; many would be as many small kernels.
    several = sum(len(part.rows) for part in records.content) > 1
    return several and device.type == "cuda" and find_spec("triton") is not None


def gather_by_kernel(local: LocalTensors, records: PackedBuffer) -> None:
    """Fill the records, values of any floating dtype without scalars, from the rank's own tensors."""
    from ringattn.kernels.rows import move_rows_call

    for own, packed, rows in _sides(local, records):
        move_rows_call(own, packed, gather=rows).run()


def add_by_kernel(records: PackedBuffer, local: LocalTensors, first: bool = False) -> None:
    """Add the records to the rank's own tensors; where they are the `first`, write them."""
    from ringattn.kernels.rows import move_rows_call

    for own, packed, rows in _sides(local, records):
        move_rows_call(packed, own, scatter=rows, add=not first).run()


def _sides(local: LocalTensors, records: PackedBuffer) -> Iterator[Side]:
    # All parts at once: with (row, head) as one index, row * ratio + head addresses the local tensor flat.
    #    x[row, batch, head]  ->  flat[row * ratio + head]      ratio = row stride / head stride
    # Requires row strides that are multiples of the head stride; else part by part below.
    if len(records.content) > 1 and all(part.heads.count == 1 for part in records.content):
        if all(_step(value.x) and value.x.stride(0) % _step(value.x) == 0 for value in local.values):
            for value, packed in zip(local.values, records.flattened(), strict=True):
                own, ratio = value.x, value.x.stride(0) // _step(value.x)
                # The last index is (rows - 1) * ratio + heads - 1, so the view ends inside the tensor.
                size = ((own.shape[0] - 1) * ratio + own.shape[2], own.shape[1], 1, own.shape[3])
                flat = own.as_strided(size, (_step(own), own.stride(1), 0, 1))
                yield Side(flat, packed.x, _row_list(records, None, ratio, own.device))
            return
    for number, value in enumerate(local.values):
        yield from _by_part(value.x, records, number)


def _step(x: Tensor) -> int:
    """Elements from one head of (rows, batch, heads, dim) to the next, or where there is one from row to row."""
    return x.stride(2) if x.shape[2] > 1 else x.stride(0)


def _by_part(x: Tensor, records: PackedBuffer, number: int) -> Iterator[Side]:
    for part in records.content:
        heads = slice(part.heads.start, part.heads.stop)
        rows = _row_list(records, part.heads, 1, x.device)
        yield Side(x[:, :, heads], records.parts[part.heads][number].x, rows)


def _row_list(records: PackedBuffer, heads: StridedRange | None, ratio: int, device: torch.device) -> Tensor:
    """int64: the owner's rows of one part in order, or of all, each times `ratio` plus its head."""
    # Kept with the buffer: made on the first pass, then read by every one.
    key = heads, ratio, device
    if key not in records.lists:
        rows = [
            # Content order is wire order: part after part, range after range.
            torch.arange(run.start, run.stop, run.stride) * ratio + (part.heads.start if heads is None else 0)
            for part in records.content
            if heads in (None, part.heads)
            for run in part.rows
        ]
        records.lists[key] = torch.cat(rows).to(device)
    return records.lists[key]


# --- the pool: the memory of all buffers -----------------------------------------------------------------------------
# The one piece of memory that a ring's passes work in.
# Guarantees: nothing is allocated inside a pass; one pass at a time; with `poison`, memory that was not written in this
# pass, or that was released, reads as NaN in every floating dtype, so that a test notices, and a write past the end of
# a pass's memory, or before its start, ends the pass with an error (canaries).
# Not covered: what the slots hold; the placement of a plan says where they are.

ALIGNMENT_BYTES = 256
POISON = 0xFF
CANARY = 0xA5


class Pool:
    """An arena that `allocate(nbytes)` gave, a flat uint8 tensor such as `Transport.allocate` returns.

    `high_water_bytes`: of the largest pass; `passes`: begun so far; `growths`: times that new memory was taken. All
    other passes used again what was there.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], poison: bool = False) -> None:
        self._allocate = allocate
        self._poison = poison
        self._running = threading.Lock()
        self._edges: tuple[torch.Tensor, ...] = ()
        self._canaries: tuple[torch.Tensor, ...] = ()
        self._nothing = self._aligned(0).clone()
        self._arena = self._nothing
        self.taken_bytes = 0
        """Bytes of the arena, or those that it had when it was let go."""
        self.high_water_bytes = self.passes = self.growths = 0

    @property
    def nbytes(self) -> int:
        """Bytes that a pass can use without growth."""
        return self._arena.numel()

    @property
    def reuses(self) -> int:
        """Passes that found enough memory."""
        return self.passes - self.growths

    def report(self) -> dict[str, int]:
        """Bytes now and in the largest pass, and how many passes needed no new memory."""
        return {
            "pool_bytes": self.nbytes, "pool_high_water_bytes": self.high_water_bytes, "pool_reuses": self.reuses,
        }  # fmt: skip

    def reserve(self, nbytes: int) -> None:
        """Make room for `nbytes`. Growth makes all former views stale. Raises `RingError` while a pass is running."""
        if self._running.locked():
            raise RingError("the pool cannot grow while a pass is running")
        self._grow(nbytes)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """The uint8 bytes [offset, offset + nbytes). Raises `PlanError` outside the arena or off the alignment."""
        if offset % ALIGNMENT_BYTES or not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise PlanError(
                f"no slot of {nbytes} bytes at {offset}: the arena has {self.nbytes}, slots align to {ALIGNMENT_BYTES}"
            )
        return self._arena[offset : offset + nbytes]

    def slot(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of `shape` at `offset` bytes; its contents are whatever was written there."""
        return self.view(offset, math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))

    def release(self, offset: int, nbytes: int) -> None:
        """Say that these bytes are not read before they are written again."""
        if self._poison:
            self.view(offset, nbytes).fill_(POISON)

    def begin_pass(self, nbytes: int) -> None:
        """Start a pass that uses [0, nbytes), growing if need be. Raises `RingError` while another is running."""
        if not self._running.acquire(blocking=False):
            raise RingError("one pass at a time: another is still running on this ring")
        try:
            self._grow(nbytes)
        except BaseException:
            self._running.release()
            raise
        self.passes += 1
        self.high_water_bytes = max(self.high_water_bytes, nbytes)
        self.release(0, nbytes)
        if self._poison:
            self._canaries = (*self._edges, self._arena[nbytes:])
            for canary in self._canaries:
                canary.fill_(CANARY)

    def end_pass(self) -> None:
        """End the running pass, whether it succeeded or not.

        Raises `RingError` when none is running, and `PlanError` when it wrote outside its memory.
        """
        if not self._running.locked():
            raise RingError("no pass is running")
        intact = all(bool((canary == CANARY).all()) for canary in self._canaries)
        self.release(0, self.nbytes)
        self._running.release()
        if not intact:
            raise PlanError("a pass wrote outside the bytes that its plan asked for; the plan or a kernel is wrong")

    def release_arena(self) -> None:
        """Let go of the memory. Views that still exist keep it."""
        self._arena, self._edges, self._canaries = self._nothing, (), ()

    def reset_high_water(self) -> None:
        """Forget the largest pass so far."""
        self.high_water_bytes = 0

    def _grow(self, nbytes: int) -> None:
        if nbytes > self.nbytes:
            self.release_arena()  # the old memory must be free before the new is taken
            self.taken_bytes = 0
            self._arena = self._aligned(nbytes)
            self.taken_bytes = nbytes
            self.growths += 1
            self.release(0, nbytes)

    def _aligned(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):  # it outlives the pass that needs it: the next one may be a training step's
            memory = self._allocate(nbytes + ALIGNMENT_BYTES)
            start = -memory.data_ptr() % ALIGNMENT_BYTES
            self._edges = memory[:start], memory[start + nbytes :]
            return memory[start : start + nbytes]
