"""The Gluon kernel of the forward ring step on Hopper: its three groups of warps and their shared buffers.

The structure is that of FlashAttention-3 (arXiv 2407.08608, section 3): a producer warp loads Q, K and V by TMA. Each
of two consumer warpgroups has half the rows of a query block. It issues the product Q.K of a key block together with
P.V of the block before, so that the softmax overlaps with P.V. The online softmax is that of
`attention_forward.update`. With RAW_PEAK the peak is taken from unscaled products, which needs a positive scale, and a
logit is scaled and shifted with a single rounding.
Guarantees: no buffer is written before its readers are done, and none is read before it is filled, whatever entries a
block has, even if it has none. All roles of a program go through the same key blocks in the same order.
`attention_gluon.gluon_takes` defines the supported calls.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringattn.kernels.attention_gluon_parts import (
    CONSUMERS,
    alibi_of,
    barriers_for,
    bring,
    buffers_for,
    described,
    hand,
    hand_over,
    landed,
    numbered,
    over_dims,
    places,
    products,
    received,
    rows_at,
    rows_from,
    scaled,
    seen,
    slot_of,
    taken,
    visited,
    work_of,
)
from ringattn.kernels.attention_options import biased, steps_of
from ringattn.kernels.attention_tiles import (
    ENTRY_COLUMNS,
    LN_2,
    LOG2_E,
    LOWEST,
    ends_of,
    logits,
    rows_and_band,
    run_of,
    visits,
)
from ringattn.kernels.launch import VARYING

# --- the softmax of a consumer ---------------------------------------------------------------------------------------


@gluon.jit
def weighed(
    s, peak, weight, n_block, entry, own_rows, scales, bias,
    BLOCK_N: gl.constexpr, MASKED: gl.constexpr, RAW_PEAK: gl.constexpr,
):  # fmt: skip
    """Return (p = 2 ** (logit - peak), new peak, new weight, factor for the old sums) for key block `n_block`."""
    scale, softcap = scales
    s, raw = logits(s, scale, softcap, softcap is not None)
    factor = scale if softcap is None else softcap
    if RAW_PEAK:
        s = raw
    if bias is not None:
        slope, place = bias
        layout: gl.constexpr = s.type.layout
        s, rest = biased(
            s, slope, place, steps_of(place, True), n_block, own_rows, numbered(BLOCK_N, layout),
            CONSUMERS * own_rows.shape[0], False,
        )  # fmt: skip
        rest = rest * factor if RAW_PEAK else rest
    if MASKED:
        first, last = seen(own_rows, entry)
        cols = gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s.type.layout)), 0)
        # A thread's columns are a base, which is 0, 2, 4 or 6, plus 32 constants. With the base on the other side of
        # the comparison, the constants are part of the code; otherwise each would take a register through all loops.
        fixed, column_base = cols & ~6, cols & 6
        # Count from the block's first key, like `cols`.
        left = gl.expand_dims(first - n_block * BLOCK_N, 1) - column_base
        right = gl.expand_dims(last - n_block * BLOCK_N, 1) - column_base
        s = gl.where((fixed >= left) & (fixed <= right), s, float("-inf"))
    # Scale only the largest product of a row, not all: with a positive scale, logits have the order of products.
    highest = gl.max(s, 1) * factor if RAW_PEAK else gl.max(s, 1)
    # The first peak is finite, so the new one is never -inf: if all logits of a row are -inf, no exponent is NaN.
    new_peak = gl.maximum(peak, highest if bias is None else highest + rest)
    # The product and the difference become one instruction (FFMA); a masked product stays -inf because scale > 0.
    shift = gl.expand_dims(new_peak if bias is None else new_peak - rest, 1)
    p = gl.exp2((s * factor if RAW_PEAK else s) - shift)
    # The factor that rescales the old accumulator.
    keep = gl.exp2(peak - new_peak)
    return p, new_peak, weight * keep + gl.sum(p, 1), keep


@gluon.jit
def earlier(state, own_rows, own_out, D_V: gl.constexpr, o_layout: gl.constexpr):
    """Return (acc, peak, weight) of a block's rows: the stored state, or the state over no key if the pass begins.

    `own_rows`, `own_out`: the rows, counted within the block, in the layout of the logits and in that of the output.
    """
    out, lse, sinks, out_strides, lse_strides, block, batch, head, live = state
    begins, _ = ends_of(block)
    # A FIRST block has no earlier state: it starts with lse = -inf, or with the sink.
    stored = begins == 0
    acc = gl.zeros([own_out.shape[0], D_V], gl.float32, o_layout)
    if out is not None:
        out_at = over_dims(places(out, out_strides, block, batch, head, own_out), D_V, o_layout)
        acc = gl.load(out_at, mask=gl.expand_dims(own_out < live, 1) & stored, other=0.0)
    lse_at = places(lse, lse_strides, block, batch, head, own_rows)
    peak = gl.load(lse_at, mask=(own_rows < live) & stored, other=float("-inf")) * LOG2_E
    if sinks is not None:
        peak = gl.where(begins, gl.load(sinks + head).to(gl.float32) * LOG2_E, peak)
    # A normalized state has weight 1 at its peak, and weight 0 if it has no peak.
    nothing = peak == float("-inf")
    ones = gl.full([own_rows.shape[0]], 1.0, gl.float32, own_rows.type.layout)
    return acc, gl.where(nothing, LOWEST, peak), gl.where(nothing, 0.0, ones)


@gluon.jit
def _open(
    state, turn, n_block, entry, own_rows, own_out, scales, bias, q_rows, k_buffers, barriers,
    D_V: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, RAW_PEAK: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Do the attention update for the first key block, except for its values, which the next update adds."""
    _, _, k_full, k_empty, _, _ = barriers
    slot, parity = slot_of(turn, SLOTS)
    mbarrier.wait(k_full.index(slot), parity)
    s = products(q_rows, rows_at(k_buffers, slot), BLOCK_N, s_layout)
    # Load the state after the product has started, so that the loads overlap with it: the assembler waits for all
    # earlier loads before the product.
    acc, peak, weight = earlier(state, own_rows, own_out, D_V, o_layout)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    # The product has ended, so K's slot can be refilled during the softmax.
    mbarrier.arrive(k_empty.index(slot))
    p, peak, weight, keep = weighed(s, peak, weight, n_block, entry, own_rows, scales, bias, BLOCK_N, True, RAW_PEAK)
    # P stays in registers, as the left operand of P.V.
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    return scaled(acc, keep), gl.convert_layout(p.to(q_rows[0].dtype), p_layout), peak, weight


