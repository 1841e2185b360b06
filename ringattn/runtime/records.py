"""Packed records: the layout of a content in a flat buffer, and the copies into and out of it.

Wire order: one head part after the other; within a part rows are outermost, then batch, then heads. A record holds the
values of one row, batch and head next to each other, for example K and V, then padding, then scalars, for example the
scales of eight-bit codes or the lse of an output (see `plan.RecordLayout`). Every view is row-first, (rows, batch,
heads, dim), and strided. Only merging, and quantizing and restoring without a kernel, allocate memory.
Guarantees: a block is rounded once, when it is packed to eight bits. A relayed block is copied bit by bit, so every
reader of a block restores the same values. A kernel that moves rows gives the same bits as copies of row ranges.
"""

from __future__ import annotations

import itertools
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
# The largest number of each eight-bit dtype: the largest value of a record is mapped to it.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: division is defined for zeros and accurate for tiny values."""


class Rows(NamedTuple):
    """One value of some records, such as K: x (rows, batch, heads, dim) and its scalars, (rows, batch, heads) each.

    If x holds eight-bit codes, its only scalar is their scale.
    """

    x: Tensor
    scalars: tuple[Tensor, ...] = ()

    def take(self, rows: slice) -> Rows:
        """Return the rows that the slice `rows` selects."""
        return Rows(self.x[rows], tuple(scalar[rows] for scalar in self.scalars))

    @property
    def coded(self) -> bool:
        """Whether x holds eight-bit codes."""
        return self.x.dtype in LARGEST


class PackedBuffer:
    """The flat tensor of a buffer, with views of the values of each head part of its content."""

    def __init__(self, flat: Tensor, content: Content, batch: int, form: RecordLayout, dtype: torch.dtype) -> None:
        """Create the views of `flat`, a contiguous tensor of the content's records.

        `form`: the layout of a record. `dtype`: the dtype of the values. `flat` has this dtype too, unless records have
        scalars: then it is uint8.
        """
        self.flat, self.content, self.form, self.dtype, self.batch = flat, content, form, dtype, batch
        self.lists: dict[Any, Tensor] = {}
        """Cached lists of rows on the device, see `_row_list`."""
        self.parts: dict[StridedRange, tuple[Rows, ...]] = {}
        self._records: dict[StridedRange, Tensor] = {}
        records = sum(part.row_count * part.heads.count for part in content) * batch
        # A record belongs to one row, batch and head. Its width in elements follows from the size of `flat`.
        width = flat.numel() // records if records else 0
        start = 0
        for part in content:
            count = part.row_count * batch * part.heads.count * width
            # One head part after the other. Rows are outermost, so a range of rows is one contiguous slice:
            #    flat  | part 0: row 0 (batch, head, K|V) . row 1 . ... | part 1: row 0 . row 1 . ... |
            block = flat[start : start + count].view(part.row_count, batch, part.heads.count, width)
            self._records[part.heads] = block
            self.parts[part.heads] = _values(block, form, dtype)
            start += count

    def part(self, heads: StridedRange) -> KV:
        """Return K and V of one head part."""
        k, v = self.parts[heads]
        # Tiles count heads of the whole tensor; the engine subtracts the first head of the part.
        return KV(k.x, v.x, heads.start)

    def flattened(self) -> tuple[Rows, ...]:
        """Return all values as rows of a single head, (rows * heads, batch, 1, dim). Every part must have one head."""
        # If every part has one head, the rows of all parts are contiguous.
        rows = sum(part.row_count for part in self.content)
        return _values(self.flat.view(rows, self.batch, 1, -1), self.form, self.dtype)

    def overlaps(self, part: HeadRows) -> Iterator[list[Overlap]]:
        """Yield one list for each range of rows of `part`: the positions of these rows in this buffer."""
        # A content has one part per range of heads.
        return next(each for each in self.content if each.heads == part.heads).locate(part.rows)

    def zero(self, rows: Content) -> None:
        """Set the packed `rows` of each head part to zero."""
        for heads, runs in rows:
            for run in runs:
                self._records[heads][run.start : run.stop : run.stride].zero_()

    def rows(self, heads: StridedRange, packed: StridedRange) -> tuple[Rows, ...]:
        """Return the values of the `packed` rows of one head part."""
        return tuple(value.take(slice(packed.start, packed.stop, packed.stride)) for value in self.parts[heads])


def _values(block: Tensor, form: RecordLayout, dtype: torch.dtype) -> tuple[Rows, ...]:
    """Return views of the values of a block of records (rows, batch, heads, width), with their scalars."""
    # A record with scalars consists of bytes:  | values of the dtype | padding | scalars |
    values = block if not form.scalars else block[..., : sum(form.dims) * dtype.itemsize].view(dtype)
    xs = values.split(form.dims, -1)
    if not form.scalars:
        return tuple(map(Rows, xs))
    # Scalars are at the end of the record, those of the first value first.
    scalars = block.view(TORCH_DTYPE[form.scalar_dtype])[..., -len(xs) * form.scalars :].unbind(-1)
    return tuple(Rows(x, scalars[n * form.scalars : (n + 1) * form.scalars]) for n, x in enumerate(xs))


