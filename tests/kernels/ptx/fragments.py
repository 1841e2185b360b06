"""Matrices of 8 rows and 8 columns that a warp holds in registers (ldmatrix, stmatrix), and their products (mma.sync).

Each lane holds two adjacent elements of a matrix in a register. See "Matrix fragments for mma.m16n8k16" of the PTX ISA.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.kernels.ptx.arithmetic import Lanes
from tests.kernels.ptx.products import DEPTH, LANE, accumulator_places, left_of_registers, pairs_of

ROW_BYTES = 16
COLUMNS = 8
_PAIR = 2 * (LANE % 4) + np.arange(2)[:, None]
_SINGLE = np.broadcast_to(LANE // 4, _PAIR.shape)
_DEPTHS = np.moveaxis(_PAIR[..., None] + 8 * np.arange(2), 2, 0).swapaxes(1, 2)
"""The depth of each value (registers, lanes, 2) of a right operand."""


def element_offsets(rows: Lanes, transposed: bool) -> Lanes:
    """Return the byte offsets (matrices, 2, lanes) of the two elements that each lane holds of each matrix.

    `rows`: the offsets (8 * matrices) of the matrices' rows. `transposed`: lanes hold adjacent elements of a column.
    """
    first = rows.reshape(-1, 8)
    row, column = (_PAIR, _SINGLE) if transposed else (_SINGLE, _PAIR)
    return first[:, row] + 2 * column


def product(left: Sequence[Lanes], right: Sequence[Lanes], sums: Sequence[Lanes], dtype: str) -> list[Lanes]:
    """Return the registers of `sums` plus the product of a matrix (16, 16) and a matrix (16, 8) of `bf16` or `f16`."""
    columns = np.empty((COLUMNS, DEPTH), np.float32)
    columns[(LANE // 4)[:, None], _DEPTHS] = pairs_of(right, dtype)
    result = left_of_registers(left, dtype) @ columns.T
    places = accumulator_places(len(sums))
    return [(x.view(np.float32) + new).view(np.uint32) for x, new in zip(sums, result[places], strict=True)]
