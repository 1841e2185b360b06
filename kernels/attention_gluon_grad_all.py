"""The Gluon kernel of all gradients on Hopper: five products for each pair of blocks, and dQ by atomic additions.

A program processes 128 keys, as in `attention_gluon_grad_kv`: 64 in each of two consumer warpgroups, with dK and dV in
registers. Both consumers also store dS^T in shared memory. Each then multiplies the dS of all 128 keys by a half of the
columns of K, for dQ of the block of queries. A warp of its own adds dQ to global memory by TMA, in float32.
Guarantees: the buffer guarantees of `attention_gluon_forward`. Programs add to dQ in any order, so the bits of dQ may
differ between launches; those of dK and dV do not.
`attention_gluon.gluon_takes` and `gluon_adds` define the supported calls.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ringattn.kernels.attention_gluon_grad_kv import produce
from ringattn.kernels.attention_gluon_parts import (
    CONSUMERS,
    barriers_for,
    deliver,
    described,
    hand,
    masked,
    products,
    received,
    seen,
    slot_of,
    visited,
    work_of,
)
from ringattn.kernels.attention_tiles import ENTRY_COLUMNS, query_heads, rows_and_band, visits
from ringattn.kernels.launch import VARYING


@builtin
def _add_block(rows, coordinates, buffer, _semantic=None):
    """Start to add a box in shared memory to global memory by TMA, for which Triton 3.6 to 3.8 have no function."""
    places = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, rows.handle, places, buffer.handle)


add_block = getattr(tma, "async_atomic_add", _add_block)


@gluon.jit
def _add(
    dq, tables, sizes, dq_strides, dq_buffers, barriers, handed, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Add the blocks of dQ that the consumers store to global memory, in the order in which they store them."""
    blocks, entries = tables
    block_count, slots, batches, section, group = sizes
    dq_row, dq_batch, dq_head = dq_strides
    dq_full, dq_empty = barriers
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    total = block_count * slots * batches
    item = gl.program_id(0)
    while item < total:
        work = work_of(blocks, item, block_count, slots, batches, section)
        batch, kv_head, first, last = work[1], work[2], work[4], work[5]
        for index in range(first, last):
            entry = entries + index * ENTRY_COLUMNS
            rows = rows_and_band(entry)[0]
            start, full, full_end, end = visits(entry)
            before, reading = query_heads(entry)
            first_head = kv_head * group + before
            for offset in range(reading):
                # No addition reads the descriptor before this one: each was waited for. Its bounds drop the rows past
                # the end of the entry.
                base = dq + batch * dq_batch + (first_head + offset) * dq_head
                dq_rows = described(base, rows[0], rows[1], dq_row, rows[2], (dq_buffers.index(0),))
                for nth in range(end - start):
                    slot, parity = slot_of(turn, SLOTS)
                    mbarrier.wait(dq_full.index(slot), parity)
                    first_row = visited(nth, start, full, full_end) * BLOCK_M
                    add_block(dq_rows, [first_row, 0], dq_buffers.index(slot))
                    # Wait until the addition has read its buffer. The other buffer keeps the consumers busy.
                    tma.store_wait(0)
                    mbarrier.arrive(dq_empty.index(slot))
                    turn += 1
        item = received(rounds, handed, 1)
        rounds += 1