class LocalTensors:
    """The local tensors of one kind, as row-first views of the caller's tensors, with the methods of `PackedBuffer`."""

    def __init__(self, *values: Tensor, scalars: Sequence[Tensor] = ()) -> None:
        """Take tensors of one kind, for example K and V.

        `values`: (rows, batch, heads, dim) each. `scalars`: (rows, batch, heads) each, if there is a single value.
        """
        self.values = tuple(Rows(x, tuple(scalars)) for x in values)

    def part(self, heads: StridedRange) -> KV:
        """Return all rows of K and V of these heads."""
        k, v = (value.x[:, :, heads.start : heads.stop] for value in self.values)
        return KV(k, v, heads.start)

    def overlaps(self, part: HeadRows) -> Iterator[list[Overlap]]:
        """Yield one list for each range of rows of `part`: the positions of these rows in the tensors."""
        # All rows are present and in order, so each range is at its row numbers.
        return ([Overlap(StridedRange(0, run.count), run)] for run in part.rows)

    def rows(self, heads: StridedRange, packed: StridedRange) -> tuple[Rows, ...]:
        """Return the values of the `packed` rows of these heads."""
        index = slice(packed.start, packed.stop, packed.stride), slice(None), slice(heads.start, heads.stop)
        return tuple(Rows(value.x[index], tuple(scalar[index] for scalar in value.scalars)) for value in self.values)


BufferRef = PackedBuffer | LocalTensors


def pack(source: BufferRef, into: PackedBuffer) -> None:
    """Fill `into` with its rows of `source`, converting values to the dtype of `into` (also to or from eight bits)."""
    # Use one kernel instead of one copy per range. The kernel does not support scalars.
    if isinstance(source, LocalTensors) and not into.form.scalars and kernel_is_faster(into, into.flat.device):
        gather_by_kernel(source, into)
        return
    for src, dst in _pairs(source, into, into.content):
        if src.coded and not dst.coded:
            restore(src.x, src.scalars[0], dst.x)
        elif dst.coded and not src.coded:
            quantize(src.x, dst.x, dst.scalars[0])
        else:
            # Codes are copied with their scales, so a relayed block keeps its bits.
            dst.x.copy_(src.x)
            for src_scalar, dst_scalar in zip(src.scalars, dst.scalars, strict=True):
                dst_scalar.copy_(src_scalar)


def add(part: PackedBuffer, into: BufferRef, overwrite: bool = False) -> None:
    """Add the rows of `part` to the same rows of `into`. Outputs, which have an lse, are merged instead.

    `overwrite`: copy gradients instead of adding them, because the rows of `into` are not set yet.
    """
    if isinstance(into, LocalTensors) and not part.form.scalars and kernel_is_faster(part, part.flat.device):
        add_by_kernel(part, into, overwrite)
        return
    for src, dst in _pairs(part, into, part.content):
        if src.scalars:
            # A packed lse is (rows, batch, heads); the merge takes (batch, heads, rows).
            dst_lse, src_lse = (rows.scalars[0].permute(1, 2, 0) for rows in (dst, src))
            merge_(dst.x, dst_lse, src.x, src_lse)
        elif overwrite:
            dst.x.copy_(src.x)
        else:
            dst.x.add_(src.x)


def _pairs(source: BufferRef, into: BufferRef, content: Content) -> Iterator[tuple[Rows, Rows]]:
    """Yield pairs of views of the rows that `source` and `into` have in common, evenly spaced on both sides.

    One of the two has exactly the rows of `content`.
    """
    for part in content:
        for in_source, in_into in zip(source.overlaps(part), into.overlaps(part), strict=True):
            for src, dst in itertools.product(in_source, in_into):
                # Common rows are evenly spaced on either side, so each overlap is one strided copy:
                #    source  overlap 0..4 at packed 10..14     into  overlap 2..9 at rows 0..7
                #    common  2..4: packed 12..14 -> rows 0..2
                if common := src.common_rows(dst):
                    yield from zip(source.rows(part.heads, common[0]), into.rows(part.heads, common[1]), strict=True)


def from_row(kv: KV, row: int, step: int = 1) -> KV:
    """Return a view of every `step`-th row of K and V from `row` on. Tiles count the rows of this view."""
    return KV(kv.k[row::step], kv.v[row::step], kv.first_head) if row or step > 1 else kv


