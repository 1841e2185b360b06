"""What the two Gluon kernels of the backward share: products, masks, and sums that are carried or delivered."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ringattn.kernels.attention_gluon_parts import over_dims, places
from ringattn.kernels.attention_tiles import ends_of

CONSUMERS = gl.constexpr(2)


@gluon.jit
def products(own, other, COLS: gl.constexpr, layout: gl.constexpr):
    """Start own . other, rows by rows: (own rows, COLS)."""
    ROWS: gl.constexpr = own.shape[0]
    # Not read, since use_acc is False: it gives the product its layout.
    zeros = gl.zeros([ROWS, COLS], gl.float32, layout)
    return hopper.warpgroup_mma(own, other.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def masked(s, limits, at, COLS: gl.constexpr):
    """`s` of block `at` of the entry where `limits`, the first and the last row that each own row sees, admit it."""
    cols = gl.expand_dims(gl.arange(0, COLS, layout=gl.SliceLayout(0, s.type.layout)), 0)
    # A thread has columns 8 apart: split so, it keeps no register for the number of each.
    of_eight = cols & 7
    eight = cols - of_eight
    # Counted from the block's first row, like `cols`. One comparison serves both ends: what is before the first is,
    # without a sign, more than any count.
    left, count = limits[0] - at * COLS, gl.maximum(limits[1] - limits[0] + 1, 0)
    beyond = eight - (gl.expand_dims(left, 1) - of_eight)
    return gl.where(beyond.to(gl.uint32) < gl.expand_dims(count.to(gl.uint32), 1), s, float("-inf"))


@gluon.jit
def deliver(
    total, carried, result, carried_strides, result_strides, block, batch, head, own, live,
    DIM: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Add to the sum that is carried between launches, or with the last of them write the result."""
    begins, ends = ends_of(block)
    inside = gl.expand_dims(own < live, 1)
    if carried is not None:
        at = over_dims(places(carried, carried_strides, block, batch, head, own), DIM, layout)
        # A FIRST block finds no sum there.
        total += gl.load(at, mask=inside & (begins == 0), other=0.0)
        gl.store(at, total, mask=inside & (ends == 0))
    if result is not None:
        at = over_dims(places(result, result_strides, block, batch, head, own), DIM, layout)
        gl.store(at, total.to(result.dtype.element_ty), mask=inside & ends)
