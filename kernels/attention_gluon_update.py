"""The softmax of a consumer warpgroup on Hopper, and its attention updates by the key blocks of one block of queries.

Guarantees: P.V of a key block runs beside the softmax of the next; a slot is given back when its last reader has ended.
The online softmax is that of `attention_forward.update`; with RAW_PEAK the peak is found among products that are not
scaled yet, which takes a positive scale, and a logit is scaled and shifted in one rounding.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringattn.kernels.attention_gluon_parts import over_dims, places, scaled, seen, slot_of, visited
from ringattn.kernels.attention_tiles import ENTRY_COLUMNS, LOG2_E, LOWEST, ends_of, visits


@gluon.jit
def _weighed(
    s, peak, weight, at, entry, own, scale, BLOCK_N: gl.constexpr, MASKED: gl.constexpr, RAW_PEAK: gl.constexpr
):  # fmt: skip
    """(2 ** (logit - peak) for block `at` of the entry, the new peak, the new weight, the share that the old keep)."""
    if not RAW_PEAK:
        s = s * scale
    if MASKED:
        first, last = seen(own, entry)
        cols = gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s.type.layout)), 0)
        # A thread's columns are its own base, one of 0, 2, 4 and 6, and 32 constants. With the base on the other side
        # of the comparison the constants are part of the code; else each would hold a register through all loops.
        fixed, own_base = cols & ~6, cols & 6
        # Counted from the block's first key, like `cols`.
        left = gl.expand_dims(first - at * BLOCK_N, 1) - own_base
        right = gl.expand_dims(last - at * BLOCK_N, 1) - own_base
        s = gl.where((fixed >= left) & (fixed <= right), s, float("-inf"))
    # The scale of a row's greatest product, not of all 128; the order of logits is that of products if it is positive.
    # Never -inf, as the first peak is not: a row's exponents are -inf, and no NaN, where all its logits are.
    new_peak = gl.maximum(peak, gl.max(s, 1) * scale if RAW_PEAK else gl.max(s, 1))
    # A product and a difference become one instruction (FFMA); a masked product stays -inf, as scale > 0.
    p = gl.exp2((s * scale if RAW_PEAK else s) - gl.expand_dims(new_peak, 1))
    # The share that the old accumulator keeps.
    keep = gl.exp2(peak - new_peak)
    return p, new_peak, weight * keep + gl.sum(p, 1), keep


@gluon.jit
def _products(q_rows, k_rows, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Start q . k."""
    ROWS: gl.constexpr = q_rows.shape[0]
    # Not read, since use_acc is False: it gives the product its layout.
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    return hopper.warpgroup_mma(q_rows, k_rows.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def earlier(state, own, own_out, DIM: gl.constexpr, o_layout: gl.constexpr):
    """(acc, peak, weight) of a block's rows: what an earlier launch left or, where the pass begins, nothing seen."""
    out, lse, sinks, out_strides, lse_strides, block, batch, head, live = state
    begins, _ = ends_of(block)
    # A FIRST block has no earlier state: it begins at lse = -inf, or at the sink.
    known = begins == 0
    acc = gl.zeros([own_out.shape[0], DIM], gl.float32, o_layout)
    if out is not None:
        out_at = over_dims(places(out, out_strides, block, batch, head, own_out), DIM, o_layout)
        acc = gl.load(out_at, mask=gl.expand_dims(own_out < live, 1) & known, other=0.0)
    lse_at = places(lse, lse_strides, block, batch, head, own)
    peak = gl.load(lse_at, mask=(own < live) & known, other=float("-inf")) * LOG2_E
    if sinks is not None:
        peak = gl.where(begins, gl.load(sinks + head).to(gl.float32) * LOG2_E, peak)
    # A normalized state weighs 1 at its own peak, and nothing where it has none.
    nothing = peak == float("-inf")
    ones = gl.full([own.shape[0]], 1.0, gl.float32, own.type.layout)
    return acc, gl.where(nothing, LOWEST, peak), gl.where(nothing, 0.0, ones)


@gluon.jit
def _open(
    state, turn, at, entry, own, own_out, scale, q_rows, k_buffers, barriers,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, RAW_PEAK: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """The attention update by the first key block, but for its values, which the next update adds."""
    _, _, k_full, k_empty, _, _ = barriers
    slot, parity = slot_of(turn, SLOTS)
    mbarrier.wait(k_full.index(slot), parity)
    s = _products(q_rows, k_buffers.index(slot), BLOCK_N, s_layout)
    # Not before the product begins: the assembler waits for all loads there. So these run beside it.
    acc, peak, weight = earlier(state, own, own_out, DIM, o_layout)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    # The product has ended, so K's slot is free while the softmax runs.
    mbarrier.arrive(k_empty.index(slot))
    p, peak, weight, keep = _weighed(s, peak, weight, at, entry, own, scale, BLOCK_N, True, RAW_PEAK)
    # P stays in registers, as the left operand of P.V.
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    return scaled(acc, keep), gl.convert_layout(p.to(q_rows.dtype), p_layout), peak, weight


@gluon.jit
def _update(
    acc, p, peak, weight, turn, at, entry, own, scale, q_rows, k_buffers, v_buffers, barriers,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, MASKED: gl.constexpr, RAW_PEAK: gl.constexpr,
    s_layout: gl.constexpr,
):  # fmt: skip
    """The update by key block `turn`, block `at` of the entry, and the values of the one before it, of weights `p`."""
    _, _, k_full, k_empty, v_full, v_empty = barriers
    slot, parity = slot_of(turn, SLOTS)
    mbarrier.wait(k_full.index(slot), parity)
    s = _products(q_rows, k_buffers.index(slot), BLOCK_N, s_layout)
    # P.V runs one block behind: V of turn - 1.
    old_slot, old_parity = slot_of(turn - 1, SLOTS)
    mbarrier.wait(v_full.index(old_slot), old_parity)
    # Issued before the softmax of this block: P.V of the block before runs beside it.
    acc = hopper.warpgroup_mma(p, v_buffers.index(old_slot), acc, is_async=True)
    # One product may be under way: the older of the two, Q.K, has ended and P.V still runs beside the softmax.
    s = hopper.warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(slot))
    new_p, peak, weight, keep = _weighed(s, peak, weight, at, entry, own, scale, BLOCK_N, MASKED, RAW_PEAK)
    # Passes at once, but ends a basic block: the assembler would else put the softmax behind the wait below.
    mbarrier.wait(v_full.index(old_slot), old_parity)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(old_slot))
    return scaled(acc, keep), gl.convert_layout(new_p.to(p.dtype), p.type.layout), peak, weight


