"""The Gluon kernel of the forward ring step on Blackwell (sm_100): products by tcgen05 with sums in tensor memory.

The structure is that of FlashAttention-4: a warp loads Q, K and V by TMA, another one issues all products, and two
warpgroups compute the softmax of 128 queries each. S, P and O are in tensor memory; P takes the columns of its S. While
one warpgroup computes exponentials, the products of the other one run. A warpgroup also rescales its own O, which
FlashAttention-4 leaves to a third one: a row then needs no exchange of its factor, and the registers of 12 warps
suffice.
Guarantees: those of `attention_gluon_forward`, whose loads, softmax and state this kernel shares. Tensor memory is not
overwritten before a product that reads it has ended, whatever the order of products.
Tested by executing its PTX; no B200 has run it.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell, hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringattn.kernels.attention_gluon_forward import earlier, produce, weighed, write_state
from ringattn.kernels.attention_gluon_parts import (
    CONSUMERS,
    barriers_for,
    buffers_for,
    hand,
    received,
    scaled,
    slot_of,
    visited,
    work_of,
)
from ringattn.kernels.attention_tiles import ENTRY_COLUMNS, visits
from ringattn.kernels.launch import VARYING

PIECE = gl.constexpr(32)
"""The columns of O that are rescaled at once, which limits the registers."""


# --- operands in tensor memory ---------------------------------------------------------------------------------------


@gluon.jit
def left_operand(matrix, START: gl.constexpr, COLS: gl.constexpr, dtype: gl.constexpr):
    """Return a left operand of COLS columns of 16 bits in the COLS / 2 float32 columns of a matrix from START on."""
    ROWS: gl.constexpr = matrix.shape[0]
    layout: gl.constexpr = blackwell.TensorMemoryLayout([ROWS, COLS], col_stride=1)
    return matrix.slice(START, COLS // 2)._reinterpret(dtype, [ROWS, COLS], layout)


# --- the softmax of a warpgroup --------------------------------------------------------------------------------------


@gluon.jit
def _update(
    peak, weight, turn, n_block, entry, own_rows, scale, scores, sums, ready,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, MASKED: gl.constexpr, RAW_PEAK: gl.constexpr, dtype: gl.constexpr,
    s_layout: gl.constexpr,
):  # fmt: skip
    """Turn the scores of key block `n_block`, the block number `turn` of this program, into weights in tensor memory.

    Rescale the sums of the blocks before, and let the product of the weights with V start.
    """
    s_full, p_full, _ = ready
    mbarrier.wait(s_full, turn & 1)
    p, peak, weight, keep = weighed(
        scores.load(s_layout), peak, weight, n_block, entry, own_rows, (scale, None), None, BLOCK_N, MASKED, RAW_PEAK
    )
    weights = left_operand(scores, 0, BLOCK_N, dtype)
    weights.store(p.to(dtype))
    # No product adds to the sums now: these scores were started after the product of the block before had ended.
    piece_layout: gl.constexpr = gl.BlockedLayout([1, PIECE], [32, 1], [4, 1], [1, 0])
    for start in gl.static_range(0, DIM, PIECE):
        piece = sums.slice(start, PIECE)
        piece.store(scaled(piece.load(piece_layout), keep))
    mbarrier.arrive(p_full)
    return peak, weight


@gluon.jit
def _soften(
    WHICH: gl.constexpr, state, tables, sizes, strides, scale, dtype: gl.constexpr, scores, sums, ready, handed,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, RAW_PEAK: gl.constexpr,
):  # fmt: skip
    """Do the softmax of the first or the second half of every block's rows."""
    ROWS: gl.constexpr = scores.shape[1]
    s_layout: gl.constexpr = gl.BlockedLayout([1, BLOCK_N], [32, 1], [4, 1], [1, 0])
    o_layout: gl.constexpr = gl.BlockedLayout([1, DIM], [32, 1], [4, 1], [1, 0])
    out, lse, result, sinks = state
    out_strides, result_strides, lse_strides = strides
    blocks, entries = tables
    block_count, slots, batches, section = sizes
    total = block_count * slots * batches
    own_rows = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    own_out = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    scores, sums = scores.index(WHICH), sums.index(WHICH)
    s_full, p_full, o_full = ready
    own_ready = s_full.index(WHICH), p_full.index(WHICH), o_full.index(WHICH)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    item = gl.program_id(0)
    while item < total:
        block, batch, head, live, first, last = work_of(blocks, item, block_count, slots, batches, section)
        old = out, lse, sinks, out_strides, lse_strides, block, batch, head, live
        acc, peak, weight = earlier(old, own_rows, own_out, DIM, o_layout)
        if first < last:
            sums.store(acc)
            for index in range(first, last):
                entry = entries + index * ENTRY_COLUMNS
                start, full, full_end, end = visits(entry)
                for _ in range(full_end - full):
                    peak, weight = _update(
                        peak, weight, turn, 0, entry, own_rows, scale, scores, sums, own_ready,
                        DIM, BLOCK_N, False, RAW_PEAK, dtype, s_layout,
                    )  # fmt: skip
                    turn += 1
                for nth in range(full_end - full, end - start):
                    peak, weight = _update(
                        peak, weight, turn, visited(nth, start, full, full_end), entry, own_rows, scale, scores, sums,
                        own_ready, DIM, BLOCK_N, True, RAW_PEAK, dtype, s_layout,
                    )  # fmt: skip
                    turn += 1
            mbarrier.wait(own_ready[2], (turn & 1) ^ 1)
            acc = sums.load(o_layout)
        write_state(
            acc, peak, weight, out, lse, result, out_strides, result_strides, lse_strides, block, batch, head, live,
            own_rows, own_out, DIM, o_layout,
        )  # fmt: skip
        item = received(rounds, handed, 4)
        rounds += 1


