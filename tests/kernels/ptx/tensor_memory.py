"""Tensor memory of Blackwell (tcgen05): 128 lanes of 512 columns with 32 bits each, transfers and products in flight.

A product happens when the mbarrier of its commit is reached, which is as late as the program allows. A load or a store
lasts until its warp waits for it. Race detection has a word for each column of each 16 lanes, because warps and
products access whole groups of 16 lanes. The facts are those of "TensorCore 5th Generation Instructions" of the PTX
ISA: "Tensor Memory", "Data Movement Shape", "Shared Memory Descriptor", "Instruction Descriptor" and "Memory
Consistency Model".
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any, NamedTuple

import numpy as np

from tests.kernels.ptx.arithmetic import Lanes
from tests.kernels.ptx.barriers import Mbarrier
from tests.kernels.ptx.memory import Fault, SharedMemory
from tests.kernels.ptx.products import DEPTH, InFlight, operand_offsets, to_floats
from tests.kernels.ptx.races import RaceDetector
from tests.kernels.ptx.rules import Rules

ROWS, COLUMNS = 128, 512
HALF = 16
"""The lanes of a word of race detection."""
WORDS = ROWS // HALF * COLUMNS
SLAB = 32
"""Each warp accesses the lanes of one of four slabs: that of its number modulo 4."""
DTYPES = {0: "f16", 1: "bf16"}
NOT_LOADED = np.full(SLAB, 0xFFFFFFFF, np.uint32)
"""The content of registers, by the relaxed rules, until their load has ended."""


class Shape(NamedTuple):
    """An instruction descriptor of `kind::f16`: the rows and columns of D, and how the operands lie in memory."""

    rows: int
    columns: int
    dtype: str
    left_transposed: bool
    right_transposed: bool


def shape_of(descriptor: int) -> Shape:
    """Decode an instruction descriptor. Raises Fault for anything but dense products with sums in float32."""
    left, right = descriptor >> 7 & 7, descriptor >> 10 & 7
    columns, rows = (descriptor >> 17 & 0x3F) << 3, (descriptor >> 24 & 0x1F) << 4
    others = descriptor & ~(7 << 7 | 7 << 10 | 3 << 15 | 0x3F << 17 | 0x1F << 24)
    if others != 1 << 4 or left != right or left not in DTYPES:
        raise Fault(f"a product with the instruction descriptor {descriptor:#x}")
    step = {64: 8, 128: 16}.get(rows)
    if step is None or not 0 < columns <= 256 or columns % step:
        raise Fault(f"a product of {rows} rows and {columns} columns")
    return Shape(rows, columns, DTYPES[left], bool(descriptor >> 15 & 1), bool(descriptor >> 16 & 1))


class Loading(InFlight):
    """The content of registers while a load of tensor memory has not been waited for."""

    why = "a register is read before its load of tensor memory has been waited for"


class Transfer(NamedTuple):
    """A load or store of a warp in flight: its cells (registers, 32), and what it loads into or stores."""

    lanes: Lanes
    columns: Lanes
    words: Lanes
    slots: list[int]
    content: Any


class Product(NamedTuple):
    """A product in flight: the cells of D, whether it adds to them, and where its operands are."""

    shape: Shape
    lanes: Lanes
    column: int
    adds: bool
    left: tuple[Lanes, int] | Lanes
    right: Lanes


class Commit(NamedTuple):
    """Products of a thread in flight, and the mbarrier at which they arrive together.

    `clocks`: what happened before them, see `RaceDetector.before`.
    """

    warp: int
    group: int
    products: list[Product]
    barrier: Mbarrier
    clocks: tuple[Lanes, Lanes]


class TensorMemory:
    """The tensor memory of a thread block, and the products of each warp that have not ended."""

    def __init__(self, first_word: int, shared: SharedMemory, detector: RaceDetector, rng: Random) -> None:
        """Start with nothing allocated. `first_word`: where its words are in the race detector."""
        self._first_word, self._shared, self._detector, self._rng = first_word, shared, detector, rng
        self._cells = np.full((ROWS, COLUMNS), 0xFFFFFFFF, np.uint32)
        self._accumulators = np.zeros((ROWS // HALF, COLUMNS), np.int64)
        """For each word a number of the address and shape of the sums that it was part of."""
        self._allocated: dict[int, int] = {}
        self._taken = np.zeros(COLUMNS, bool)
        """The columns that are allocated."""
        self._relinquished = False
        self._open: dict[int, list[Product]] = {}
        """The products without a commit of each thread that issued some."""
        self._commits: dict[int, deque[Commit]] = {}
        self._groups: dict[int, int] = {}

    # --- allocation -----------------------------------------------------------------------------------------------

    def allocate(self, columns: int) -> int:
        """Return the address of free columns, anywhere where they fit."""
        if columns not in (32, 64, 128, 256, 512):
            raise Fault(f"an allocation of {columns} columns of tensor memory")
        if self._relinquished:
            raise Fault("an allocation of tensor memory after the permit was relinquished")
        free = [start for start in range(0, COLUMNS, columns) if not self._taken[start : start + columns].any()]
        if not free:
            raise Fault(f"no {columns} columns of tensor memory are free")
        start = self._rng.choice(free)
        self._allocated[start], self._taken[start : start + columns] = columns, True
        return start

    def free(self, thread: int, address: int, columns: int) -> None:
        """Free an allocation, all accesses to which must have ended."""
        if self._allocated.pop(address, None) != columns:
            raise Fault("tensor memory is freed that was not allocated so")
        self._taken[address : address + columns] = False
        words = self._words(np.arange(0, ROWS, HALF)[:, None], address + np.arange(columns)).reshape(-1)
        self._detector.write(np.full(len(words), thread), words)
        self._detector.forget(words)

    def relinquish(self) -> None:
        """Give up the right to allocate."""
        self._relinquished = True

    def _words(self, lanes: Lanes, columns: Lanes) -> Lanes:
        return self._first_word + lanes // HALF * COLUMNS + columns

    def finish(self) -> None:
        """Raise Fault if tensor memory is still allocated or a product has not ended when the thread block ends."""
        if any(self._open.values()) or any(self._commits.values()):
            raise Fault("a thread block ends with a product in flight")
        if self._allocated:
            raise Fault("a thread block ends without freeing its tensor memory")

    # --- loads and stores -----------------------------------------------------------------------------------------

    def transfer(self, warp: int, address: int, shape: str, slots: list[int], split: int, content: Any) -> Transfer:
        """Return the cells of a load or store. `split`: the distance of the second half of the shape 16x32bx2."""
        lane, column = address >> 16, address & 0xFFFF
        thread, register = np.arange(SLAB), np.arange(len(slots))[:, None]
        if shape == "32x32b":
            lanes, columns = lane + thread, column + register
        elif shape == "16x32bx2":
            lanes, columns = lane + thread % HALF, column + thread // HALF * split + register
        else:
            raise Fault(f"a transfer of shape {shape}")
        lanes, columns = np.broadcast_arrays(lanes, columns)
        slab = SLAB * (warp % 4)
        if lanes.min() < slab or lanes.max() >= slab + SLAB or lane % HALF or (shape == "32x32b" and lane % SLAB):
            raise Fault(f"warp {warp} accesses lanes {lanes.min()} to {lanes.max()} of tensor memory")
        self._check(columns)
        return Transfer(lanes, columns, np.unique(self._words(lanes, columns)), slots, content)

    def _check(self, columns: Lanes) -> None:
        if columns.min() < 0 or columns.max() >= COLUMNS or not self._taken[columns].all():
            raise Fault("an access to tensor memory that is not allocated")

    def load(self, transfer: Transfer) -> Lanes:
        """Return the values of a load (registers, 32)."""
        return self._cells[transfer.lanes, transfer.columns]

    def store(self, transfer: Transfer) -> Lanes:
        """Do a store. Return which of its words had the same values before."""
        places = transfer.lanes, transfer.columns
        changed = self._words(*places)[self._cells[places] != transfer.content]
        self._cells[places] = transfer.content
        return ~np.isin(transfer.words, changed)

    # --- products -------------------------------------------------------------------------------------------------

    def start(
        self, thread: int, target: int, left: int, left_address: bool, right: int, descriptor: int, adds: bool
    ) -> None:
        """Start a product of a thread. `left`: a descriptor, or with `left_address` an address in tensor memory."""
        shape, warp, detector = shape_of(descriptor), thread // SLAB, self._detector
        group = self._groups.get(warp, 0) + 1
        if any(products for other, products in self._open.items() if other // SLAB == warp and other != thread):
            raise Fault("two threads of a warp issue products")
        right_offsets, words = operand_offsets(right, 0, shape.columns, shape.right_transposed, 1)
        self._shared.check(right_offsets)
        detector.multiply(warp, words, group, thread)
        operand: tuple[Lanes, int] | Lanes
        if left_address:
            lanes, column, words = self._block(left, shape.rows, DEPTH // 2)
            if (left ^ target) >> 16 or shape.left_transposed:
                raise Fault("a left operand in other lanes of tensor memory than the sums, or transposed")
            detector.multiply(warp, words, group, thread, fenced=False)
            operand = lanes, column
        else:
            operand, words = operand_offsets(left, 0, shape.rows, shape.left_transposed, 1)
            self._shared.check(operand)
            detector.multiply(warp, words, group, thread)
        lanes, column, words = self._block(target, shape.rows, shape.columns)
        place = np.unravel_index(words - self._first_word, self._accumulators.shape)
        number = target << 32 | shape.rows << 16 | shape.columns
        # Products of the same shape on the same sums are pipelined: they happen in their order.
        detector.accumulate(thread, words, group, adds, self._accumulators[place] == number)
        self._accumulators[place] = number
        self._open.setdefault(thread, []).append(Product(shape, lanes, column, adds, operand, right_offsets))

    def _block(self, address: int, rows: int, columns: int) -> tuple[Lanes, int, Lanes]:
        """Return the lanes of the rows of a matrix, its first column and its words.

        128 rows take all lanes, 64 rows the first or the last 16 of each slab.
        """
        lane, column = address >> 16, address & 0xFFFF
        row = np.arange(rows)
        if lane not in ((0,) if rows == ROWS else (0, HALF)):
            raise Fault(f"a matrix of {rows} rows at lane {lane} of tensor memory")
        self._check(column + np.arange(columns))
        lanes = row if rows == ROWS else lane + row // HALF * SLAB + row % HALF
        words = self._words(lanes[::HALF, None], column + np.arange(columns))
        return lanes, column, words.reshape(-1)

    def commit(self, thread: int, barrier: Mbarrier) -> None:
        """Let a barrier be reached when all products that a thread has issued have ended."""
        warp = thread // SLAB
        self._groups[warp] = self._groups.get(warp, 0) + 1
        products, clocks = self._open.pop(thread, []), self._detector.before(thread)
        commit = Commit(warp, self._groups[warp], products, barrier, clocks)
        self._commits.setdefault(warp, deque()).append(commit)

    def commits(self) -> list[Commit]:
        """Return the commits that may be reached next."""
        return [commits[0] for commits in self._commits.values() if commits]

    def uses(self, barrier: Mbarrier) -> bool:
        """Return whether a commit has not reached a barrier."""
        return any(commit.barrier is barrier for commits in self._commits.values() for commit in commits)

    def land(self, commit: Commit) -> None:
        """Do the products of a commit and arrive at its barrier."""
        self._commits[commit.warp].popleft()
        for product in commit.products:
            self._compute(product)
        commit.barrier.multiplied(commit.warp, commit.group, commit.clocks)

    def _compute(self, product: Product) -> None:
        shape = product.shape
        if isinstance(product.left, tuple):
            lanes, column = product.left
            pairs = np.ascontiguousarray(self._cells[lanes, column : column + DEPTH // 2])
            left = to_floats(pairs.view(np.uint16), shape.dtype)
        else:
            left = to_floats(self._shared.load(product.left, np.uint16), shape.dtype)
        result = left @ to_floats(self._shared.load(product.right, np.uint16), shape.dtype).T
        columns = slice(product.column, product.column + shape.columns)
        if product.adds:
            result = self._cells[product.lanes, columns].view(np.float32) + result
        self._cells[product.lanes, columns] = result.view(np.uint32)


class TransferUnit:
    """The loads and stores of tensor memory that a warp has started and not waited for."""

    def __init__(
        self,
        warp: int,
        threads: Lanes,
        registers: list[Any],
        memory: TensorMemory,
        detector: RaceDetector,
        rules: Rules,
    ) -> None:
        self._warp, self._threads, self._registers, self._rules = warp, threads, registers, rules
        self._memory, self._detector = memory, detector
        self._loads: list[Transfer] = []
        self._places: list[int] = []
        self._stores: list[Transfer] = []

    def load(self, address: int, shape: str, slots: list[int], split: int, place: int) -> None:
        """Start a load into registers. `place`: the number of the instruction."""
        content = Loading(tuple(slots), np.empty(0))
        load = self._memory.transfer(self._warp, address, shape, slots, split, content)
        self._detector.start_read(self._threads, load.words)
        self._places.append(place)
        for slot in slots:
            self._registers[slot] = content if self._rules.waited_loads else NOT_LOADED
        self._loads.append(load)

    def store(self, address: int, shape: str, slots: list[int], split: int) -> None:
        """Start a store of registers."""
        values = np.stack([self._registers[slot] for slot in slots])
        store = self._memory.transfer(self._warp, address, shape, slots, split, values)
        self._detector.start_write(self._threads, store.words, self._memory.store(store))
        self._stores.append(store)

    def wait_for_loads(self) -> int | None:
        """Wait until all loads have ended. Return the number of the first instruction that started one, or None."""
        first, self._places = min(self._places, default=None), []
        for load in self._loads:
            self._detector.end_read(self._threads, load.words)
            for slot, values in zip(load.slots, self._memory.load(load), strict=True):
                if self._registers[slot] is not (load.content if self._rules.waited_loads else NOT_LOADED):
                    raise Fault("a register is written before its load of tensor memory has been waited for")
                self._registers[slot] = values
        self._loads = []
        return first

    def wait_for_stores(self) -> None:
        """Wait until all stores have ended."""
        for store in self._stores:
            self._detector.end_write(self._threads, store.words)
        self._stores = []

    def finish(self) -> None:
        """Raise Fault if a load or a store is still in flight when the warp ends."""
        if self._loads or self._stores:
            raise Fault("a warp ends while a load or a store of tensor memory is in flight")
