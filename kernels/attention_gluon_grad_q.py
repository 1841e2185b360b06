"""The Gluon kernel of dQ on Hopper: a program processes 128 queries, 64 in each of two consumer warpgroups.

A producer warp loads a block's rows of q and dout once, and blocks of K and V, by TMA. A warpgroup computes S = Q.K^T
and dP = dO.V^T of its queries, and keeps the score gradients in registers as the left operand of dQ += dS.K.
Guarantees: the buffer guarantees of `attention_gluon_forward`; no atomics, so equal tables give equal bits.
`attention_gluon.gluon_takes` defines the supported calls.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringattn.kernels.attention_gluon_parts import (
    CONSUMERS,
    added,
    alibi_of,
    barriers_for,
    bring,
    buffers_for,
    completed,
    copy_rows,
    deliver,
    described,
    hand,
    hand_over,
    landed,
    masked,
    numbered,
    places,
    products,
    received,
    rows_at,
    rows_from,
    seen,
    slot_of,
    taken,
    visited,
    work_of,
    zeros_for,
)
from ringattn.kernels.attention_options import steps_of, with_bias
from ringattn.kernels.attention_tiles import ENTRY_COLUMNS, LOG2_E, logits, rows_and_band, run_of, through_cap, visits
from ringattn.kernels.launch import VARYING


@gluon.jit
def produce(
    inputs, tables, counter, sizes, strides, buffers, barriers, handed, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Load the rows that the consumers read, in the order in which they read them."""
    q, k, v, dout = inputs
    blocks, entries = tables
    block_count, slots, batches, section, group, first_kv_head = sizes
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch, dout_head = strides
    q_buffer, dout_buffer, k_buffers, v_buffers = buffers
    q_full, q_empty, k_full, v_full, empty = barriers
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    total = block_count * slots * batches
    item = gl.program_id(0)
    while item < total:
        block, batch, head, live, first, last = work_of(blocks, item, block_count, slots, batches, section)
        # A block without entries loads nothing. Consumers skip it by the same test, so the turns agree.
        if first < last:
            run = run_of(block)
            q_base = q + batch * q_batch + head * q_head
            dout_base = dout + batch * dout_batch + head * dout_head
            # Wait until the loads of the block before have landed: the new descriptors overwrite those of these loads.
            mbarrier.wait(q_full, items & 1 ^ 1)
            q_rows = described(q_base, run[0], run[1], q_row, live, q_buffer)
            dout_rows = described(dout_base, run[0], run[1], dout_row, live, dout_buffer)
            mbarrier.wait(q_empty, items & 1 ^ 1)
            mbarrier.expect(q_full, q_rows.block_type.nbytes * len(q_buffer) + dout_rows.block_type.nbytes)
            copy_rows(q_rows, 0, q_full, q_buffer)
            copy_rows(dout_rows, 0, q_full, dout_buffer)
            items += 1

            kv_head = head // group - first_kv_head
            k_base = k + batch * k_batch + kv_head * k_head
            v_base = v + batch * v_batch + kv_head * v_head
            for index in range(first, last):
                rows = rows_and_band(entries + index * ENTRY_COLUMNS)[0]
                start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
                # A descriptor overwrites its predecessor, which loads in flight may still read.
                landed(turn, k_full, SLOTS)
                landed(turn, v_full, SLOTS)
                k_rows = described(k_base, rows[0], rows[1], k_row, rows[2], rows_at(k_buffers, 0))
                v_rows = described(v_base, rows[0], rows[1], v_row, rows[2], rows_at(v_buffers, 0))
                for nth in range(end - start):
                    first_row = visited(nth, start, full, full_end) * BLOCK_N
                    slot, parity = slot_of(turn, SLOTS)
                    # One barrier signals that both buffers of a slot are free. V has a separate barrier for its
                    # arrival, because the products with K start before it.
                    bring(k_rows, first_row, slot, parity, k_full, empty, k_buffers)
                    mbarrier.expect(v_full.index(slot), v_rows.block_type.nbytes)
                    copy_rows(v_rows, first_row, v_full.index(slot), rows_at(v_buffers, slot))
                    turn += 1
        # Take the next item while the consumers still sum the last blocks of this one.
        item = taken(counter, total)
        hand_over(item, rounds, handed, 1)
        rounds += 1


