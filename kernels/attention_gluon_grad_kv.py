"""The Gluon kernel of dK and dV on Hopper: a program processes 128 keys, 64 in each of two consumer warpgroups.

The products are transposed, S^T = K.Q^T and dP^T = V.dO^T, as in FlashAttention-3's backward (arXiv 2407.08608, its
`mainloop_bwd_sm90`). A warpgroup's weights and score gradients then have its keys as rows, and stay in registers as
left operands of dV += P^T.dO and dK += dS^T.Q. A producer warp loads K and V of a block once, and blocks of queries and
dout by TMA, each with the base-2 lse and the delta of its rows.
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
from ringattn.kernels.attention_tiles import (
    ENTRY_COLUMNS,
    LOG2_E,
    logits,
    query_heads,
    rows_and_band,
    run_of,
    through_cap,
    visits,
)
from ringattn.kernels.launch import VARYING


@gluon.jit
def _bring_rows(
    q_rows, dout_rows, lse, delta, rows, first_row, turn, lse_row, delta_row, buffers, barriers,
    BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Load block `turn` of this program, queries from `first_row` on: q and dout by TMA, lse and delta by threads."""
    _, _, q_buffers, dout_buffers, peak_buffers, delta_buffers = buffers
    _, _, q_full, dout_full, empty = barriers
    slot, parity = slot_of(turn, SLOTS)
    # Load lse and delta before the waits below, so that the loads overlap with the waits.
    cols = first_row + gl.arange(0, BLOCK_M, layout=layout)
    near = cols < rows[2]
    at_rows = (rows[0] + cols * rows[1]).to(gl.int64)
    peaks = gl.load(lse + at_rows * lse_row, mask=near, other=0.0) * LOG2_E
    deltas = gl.load(delta + at_rows * delta_row, mask=near, other=0.0)
    # One barrier signals that all four buffers of a slot are free. dout has a separate barrier for its arrival, because
    # the products with q start before it.
    bring(q_rows, first_row, slot, parity, q_full, empty, q_buffers)
    mbarrier.expect(dout_full.index(slot), dout_rows.block_type.nbytes)
    copy_rows(dout_rows, first_row, dout_full.index(slot), rows_at(dout_buffers, slot))
    # Rows that saw no key get weight 0: exp2(x - inf).
    peak_buffers.index(slot).store(gl.where(peaks == float("-inf"), float("inf"), peaks))
    delta_buffers.index(slot).store(deltas)
    # These are the second arrivals of the phase; the copies make the first arrivals.
    mbarrier.arrive(q_full.index(slot))
    mbarrier.arrive(dout_full.index(slot))


