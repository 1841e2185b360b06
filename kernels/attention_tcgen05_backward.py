"""The Gluon kernels of the backward on Blackwell (sm_100): products by tcgen05 with sums in tensor memory.

There are two kernels, dQ and dK/dV. In each, a warp loads rows by TMA, another one issues all products, and two
warpgroups turn S and dP into P and dS. dK/dV computes S^T = K.Q^T and dP^T = V.dO^T, so that P^T and dS^T are left
operands in tensor memory of dV += P^T.dO and dK += dS^T.Q; dQ needs dS alone. A warpgroup has all 128 rows of a block
and half of its columns. The left operand that it stores takes half of the columns that it has read, and no other
warpgroup reads these. Columns of tensor memory, the 512 of a multiprocessor at dimension 128:

    dQ       S 128, dP and dS of two blocks 256, dQ D_K
    dK, dV   S and P 128, dP and dS 128, dK D_K, dV D_V

Guarantees: those of `attention_gluon_grad_q` and `attention_gluon_grad_kv`, whose loads these kernels share. There are
no atomics, so equal tables give equal bits. Tensor memory is not overwritten before a product that reads it has ended,
whatever the order of products.
Tested by executing their PTX; no B200 has run them.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell, hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringattn.kernels.attention_gluon_grad_kv import produce as produce_queries
from ringattn.kernels.attention_gluon_grad_q import produce as produce_keys
from ringattn.kernels.attention_gluon_parts import (
    CONSUMERS,
    barriers_for,
    buffers_for,
    deliver,
    hand,
    masked,
    places,
    received,
    rows_at,
    seen,
    slot_of,
    visited,
    work_of,
)
from ringattn.kernels.attention_tcgen05_forward import left_operand
from ringattn.kernels.attention_tiles import ENTRY_COLUMNS, LOG2_E, logits, query_heads, visits
from ringattn.kernels.launch import VARYING

AHEAD = gl.constexpr(2)
"""The blocks of dQ whose dP or dS are in tensor memory at once."""


@gluon.jit
def _half(matrix, WHICH: gl.constexpr):
    """Return the columns of a matrix that a warpgroup reads."""
    COLS: gl.constexpr = matrix.shape[1] // CONSUMERS
    return matrix.slice(WHICH * COLS, COLS)


@gluon.jit
def _operand(matrix, WHICH: gl.constexpr, dtype: gl.constexpr):
    """Return where a warpgroup stores the left operand that it makes of its half of a matrix: in the same columns."""
    COLS: gl.constexpr = matrix.shape[1] // CONSUMERS
    return left_operand(matrix, WHICH * COLS, COLS, dtype)


@gluon.jit
def _multiply_halves(matrix, rows, sums, done, adds, dtype: gl.constexpr):
    """Start the product of a left operand, one half after the other, with `rows`: (ROWS, columns of `rows`)."""
    COLS: gl.constexpr = matrix.shape[1] // CONSUMERS
    for which in gl.static_range(CONSUMERS):
        blackwell.tcgen05_mma(
            _operand(matrix, which, dtype), rows.slice(which * COLS, COLS), sums, use_acc=adds if which == 0 else True,
            mbarriers=[done],
        )  # fmt: skip


@gluon.jit
def _gradient(
    sums, filled, scale, carried, result, carried_strides, result_strides, block, batch, head, live,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Add a warpgroup's half of the columns of a gradient to what is carried between launches, or write the result.

    `filled`: whether the block has entries. Otherwise the sums are not read.
    """
    ROWS: gl.constexpr = sums.shape[0]
    COLS: gl.constexpr = sums.shape[1] // CONSUMERS
    layout: gl.constexpr = gl.BlockedLayout([1, COLS], [32, 1], [4, 1], [1, 0])
    total = gl.zeros([ROWS, COLS], gl.float32, layout)
    if filled:
        total = _half(sums, WHICH).load(layout) * scale
    if carried is not None:
        carried += WHICH * COLS
    if result is not None:
        result += WHICH * COLS
    own_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    deliver(
        (total,), None, carried, result, carried_strides, result_strides, block, batch, head, own_rows, live, layout,
    )  # fmt: skip