@gluon.jit
def _update(
    dq, turn, n_block, own_rows, limits, peaks, deltas, scales, bias, q_rows, dout_rows, k_buffers, v_buffers, barriers,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, RAW_BIAS: gl.constexpr, MASKED: gl.constexpr, s_layout: gl.constexpr,
):  # fmt: skip
    """Return dQ before scaling after key block `turn` of this program, which is block `n_block` of its entry.

    `limits`: the first and the last key of the entry that each query sees.
    """
    _, _, k_full, v_full, empty = barriers
    scale, softcap = scales
    slot, parity = slot_of(turn, SLOTS)
    k_rows = rows_at(k_buffers, slot)
    mbarrier.wait(k_full.index(slot), parity)
    s = products(q_rows, k_rows, BLOCK_N, s_layout)
    mbarrier.wait(v_full.index(slot), parity)
    dp = products(dout_rows, rows_at(v_buffers, slot), BLOCK_N, s_layout)
    # S has ended; dP overlaps with the exponentials.
    s = hopper.warpgroup_mma_wait(1, deps=(s,))
    s, capped = logits(s, scale, softcap, softcap is not None)
    if bias is not None:
        s, rest = with_bias(
            s, capped, scale if softcap is None else softcap, bias, steps_of(bias[1], True), n_block, own_rows,
            numbered(BLOCK_N, s_layout), CONSUMERS * own_rows.shape[0], False, RAW_BIAS,
        )  # fmt: skip
        peaks = peaks - rest
    s = s - gl.expand_dims(peaks, 1)
    if MASKED:
        s = masked(s, limits, n_block, BLOCK_N)
    # The final weights, because lse is over all keys of the row.
    p = through_cap(gl.exp2(s), capped, softcap is not None)
    # This wait passes at once, but it ends a basic block: otherwise the assembler moves the exponentials after the wait
    # below.
    mbarrier.wait(v_full.index(slot), parity)
    dp = hopper.warpgroup_mma_wait(0, deps=(dp,))
    # dS = P * (dP - delta), delta = sum(dout * out) - dlse; the scale is applied at the end.
    ds = p * (dp - gl.expand_dims(deltas, 1))
    operand: gl.constexpr = gl.DotOperandLayout(0, dq[0].type.layout, 2)
    dq = added(dq, gl.convert_layout(ds.to(q_rows[0].dtype), operand), k_rows)
    dq = completed(dq, 0)
    mbarrier.arrive(empty.index(slot))
    return dq


@gluon.jit
def _attend(
    dq, turn, first, last, entries, own_rows, head, peaks, deltas, scales, alibi, q_rows, dout_rows, k_buffers,
    v_buffers, barriers,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, RAW_BIAS: gl.constexpr, s_layout: gl.constexpr,
):  # fmt: skip
    """Return dQ before scaling after entries first .. last - 1, and the turn of the next key block."""
    for index in range(first, last):
        entry = entries + index * ENTRY_COLUMNS
        start, full, full_end, end = visits(entry)
        bias = alibi_of(alibi, index, head, scales, RAW_BIAS)
        for nth in range(full_end - full):
            dq = _update(
                dq, turn, full + nth, own_rows, (0, 0), peaks, deltas, scales, bias, q_rows, dout_rows, k_buffers,
                v_buffers, barriers, BLOCK_N, SLOTS, RAW_BIAS, False, s_layout,
            )  # fmt: skip
            turn += 1
        limits = seen(own_rows, entry)
        # The blocks before the full ones, then those after them.
        for edge in range(start, end - (full_end - full)):
            dq = _update(
                dq, turn, gl.where(edge < full, edge, edge + (full_end - full)), own_rows, limits, peaks, deltas,
                scales, bias, q_rows, dout_rows, k_buffers, v_buffers, barriers, BLOCK_N, SLOTS, RAW_BIAS, True,
                s_layout,
            )  # fmt: skip
            turn += 1
    return dq, turn