@gluon.jit
def _update(
    WHICH: gl.constexpr, dk, dv, turn, m_block, limits, scales, kv_buffers, buffers, barriers, adding,
    BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, MASKED: gl.constexpr, s_layout: gl.constexpr, q_layout: gl.constexpr,
):  # fmt: skip
    """Return (dk before scaling, dv) after query block `turn` of this program, and store the half of its dQ.

    `limits`: the first and the last query of the entry that attend to each key.
    """
    _, _, q_buffers, dout_buffers, peak_buffers, delta_buffers = buffers
    _, _, q_full, dout_full, empty = barriers
    ds_buffers, dq_buffers, adding_barriers = adding
    ds_full, dq_full, dq_empty = adding_barriers
    KEYS: gl.constexpr = kv_buffers.shape[1] // CONSUMERS
    COLUMNS: gl.constexpr = kv_buffers.shape[2] // CONSUMERS
    scale, in_scale = scales
    # The slot of an unsigned turn is a bit of it, so the loop keeps no register for each address that follows from it.
    slot, parity = slot_of(turn.to(gl.uint32), SLOTS)
    slot, parity = slot.to(gl.int32), parity.to(gl.int32)
    q_rows, dout_rows = q_buffers[0].index(slot), dout_buffers[0].index(slot)
    of_queries: gl.constexpr = gl.SliceLayout(0, s_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    # This is 0, but the compiler does not know it. Otherwise the descriptors of K and V would be constants of the loop:
    # with those of dQ there are more than uniform registers, and the others would be kept in local memory.
    nought = (turn.to(gl.uint32) >> 31).to(gl.int32)
    k_buffer = kv_buffers.index(nought)
    k_rows, v_rows = k_buffer.slice(WHICH * KEYS, KEYS), kv_buffers.index(nought + 1).slice(WHICH * KEYS, KEYS)
    k_columns = k_buffer.slice(WHICH * COLUMNS, COLUMNS, 1)
    mbarrier.wait(q_full.index(slot), parity)
    s = products((k_rows,), (q_rows,), BLOCK_M, s_layout)
    peaks = peak_buffers.index(slot).load(of_queries)
    mbarrier.wait(dout_full.index(slot), parity)
    dp = products((v_rows,), (dout_rows,), BLOCK_M, s_layout)
    # S^T has ended; dP^T overlaps with the exponentials.
    s = hopper.warpgroup_mma_wait(1, deps=(s,))
    s = s * in_scale - gl.expand_dims(peaks, 0)
    if MASKED:
        s = masked(s, limits, m_block, BLOCK_M)
    # The final weights, because lse is over all keys of the row.
    p = gl.exp2(s)
    dv = hopper.warpgroup_mma(gl.convert_layout(p.to(q_rows.dtype), operand), dout_rows, dv, is_async=True)
    deltas = delta_buffers.index(slot).load(of_queries)
    # dP^T has ended; P^T.dO overlaps with the differences.
    dp = hopper.warpgroup_mma_wait(1, deps=(dp,))
    # dS = P * (dP - delta), delta = sum(dout * out) - dlse.
    ds = (p * (dp - gl.expand_dims(deltas, 0))).to(q_rows.dtype)
    # Of two buffers, this one was read two blocks ago. The other consumer has arrived for the block before, which it
    # does after that product.
    ds_buffers.index(slot).slice(WHICH * KEYS, KEYS).store(ds)
    # Products read shared memory by the asynchronous proxy.
    hopper.fence_async_shared()
    mbarrier.arrive(ds_full.index(slot))
    dk = hopper.warpgroup_mma(gl.convert_layout(ds, operand), q_rows, dk, is_async=True)
    mbarrier.wait(ds_full.index(slot), parity)
    zeros = gl.zeros([BLOCK_M, COLUMNS], gl.float32, q_layout)
    dq = hopper.warpgroup_mma(ds_buffers.index(slot).permute((1, 0)), k_columns, zeros, use_acc=False, is_async=True)
    dv = hopper.warpgroup_mma_wait(2, deps=(dv,))
    dk = hopper.warpgroup_mma_wait(1, deps=(dk,))
    mbarrier.arrive(empty.index(slot))
    dq = hopper.warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.wait(dq_empty.index(slot), parity ^ 1)
    dq_buffers.index(slot).slice(WHICH * COLUMNS, COLUMNS, 1).store(dq * scale)
    # TMA reads shared memory by the asynchronous proxy too.
    hopper.fence_async_shared()
    mbarrier.arrive(dq_full.index(slot))
    return dk, dv


@gluon.jit
def _attend(
    WHICH: gl.constexpr, dk, dv, turn, live, first, last, entries, own_rows, scales, kv_buffers, buffers, barriers,
    adding, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, s_layout: gl.constexpr, q_layout: gl.constexpr,
):  # fmt: skip
    """Return (dk before scaling, dv) after entries first .. last - 1, and the turn of the next query block."""
    BLOCK_N: gl.constexpr = kv_buffers.shape[1]
    for index in range(first, last):
        entry = entries + index * ENTRY_COLUMNS
        start, full, full_end, end = visits(entry)
        # Weights of keys past the end of the block must be 0, because dQ sums over all keys: such a block needs a mask
        # everywhere.
        unmasked = gl.where(live < BLOCK_N, 0, full_end - full)
        for _ in range(query_heads(entry)[1]):
            # Full blocks need no block number, which only the mask reads.
            for _ in range(unmasked):
                dk, dv = _update(
                    WHICH, dk, dv, turn, 0, (0, 0), scales, kv_buffers, buffers, barriers, adding,
                    BLOCK_M, SLOTS, False, s_layout, q_layout,
                )  # fmt: skip
                turn += 1
            first_query, last_query = seen(own_rows, entry)
            limits = first_query, gl.where(own_rows < live, last_query, -1)
            for nth in range(unmasked, end - start):
                dk, dv = _update(
                    WHICH, dk, dv, turn, visited(nth, start, full, full_end), limits, scales, kv_buffers, buffers,
                    barriers, adding, BLOCK_M, SLOTS, True, s_layout, q_layout,
                )  # fmt: skip
                turn += 1
    return dk, dv, turn


@gluon.jit
def _consume(
    WHICH: gl.constexpr, grads, tables, sizes, strides, scales, kv_buffers, buffers, barriers, adding, handed,
    DIM: gl.constexpr, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of the first or the second half of every block's keys."""
    # The four warps of a consumer have 16 keys each.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    # Each consumer has all queries of the block and a half of the columns of dQ.
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM // CONSUMERS, 16])
    dk_carried, dv_carried, dk_result, dv_result = grads
    dk_strides, dv_strides, dk_result_strides, dv_result_strides = strides
    scale, _ = scales
    blocks, entries = tables
    block_count, slots, batches, section, _, first_kv_head = sizes
    KEYS: gl.constexpr = kv_buffers.shape[1] // CONSUMERS
    own_rows = WHICH * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, s_layout))
    # The same keys in the layout of the gradients.
    own_d = WHICH * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, d_layout))
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    rounds = gl.to_tensor(0)
    total = block_count * slots * batches
    item = gl.program_id(0)
    while item < total:
        live, first, last = work_of(blocks, item, block_count, slots, batches, section)[3:]
        dk = gl.zeros([KEYS, DIM], gl.float32, d_layout)
        dv = gl.zeros([KEYS, DIM], gl.float32, d_layout)
        if first < last:
            mbarrier.wait(barriers[0], items & 1)
            items += 1
            dk, dv, turn = _attend(
                WHICH, dk, dv, turn, live, first, last, entries, own_rows, scales, kv_buffers, buffers, barriers,
                adding, BLOCK_M, SLOTS, s_layout, q_layout,
            )  # fmt: skip
            # K and V are not read again, so the producer may load those of the next item.
            mbarrier.arrive(barriers[1])
        # Read this again: kept through the loops, it would take registers of every thread.
        block, batch, kv_head, live, _, _ = work_of(blocks, item, block_count, slots, batches, section)
        # The first K/V head in the buffer may be later than 0; gradients have the same heads.
        buffer_head = kv_head - first_kv_head
        deliver(
            (dv,), None, dv_carried, dv_result, dv_strides, dv_result_strides, block, batch, buffer_head, own_d, live,
            d_layout,
        )  # fmt: skip
        deliver(
            (dk,), scale, dk_carried, dk_result, dk_strides, dk_result_strides, block, batch, buffer_head, own_d, live,
            d_layout,
        )  # fmt: skip
        item = received(rounds, handed, 4)
        rounds += 1


