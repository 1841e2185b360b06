"""The Gluon kernel of the forward ring step on Hopper: its three groups of warps and what they share.

The shape is FlashAttention-3's (arXiv 2407.08608, section 3): one warp brings Q, K and V by TMA; each of two consumer
warpgroups owns half the rows of a query block, and issues the product Q.K of a key block and P.V of the one before it
together, so that its softmax runs beside the latter. The online softmax is that of `attention_forward.update`; with
RAW_PEAK the peak is found among products that are not scaled yet, which takes a positive scale, and a logit is scaled
and shifted in one rounding.
Guarantees: no buffer is written before its readers have left it and none is read before it is filled, whatever the
entries of a block, none among them; all roles of a program find the same blocks of keys in the same order.
`attention_gluon.gluon_takes` says which calls it may be given.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringattn.kernels.attention_gluon_parts import (
    CONSUMERS,
    barriers_for,
    bring,
    described,
    hand,
    hand_over,
    landed,
    over_dims,
    places,
    products,
    received,
    scaled,
    seen,
    slot_of,
    taken,
    visited,
    work_of,
)
from ringattn.kernels.attention_tiles import ENTRY_COLUMNS, LN_2, LOG2_E, LOWEST, ends_of, rows_and_band, run_of, visits
from ringattn.kernels.launch import VARYING

# --- the softmax of a consumer ---------------------------------------------------------------------------------------


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
    s = products(q_rows, k_buffers.index(slot), BLOCK_N, s_layout)
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
    s = products(q_rows, k_buffers.index(slot), BLOCK_N, s_layout)
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


# --- the kernel ------------------------------------------------------------------------------------------------------


Q_SLOTS = gl.constexpr(2)
"""Buffers for Q: a consumer that is done with a block of queries need not wait for the other to begin the next."""
TO_L2 = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")
PIECE = gl.constexpr(64)
"""Bytes that L2 takes from memory at once, at least."""


@gluon.jit
def _expect_state(out, strides, block, batch, head, live, DIM: gl.constexpr):
    """Have the rows of a block's state brought from memory into L2, from where its consumers will load them."""
    begins, _ = ends_of(block)
    # A FIRST block reads none.
    if begins == 0:
        PIECES: gl.constexpr = DIM * 4 // PIECE
        lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        run = run_of(block)
        base = out + batch * strides[1] + head * strides[2] + run[0].to(gl.int64) * strides[0]
        step = run[1].to(gl.int64) * strides[0]
        for at in range(0, live, 32 // PIECES):
            # The last rows of a ragged block are asked for twice.
            row = gl.minimum(at + lanes // PIECES, live - 1)
            piece = base + row.to(gl.int64) * step + lanes % PIECES * (PIECE // 4)
            gl.inline_asm_elementwise(TO_L2, "=r,l", [piece], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _produce(
    inputs, out, tables, counter, sizes, strides, out_strides, buffers, barriers, handed,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Bring what the consumers ask for, in their order."""
    q, k, v = inputs
    blocks, entries = tables
    block_count, slots, batches, section, group, first_kv_head = sizes
    total = block_count * slots * batches
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head = strides
    q_buffers, k_buffers, v_buffers = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    item = gl.program_id(0)
    while item < total:
        block, batch, head, live, first, last = work_of(blocks, item, block_count, slots, batches, section)
        # A block without entries loads nothing; consumers skip it by the same test, so turns agree.
        if first < last:
            if out is not None:
                # Consumers are up to SLOTS key blocks behind: the rows are on their way meanwhile.
                _expect_state(out, out_strides, block, batch, head, live, DIM)
            # Each of the three descriptors is written where the one before it lay, which a load reads until it has
            # landed. So all loads by the old one are waited for, and no consumer: the descriptors are made while the
            # item before is still summed. Only `bring` waits for its buffers.
            landed(items, q_full, Q_SLOTS)
            q_slot, q_parity = slot_of(items, Q_SLOTS)
            q_base = q + batch * q_batch + head * q_head
            run = run_of(block)
            # `live` rows: those past the block's end are 0.
            q_rows = described(q_base, run[0], run[1], q_row, live, q_buffers.index(0))
            kv_head = head // group - first_kv_head
            k_base = k + batch * k_batch + kv_head * k_head
            v_base = v + batch * v_batch + kv_head * v_head
            for index in range(first, last):
                rows, _ = rows_and_band(entries + index * ENTRY_COLUMNS)
                start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
                landed(turn, k_full, SLOTS)
                landed(turn, v_full, SLOTS)
                k_rows = described(k_base, rows[0], rows[1], k_row, rows[2], k_buffers.index(0))
                v_rows = described(v_base, rows[0], rows[1], v_row, rows[2], v_buffers.index(0))
                for nth in range(end - start):
                    at = visited(nth, start, full, full_end) * BLOCK_N
                    # K and V have barriers of their own: Q.K of a block may begin before its V is there.
                    slot, parity = slot_of(turn, SLOTS)
                    bring(k_rows, at, slot, parity, k_full, k_empty, k_buffers)
                    # The first K's slot is left before Q's, and V's after it.
                    if (index == first) & (nth == 0):
                        bring(q_rows, 0, q_slot, q_parity, q_full, q_empty, q_buffers)
                    bring(v_rows, at, slot, parity, v_full, v_empty, v_buffers)
                    turn += 1
            items += 1
        # While the consumers still sum the last blocks of this one.
        item = taken(counter, total)
        hand_over(item, rounds, handed, 1)
        rounds += 1


@gluon.jit
def _consume(
    WHICH: gl.constexpr, state, tables, sizes, strides, scale, buffers, barriers, handed,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, RAW_PEAK: gl.constexpr,
):  # fmt: skip
    """The attention updates of the first half of every block's rows, or of the second."""
    # The four warps of a consumer lie along the rows, 16 rows each.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    out, lse, result, sinks = state
    out_strides, result_strides, lse_strides = strides
    blocks, entries = tables
    block_count, slots, batches, section = sizes
    total = block_count * slots * batches
    q_buffers, k_buffers, v_buffers = buffers
    ROWS: gl.constexpr = q_buffers.shape[1] // CONSUMERS
    own = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    # The same rows in the layout of the output product.
    own_out = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    item = gl.program_id(0)
    while item < total:
        block, batch, head, live, first, last = work_of(blocks, item, block_count, slots, batches, section)
        _, ends = ends_of(block)
        live_out = gl.expand_dims(own_out < live, 1)
        old = out, lse, sinks, out_strides, lse_strides, block, batch, head, live
        if first < last:
            q_slot, q_parity = slot_of(items, Q_SLOTS)
            # Two consumers share a buffer of Q: each reads its own half.
            q_rows = q_buffers.index(q_slot).slice(WHICH * ROWS, ROWS)
            mbarrier.wait(barriers[0].index(q_slot), q_parity)
            acc, peak, weight, turn = attend(
                old, turn, first, last, entries, own, own_out, scale, q_rows, q_slot, k_buffers, v_buffers, barriers,
                DIM, BLOCK_N, SLOTS, RAW_PEAK, s_layout, o_layout,
            )  # fmt: skip
            items += 1
        else:
            acc, peak, weight = earlier(old, own, own_out, DIM, o_layout)

        # A row that has seen no key: lse -inf and output 0, without a division by 0.
        blind = weight == 0.0
        whole = gl.where(blind, 1.0, weight)
        natural = gl.where(blind, float("-inf"), (peak + gl.log2(whole)) * LN_2)
        mean = scaled(acc, 1.0 / whole)
        if result is not None:
            result_at = over_dims(places(result, result_strides, block, batch, head, own_out), DIM, o_layout)
            gl.store(result_at, mean.to(result.dtype.element_ty), mask=live_out & ends)
        if out is not None:
            out_at = over_dims(places(out, out_strides, block, batch, head, own_out), DIM, o_layout)
            gl.store(out_at, mean, mask=live_out & (ends == 0))
        gl.store(places(lse, lse_strides, block, batch, head, own), natural, mask=own < live)
        item = received(rounds, handed, 4)
        rounds += 1


@gluon.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, out, lse, result, sinks, blocks, entries, counter, block_count, slots, batches, section, group,
    first_kv_head, scale,
    q_row: tl.int64, q_batch: tl.int64, q_head: tl.int64, k_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    v_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, out_row: tl.int64, out_batch: tl.int64, out_head: tl.int64,
    result_row: tl.int64, result_batch: tl.int64, result_head: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64, lse_row: tl.int64,
    DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, RAW_PEAK: gl.constexpr,
):  # fmt: skip
    """What `attention_gluon.forward_gluon` launches, with the warps of one consumer; the others are added here.

    Each of the 384 threads starts with 168 registers; the producer's warpgroup keeps 56, so that each consumer has 224.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, DIM], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], dtype)
    q_buffers = gl.allocate_shared_memory(dtype, [Q_SLOTS, BLOCK_M, DIM], q_layout)
    k_buffers = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_N, DIM], kv_layout)
    v_buffers = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_N, DIM], kv_layout)
    # Full: one arrival, the producer's. Empty: one of each consumer.
    q_full, q_empty = barriers_for(Q_SLOTS, 1), barriers_for(Q_SLOTS, CONSUMERS)
    k_full, k_empty = barriers_for(SLOTS, 1), barriers_for(SLOTS, CONSUMERS)
    v_full, v_empty = barriers_for(SLOTS, 1), barriers_for(SLOTS, CONSUMERS)
    handed = hand(CONSUMERS)
    # The barriers are visible to TMA before any role begins.
    hopper.fence_async_shared()

    state, inputs, tables = (out, lse, result, sinks), (q, k, v), (blocks, entries)
    buffers, barriers = (q_buffers, k_buffers, v_buffers), (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = block_count, slots, batches, section
    all_sizes = block_count, slots, batches, section, group, first_kv_head
    strides = q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head
    out_strides, result_strides = (out_row, out_batch, out_head), (result_row, result_batch, result_head)
    state_strides = out_strides, result_strides, (lse_row, lse_batch, lse_head)
    upper: gl.constexpr = 0
    lower: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (upper, state, tables, sizes, state_strides, scale, buffers, barriers, handed,
                        DIM, BLOCK_N, SLOTS, RAW_PEAK)),
            (_consume, (lower, state, tables, sizes, state_strides, scale, buffers, barriers, handed,
                        DIM, BLOCK_N, SLOTS, RAW_PEAK)),
            (_produce, (inputs, out, tables, counter, all_sizes, strides, out_strides, buffers, barriers, handed,
                        DIM, BLOCK_N, SLOTS)),
        ],
        [4, 1],
        [224, 56],
    )  # fmt: skip
