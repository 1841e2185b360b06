"""The matrix products of Hopper (wgmma): operands in swizzled shared memory or in registers, and products in flight.

A product happens when its group is waited for, which is as late as the program allows. Until then no instruction may
read or write its accumulators or change its left operand. Each warp computes its 16 of the 64 rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from tests.kernels.ptx.arithmetic import Lanes
from tests.kernels.ptx.memory import Fault, SharedMemory, swizzled
from tests.kernels.ptx.program import SHARED_BASE
from tests.kernels.ptx.races import RaceDetector
from tests.kernels.ptx.rules import Rules

DEPTH = 16
WARP_ROWS = 16
LANE = np.arange(32)


@lru_cache(maxsize=1 << 14)
def operand_offsets(descriptor: int, first: int, rows: int, transposed: bool, constant: int = 0) -> tuple[Lanes, Lanes]:
    """Return the byte offsets in shared memory of an operand's elements (rows, 16), and the words that contain them.

    `descriptor`: see "Matrix descriptor format" of the PTX ISA. `first`: the first row. `transposed`: adjacent elements
    belong to adjacent rows, not to adjacent depths. `constant`: bits 46 to 48, which are 0 for wgmma and 1 for tcgen05.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 46 != constant | 1 << 16:
        raise Fault(f"a matrix descriptor other than one with 128-byte swizzle and no base offset: {descriptor:#x}")
    row, depth = np.arange(first, first + rows)[:, None], np.arange(DEPTH)[None, :]
    if transposed:
        places = row // 64 * leading + depth // 8 * stride + depth % 8 * 128 + row % 64 * 2
    else:
        places = row // 8 * stride + row % 8 * 128 + depth * 2
    offsets = swizzled(start + places) - SHARED_BASE
    return offsets, np.unique(offsets // 4)


@lru_cache
def accumulator_places(registers: int) -> tuple[Lanes, Lanes]:
    """Return the row and the column of each accumulator register in each lane."""
    index = np.arange(registers)[:, None]
    return LANE // 4 + 8 * (index // 2 % 2), 8 * (index // 4) + 2 * (LANE % 4) + index % 2


def to_floats(values: Lanes, dtype: str) -> Lanes:
    """Return float32 values of the bits of `bf16` or `f16`."""
    if dtype == "bf16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.view(np.float16).astype(np.float32)


_REGISTER, _HALF = np.arange(4)[:, None, None], np.arange(2)
_LEFT_ROWS = (LANE // 4)[:, None] + 8 * (_REGISTER % 2)
_LEFT_COLUMNS = 2 * (LANE % 4)[:, None] + 8 * (_REGISTER // 2) + _HALF


def left_of_registers(registers: Sequence[Lanes], dtype: str) -> Lanes:
    """Return the matrix (16, 16) of a left operand in four registers per lane, each with two values."""
    matrix = np.empty((WARP_ROWS, DEPTH), np.float32)
    matrix[_LEFT_ROWS, _LEFT_COLUMNS] = pairs_of(registers, dtype)
    return matrix


def pairs_of(registers: Sequence[Lanes], dtype: str) -> Lanes:
    """Return the values (registers, lanes, 2) of registers with two values per lane."""
    return to_floats(np.stack(registers).view(np.uint16).reshape(len(registers), 32, 2), dtype)


class InFlight:
    """The content of accumulator registers while products on them have not been waited for."""

    __array_ufunc__ = None
    why = "an accumulator is read before its product has been waited for"

    def __init__(self, slots: tuple[int, ...], matrix: Lanes) -> None:
        self.slots, self.matrix, self.pending = slots, matrix, 0

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise Fault(self.why)

    view = astype = __array__ = __getitem__ = __add__ = __radd__ = __invert__ = _refuse
    __lshift__ = __rshift__ = __mul__ = __sub__ = __lt__ = __eq__ = _refuse
    __hash__ = object.__hash__


class Product:
    """One product in flight: its accumulators, and its operands as registers or as descriptors."""

    def __init__(
        self, target: InFlight, adds: bool, left: tuple[tuple[int, ...], list[Lanes]] | Lanes, right: Lanes, dtype: str
    ) -> None:
        self.target, self.adds, self.left, self.right, self.dtype = target, adds, left, right, dtype

    def compute(self, registers: list[Any], shared: SharedMemory) -> None:
        """Do the product with the values that the operands have now."""
        if isinstance(self.left, tuple):
            slots, values = self.left
            if any(registers[slot] is not value for slot, value in zip(slots, values, strict=True)):
                raise Fault("a left operand is changed before its product has been waited for")
            left = left_of_registers(values, self.dtype)
        else:
            left = to_floats(shared.load(self.left, np.uint16), self.dtype)
        right = to_floats(shared.load(self.right, np.uint16), self.dtype)
        result = left @ right.T
        self.target.matrix = self.target.matrix + result if self.adds else result


class MatrixUnit:
    """The products that a warp has started and not waited for."""

    def __init__(
        self, warp: int, registers: list[Any], shared: SharedMemory, detector: RaceDetector, rules: Rules
    ) -> None:
        self._rules = rules
        self.warp, self._registers, self._shared, self._detector = warp, registers, shared, detector
        self._fenced: list[Any] | None = None
        self._open: list[Product] = []
        self._groups: deque[list[Product]] = deque()
        self._committed = self._ended = 0

    def fence(self) -> None:
        """Order earlier accesses of registers before later products (`wgmma.fence`)."""
        self._fenced = self._registers.copy()

    def _check_fenced(self, slots: tuple[int, ...]) -> None:
        if not self._rules.fenced_registers:
            return
        if self._fenced is None or any(self._registers[slot] is not self._fenced[slot] for slot in slots):
            raise Fault("a product of registers that were accessed after the last wgmma.fence")

    def start(
        self, slots: tuple[int, ...], adds: bool, left: tuple[int, ...] | int, right: int,
        transposed: tuple[bool, bool], columns: int, dtype: str,
    ) -> None:  # fmt: skip
        """Start a product. `left`: four registers or a descriptor; `right`: a descriptor."""
        target = self._registers[slots[0]]
        if isinstance(target, InFlight):
            if target.slots != slots:
                raise Fault("products in flight overlap in their accumulators")
        else:
            self._check_fenced(slots)
            matrix = np.zeros((WARP_ROWS, columns), np.float32)
            if adds:
                rows, places = accumulator_places(len(slots))
                matrix[rows, places] = np.stack([self._registers[slot].view(np.float32) for slot in slots])
            target = InFlight(slots, matrix)
            for slot in slots:
                self._registers[slot] = target
        group = self._committed + 1
        if isinstance(left, tuple):
            self._check_fenced(left)
            operand: Any = left, [self._registers[slot] for slot in left]
        else:
            operand, words = operand_offsets(left, WARP_ROWS * (self.warp % 4), WARP_ROWS, transposed[0])
            self._detector.multiply(self.warp, words, group)
        right_offsets, words = operand_offsets(right, 0, columns, transposed[1])
        self._detector.multiply(self.warp, words, group)
        target.pending += 1
        self._open.append(Product(target, adds, operand, right_offsets, dtype))

    def commit(self) -> None:
        """End the group of the products that were started since the last one."""
        self._groups.append(self._open)
        self._open = []
        self._committed += 1

    def wait(self, most: int) -> None:
        """Wait until at most `most` groups are in flight."""
        while len(self._groups) > most:
            group = self._groups.popleft()
            for product in group:
                product.compute(self._registers, self._shared)
                product.target.pending -= 1
            self._ended += 1
            for target in {id(product.target): product.target for product in group}.values():
                if not target.pending:
                    self._deliver(target)
        self._detector.multiplied(self.warp, self._ended)

    def _deliver(self, target: InFlight) -> None:
        if any(self._registers[slot] is not target for slot in target.slots):
            raise Fault("an accumulator is written before its product has been waited for")
        rows, columns = accumulator_places(len(target.slots))
        for slot, values in zip(target.slots, target.matrix[rows, columns].view(np.uint32), strict=True):
            self._registers[slot] = values

    def finish(self) -> None:
        """Raise Fault if a product is still in flight when the warp ends."""
        if self._open or self._groups:
            raise Fault("a warp ends with a product in flight")