# --- products --------------------------------------------------------------------------------------------------------


@gluon.jit
def _score(turn, q_rows, k_buffers, scores, s_full, k_full, k_empty, WHICH: gl.constexpr, SLOTS: gl.constexpr):
    """Start the product of half of the rows of Q with the key block number `turn` of this program."""
    slot, parity = slot_of(turn, SLOTS)
    mbarrier.wait(k_full.index(slot), parity)
    ROWS: gl.constexpr = scores.shape[1]
    blackwell.tcgen05_mma(
        q_rows.slice(WHICH * ROWS, ROWS), k_buffers.index(slot).permute((1, 0)), scores.index(WHICH), use_acc=False,
        mbarriers=[s_full.index(WHICH)],
    )  # fmt: skip
    # The second half is the last reader of the key block.
    if WHICH == CONSUMERS - 1:
        blackwell.tcgen05_commit(k_empty.index(slot))


@gluon.jit
def _multiply(
    tables, sizes, buffers, barriers, dtype: gl.constexpr, scores, sums, ready, handed,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr,
):  # fmt: skip
    """Issue all products, those of one half while the other half is in its softmax."""
    blocks, entries = tables
    block_count, slots, batches, section = sizes
    total = block_count * slots * batches
    q_buffers, k_buffers, v_buffers = buffers[0][0], buffers[1][0], buffers[2][0]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    s_full, p_full, o_full = ready
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    item = gl.program_id(0)
    while item < total:
        _, _, _, _, first, last = work_of(blocks, item, block_count, slots, batches, section)
        if first < last:
            q_slot, q_parity = slot_of(items, Q_SLOTS)
            q_rows = q_buffers.index(q_slot)
            mbarrier.wait(q_full.index(q_slot), q_parity)
            stop = turn
            for index in range(first, last):
                start, _, _, end = visits(entries + index * ENTRY_COLUMNS)
                stop += end - start
            for which in gl.static_range(CONSUMERS):
                _score(turn, q_rows, k_buffers, scores, s_full, k_full, k_empty, which, SLOTS)
            while turn < stop:
                slot, parity = slot_of(turn, SLOTS)
                mbarrier.wait(v_full.index(slot), parity)
                for which in gl.static_range(CONSUMERS):
                    mbarrier.wait(p_full.index(which), turn & 1)
                    weights = left_operand(scores.index(which), 0, BLOCK_N, dtype)
                    blackwell.tcgen05_mma(
                        weights, v_buffers.index(slot), sums.index(which), use_acc=True,
                        mbarriers=[o_full.index(which)],
                    )  # fmt: skip
                    if turn + 1 < stop:
                        # The next scores take the columns of these weights.
                        mbarrier.wait(o_full.index(which), turn & 1)
                        _score(turn + 1, q_rows, k_buffers, scores, s_full, k_full, k_empty, which, SLOTS)
                blackwell.tcgen05_commit(v_empty.index(slot))
                turn += 1
            # All products have been issued. Q is free when they have ended.
            blackwell.tcgen05_commit(q_empty.index(q_slot))
            items += 1
        item = received(rounds, handed, 1)
        rounds += 1