def quantize(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantize x (rows, batch, heads, dim) to eight bits, so that x is about `values` times `scales`.

    `values` has the shape of x, in int8 or float8_e4m3fn; `scales` is (rows, batch, heads). On CUDA the kernel of
    `ringattn.kernels.rows` does this, which states the error bound; elsewhere plain torch gives the same bits.
    """
    if not x.shape[-1]:
        scales.fill_(SMALLEST_SCALE)  # records of dimension 0 have no largest value
        return
    if _kernel_serves(x.device, values.dtype):
        from ringattn.kernels.rows import quantize_call

        quantize_call(x, values, scales).run()
        return
    full = x.float()
    # One scale per record (row, batch, head), clamped so that rows of zeros are divided by a normal number.
    scale = (full.abs().amax(-1) / LARGEST[values.dtype]).clamp_min(SMALLEST_SCALE)
    scale += (full * 0.0).sum(-1)  # NaN if a value is not finite
    steps = full / scale[..., None]
    # int8 would truncate, so round half up; float8 rounds in the copy.
    values.copy_(torch.floor(steps + 0.5) if values.dtype == torch.int8 else steps)
    scales.copy_(scale)


def restore(values: Tensor, scales: Tensor, x: Tensor) -> None:
    """Invert `quantize`: write values * scales to x, rounded to its dtype."""
    if x.shape[-1] and _kernel_serves(x.device, values.dtype):
        from ringattn.kernels.rows import restore_call

        restore_call(values, scales, x).run()
        return
    x.copy_(values.float() * scales[..., None])


@lru_cache
def _kernel_serves(device: torch.device, code: torch.dtype) -> bool:
    """Return whether the Triton kernel supports this device and code dtype. float8_e4m3fn needs sm_89."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return code == torch.int8 or torch.cuda.get_device_capability(device) >= (8, 9)


# --- packing by one kernel per value, on CUDA devices ----------------------------------------------------------------


class Side(NamedTuple):
    """Both places of a tensor, such as K, in a move: the local tensor and the packed records.

    Both are (rows, batch, heads, dim).

    `rows`: for each row of `packed`, the int64 index of the same row in `local`.
    """

    local: Tensor
    packed: Tensor
    rows: Tensor


def kernel_is_faster(records: PackedBuffer, device: torch.device) -> bool:
    """Return whether the kernel is faster than copies: for several row ranges on a CUDA device, if Triton is there."""
    # A single range is one strided copy; several ranges would be several small kernels.
    has_several_ranges = sum(len(part.rows) for part in records.content) > 1
    return has_several_ranges and device.type == "cuda" and find_spec("triton") is not None


def gather_by_kernel(local: LocalTensors, records: PackedBuffer) -> None:
    """Fill the records (of any floating dtype, without scalars) from the local tensors."""
    from ringattn.kernels.rows import move_rows_call

    for values, packed, rows in _sides(local, records):
        move_rows_call(values, packed, gather=rows).run()


def add_by_kernel(records: PackedBuffer, local: LocalTensors, overwrite: bool = False) -> None:
    """Add the records to the local tensors; with `overwrite`, overwrite them instead."""
    from ringattn.kernels.rows import move_rows_call

    for values, packed, rows in _sides(local, records):
        move_rows_call(packed, values, scatter=rows, add=not overwrite).run()


def _sides(local: LocalTensors, records: PackedBuffer) -> Iterator[Side]:
    # All parts in one launch: with (row, head) as one index, row * ratio + head addresses the local tensor.
    #    x[row, batch, head]  ->  flat[row * ratio + head]      ratio = row stride / head stride
    # The row stride must be a multiple of the head stride; otherwise one launch per part, below.
    if len(records.content) > 1 and all(part.heads.count == 1 for part in records.content):
        if all(_step(value.x) and value.x.stride(0) % _step(value.x) == 0 for value in local.values):
            for value, packed in zip(local.values, records.flattened(), strict=True):
                x, ratio = value.x, value.x.stride(0) // _step(value.x)
                # The last index is (rows - 1) * ratio + heads - 1, so the view ends inside the tensor.
                size = ((x.shape[0] - 1) * ratio + x.shape[2], x.shape[1], 1, x.shape[3])
                flat = x.as_strided(size, (_step(x), x.stride(1), 0, 1))
                yield Side(flat, packed.x, _row_list(records, None, ratio, x.device))
            return
    for number, value in enumerate(local.values):
        yield from _by_part(value.x, records, number)


def _step(x: Tensor) -> int:
    """Return the stride of the heads of (rows, batch, heads, dim); with one head, the stride of the rows."""
    return x.stride(2) if x.shape[2] > 1 else x.stride(0)


def _by_part(x: Tensor, records: PackedBuffer, number: int) -> Iterator[Side]:
    for part in records.content:
        heads = slice(part.heads.start, part.heads.stop)
        rows = _row_list(records, part.heads, 1, x.device)
        yield Side(x[:, :, heads], records.parts[part.heads][number].x, rows)


def _row_list(records: PackedBuffer, heads: StridedRange | None, ratio: int, device: torch.device) -> Tensor:
    """Return the local rows of the part of `heads` in packed order, int64.

    With `heads` None, return the rows of all parts, each as row * ratio + head.
    """
    # Cached with the buffer: made in the first pass and used by all later ones.
    key = heads, ratio, device
    if key not in records.lists:
        rows = [
            # Content order is wire order: part after part, range after range.
            torch.arange(run.start, run.stop, run.stride, device="cpu") * ratio
            + (part.heads.start if heads is None else 0)
            for part in records.content
            if heads in (None, part.heads)
            for run in part.rows
        ]
        records.lists[key] = torch.cat(rows).to(device)
    return records.lists[key]


# --- the pool: the memory of all buffers -----------------------------------------------------------------------------
# Guarantees: nothing is allocated during a pass, and one pass runs at a time. With `poison`, memory that was not
# written in this pass, or that was released, reads as NaN in every floating dtype, and a write before the start or past
# the end of the memory of a pass ends it with an error (canaries). The placement decides what is stored where.

ALIGNMENT_BYTES = 256
POISON = 0xFF
CANARY = 0xA5


class Pool:
    """The arena in which the passes of a ring run: a flat uint8 tensor that `allocate(nbytes)` returns.

    `high_water_bytes`: the size of the largest pass; `passes`: the number of passes begun; `growths`: how many of them
    needed a larger arena.
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
        """Bytes of the arena, or, after its release, the bytes it had."""
        self.high_water_bytes = self.passes = self.growths = 0

    @property
    def nbytes(self) -> int:
        """Bytes that a pass can use without growing the arena."""
        return self._arena.numel()

    @property
    def reuses(self) -> int:
        """The number of passes that needed no new memory."""
        return self.passes - self.growths

    def report(self) -> dict[str, int]:
        """Return the bytes of the arena and of the largest pass, and the number of passes that needed no new memory."""
        return {
            "pool_bytes": self.nbytes, "pool_high_water_bytes": self.high_water_bytes, "pool_reuses": self.reuses,
        }  # fmt: skip

    def reserve(self, nbytes: int) -> None:
        """Grow to at least `nbytes`. Growth invalidates all earlier views. Raises `RingError` while a pass runs."""
        if self._running.locked():
            raise RingError("the pool cannot grow while a pass is running")
        self._grow(nbytes)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes [offset, offset + nbytes). Raises `PlanError` outside the arena or for an unaligned offset."""
        if offset % ALIGNMENT_BYTES or not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise PlanError(
                f"no slot of {nbytes} bytes at {offset}: the arena has {self.nbytes}, slots align to {ALIGNMENT_BYTES}"
            )
        return self._arena[offset : offset + nbytes]

    def slot(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of `shape` at `offset` bytes, with the contents last written there."""
        return self.view(offset, math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))

    def release(self, offset: int, nbytes: int) -> None:
        """Declare that nothing reads these bytes before they are written again. With `poison`, fill them with NaN."""
        if self._poison:
            self.view(offset, nbytes).fill_(POISON)

    def begin_pass(self, nbytes: int) -> None:
        """Start a pass that uses bytes [0, nbytes); grow if necessary. Raises `RingError` while another pass runs."""
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

        Raises `RingError` if no pass is running, and `PlanError` if the pass wrote outside its memory.
        """
        if not self._running.locked():
            raise RingError("no pass is running")
        intact = all(bool((canary == CANARY).all()) for canary in self._canaries)
        self.release(0, self.nbytes)
        self._running.release()
        if not intact:
            raise PlanError("a pass wrote outside the bytes that its plan asked for; the plan or a kernel is wrong")

    def release_arena(self) -> None:
        """Release the arena. Its memory is freed when no view of it is left."""
        self._arena, self._edges, self._canaries = self._nothing, (), ()

    def reset_high_water(self) -> None:
        """Forget the largest pass so far."""
        self.high_water_bytes = 0

    def _grow(self, nbytes: int) -> None:
        if nbytes > self.nbytes:
            self.release_arena()  # free the old memory before the new is allocated
            self.taken_bytes = 0
            self._arena = self._aligned(nbytes)
            self.taken_bytes = nbytes
            self.growths += 1
            self.release(0, nbytes)

    def _aligned(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):  # the memory outlives this pass, and the next may belong to a training step
            memory = self._allocate(nbytes + ALIGNMENT_BYTES)
            start = -memory.data_ptr() % ALIGNMENT_BYTES
            self._edges = memory[:start], memory[start + nbytes :]
            return memory[start : start + nbytes]