@gluon.jit
def produce(
    inputs, per_row, tables, counter, sizes, strides, row_strides, buffers, barriers, handed,
    BLOCK_M: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Load the rows that the consumers read, in the order in which they read them."""
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    q, k, v, dout = inputs
    lse, delta = per_row
    blocks, entries = tables
    block_count, slots, batches, section, group, first_kv_head = sizes
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch, dout_head = strides
    lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row = row_strides
    k_buffer, v_buffer, q_buffers, dout_buffers, _, _ = buffers
    kv_full, kv_empty, q_full, dout_full, _ = barriers
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    total = block_count * slots * batches
    item = gl.program_id(0)
    while item < total:
        block, batch, kv_head, live, first, last = work_of(blocks, item, block_count, slots, batches, section)
        # A block without entries loads nothing. Consumers skip it by the same test, so the turns agree.
        if first < last:
            buffer_head = kv_head - first_kv_head
            run = run_of(block)
            # Wait until the loads of the block before have landed: the new descriptors overwrite those of these loads.
            mbarrier.wait(kv_full, items & 1 ^ 1)
            k_rows = described(k + batch * k_batch + buffer_head * k_head, run[0], run[1], k_row, live, k_buffer)
            v_rows = described(v + batch * v_batch + buffer_head * v_head, run[0], run[1], v_row, live, v_buffer)
            mbarrier.wait(kv_empty, items & 1 ^ 1)
            mbarrier.expect(kv_full, k_rows.block_type.nbytes * len(k_buffer) + v_rows.block_type.nbytes)
            copy_rows(k_rows, 0, kv_full, k_buffer)
            copy_rows(v_rows, 0, kv_full, v_buffer)
            items += 1
            for index in range(first, last):
                entry = entries + index * ENTRY_COLUMNS
                # The rows of the entry are queries, of the query heads that read this K/V head.
                rows = rows_and_band(entry)[0]
                start, full, full_end, end = visits(entry)
                before, reading = query_heads(entry)
                first_head = kv_head * group + before
                for offset in range(reading):
                    head = first_head + offset
                    # A descriptor overwrites its predecessor, which loads in flight may still read.
                    landed(turn, q_full, SLOTS)
                    landed(turn, dout_full, SLOTS)
                    q_rows = described(
                        q + batch * q_batch + head * q_head, rows[0], rows[1], q_row, rows[2], rows_at(q_buffers, 0)
                    )
                    dout_rows = described(
                        dout + batch * dout_batch + head * dout_head, rows[0], rows[1], dout_row, rows[2],
                        rows_at(dout_buffers, 0),
                    )  # fmt: skip
                    for nth in range(end - start):
                        _bring_rows(
                            q_rows, dout_rows, lse + batch * lse_batch + head * lse_head,
                            delta + batch * delta_batch + head * delta_head, rows,
                            visited(nth, start, full, full_end) * BLOCK_M, turn, lse_row, delta_row, buffers, barriers,
                            BLOCK_M, SLOTS, layout,
                        )  # fmt: skip
                        turn += 1
        # Take the next item while the consumers still sum the last blocks of this one.
        item = taken(counter, total)
        hand_over(item, rounds, handed, 1)
        rounds += 1


@gluon.jit
def _update(
    grads, turn, m_block, own_rows, limits, scales, bias, k_rows, v_rows, buffers, barriers,
    BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, RAW_BIAS: gl.constexpr, MASKED: gl.constexpr, PART: gl.constexpr,
    OWN: gl.constexpr, s_layout: gl.constexpr,
):  # fmt: skip
    """Return the gradients, dK before scaling, after query block `turn` of this program, block `m_block` of its entry.

    `grads`: dK and dV; with PART dK or dV alone. `limits`: the first and the last query of the entry that attend to
    each key. OWN: the keys of the program's block.
    """
    _, _, q_buffers, dout_buffers, peak_buffers, delta_buffers = buffers
    _, _, q_full, dout_full, empty = barriers
    scale, softcap = scales
    slot, parity = slot_of(turn, SLOTS)
    q_rows, dout_rows = rows_at(q_buffers, slot), rows_at(dout_buffers, slot)
    of_queries: gl.constexpr = gl.SliceLayout(0, s_layout)
    mbarrier.wait(q_full.index(slot), parity)
    s = products(k_rows, q_rows, BLOCK_M, s_layout)
    peaks = peak_buffers.index(slot).load(of_queries)
    mbarrier.wait(dout_full.index(slot), parity)
    if PART == "dv":
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
    else:
        dp = products(v_rows, dout_rows, BLOCK_M, s_layout)
        # S^T has ended; dP^T overlaps with the exponentials.
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
    s, capped = logits(s, scale, softcap, softcap is not None)
    if bias is not None:
        steps, rows = steps_of(bias[1], True), numbered(BLOCK_M, s_layout)
        s, rest = with_bias(
            s, capped, scale if softcap is None else softcap, bias, steps, m_block, own_rows, rows, OWN, True, RAW_BIAS
        )  # fmt: skip
        peaks = peaks - rest * (rows * steps[2])
    s = s - gl.expand_dims(peaks, 0)
    if MASKED:
        s = masked(s, limits, m_block, BLOCK_M)
    # The final weights, because lse is over all keys of the row.
    p = gl.exp2(s)
    if PART != "dk":
        dv = grads[-1]
        of_dv: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
        dv = added(dv, gl.convert_layout(p.to(q_rows[0].dtype), of_dv), dout_rows)
    if PART != "dv":
        dk = grads[0]
        of_dk: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
        p = through_cap(p, capped, softcap is not None)
        deltas = delta_buffers.index(slot).load(of_queries)
        # dP^T has ended; P^T.dO, if it is computed, overlaps with the differences.
        dp = hopper.warpgroup_mma_wait(0 if PART == "dk" else 1, deps=(dp,))
        # dS = P * (dP - delta), delta = sum(dout * out) - dlse.
        ds = p * (dp - gl.expand_dims(deltas, 0))
        dk = added(dk, gl.convert_layout(ds.to(q_rows[0].dtype), of_dk), q_rows)
    if PART == "dk":
        grads = (completed(dk, 0),)
    elif PART == "dv":
        grads = (completed(dv, 0),)
    else:
        dv = completed(dv, len(dk))
        dk = completed(dk, 0)
        grads = dk, dv
    mbarrier.arrive(empty.index(slot))
    return grads


@gluon.jit
def _attend(
    grads, turn, first, last, entries, own_rows, kv_head, group, scales, alibi, k_rows, v_rows, buffers, barriers,
    BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, RAW_BIAS: gl.constexpr, PART: gl.constexpr, OWN: gl.constexpr,
    s_layout: gl.constexpr,
):  # fmt: skip
    """Return the gradients, dK before scaling, after entries first .. last - 1, and the next turn."""
    for index in range(first, last):
        entry = entries + index * ENTRY_COLUMNS
        start, full, full_end, end = visits(entry)
        before, reading = query_heads(entry)
        # One program processes all query heads of the K/V head in turn, so no atomics are needed.
        for offset in range(reading):
            bias = alibi_of(alibi, index, kv_head * group + before + offset, scales, RAW_BIAS)
            for nth in range(full_end - full):
                grads = _update(
                    grads, turn, full + nth, own_rows, (0, 0), scales, bias, k_rows, v_rows, buffers, barriers,
                    BLOCK_M, SLOTS, RAW_BIAS, False, PART, OWN, s_layout,
                )  # fmt: skip
                turn += 1
            limits = seen(own_rows, entry)
            # The blocks before the full ones, then those after them.
            for edge in range(start, end - (full_end - full)):
                m_block = gl.where(edge < full, edge, edge + (full_end - full))
                grads = _update(
                    grads, turn, m_block, own_rows, limits, scales, bias, k_rows, v_rows, buffers, barriers,
                    BLOCK_M, SLOTS, RAW_BIAS, True, PART, OWN, s_layout,
                )  # fmt: skip
                turn += 1
    return grads, turn


@gluon.jit
def _consume(
    WHICH: gl.constexpr, grads, tables, sizes, strides, scales, alibi, buffers, barriers, handed,
    D_V: gl.constexpr, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, RAW_BIAS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of the first or the second half of every block's keys, or with PART one gradient of all."""
    K_COLS: gl.constexpr = buffers[0][0].shape[1]
    # The four warps of a consumer have 16 keys each.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K_COLS, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    PIECES: gl.constexpr = len(buffers[0])
    dk_carried, dv_carried, dk_result, dv_result = grads
    dk_strides, dv_strides, dk_result_strides, dv_result_strides = strides
    scale, in_scale, softcap = scales
    blocks, entries = tables
    block_count, slots, batches, section, group, first_kv_head = sizes
    OWN: gl.constexpr = buffers[0][0].shape[0]
    # Two consumers share the block's K and V; each reads half of it, or all for one of the gradients.
    KEYS: gl.constexpr = OWN // CONSUMERS if PART == "" else OWN
    FIRST: gl.constexpr = WHICH * KEYS if PART == "" else 0
    k_rows, v_rows = rows_from(buffers[0], FIRST, KEYS), rows_from(buffers[1], FIRST, KEYS)
    own_rows = FIRST + gl.arange(0, KEYS, layout=gl.SliceLayout(1, s_layout))
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    total = block_count * slots * batches
    item = gl.program_id(0)
    while item < total:
        _, _, kv_head, _, first, last = work_of(blocks, item, block_count, slots, batches, section)
        if PART == "dk":
            sums = (zeros_for(PIECES, KEYS, K_COLS, k_layout),)
        elif PART == "dv":
            sums = (zeros_for(1, KEYS, D_V, v_layout),)
        else:
            both = zeros_for(PIECES, KEYS, K_COLS, k_layout), zeros_for(1, KEYS, D_V, v_layout)
            sums = both  # type: ignore[assignment]
        if first < last:
            mbarrier.wait(barriers[0], items & 1)
            items += 1
            sums, turn = _attend(
                sums, turn, first, last, entries, own_rows, kv_head, group, (in_scale, softcap), alibi, k_rows, v_rows,
                buffers, barriers, BLOCK_M, SLOTS, RAW_BIAS, PART, OWN, s_layout,
            )  # fmt: skip
            # K and V are not read again, so the producer may load those of the next item.
            mbarrier.arrive(barriers[1])
        # Read this again: kept through the loops, it would take registers of every thread.
        block, batch, kv_head, live, _, _ = work_of(blocks, item, block_count, slots, batches, section)
        # The first K/V head in the buffer may be later than 0; gradients have the same heads.
        buffer_head = kv_head - first_kv_head
        if PART != "dk":
            own_dv = FIRST + gl.arange(0, KEYS, layout=gl.SliceLayout(1, v_layout))
            deliver(
                sums[-1], None, dv_carried, dv_result, dv_strides, dv_result_strides, block, batch, buffer_head, own_dv,
                live, v_layout,
            )  # fmt: skip
        if PART != "dv":
            own_dk = FIRST + gl.arange(0, KEYS, layout=gl.SliceLayout(1, k_layout))
            deliver(
                sums[0], scale, dk_carried, dk_result, dk_strides, dk_result_strides, block, batch, buffer_head,
                own_dk, live, k_layout,
            )  # fmt: skip
        item = received(rounds, handed, 4)
        rounds += 1


@gluon.jit(do_not_specialize=VARYING)
def grad_kv_kernel(
    q, k, v, dout, lse, delta, dk, dv, dk_result, dv_result, blocks, entries, places, slopes, counter, block_count,
    slots, batches, section, group, first_kv_head, scale, in_scale, softcap,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch, dout_head,
    dk_row, dk_batch, dk_head, dv_row, dv_batch, dv_head,
    dk_result_row, dk_result_batch, dk_result_head, dv_result_row, dv_result_batch, dv_result_head,
    lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row,
    D_K: gl.constexpr, D_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
    RAW_BIAS: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Run a program of `attention_gluon.grad_kv_gluon`. It starts with the warps of one consumer and adds the others.

    APART: each consumer computes one of the two gradients, of all keys of a block.
    Each of the 384 threads starts with 168 registers; the producer's warpgroup keeps 24, so that each consumer has 240.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_buffer = rows_at(buffers_for(dtype, 1, BLOCK_N, D_K), 0)
    v_buffer = rows_at(buffers_for(dtype, 1, BLOCK_N, D_V), 0)
    q_buffers, dout_buffers = buffers_for(dtype, SLOTS, BLOCK_M, D_K), buffers_for(dtype, SLOTS, BLOCK_M, D_V)
    peak_buffers = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], row_layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], row_layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full, dout_full, empty = barriers_for(SLOTS, 2), barriers_for(SLOTS, 2), barriers_for(SLOTS, CONSUMERS)
    # Full: the arrival of the copy and, for query rows, that of lse and delta. Empty: an arrival from each consumer.
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=CONSUMERS)
    handed = hand(CONSUMERS)
    # Make the barriers visible to TMA before any role starts.
    hopper.fence_async_shared()

    inputs, per_row, tables = (q, k, v, dout), (lse, delta), (blocks, entries)
    grads = dk, dv, dk_result, dv_result
    buffers = k_buffer, v_buffer, q_buffers, dout_buffers, peak_buffers, delta_buffers
    barriers = kv_full, kv_empty, q_full, dout_full, empty
    sizes, alibi = (block_count, slots, batches, section, group, first_kv_head), (places, slopes)
    scales = scale, in_scale, softcap
    strides = q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch, dout_head
    row_strides = lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row
    dk_strides, dv_strides = (dk_row, dk_batch, dk_head), (dv_row, dv_batch, dv_head)
    dk_result_strides = dk_result_row, dk_result_batch, dk_result_head
    dv_result_strides = dv_result_row, dv_result_batch, dv_result_head
    grad_strides = dk_strides, dv_strides, dk_result_strides, dv_result_strides
    upper: gl.constexpr = 0
    lower: gl.constexpr = 1
    of_upper: gl.constexpr = "dk" if APART else ""
    of_lower: gl.constexpr = "dv" if APART else ""
    gl.warp_specialize(
        [
            (_consume, (upper, grads, tables, sizes, grad_strides, scales, alibi, buffers, barriers, handed,
                        D_V, BLOCK_M, SLOTS, RAW_BIAS, of_upper)),
            (_consume, (lower, grads, tables, sizes, grad_strides, scales, alibi, buffers, barriers, handed,
                        D_V, BLOCK_M, SLOTS, RAW_BIAS, of_lower)),
            (produce, (inputs, per_row, tables, counter, sizes, strides, row_strides, buffers, barriers, handed,
                        BLOCK_M, SLOTS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
