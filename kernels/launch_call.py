"""A kernel launch as a value, before it happens.

Guarantees that one value serves a plain launch, a compile without a launch (`kernel.warmup`) and a kept handle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ringattn.kernels.scratch import Scratch


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
