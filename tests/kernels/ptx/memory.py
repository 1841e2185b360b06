"""The memories of a launch: tensors in global memory with exact bounds, shared memory, and tensor maps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tests.kernels.ptx.arithmetic import Lanes
from tests.kernels.ptx.program import SHARED_BASE

ALIGNMENT = 16


class Fault(Exception):
    """An error of the program under test. The message says what and where."""


# --- global memory ---------------------------------------------------------------------------------------------------


class Region:
    """A tensor in global memory: the only bytes that a kernel may access are those of its elements."""

    def __init__(self, name: str, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
        """Describe a tensor by the address of its first element; `strides` are in bytes."""
        self.name, self.address, self.itemsize = name, address, itemsize
        self.dims = sorted(((s, n) for n, s in zip(shape, strides, strict=True) if n != 1), reverse=True)
        self.extent = 0 if 0 in shape else itemsize + sum(stride * (count - 1) for stride, count in self.dims)
        self._start = address - address % ALIGNMENT
        size = -(-(self.extent + address - self._start) // ALIGNMENT) * ALIGNMENT
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._start)) if size else np.zeros(0)

    def contains(self, addresses: Lanes, size: int) -> Lanes:
        """Return which accesses of `size` bytes are inside elements of the tensor."""
        inside = np.ones(addresses.shape, bool)
        for last in {0, max(0, size - self.itemsize)}:
            rest = addresses.astype(np.int64) + (last - self.address)
            for stride, count in self.dims:
                index = np.minimum(rest // stride, count - 1)
                inside &= index >= 0
                rest = rest - index * stride
            inside &= (rest >= 0) & (rest + min(size, self.itemsize) <= self.itemsize)
        return inside

    def values(self, dtype: type[np.generic]) -> Lanes:
        """Return the memory of the tensor as an array of `dtype` that starts at the aligned address."""
        return self._bytes.view(dtype)

    def places(self, addresses: Lanes, size: int) -> Lanes:
        """Return the indices of addresses in `values` of a dtype of `size` bytes."""
        return (addresses.astype(np.int64) - self._start) // size


class Accessor(NamedTuple):
    """Threads of a warp that access global memory, and what happened before.

    `block`, `warp`: their numbers in the launch. `threads`: the numbers in the block of the active lanes; `counts`: the
    current count of each (see `races.py`). `known`: for each thread of the block, the count that the whole warp knows.
    """

    block: int
    warp: int
    threads: Lanes
    counts: Lanes
    known: Lanes


class Access(NamedTuple):
    """An access of a warp to global memory."""

    addresses: Lanes
    by: Accessor
    size: int
    writes: bool
    atomic: bool


class GlobalMemory:
    """The tensors that a launch may access. It records every access for `conflicts`."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._log: list[Access] = []
        self._copied: set[str] = set()
        self._added: list[tuple[str, Lanes]] = []
        self._written: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor."""
        size = tensor.element_size()
        strides = [size * stride for stride in tensor.stride()]
        self._regions.append(Region(name, tensor.data_ptr(), tensor.shape, strides, size))

    def _region(self, addresses: Lanes, size: int, what: str) -> Region:
        if (addresses % size).any():
            raise Fault(f"{what} of {size} bytes at a misaligned address")
        first = int(addresses[0])
        for region in self._regions:
            near = region.address <= first < region.address + region.extent
            if near and region.contains(addresses, size).all():
                return region
        near_by = [x for x in self._regions if x.address <= first < x.address + x.extent]
        raise Fault(f"{what} outside every tensor, near {near_by[0].name if near_by else hex(first)}")

    def load(self, addresses: Lanes, dtype: type[np.generic], by: Accessor, atomic: bool = False) -> Lanes:
        """Load a value for each thread."""
        size = np.dtype(dtype).itemsize
        region = self._region(addresses, size, "a load")
        self._log.append(Access(addresses, by, size, False, atomic))
        return region.values(dtype)[region.places(addresses, size)]

    def store(self, addresses: Lanes, values: Lanes, by: Accessor, atomic: bool = False) -> None:
        """Store a value of each thread."""
        size = values.dtype.itemsize
        region = self._region(addresses, size, "a store")
        self._log.append(Access(addresses, by, size, True, atomic))
        self._written.add(region.name)
        region.values(values.dtype.type)[region.places(addresses, size)] = values

    def prefetch(self, addresses: Lanes) -> None:
        """Check that a prefetch is inside a tensor."""
        self._region(addresses, 1, "a prefetch")

    def copy_rows(self, addresses: Lanes, count: int) -> Lanes:
        """Return `count` elements of 2 bytes from each address, for a tensor copy."""
        if not len(addresses):
            return np.zeros((0, count), np.uint16)
        whole = (addresses[:, None] + np.arange(count, dtype=np.uint64) * 2).reshape(-1)
        return self.copy(whole, np.uint16).reshape(-1, count)

    def copy(self, addresses: Lanes, dtype: type[np.generic]) -> Lanes:
        """Return the values at addresses, for a copy to shared memory at an unknown time."""
        size = np.dtype(dtype).itemsize
        region = self._region(addresses, size, "a copy")
        self._copied.add(region.name)
        return region.values(dtype)[region.places(addresses, size)]

    def add_values(self, addresses: Lanes, values: Lanes) -> None:
        """Add float32 values at addresses, at an unknown time."""
        region = self._region(addresses, 4, "an addition")
        self._added.append((region.name, addresses))
        region.values(np.float32)[region.places(addresses, 4)] += values

    def conflicts(self) -> list[str]:
        """Return the races: words that a warp writes and another one accesses in the same launch.

        Barriers order the warps of a thread block. No barrier orders blocks, because kernels exchange nothing through
        global memory except by atomic operations, and none orders copies to shared memory and writes.
        """
        written = self._written | {name for name, _ in self._added}
        races = [f"{name} is written in a launch that copies from it" for name in sorted(written & self._copied)]
        if self._added and self._log:
            # Additions by TMA are atomic with each other, but nothing in the launch orders them and other accesses.
            added = np.unique(np.concatenate([x for _, x in self._added]) >> np.uint64(2))
            accessed = np.concatenate([x.addresses for x in self._log]) >> np.uint64(2)
            racing = int(np.isin(accessed, added).sum())
            races += [f"{racing} accesses to words of global memory that are added to"] if racing else []
        log = [access for access in self._log if not access.atomic]
        if not any(access.writes for access in log):
            return races
        words, which, lanes = [], [], []
        for number, access in enumerate(log):
            count = len(access.addresses)
            for start in range(0, access.size, 4):
                words.append((access.addresses + np.uint64(start)) >> np.uint64(2))
                which.append(np.full(count, number))
                lanes.append(np.arange(count))
        places, accesses, lane = (np.concatenate(x) for x in (words, which, lanes))
        writes, warps = (np.array(x)[accesses] for x in ([x.writes for x in log], [x.by.warp for x in log]))
        order = np.argsort(places, kind="stable")
        starts = np.flatnonzero(np.concatenate(([True], np.diff(places[order]) != 0)))
        several = np.maximum.reduceat(warps[order], starts) != np.minimum.reduceat(warps[order], starts)
        conflicting = several & np.logical_or.reduceat(writes[order], starts)
        ends = np.append(starts[1:], len(order))
        racing = sum(
            _unordered(log, [(int(accesses[x]), int(lane[x])) for x in order[start:end]])
            for start, end in zip(starts[conflicting], ends[conflicting], strict=True)
        )
        return [*races, f"{racing} words of global memory in a race"] if racing else races


def _unordered(log: Sequence[Access], accesses: Sequence[tuple[int, int]]) -> bool:
    """Return whether two accesses to a word, by the number of the access and the lane, are a race."""
    for index, (second, _) in enumerate(accesses):
        for first, lane in accesses[:index]:
            earlier, later = log[first].by, log[second].by
            if earlier.warp == later.warp or not (log[first].writes or log[second].writes):
                continue
            if earlier.block != later.block or later.known[earlier.threads[lane]] < earlier.counts[lane]:
                return True
    return False


# --- tensor maps -----------------------------------------------------------------------------------------------------


MAP_BYTES = 128
MAP = np.dtype({
    "names": ["global_address", "global_stride", "global_dim", "box_dim", "element_stride",
              "rank", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode"],
    "formats": ["u8", ("u8", 4), ("u4", 5), ("u4", 5), ("u4", 5), "u4", "u1", "u1", "u1", "u1"],
    "itemsize": MAP_BYTES,
})  # fmt: skip
"""A layout of our own: NVIDIA does not document the bits of a CUtensorMap. Programs only replace whole fields."""
ITEM_SIZES = {0x6: 2, 0xA: 2, 0x7: 4}
"""The bytes of an element of float16, bfloat16 and float32."""
SWIZZLE_128 = 3


class TensorMap(NamedTuple):
    """The fields of a map over a matrix with 128-byte swizzle, the only kind that the kernels make."""

    address: int
    stride: int
    dims: tuple[int, int]
    box: tuple[int, int]
    itemsize: int

    @classmethod
    def read(cls, data: Lanes) -> TensorMap:
        """Read the 128 bytes of a map. Raises Fault for fields that no map of these kernels has."""
        fields: Any = data.view(MAP)[0]
        kinds = fields["rank"], fields["interleave_layout"], fields["swizzle_mode"], fields["fill_mode"]
        if tuple(map(int, kinds)) != (1, 0, SWIZZLE_128, 0) or int(fields["elemtype"]) not in ITEM_SIZES:
            raise Fault(f"a tensor map with rank, interleave, swizzle and fill {kinds}, type {fields['elemtype']}")
        if tuple(fields["element_stride"][:2]) != (1, 1):
            raise Fault(f"a tensor map with element strides {fields['element_stride']}")
        (width, rows), (box_width, box_rows) = fields["global_dim"][:2].tolist(), fields["box_dim"][:2].tolist()
        address, stride = int(fields["global_address"]), int(fields["global_stride"][0])
        if address % 16 or stride % 16 or not 0 < stride < 1 << 40:
            raise Fault(f"a tensor map with address {address:#x} and stride {stride}")
        itemsize = ITEM_SIZES[int(fields["elemtype"])]
        if not (0 < box_width * itemsize <= 128 and 0 < box_rows <= 256 and width and rows):
            raise Fault(f"a tensor map of {rows} rows of {width} with a box of {box_rows} rows of {box_width}")
        return cls(address, stride, (width, rows), (box_width, box_rows), itemsize)

    def add_box(self, memory: GlobalMemory, column: int, row: int, values: Lanes) -> None:
        """Add the values of a box, from (row, column) on, to the matrix. Values outside the matrix are dropped."""
        rows, columns = np.indices(values.shape)
        rows, columns = rows + row, columns + column
        inside = (rows >= 0) & (rows < self.dims[1]) & (columns >= 0) & (columns < self.dims[0])
        addresses = (self.address + rows * self.stride + 4 * columns)[inside].astype(np.uint64)
        if len(addresses):
            memory.add_values(addresses, values[inside])

    def box_values(self, memory: GlobalMemory, column: int, row: int) -> Lanes:
        """Return the box from (row, column) on, with 0 outside the matrix."""
        values = np.zeros(self.box[::-1], np.uint16)
        rows = np.arange(self.box[1], dtype=np.int64) + row
        columns = min(self.box[0], self.dims[0] - column)
        inside = (rows >= 0) & (rows < self.dims[1])
        if columns > 0:
            addresses = (self.address + rows[inside] * self.stride + 2 * column).astype(np.uint64)
            values[inside, :columns] = memory.copy_rows(addresses, columns)
        return values


# --- shared memory ---------------------------------------------------------------------------------------------------


def swizzled(addresses: Lanes) -> Lanes:
    """Return where the 128-byte swizzle puts addresses: bits 7 to 9 are added to bits 4 to 6 without a carry."""
    return addresses ^ ((addresses >> 7 & 7) << 4)


class SharedMemory:
    """The dynamic shared memory of a thread block. Bytes that nothing has written are NaN in every float format."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // MAP_BYTES) * MAP_BYTES
        self._exact = size
        self._bytes = np.full(self.size, 0xFF, np.uint8)

    def offsets(self, addresses: Lanes, size: int) -> Lanes:
        """Return the offsets of addresses. Raises Fault outside shared memory."""
        offsets = addresses.astype(np.int64) - SHARED_BASE
        if (offsets < 0).any() or (offsets + size > self._exact).any():
            raise Fault(f"an access outside the {self._exact} bytes of shared memory")
        if (offsets % size).any():
            raise Fault(f"an access of {size} bytes at a misaligned address of shared memory")
        return offsets

    def check(self, offsets: Lanes) -> None:
        """Raise Fault if an element of 2 bytes is outside shared memory."""
        if offsets.min() < 0 or offsets.max() + 2 > self._exact:
            raise Fault(f"an operand outside the {self._exact} bytes of shared memory")

    def load(self, offsets: Lanes, dtype: type[np.generic]) -> Lanes:
        """Load values at offsets."""
        return self._bytes.view(dtype)[offsets // np.dtype(dtype).itemsize]

    def store(self, offsets: Lanes, values: Lanes) -> None:
        """Store values at offsets."""
        self._bytes.view(values.dtype)[offsets // values.dtype.itemsize] = values

    def map_at(self, offset: int) -> Lanes:
        """Return the 128 bytes of a tensor map, which can be changed in place."""
        return self._bytes[offset : offset + MAP_BYTES]