@gluon.jit(do_not_specialize=VARYING)
def grad_all_kernel(
    q, k, v, dout, lse, delta, dq, dk, dv, dk_result, dv_result, blocks, entries, counter, block_count, slots, batches,
    section, group, first_kv_head, scale, in_scale,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch, dout_head,
    dq_row, dq_batch, dq_head, dk_row, dk_batch, dk_head, dv_row, dv_batch, dv_head,
    dk_result_row, dk_result_batch, dk_result_head, dv_result_row, dv_result_batch, dv_result_head,
    lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row,
    D_K: gl.constexpr, D_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Run a program of `attention_gluon.grad_kv_gluon` with dQ.

    It starts with the warps of one consumer and adds the others. Each of the 384 threads starts with 168 registers. The
    warpgroup of the producer and of the warp that adds keeps 24, so that each consumer has 240.
    """
    gl.static_assert(D_K == D_V, "K and V share an allocation")
    dtype: gl.constexpr = q.dtype.element_ty
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D_V], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D_V], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kv_buffers = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D_V], kv_layout)
    q_buffers = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_M, D_V], q_layout)
    dout_buffers = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_M, D_V], q_layout)
    peak_buffers = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], row_layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], row_layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    dq_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D_V], gl.float32)
    ds_buffers = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_N, BLOCK_M], ds_layout)
    dq_buffers = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M, D_V], dq_layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full, dout_full, empty = barriers_for(SLOTS, 2), barriers_for(SLOTS, 2), barriers_for(SLOTS, CONSUMERS)
    ds_full, dq_full = barriers_for(SLOTS, CONSUMERS), barriers_for(SLOTS, CONSUMERS)
    dq_empty = barriers_for(SLOTS, 1)
    # Full: the arrival of the copy and, for query rows, that of lse and delta. Empty: an arrival from each consumer.
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=CONSUMERS)
    handed = hand(CONSUMERS + 1)
    # Make the barriers visible to TMA before any role starts.
    hopper.fence_async_shared()

    inputs, per_row, tables = (q, k, v, dout), (lse, delta), (blocks, entries)
    grads = dk, dv, dk_result, dv_result
    k_buffer, v_buffer = (kv_buffers.index(0),), (kv_buffers.index(1),)
    buffers = k_buffer, v_buffer, (q_buffers,), (dout_buffers,), peak_buffers, delta_buffers
    barriers = kv_full, kv_empty, q_full, dout_full, empty
    adding_barriers = ds_full, dq_full, dq_empty
    adding = ds_buffers, dq_buffers, adding_barriers
    sizes, scales = (block_count, slots, batches, section, group, first_kv_head), (scale, in_scale)
    strides = q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch, dout_head
    row_strides = lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row
    dk_strides, dv_strides = (dk_row, dk_batch, dk_head), (dv_row, dv_batch, dv_head)
    dk_result_strides = dk_result_row, dk_result_batch, dk_result_head
    dv_result_strides = dv_result_row, dv_result_batch, dv_result_head
    grad_strides = dk_strides, dv_strides, dk_result_strides, dv_result_strides
    upper: gl.constexpr = 0
    lower: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (upper, grads, tables, sizes, grad_strides, scales, kv_buffers, buffers, barriers, adding,
                        handed, D_V, BLOCK_M, SLOTS)),
            (_consume, (lower, grads, tables, sizes, grad_strides, scales, kv_buffers, buffers, barriers, adding,
                        handed, D_V, BLOCK_M, SLOTS)),
            (produce, (inputs, per_row, tables, counter, sizes, strides, row_strides, buffers, barriers, handed,
                        BLOCK_M, SLOTS)),
            (_add, (dq, tables, sizes[:5], (dq_row, dq_batch, dq_head), dq_buffers, (dq_full, dq_empty), handed,
                    BLOCK_M, SLOTS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