@gluon.jit
def _update(
    acc, p, peak, weight, turn, n_block, entry, own_rows, scales, bias, q_rows, k_buffers, v_buffers, barriers,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, MASKED: gl.constexpr, RAW_PEAK: gl.constexpr,
    s_layout: gl.constexpr,
):  # fmt: skip
    """Do the attention update for block `n_block` of the entry, the key block number `turn` of this program.

    This update adds the values of the block before, whose weights are `p`. The next update adds this block's values.
    """
    _, _, k_full, k_empty, v_full, v_empty = barriers
    slot, parity = slot_of(turn, SLOTS)
    mbarrier.wait(k_full.index(slot), parity)
    s = products(q_rows, rows_at(k_buffers, slot), BLOCK_N, s_layout)
    # P.V is one block behind, so it reads V of turn - 1.
    old_slot, old_parity = slot_of(turn - 1, SLOTS)
    mbarrier.wait(v_full.index(old_slot), old_parity)
    # Issue P.V of the block before now, so that it overlaps with the softmax of this block.
    acc = hopper.warpgroup_mma(p, v_buffers[0].index(old_slot), acc, is_async=True)
    # Let one product run on: the older product, Q.K, has then ended, and P.V overlaps with the softmax.
    s = hopper.warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(slot))
    new_p, peak, weight, keep = weighed(
        s, peak, weight, n_block, entry, own_rows, scales, bias, BLOCK_N, MASKED, RAW_PEAK
    )
    # This wait passes at once, but it ends a basic block: otherwise the assembler moves the softmax after the wait
    # below.
    mbarrier.wait(v_full.index(old_slot), old_parity)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(old_slot))
    return scaled(acc, keep), gl.convert_layout(new_p.to(p.dtype), p.type.layout), peak, weight