@gluon.jit
def _consume(
    WHICH: gl.constexpr, per_row, grads, tables, sizes, strides, scales, alibi, buffers, barriers, handed,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, RAW_BIAS: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of the first or the second half of every block's queries."""
    q_buffer, dout_buffer, k_buffers, v_buffers = buffers
    PIECES: gl.constexpr = len(k_buffers)
    COLS: gl.constexpr = k_buffers[0].shape[2]
    # The four warps of a consumer have 16 queries each.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    lse, delta = per_row
    dq_carried, dq_result = grads
    dq_strides, result_strides, lse_strides, delta_strides = strides
    scale, in_scale, softcap = scales
    blocks, entries = tables
    block_count, slots, batches, section, _, _ = sizes
    ROWS: gl.constexpr = q_buffer[0].shape[0] // CONSUMERS
    # Two consumers share the block's rows of q and dout; each reads half of them.
    q_rows, dout_rows = rows_from(q_buffer, WHICH * ROWS, ROWS), rows_from(dout_buffer, WHICH * ROWS, ROWS)
    own_rows = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    # The same rows in the layout of the gradient.
    own_d = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, d_layout))
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    total = block_count * slots * batches
    item = gl.program_id(0)
    while item < total:
        block, batch, head, live, first, last = work_of(blocks, item, block_count, slots, batches, section)
        dq = zeros_for(PIECES, ROWS, COLS, d_layout)
        if first < last:
            lse_at = places(lse, lse_strides, block, batch, head, own_rows)
            peaks = gl.load(lse_at, mask=own_rows < live, other=float("-inf")) * LOG2_E
            # Rows that saw no key get weight 0: exp2(x - inf).
            peaks = gl.where(peaks == float("-inf"), float("inf"), peaks)
            deltas = gl.load(
                places(delta, delta_strides, block, batch, head, own_rows), mask=own_rows < live, other=0.0
            )
            mbarrier.wait(barriers[0], items & 1)
            items += 1
            dq, turn = _attend(
                dq, turn, first, last, entries, own_rows, head, peaks, deltas, (in_scale, softcap), alibi, q_rows,
                dout_rows, k_buffers, v_buffers, barriers, BLOCK_N, SLOTS, RAW_BIAS, s_layout,
            )  # fmt: skip
            # q and dout are not read again, so the producer may load those of the next item.
            mbarrier.arrive(barriers[1])
        deliver(
            dq, scale, dq_carried, dq_result, dq_strides, result_strides, block, batch, head, own_d, live, d_layout,
        )  # fmt: skip
        item = received(rounds, handed, 4)
        rounds += 1


@gluon.jit(do_not_specialize=VARYING)
def grad_q_kernel(
    q, k, v, dout, lse, delta, dq, dq_result, blocks, entries, places, slopes, counter, block_count, slots, batches,
    section, group, first_kv_head, scale, in_scale, softcap,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch, dout_head,
    dq_row, dq_batch, dq_head, result_row, result_batch, result_head,
    lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row,
    D_K: gl.constexpr, D_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
    RAW_BIAS: gl.constexpr,
):  # fmt: skip
    """Run a program of `attention_gluon.grad_q_gluon`. It starts with the warps of one consumer and adds the others.

    Each of the 384 threads starts with 168 registers; the producer's warpgroup keeps 24, so that each consumer has 240.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    q_buffer = rows_at(buffers_for(dtype, 1, BLOCK_M, D_K), 0)
    dout_buffer = rows_at(buffers_for(dtype, 1, BLOCK_M, D_V), 0)
    k_buffers, v_buffers = buffers_for(dtype, SLOTS, BLOCK_N, D_K), buffers_for(dtype, SLOTS, BLOCK_N, D_V)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full, v_full, empty = barriers_for(SLOTS, 1), barriers_for(SLOTS, 1), barriers_for(SLOTS, CONSUMERS)
    # Full: one arrival, from the producer. Empty: one arrival from each consumer.
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=CONSUMERS)
    handed = hand(CONSUMERS)
    # Make the barriers visible to TMA before any role starts.
    hopper.fence_async_shared()

    inputs, rows, tables, grads = (q, k, v, dout), (lse, delta), (blocks, entries), (dq, dq_result)
    buffers = q_buffer, dout_buffer, k_buffers, v_buffers
    barriers = q_full, q_empty, k_full, v_full, empty
    sizes, alibi = (block_count, slots, batches, section, group, first_kv_head), (places, slopes)
    scales = scale, in_scale, softcap
    strides = q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch, dout_head
    dq_strides, result_strides = (dq_row, dq_batch, dq_head), (result_row, result_batch, result_head)
    lse_strides, delta_strides = (lse_row, lse_batch, lse_head), (delta_row, delta_batch, delta_head)
    by_row = dq_strides, result_strides, lse_strides, delta_strides
    upper: gl.constexpr = 0
    lower: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (upper, rows, grads, tables, sizes, by_row, scales, alibi, buffers, barriers, handed,
                        BLOCK_N, SLOTS, RAW_BIAS)),
            (_consume, (lower, rows, grads, tables, sizes, by_row, scales, alibi, buffers, barriers, handed,
                        BLOCK_N, SLOTS, RAW_BIAS)),
            (produce, (inputs, tables, counter, sizes, strides, buffers, barriers, handed, BLOCK_N, SLOTS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