@gluon.jit
def attend(
    state, turn, first, last, entries, own, own_out, scale, q_rows, q_slot, k_buffers, v_buffers, barriers,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, RAW_PEAK: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """The state after the entries, of which there is at least one, and the turn of the next key block."""
    _, q_empty, _, _, v_full, v_empty = barriers
    start, full, full_end, _ = visits(entries + first * ENTRY_COLUMNS)
    acc, p, peak, weight = _open(
        state, turn, visited(0, start, full, full_end), entries + first * ENTRY_COLUMNS, own, own_out, scale, q_rows,
        k_buffers, barriers, DIM, BLOCK_N, SLOTS, RAW_PEAK, s_layout, o_layout,
    )  # fmt: skip
    turn += 1
    for index in range(first, last):
        entry = entries + index * ENTRY_COLUMNS
        start, full, full_end, end = visits(entry)
        # `_open` has taken block 0 of the first entry.
        met = gl.where(index == first, 1, 0)
        # Full blocks need no block number: it is only read for the mask.
        for _ in range(met, full_end - full):
            acc, p, peak, weight = _update(
                acc, p, peak, weight, turn, 0, entry, own, scale, q_rows, k_buffers, v_buffers, barriers,
                BLOCK_N, SLOTS, False, RAW_PEAK, s_layout,
            )  # fmt: skip
            turn += 1
        for nth in range(gl.maximum(full_end - full, met), end - start):
            acc, p, peak, weight = _update(
                acc, p, peak, weight, turn, visited(nth, start, full, full_end), entry, own, scale, q_rows,
                k_buffers, v_buffers, barriers, BLOCK_N, SLOTS, True, RAW_PEAK, s_layout,
            )  # fmt: skip
            turn += 1
    # Q is not read again: the producer may load another item's. The last block's values are still to be added.
    mbarrier.arrive(q_empty.index(q_slot))
    slot, parity = slot_of(turn - 1, SLOTS)
    mbarrier.wait(v_full.index(slot), parity)
    acc = hopper.warpgroup_mma(p, v_buffers.index(slot), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(slot))
    return acc, peak, weight, turn