# --- the kernel ------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=VARYING)
def tcgen05_forward_kernel(
    q, k, v, out, lse, result, sinks, blocks, entries, counter, block_count, slots, batches, section, group,
    first_kv_head, scale,
    q_row: tl.int64, q_batch: tl.int64, q_head: tl.int64, k_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    v_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, out_row: tl.int64, out_batch: tl.int64, out_head: tl.int64,
    result_row: tl.int64, result_batch: tl.int64, result_head: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64, lse_row: tl.int64,
    D_K: gl.constexpr, D_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
    Q_SLOTS: gl.constexpr, RAW_PEAK: gl.constexpr,
):  # fmt: skip
    """Run a program of `attention_gluon.forward_gluon` on Blackwell.

    Each of the 384 threads starts with 168 registers; the warps of loads and products keep 56, so that each warpgroup
    of the softmax has 224. Scores and sums take 256 + 2 * D_V of the 512 columns of tensor memory.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    gl.static_assert(CONSUMERS * (BLOCK_N + D_V) <= 512, "scores and sums take more columns than tensor memory has")
    q_buffers = buffers_for(dtype, Q_SLOTS, BLOCK_M, D_K)
    k_buffers, v_buffers = buffers_for(dtype, SLOTS, BLOCK_N, D_K), buffers_for(dtype, SLOTS, BLOCK_N, D_V)
    scores = blackwell.allocate_tensor_memory(
        gl.float32, [CONSUMERS, ROWS, BLOCK_N], blackwell.TensorMemoryLayout([ROWS, BLOCK_N], col_stride=1)
    )
    sums = blackwell.allocate_tensor_memory(
        gl.float32, [CONSUMERS, ROWS, D_V], blackwell.TensorMemoryLayout([ROWS, D_V], col_stride=1)
    )
    # Full: one arrival, from the producer. Empty: one arrival, when the products that read the buffer have ended.
    q_full, q_empty = barriers_for(Q_SLOTS, 1), barriers_for(Q_SLOTS, 1)
    k_full, k_empty = barriers_for(SLOTS, 1), barriers_for(SLOTS, 1)
    v_full, v_empty = barriers_for(SLOTS, 1), barriers_for(SLOTS, 1)
    # For each half: its scores are complete, its weights are stored, and its sums include them.
    ready = barriers_for(CONSUMERS, 1), barriers_for(CONSUMERS, 1), barriers_for(CONSUMERS, 1)
    # Both warpgroups and the warp that issues products read each item.
    handed = hand(CONSUMERS + 1)
    # Make the barriers visible to TMA and to products before any role starts.
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
            (_soften, (upper, state, tables, sizes, state_strides, scale, dtype, scores, sums, ready, handed,
                       D_V, BLOCK_N, RAW_PEAK)),
            (_soften, (lower, state, tables, sizes, state_strides, scale, dtype, scores, sums, ready, handed,
                       D_V, BLOCK_N, RAW_PEAK)),
            (_multiply, (tables, sizes, buffers, barriers, dtype, scores, sums, ready, handed,
                         BLOCK_N, SLOTS, Q_SLOTS)),
            (produce, (inputs, out, tables, counter, all_sizes, strides, out_strides, buffers, barriers, handed,
                       D_V, BLOCK_N, SLOTS, Q_SLOTS)),
        ],
        [4, 1, 1],
        [224, 56, 56],
    )  # fmt: skip