@gluon.jit
def attend(
    state, turn, first, last, entries, own_rows, own_out, scales, alibi, q_rows, q_slot, k_buffers, v_buffers, barriers,
    D_V: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, RAW_PEAK: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Return (acc, peak, weight, turn) after entries first .. last - 1, of which there is at least one.

    `turn`: the number of key blocks that this program has processed. The returned number includes those of this call.
    """
    _, q_empty, _, _, v_full, v_empty = barriers
    head = state[7]
    start, full, full_end, _ = visits(entries + first * ENTRY_COLUMNS)
    first_bias = alibi_of(alibi, first, head, scales, RAW_PEAK)
    acc, p, peak, weight = _open(
        state, turn, visited(0, start, full, full_end), entries + first * ENTRY_COLUMNS, own_rows, own_out, scales,
        first_bias, q_rows, k_buffers, barriers, D_V, BLOCK_N, SLOTS, RAW_PEAK, s_layout, o_layout,
    )  # fmt: skip
    turn += 1
    for index in range(first, last):
        entry = entries + index * ENTRY_COLUMNS
        start, full, full_end, end = visits(entry)
        bias = alibi_of(alibi, index, head, scales, RAW_PEAK)
        # `_open` has already processed block 0 of the first entry.
        first_nth = gl.where(index == first, 1, 0)
        for nth in range(first_nth, full_end - full):
            acc, p, peak, weight = _update(
                acc, p, peak, weight, turn, full + nth, entry, own_rows, scales, bias, q_rows, k_buffers, v_buffers,
                barriers, BLOCK_N, SLOTS, False, RAW_PEAK, s_layout,
            )  # fmt: skip
            turn += 1
        for nth in range(gl.maximum(full_end - full, first_nth), end - start):
            acc, p, peak, weight = _update(
                acc, p, peak, weight, turn, visited(nth, start, full, full_end), entry, own_rows, scales, bias,
                q_rows, k_buffers, v_buffers, barriers, BLOCK_N, SLOTS, True, RAW_PEAK, s_layout,
            )  # fmt: skip
            turn += 1
    # Q is not read again, so the producer may load the Q of another item. Then add the values of the last block.
    mbarrier.arrive(q_empty.index(q_slot))
    slot, parity = slot_of(turn - 1, SLOTS)
    mbarrier.wait(v_full.index(slot), parity)
    acc = hopper.warpgroup_mma(p, v_buffers[0].index(slot), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(slot))
    return acc, peak, weight, turn


@gluon.jit
def write_state(
    acc, peak, weight, out, lse, result, out_strides, result_strides, lse_strides, block, batch, head, live,
    own_rows, own_out, D_V: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Store the state of a block's rows, or their result if the pass ends."""
    _, ends = ends_of(block)
    live_out = gl.expand_dims(own_out < live, 1)
    # A row that has seen no key gets lse -inf and output 0, without a division by 0.
    blind = weight == 0.0
    whole = gl.where(blind, 1.0, weight)
    natural = gl.where(blind, float("-inf"), (peak + gl.log2(whole)) * LN_2)
    mean = scaled(acc, 1.0 / whole)
    if result is not None:
        result_at = over_dims(places(result, result_strides, block, batch, head, own_out), D_V, o_layout)
        gl.store(result_at, mean.to(result.dtype.element_ty), mask=live_out & ends)
    if out is not None:
        out_at = over_dims(places(out, out_strides, block, batch, head, own_out), D_V, o_layout)
        gl.store(out_at, mean, mask=live_out & (ends == 0))
    gl.store(places(lse, lse_strides, block, batch, head, own_rows), natural, mask=own_rows < live)


# --- the kernel ------------------------------------------------------------------------------------------------------


TO_L2 = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")
PIECE = gl.constexpr(64)
"""The smallest number of bytes that L2 loads from memory at once."""


@gluon.jit
def _expect_state(out, strides, block, batch, head, live, D_V: gl.constexpr):
    """Prefetch the rows of a block's state into L2, from where its consumers will load them."""
    begins, _ = ends_of(block)
    # A FIRST block reads no state.
    if begins == 0:
        PIECES: gl.constexpr = D_V * 4 // PIECE
        lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        run = run_of(block)
        base = out + batch * strides[1] + head * strides[2] + run[0].to(gl.int64) * strides[0]
        step = run[1].to(gl.int64) * strides[0]
        for start in range(0, live, 32 // PIECES):
            # The last row of an incomplete block may be prefetched several times.
            row = gl.minimum(start + lanes // PIECES, live - 1)
            piece = base + row.to(gl.int64) * step + lanes % PIECES * (PIECE // 4)
            gl.inline_asm_elementwise(TO_L2, "=r,l", [piece], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def produce(
    inputs, out, tables, counter, sizes, strides, out_strides, buffers, barriers, handed,
    D_V: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr,
):  # fmt: skip
    """Load the rows that the consumers read, in the order in which they read them."""
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
        # A block without entries loads nothing. Consumers skip it by the same test, so the turns agree.
        if first < last:
            if out is not None:
                # Consumers are up to SLOTS key blocks behind, which gives the prefetch time.
                _expect_state(out, out_strides, block, batch, head, live, D_V)
            # Each of the three descriptors overwrites its predecessor, which loads in flight still read. So wait for
            # the loads, but not for the consumers: the descriptors are made while the previous item is still summed.
            # Only `bring` waits for buffers.
            landed(items, q_full, Q_SLOTS)
            q_slot, q_parity = slot_of(items, Q_SLOTS)
            q_base = q + batch * q_batch + head * q_head
            run = run_of(block)
            # The descriptor has `live` rows; rows past the block's end are read as 0.
            q_rows = described(q_base, run[0], run[1], q_row, live, rows_at(q_buffers, 0))
            kv_head = head // group - first_kv_head
            k_base = k + batch * k_batch + kv_head * k_head
            v_base = v + batch * v_batch + kv_head * v_head
            for index in range(first, last):
                rows, _ = rows_and_band(entries + index * ENTRY_COLUMNS)
                start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
                landed(turn, k_full, SLOTS)
                landed(turn, v_full, SLOTS)
                k_rows = described(k_base, rows[0], rows[1], k_row, rows[2], rows_at(k_buffers, 0))
                v_rows = described(v_base, rows[0], rows[1], v_row, rows[2], rows_at(v_buffers, 0))
                for nth in range(end - start):
                    first_row = visited(nth, start, full, full_end) * BLOCK_N
                    # K and V have separate barriers, so that Q.K of a block can start before its V has arrived.
                    slot, parity = slot_of(turn, SLOTS)
                    bring(k_rows, first_row, slot, parity, k_full, k_empty, k_buffers)
                    # Consumers release the first K's slot before that of Q, and V's slot after it.
                    if (index == first) & (nth == 0):
                        bring(q_rows, 0, q_slot, q_parity, q_full, q_empty, q_buffers)
                    bring(v_rows, first_row, slot, parity, v_full, v_empty, v_buffers)
                    turn += 1
            items += 1
        # Take the next item while the consumers still sum the last blocks of this one.
        item = taken(counter, total)
        hand_over(item, rounds, handed, 1)
        rounds += 1


@gluon.jit
def _consume(
    WHICH: gl.constexpr, state, tables, sizes, strides, scales, alibi, buffers, barriers, handed,
    D_V: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr, RAW_PEAK: gl.constexpr,
):  # fmt: skip
    """Do the attention updates of the first or the second half of every block's rows."""
    # The four warps of a consumer have 16 rows each.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    out, lse, result, sinks = state
    out_strides, result_strides, lse_strides = strides
    blocks, entries = tables
    block_count, slots, batches, section = sizes
    total = block_count * slots * batches
    q_buffers, k_buffers, v_buffers = buffers
    ROWS: gl.constexpr = q_buffers[0].shape[1] // CONSUMERS
    own_rows = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    # The same rows in the layout of the output product.
    own_out = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    item = gl.program_id(0)
    while item < total:
        block, batch, head, live, first, last = work_of(blocks, item, block_count, slots, batches, section)
        old = out, lse, sinks, out_strides, lse_strides, block, batch, head, live
        if first < last:
            q_slot, q_parity = slot_of(items, Q_SLOTS)
            # Two consumers share a buffer of Q; each reads half of it.
            q_rows = rows_from(rows_at(q_buffers, q_slot), WHICH * ROWS, ROWS)
            mbarrier.wait(barriers[0].index(q_slot), q_parity)
            acc, peak, weight, turn = attend(
                old, turn, first, last, entries, own_rows, own_out, scales, alibi, q_rows, q_slot, k_buffers,
                v_buffers, barriers, D_V, BLOCK_N, SLOTS, RAW_PEAK, s_layout, o_layout,
            )  # fmt: skip
            items += 1
        else:
            acc, peak, weight = earlier(old, own_rows, own_out, D_V, o_layout)

        write_state(
            acc, peak, weight, out, lse, result, out_strides, result_strides, lse_strides, block, batch, head, live,
            own_rows, own_out, D_V, o_layout,
        )  # fmt: skip
        item = received(rounds, handed, 4)
        rounds += 1


@gluon.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, out, lse, result, sinks, blocks, entries, places, slopes, counter, block_count, slots, batches, section,
    group, first_kv_head, scale, softcap,
    q_row: tl.int64, q_batch: tl.int64, q_head: tl.int64, k_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    v_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, out_row: tl.int64, out_batch: tl.int64, out_head: tl.int64,
    result_row: tl.int64, result_batch: tl.int64, result_head: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64, lse_row: tl.int64,
    D_K: gl.constexpr, D_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
    Q_SLOTS: gl.constexpr, RAW_PEAK: gl.constexpr,
):  # fmt: skip
    """Run a program of `attention_gluon.forward_gluon`. It starts with the warps of one consumer and adds the others.

    Q_SLOTS: the number of buffers for Q. With two, a consumer that is done with a block of queries can begin the next
    block while the other consumer still reads the first.

    Each of the 384 threads starts with 168 registers; the producer's warpgroup keeps 56, so that each consumer has 224.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    q_buffers = buffers_for(dtype, Q_SLOTS, BLOCK_M, D_K)
    k_buffers, v_buffers = buffers_for(dtype, SLOTS, BLOCK_N, D_K), buffers_for(dtype, SLOTS, BLOCK_N, D_V)
    # Full: one arrival, from the producer. Empty: one arrival from each consumer.
    q_full, q_empty = barriers_for(Q_SLOTS, 1), barriers_for(Q_SLOTS, CONSUMERS)
    k_full, k_empty = barriers_for(SLOTS, 1), barriers_for(SLOTS, CONSUMERS)
    v_full, v_empty = barriers_for(SLOTS, 1), barriers_for(SLOTS, CONSUMERS)
    handed = hand(CONSUMERS)
    # Make the barriers visible to TMA before any role starts.
    hopper.fence_async_shared()

    state, inputs, tables = (out, lse, result, sinks), (q, k, v), (blocks, entries)
    buffers, barriers = (q_buffers, k_buffers, v_buffers), (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes, scales, alibi = (block_count, slots, batches, section), (scale, softcap), (places, slopes)
    all_sizes = block_count, slots, batches, section, group, first_kv_head
    strides = q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head
    out_strides, result_strides = (out_row, out_batch, out_head), (result_row, result_batch, result_head)
    state_strides = out_strides, result_strides, (lse_row, lse_batch, lse_head)
    upper: gl.constexpr = 0
    lower: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (upper, state, tables, sizes, state_strides, scales, alibi, buffers, barriers,
                        handed, D_V, BLOCK_N, SLOTS, Q_SLOTS, RAW_PEAK)),
            (_consume, (lower, state, tables, sizes, state_strides, scales, alibi, buffers, barriers,
                        handed, D_V, BLOCK_N, SLOTS, Q_SLOTS, RAW_PEAK)),
            (produce, (inputs, out, tables, counter, all_sizes, strides, out_strides, buffers, barriers, handed,
                       D_V, BLOCK_N, SLOTS, Q_SLOTS)),
        ],
        [4, 1],
        [224, 56],
    )  # fmt: skip