# --- dQ --------------------------------------------------------------------------------------------------------------


@gluon.jit
def _update_q(
    turn, n_block, limits, peaks, deltas, scale, scores, gradients, ready,
    WHICH: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Turn S and dP of key block `turn` of this program, block `n_block` of its entry, into dS.

    `limits`: the first and the last key of the entry that each query sees.
    """
    s_full, s_read, dp_full, ds_full = ready
    COLS: gl.constexpr = scores.shape[1] // CONSUMERS
    slot, parity = slot_of(turn, AHEAD)
    mbarrier.wait(s_full, turn & 1)
    s = _half(scores, WHICH).load(layout)
    # The scores of the next block may overwrite these.
    mbarrier.arrive(s_read)
    s, _ = logits(s, scale, None, False)
    s = s - gl.expand_dims(peaks, 1)
    if MASKED:
        s = masked(s, limits, n_block * CONSUMERS + WHICH, COLS)
    # The final weights, because lse is over all keys of the row.
    p = gl.exp2(s)
    mbarrier.wait(dp_full.index(slot), parity)
    # dS = P * (dP - delta), delta = sum(dout * out) - dlse; the scale is applied at the end.
    ds = p * (_half(gradients.index(slot), WHICH).load(layout) - gl.expand_dims(deltas, 1))
    _operand(gradients.index(slot), WHICH, dtype).store(ds.to(dtype))
    mbarrier.arrive(ds_full.index(slot))


@gluon.jit
def _differentiate_q(
    WHICH: gl.constexpr, per_row, grads, tables, sizes, strides, scales, dtype: gl.constexpr, q_empty, memory, ready,
    handed,
):  # fmt: skip
    """Compute dS of the first or the second half of every block of keys, and deliver half of the columns of dQ."""
    scores, gradients, sums = memory
    of_update = ready[0], ready[1], ready[2], ready[3]
    ROWS: gl.constexpr = scores.shape[0]
    COLS: gl.constexpr = scores.shape[1] // CONSUMERS
    layout: gl.constexpr = gl.BlockedLayout([1, COLS], [32, 1], [4, 1], [1, 0])
    lse, delta = per_row
    dq_carried, dq_result = grads
    dq_strides, result_strides, lse_strides, delta_strides = strides
    scale, in_scale = scales
    blocks, entries = tables
    block_count, slots, batches, section, _, _ = sizes
    own_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    total = block_count * slots * batches
    item = gl.program_id(0)
    while item < total:
        block, batch, head, live, first, last = work_of(blocks, item, block_count, slots, batches, section)
        if first < last:
            lse_at = places(lse, lse_strides, block, batch, head, own_rows)
            peaks = gl.load(lse_at, mask=own_rows < live, other=float("-inf")) * LOG2_E
            # Rows that saw no key get weight 0: exp2(x - inf).
            peaks = gl.where(peaks == float("-inf"), float("inf"), peaks)
            deltas = gl.load(
                places(delta, delta_strides, block, batch, head, own_rows), mask=own_rows < live, other=0.0
            )
            for index in range(first, last):
                entry = entries + index * ENTRY_COLUMNS
                start, full, full_end, end = visits(entry)
                for _ in range(full_end - full):
                    _update_q(
                        turn, 0, (0, 0), peaks, deltas, in_scale, scores, gradients, of_update, WHICH, False, dtype,
                        layout,
                    )  # fmt: skip
                    turn += 1
                limits = seen(own_rows, entry)
                for nth in range(full_end - full, end - start):
                    _update_q(
                        turn, visited(nth, start, full, full_end), limits, peaks, deltas, in_scale, scores, gradients,
                        of_update, WHICH, True, dtype, layout,
                    )  # fmt: skip
                    turn += 1
            # All products with q and dout have ended.
            mbarrier.wait(q_empty, items & 1)
            items += 1
        _gradient(
            sums, first < last, scale, dq_carried, dq_result, dq_strides, result_strides, block, batch, head, live,
            WHICH,
        )  # fmt: skip
        item = received(rounds, handed, 4)
        rounds += 1


@gluon.jit
def _score_q(turn, buffers, barriers, scores, gradients, ready, SLOTS: gl.constexpr):
    """Start S and dP of key block `turn` of this program."""
    q_rows, dout_rows, k_buffers, v_buffers = buffers[0][0], buffers[1][0], buffers[2][0], buffers[3][0]
    k_full, v_full = barriers[2], barriers[3]
    s_full, s_read, dp_full = ready[0], ready[1], ready[2]
    slot, parity = slot_of(turn, SLOTS)
    mbarrier.wait(k_full.index(slot), parity)
    mbarrier.wait(s_read, (turn & 1) ^ 1)
    blackwell.tcgen05_mma(q_rows, k_buffers.index(slot).permute((1, 0)), scores, use_acc=False, mbarriers=[s_full])
    mbarrier.wait(v_full.index(slot), parity)
    ahead = turn % AHEAD
    blackwell.tcgen05_mma(
        dout_rows, v_buffers.index(slot).permute((1, 0)), gradients.index(ahead), use_acc=False,
        mbarriers=[dp_full.index(ahead)],
    )  # fmt: skip


@gluon.jit
def _multiply_q(
    tables, sizes, dtype: gl.constexpr, buffers, barriers, memory, ready, handed, SLOTS: gl.constexpr,
):  # fmt: skip
    """Issue all products of dQ: S and dP of a block before dQ of the block before."""
    blocks, entries = tables
    block_count, slots, batches, section, _, _ = sizes
    k_buffers = buffers[2][0]
    q_full, q_empty, empty = barriers[0], barriers[1], barriers[4]
    scores, gradients, sums = memory
    ds_full, dq_done = ready[3], ready[4]
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    total = block_count * slots * batches
    item = gl.program_id(0)
    while item < total:
        _, _, _, _, first, last = work_of(blocks, item, block_count, slots, batches, section)
        if first < last:
            begin = turn
            stop = turn
            for index in range(first, last):
                start, _, _, end = visits(entries + index * ENTRY_COLUMNS)
                stop += end - start
            mbarrier.wait(q_full, items & 1)
            _score_q(turn, buffers, barriers, scores, gradients, ready, SLOTS)
            while turn < stop:
                # The next dP takes the columns of the dS that the last product but this one reads.
                mbarrier.wait(dq_done, (turn & 1) ^ 1)
                if turn + 1 < stop:
                    _score_q(turn + 1, buffers, barriers, scores, gradients, ready, SLOTS)
                ahead, ahead_parity = slot_of(turn, AHEAD)
                mbarrier.wait(ds_full.index(ahead), ahead_parity)
                slot, _ = slot_of(turn, SLOTS)
                _multiply_halves(gradients.index(ahead), k_buffers.index(slot), sums, dq_done, turn > begin, dtype)
                blackwell.tcgen05_commit(empty.index(slot))
                turn += 1
            # All products have been issued. q and dout are free when they have ended.
            blackwell.tcgen05_commit(q_empty)
            items += 1
        item = received(rounds, handed, 1)
        rounds += 1


@gluon.jit(do_not_specialize=VARYING)
def tcgen05_grad_q_kernel(
    q, k, v, dout, lse, delta, dq, dq_result, blocks, entries, counter, block_count, slots, batches, section, group,
    first_kv_head, scale, in_scale,
    q_row: tl.int64, q_batch: tl.int64, q_head: tl.int64, k_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    v_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, dout_row: tl.int64, dout_batch: tl.int64,
    dout_head: tl.int64, dq_row: tl.int64, dq_batch: tl.int64, dq_head: tl.int64,
    result_row: tl.int64, result_batch: tl.int64, result_head: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64, lse_row: tl.int64,
    delta_batch: tl.int64, delta_head: tl.int64, delta_row: tl.int64,
    D_K: gl.constexpr, D_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Run a program of `attention_gluon.grad_q_gluon` on Blackwell.

    Each of the 384 threads starts with 168 registers; the warps of loads and products keep 56, so that each warpgroup
    of gradients has 224.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    gl.static_assert((1 + AHEAD) * BLOCK_N + D_K <= 512, "S, dP and dQ take more columns than tensor memory has")
    q_buffer = rows_at(buffers_for(dtype, 1, BLOCK_M, D_K), 0)
    dout_buffer = rows_at(buffers_for(dtype, 1, BLOCK_M, D_V), 0)
    k_buffers, v_buffers = buffers_for(dtype, SLOTS, BLOCK_N, D_K), buffers_for(dtype, SLOTS, BLOCK_N, D_V)
    of_scores: gl.constexpr = blackwell.TensorMemoryLayout([BLOCK_M, BLOCK_N], col_stride=1)
    of_sums: gl.constexpr = blackwell.TensorMemoryLayout([BLOCK_M, D_K], col_stride=1)
    scores = blackwell.allocate_tensor_memory(gl.float32, [BLOCK_M, BLOCK_N], of_scores)
    gradients = blackwell.allocate_tensor_memory(gl.float32, [AHEAD, BLOCK_M, BLOCK_N], of_scores)
    sums = blackwell.allocate_tensor_memory(gl.float32, [BLOCK_M, D_K], of_sums)
    q_full, q_empty = barriers_for(1, 1).index(0), barriers_for(1, 1).index(0)
    # Full: one arrival, from the producer. Empty: one arrival, when the products that read the buffers have ended.
    k_full, v_full, empty = barriers_for(SLOTS, 1), barriers_for(SLOTS, 1), barriers_for(SLOTS, 1)
    # S is complete; both warpgroups have loaded it; dQ includes both halves of dS.
    s_full, s_read, dq_done = (
        barriers_for(1, 1).index(0), barriers_for(1, CONSUMERS).index(0), barriers_for(1, CONSUMERS).index(0)
    )  # fmt: skip
    # dP is complete; both warpgroups have stored dS. One of them may be a block ahead.
    dp_full, ds_full = barriers_for(AHEAD, 1), barriers_for(AHEAD, CONSUMERS)
    # Both warpgroups and the warp that issues products read each item.
    handed = hand(CONSUMERS + 1)
    # Make the barriers visible to TMA and to products before any role starts.
    hopper.fence_async_shared()

    inputs, rows, tables, grads = (q, k, v, dout), (lse, delta), (blocks, entries), (dq, dq_result)
    buffers, memory = (q_buffer, dout_buffer, k_buffers, v_buffers), (scores, gradients, sums)
    barriers, ready = (q_full, q_empty, k_full, v_full, empty), (s_full, s_read, dp_full, ds_full, dq_done)
    sizes, scales = (block_count, slots, batches, section, group, first_kv_head), (scale, in_scale)
    strides = q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch, dout_head
    dq_strides, result_strides = (dq_row, dq_batch, dq_head), (result_row, result_batch, result_head)
    lse_strides, delta_strides = (lse_row, lse_batch, lse_head), (delta_row, delta_batch, delta_head)
    by_row = dq_strides, result_strides, lse_strides, delta_strides
    left: gl.constexpr = 0
    right: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_differentiate_q, (left, rows, grads, tables, sizes, by_row, scales, dtype, q_empty, memory, ready,
                                handed)),
            (_differentiate_q, (right, rows, grads, tables, sizes, by_row, scales, dtype, q_empty, memory, ready,
                                handed)),
            (_multiply_q, (tables, sizes, dtype, buffers, barriers, memory, ready, handed, SLOTS)),
            (produce_keys, (inputs, tables, counter, sizes, strides, buffers, barriers, handed, BLOCK_N, SLOTS)),
        ],
        [4, 1, 1],
        [224, 56, 56],
    )  # fmt: skip


# --- dK and dV -------------------------------------------------------------------------------------------------------


@gluon.jit
def _update_kv(
    turn, m_block, limits, scale, rows, barriers, scores, gradients, ready,
    WHICH: gl.constexpr, SLOTS: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Turn S^T and dP^T of query block `turn` of this program, block `m_block` of its entry, into P^T and dS^T.

    `limits`: the first and the last query of the entry that attend to each key.
    """
    peak_buffers, delta_buffers = rows
    s_full, p_full, dp_full, ds_full = ready
    COLS: gl.constexpr = scores.shape[1] // CONSUMERS
    slot, parity = slot_of(turn, SLOTS)
    of_queries: gl.constexpr = gl.SliceLayout(0, layout)
    # The producer has stored lse and delta before it arrived here.
    mbarrier.wait(barriers[2].index(slot), parity)
    peaks = peak_buffers.index(slot).slice(WHICH * COLS, COLS).load(of_queries)
    mbarrier.wait(s_full, turn & 1)
    s, _ = logits(_half(scores, WHICH).load(layout), scale, None, False)
    s = s - gl.expand_dims(peaks, 0)
    if MASKED:
        s = masked(s, limits, m_block * CONSUMERS + WHICH, COLS)
    # The final weights, because lse is over all keys of the row.
    p = gl.exp2(s)
    _operand(scores, WHICH, dtype).store(p.to(dtype))
    mbarrier.arrive(p_full)
    deltas = delta_buffers.index(slot).slice(WHICH * COLS, COLS).load(of_queries)
    mbarrier.wait(dp_full, turn & 1)
    # dS = P * (dP - delta), delta = sum(dout * out) - dlse.
    ds = p * (_half(gradients, WHICH).load(layout) - gl.expand_dims(deltas, 0))
    _operand(gradients, WHICH, dtype).store(ds.to(dtype))
    mbarrier.arrive(ds_full)


@gluon.jit
def _differentiate_kv(
    WHICH: gl.constexpr, grads, tables, sizes, strides, scales, dtype: gl.constexpr, rows, barriers, memory, ready,
    handed, SLOTS: gl.constexpr,
):  # fmt: skip
    """Compute P^T and dS^T of the first or the second half of every block of queries.

    Deliver half of the columns of dK and dV.
    """
    scores, gradients, dk_sums, dv_sums = memory
    of_update = ready[0], ready[1], ready[2], ready[3]
    ROWS: gl.constexpr = scores.shape[0]
    COLS: gl.constexpr = scores.shape[1] // CONSUMERS
    layout: gl.constexpr = gl.BlockedLayout([1, COLS], [32, 1], [4, 1], [1, 0])
    dk_carried, dv_carried, dk_result, dv_result = grads
    dk_strides, dv_strides, dk_result_strides, dv_result_strides = strides
    scale, in_scale = scales
    blocks, entries = tables
    block_count, slots, batches, section, _, first_kv_head = sizes
    own_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    total = block_count * slots * batches
    item = gl.program_id(0)
    while item < total:
        block, batch, kv_head, live, first, last = work_of(blocks, item, block_count, slots, batches, section)
        if first < last:
            for index in range(first, last):
                entry = entries + index * ENTRY_COLUMNS
                start, full, full_end, end = visits(entry)
                _, reading = query_heads(entry)
                # One program processes all query heads of the K/V head in turn, so no atomics are needed.
                for _ in range(reading):
                    for _ in range(full_end - full):
                        _update_kv(
                            turn, 0, (0, 0), in_scale, rows, barriers, scores, gradients, of_update, WHICH, SLOTS,
                            False, dtype, layout,
                        )  # fmt: skip
                        turn += 1
                    limits = seen(own_rows, entry)
                    for nth in range(full_end - full, end - start):
                        _update_kv(
                            turn, visited(nth, start, full, full_end), limits, in_scale, rows, barriers, scores,
                            gradients, of_update, WHICH, SLOTS, True, dtype, layout,
                        )  # fmt: skip
                        turn += 1
            # All products with K and V have ended.
            mbarrier.wait(barriers[1], items & 1)
            items += 1
        # The first K/V head in the buffer may be later than 0; gradients have the same heads.
        buffer_head = kv_head - first_kv_head
        _gradient(
            dv_sums, first < last, 1.0, dv_carried, dv_result, dv_strides, dv_result_strides, block, batch, buffer_head,
            live, WHICH,
        )  # fmt: skip
        _gradient(
            dk_sums, first < last, scale, dk_carried, dk_result, dk_strides, dk_result_strides, block, batch,
            buffer_head, live, WHICH,
        )  # fmt: skip
        item = received(rounds, handed, 4)
        rounds += 1


@gluon.jit
def _start(turn, own_rows, other_buffers, other_full, target, done, full, SLOTS: gl.constexpr):
    """Start the product of the own rows with rows of query block `turn` of this program: S^T or dP^T.

    It takes the columns that the product `done` of the block before reads.
    """
    slot, parity = slot_of(turn, SLOTS)
    mbarrier.wait(other_full.index(slot), parity)
    mbarrier.wait(done, (turn & 1) ^ 1)
    blackwell.tcgen05_mma(own_rows, other_buffers.index(slot).permute((1, 0)), target, use_acc=False, mbarriers=[full])


@gluon.jit
def _multiply_kv(
    tables, sizes, dtype: gl.constexpr, buffers, barriers, memory, ready, handed, SLOTS: gl.constexpr,
):  # fmt: skip
    """Issue all products of dK and dV: S^T of the next block after dV, and its dP^T after dK."""
    blocks, entries = tables
    block_count, slots, batches, section, _, _ = sizes
    k_rows, v_rows, q_buffers, dout_buffers = buffers[0][0], buffers[1][0], buffers[2][0], buffers[3][0]
    kv_full, kv_empty, q_full, dout_full, empty = barriers
    scores, gradients, dk_sums, dv_sums = memory
    s_full, p_full, dp_full, ds_full, dk_done, dv_done = ready
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    total = block_count * slots * batches
    item = gl.program_id(0)
    while item < total:
        _, _, _, _, first, last = work_of(blocks, item, block_count, slots, batches, section)
        if first < last:
            begin = turn
            stop = turn
            for index in range(first, last):
                entry = entries + index * ENTRY_COLUMNS
                start, _, _, end = visits(entry)
                _, reading = query_heads(entry)
                stop += (end - start) * reading
            mbarrier.wait(kv_full, items & 1)
            _start(turn, k_rows, q_buffers, q_full, scores, dv_done, s_full, SLOTS)
            _start(turn, v_rows, dout_buffers, dout_full, gradients, dk_done, dp_full, SLOTS)
            while turn < stop:
                slot, _ = slot_of(turn, SLOTS)
                mbarrier.wait(p_full, turn & 1)
                _multiply_halves(scores, dout_buffers.index(slot), dv_sums, dv_done, turn > begin, dtype)
                if turn + 1 < stop:
                    _start(turn + 1, k_rows, q_buffers, q_full, scores, dv_done, s_full, SLOTS)
                mbarrier.wait(ds_full, turn & 1)
                _multiply_halves(gradients, q_buffers.index(slot), dk_sums, dk_done, turn > begin, dtype)
                blackwell.tcgen05_commit(empty.index(slot))
                if turn + 1 < stop:
                    _start(turn + 1, v_rows, dout_buffers, dout_full, gradients, dk_done, dp_full, SLOTS)
                turn += 1
            # All products have been issued. K and V are free when they have ended.
            blackwell.tcgen05_commit(kv_empty)
            items += 1
        item = received(rounds, handed, 1)
        rounds += 1


@gluon.jit(do_not_specialize=VARYING)
def tcgen05_grad_kv_kernel(
    q, k, v, dout, lse, delta, dk, dv, dk_result, dv_result, blocks, entries, counter, block_count, slots, batches,
    section, group, first_kv_head, scale, in_scale,
    q_row: tl.int64, q_batch: tl.int64, q_head: tl.int64, k_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    v_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, dout_row: tl.int64, dout_batch: tl.int64,
    dout_head: tl.int64, dk_row: tl.int64, dk_batch: tl.int64, dk_head: tl.int64,
    dv_row: tl.int64, dv_batch: tl.int64, dv_head: tl.int64,
    dk_result_row: tl.int64, dk_result_batch: tl.int64, dk_result_head: tl.int64,
    dv_result_row: tl.int64, dv_result_batch: tl.int64, dv_result_head: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64, lse_row: tl.int64,
    delta_batch: tl.int64, delta_head: tl.int64, delta_row: tl.int64,
    D_K: gl.constexpr, D_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Run a program of `attention_gluon.grad_kv_gluon` on Blackwell, with registers as for dQ."""
    dtype: gl.constexpr = q.dtype.element_ty
    gl.static_assert(2 * BLOCK_M + D_K + D_V <= 512, "S, dP, dK and dV take more columns than tensor memory has")
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_buffer = rows_at(buffers_for(dtype, 1, BLOCK_N, D_K), 0)
    v_buffer = rows_at(buffers_for(dtype, 1, BLOCK_N, D_V), 0)
    q_buffers, dout_buffers = buffers_for(dtype, SLOTS, BLOCK_M, D_K), buffers_for(dtype, SLOTS, BLOCK_M, D_V)
    peak_buffers = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], row_layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], row_layout)
    of_scores: gl.constexpr = blackwell.TensorMemoryLayout([BLOCK_N, BLOCK_M], col_stride=1)
    of_dk: gl.constexpr = blackwell.TensorMemoryLayout([BLOCK_N, D_K], col_stride=1)
    of_dv: gl.constexpr = blackwell.TensorMemoryLayout([BLOCK_N, D_V], col_stride=1)
    scores = blackwell.allocate_tensor_memory(gl.float32, [BLOCK_N, BLOCK_M], of_scores)
    gradients = blackwell.allocate_tensor_memory(gl.float32, [BLOCK_N, BLOCK_M], of_scores)
    dk_sums = blackwell.allocate_tensor_memory(gl.float32, [BLOCK_N, D_K], of_dk)
    dv_sums = blackwell.allocate_tensor_memory(gl.float32, [BLOCK_N, D_V], of_dv)
    kv_full, kv_empty = barriers_for(1, 1).index(0), barriers_for(1, 1).index(0)
    # Full: the arrival of the copy and that of lse and delta. Empty: one arrival, when the products that read the
    # buffers have ended; they follow the reads of lse and delta.
    q_full, dout_full, empty = barriers_for(SLOTS, 2), barriers_for(SLOTS, 2), barriers_for(SLOTS, 1)
    # S^T and dP^T are complete; both warpgroups have stored P^T and dS^T; dK and dV include both halves of these.
    s_full, dp_full = barriers_for(1, 1).index(0), barriers_for(1, 1).index(0)
    p_full, ds_full = barriers_for(1, CONSUMERS).index(0), barriers_for(1, CONSUMERS).index(0)
    dk_done, dv_done = barriers_for(1, CONSUMERS).index(0), barriers_for(1, CONSUMERS).index(0)
    # Both warpgroups and the warp that issues products read each item.
    handed = hand(CONSUMERS + 1)
    # Make the barriers visible to TMA and to products before any role starts.
    hopper.fence_async_shared()

    inputs, per_row, tables = (q, k, v, dout), (lse, delta), (blocks, entries)
    grads, scales = (dk, dv, dk_result, dv_result), (scale, in_scale)
    buffers = k_buffer, v_buffer, q_buffers, dout_buffers, peak_buffers, delta_buffers
    rows, memory = (peak_buffers, delta_buffers), (scores, gradients, dk_sums, dv_sums)
    barriers = kv_full, kv_empty, q_full, dout_full, empty
    ready = s_full, p_full, dp_full, ds_full, dk_done, dv_done
    sizes = block_count, slots, batches, section, group, first_kv_head
    strides = q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch, dout_head
    row_strides = lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row
    dk_strides, dv_strides = (dk_row, dk_batch, dk_head), (dv_row, dv_batch, dv_head)
    dk_result_strides = dk_result_row, dk_result_batch, dk_result_head
    dv_result_strides = dv_result_row, dv_result_batch, dv_result_head
    grad_strides = dk_strides, dv_strides, dk_result_strides, dv_result_strides
    left: gl.constexpr = 0
    right: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_differentiate_kv, (left, grads, tables, sizes, grad_strides, scales, dtype, rows, barriers, memory, ready,
                                 handed, SLOTS)),
            (_differentiate_kv, (right, grads, tables, sizes, grad_strides, scales, dtype, rows, barriers, memory,
                                 ready, handed, SLOTS)),
            (_multiply_kv, (tables, sizes, dtype, buffers, barriers, memory, ready, handed, SLOTS)),
            (produce_queries, (inputs, per_row, tables, counter, sizes, strides, row_strides, buffers, barriers, handed,
                               BLOCK_M, SLOTS)),
        ],
        [4, 1, 1],
        [224, 56, 56],
    )  # fmt: skip
