"""The Gluon kernel of the forward ring step on Hopper, and the rotation of its buffers.

The shape is FlashAttention-3's (arXiv 2407.08608, section 3): one warp brings Q, K and V by TMA; each of two consumer
warpgroups owns half the rows of a query block, and issues the product Q.K of a key block and P.V of the one before it
together, so that its softmax runs beside the latter.
Guarantees: no buffer is written before its readers have left it and none is read before it is filled, whatever the
entries of a block, none among them; all roles of a program find the same blocks of keys in the same order.
`attention_gluon.gluon_takes` says which calls it may be given.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ringattn.kernels.attention_tiles import (
    ENTRY_COLUMNS,
    LN_2,
    LOG2_E,
    ends_of,
    entries_of,
    item_of,
    rows_and_band,
    run_of,
    visits,
)
from ringattn.kernels.launch_call import VARYING

CONSUMERS = gl.constexpr(2)


@gluon.jit
def slot_of(turn, SLOTS: gl.constexpr):
    """Of the `turn`-th use, from 0, of a ring of SLOTS buffers: (the buffer, the parity of the phase that fills it)."""
    # SLOTS 2:   turn   0 1 2 3 4 5
    #            slot   0 1 0 1 0 1
    #            parity 0 0 1 1 0 0
    return turn % SLOTS, turn // SLOTS & 1


@gluon.jit
def visited(nth, start, full, full_end):
    """The `nth` block of an entry's rows: the full ones first, then those before and after them."""
    # Full blocks need no mask and one loop body; the others follow, left edge first:
    #    blocks   start . . full . . . full_end . end
    #    nth            4 5      0 1 2 3           6
    edge = start + nth - (full_end - full)
    return gl.where(edge < start, full + nth, gl.where(edge < full, edge, start + nth))


@gluon.jit
def work_of(blocks, item, block_count, slots):
    """(block, batch, head, live rows, first entry, one past the last); an idle item has no row and no entry."""
    block, batch, head, idle = item_of(blocks, item, block_count, slots)
    first, last = entries_of(block)
    return block, batch, head, gl.where(idle, 0, run_of(block)[2]), gl.where(idle, last, first), last


@gluon.jit
def _described(base, first, stride, distance, count, buffer):
    """A descriptor, in boxes like `buffer`, of `count` rows from row `first` on, every `stride`-th; 0 beyond them."""
    layout: gl.constexpr = buffer.layout
    first_row = base + first.to(gl.int64) * distance
    step = stride.to(gl.int64) * distance
    return tma.make_tensor_descriptor(first_row, [count, buffer.shape[1]], [step, 1], buffer.shape, layout)


@gluon.jit
def _bring(rows, at, slot, parity, full, empty, buffers):
    """Load a block of rows into a slot, once its readers have left."""
    # The other parity: a new barrier counts as having finished the phase before its first, so the first wait passes.
    mbarrier.wait(empty.index(slot), parity ^ 1)
    mbarrier.expect(full.index(slot), rows.block_type.nbytes)
    tma.async_copy_global_to_shared(rows, [at, 0], full.index(slot), buffers.index(slot))


@gluon.jit
def _produce(inputs, tables, sizes, strides, buffers, barriers, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr):
    """Bring what the consumers ask for, in their order."""
    q, k, v = inputs
    blocks, entries = tables
    block_count, slots, batches, group, first_kv_head = sizes
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head = strides
    q_buffer, k_buffers, v_buffers = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), block_count * slots * batches, gl.num_programs(0)):
        block, batch, head, live, first, last = work_of(blocks, item, block_count, slots)
        # A block without entries loads nothing; consumers skip it by the same test, so turns agree.
        if first < last:
            q_base = q + batch * q_batch + head * q_head
            # `items` counts Q loads: its parity is that of the phase in which both consumers left Q.
            mbarrier.wait(q_empty, items & 1 ^ 1)
            run = run_of(block)
            # `live` rows: those past the block's end are 0.
            q_rows = _described(q_base, run[0], run[1], q_row, live, q_buffer)
            # Before the copy: the barrier flips when so many bytes have arrived.
            mbarrier.expect(q_full, q_rows.block_type.nbytes)
            tma.async_copy_global_to_shared(q_rows, [0, 0], q_full, q_buffer)
            items += 1

            kv_head = head // group - first_kv_head
            k_base = k + batch * k_batch + kv_head * k_head
            v_base = v + batch * v_batch + kv_head * v_head
            for index in range(first, last):
                rows, _ = rows_and_band(entries + index * ENTRY_COLUMNS)
                start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
                # A descriptor is made where the one before it lay, which loads under way may still read.
                for ahead in gl.static_range(SLOTS):
                    slot, parity = slot_of(turn + ahead, SLOTS)
                    mbarrier.wait(k_full.index(slot), parity ^ 1)
                    mbarrier.wait(v_full.index(slot), parity ^ 1)
                k_rows = _described(k_base, rows[0], rows[1], k_row, rows[2], k_buffers.index(0))
                v_rows = _described(v_base, rows[0], rows[1], v_row, rows[2], v_buffers.index(0))
                for nth in range(end - start):
                    at = visited(nth, start, full, full_end) * BLOCK_N
                    # K and V have barriers of their own: Q.K of a block may begin before its V is there.
                    slot, parity = slot_of(turn, SLOTS)
                    _bring(k_rows, at, slot, parity, k_full, k_empty, k_buffers)
                    _bring(v_rows, at, slot, parity, v_full, v_empty, v_buffers)
                    turn += 1


@gluon.jit
def seen(own, entry):
    """The first and the last row of the entry that each row of the block sees: a run, since steps are positive."""
    rows, band = rows_and_band(entry)
    # lo <= own * s_own - other * s_other <= hi, solved for `other`.
    near, far = own * band[0] - band[2], own * band[0] - band[3]
    first = gl.where(far > 0, (far + band[1] - 1) // band[1], 0)
    last = gl.where(near < 0, -1, near // band[1])
    return first, gl.minimum(last, rows[2] - 1)


@gluon.jit
def _weighed(s, peak, weight, at, entry, own, scale, BLOCK_N: gl.constexpr, MASKED: gl.constexpr):
    """(2 ** (logit - peak) for block `at` of the entry, the new peak, the new weight, the share that the old keep)."""
    s = s * scale
    if MASKED:
        first, last = seen(own, entry)
        cols = gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s.type.layout)), 0)
        # Counted from the block's first key, like `cols`.
        left, right = gl.expand_dims(first - at * BLOCK_N, 1), gl.expand_dims(last - at * BLOCK_N, 1)
        s = gl.where((cols >= left) & (cols <= right), s, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(s, 1))
    # A row that has seen no key so far keeps its peak of -inf, which no exponent may be taken from.
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    p = gl.exp2(s - gl.expand_dims(shift, 1))
    # The share of the old accumulator; 0 for a row without any key so far.
    keep = gl.exp2(peak - shift)
    return p, new_peak, weight * keep + gl.sum(p, 1), keep


@gluon.jit
def _scaled(acc, by):
    """`acc` with its rows multiplied."""
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.expand_dims(gl.convert_layout(by, rows), 1)


@gluon.jit
def _products(q_rows, k_rows, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Start q . k."""
    ROWS: gl.constexpr = q_rows.shape[0]
    # Not read, since use_acc is False: it gives the product its layout.
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    return hopper.warpgroup_mma(q_rows, k_rows.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _open(
    acc, peak, weight, turn, at, entry, own, scale, q_rows, k_buffers, barriers,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, s_layout: gl.constexpr,
):  # fmt: skip
    """The attention update by the first key block, but for its values, which the next update adds."""
    slot, parity = slot_of(turn, SLOTS)
    # barriers: q_full, q_empty, k_full, k_empty, v_full, v_empty.
    mbarrier.wait(barriers[2].index(slot), parity)
    s = hopper.warpgroup_mma_wait(0, deps=(_products(q_rows, k_buffers.index(slot), BLOCK_N, s_layout),))
    # The product has ended, so K's slot is free while the softmax runs.
    mbarrier.arrive(barriers[3].index(slot))
    p, peak, weight, keep = _weighed(s, peak, weight, at, entry, own, scale, BLOCK_N, True)
    # P stays in registers, as the left operand of P.V.
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return _scaled(acc, keep), gl.convert_layout(p.to(q_rows.dtype), p_layout), peak, weight


@gluon.jit
def _update(
    acc, p, peak, weight, turn, at, entry, own, scale, q_rows, k_buffers, v_buffers, barriers,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, MASKED: gl.constexpr, s_layout: gl.constexpr,
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
    new_p, peak, weight, keep = _weighed(s, peak, weight, at, entry, own, scale, BLOCK_N, MASKED)
    # Passes at once, but ends a basic block: the assembler would else put the softmax behind the wait below.
    mbarrier.wait(v_full.index(old_slot), old_parity)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(old_slot))
    return _scaled(acc, keep), gl.convert_layout(new_p.to(p.dtype), p.type.layout), peak, weight


@gluon.jit
def _attend(
    acc, peak, weight, turn, first, last, entries, own, scale, q_rows, k_buffers, v_buffers, barriers,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, s_layout: gl.constexpr,
):  # fmt: skip
    """The state after the entries, of which there is at least one, and the turn of the next key block."""
    start, full, full_end, _ = visits(entries + first * ENTRY_COLUMNS)
    acc, p, peak, weight = _open(
        acc, peak, weight, turn, visited(0, start, full, full_end), entries + first * ENTRY_COLUMNS, own, scale, q_rows,
        k_buffers, barriers, BLOCK_N, SLOTS, s_layout,
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
                BLOCK_N, SLOTS, False, s_layout,
            )  # fmt: skip
            turn += 1
        for nth in range(gl.maximum(full_end - full, met), end - start):
            acc, p, peak, weight = _update(
                acc, p, peak, weight, turn, visited(nth, start, full, full_end), entry, own, scale, q_rows,
                k_buffers, v_buffers, barriers, BLOCK_N, SLOTS, True, s_layout,
            )  # fmt: skip
            turn += 1
    # Q is not read again: the producer may load the next item's. The last block's values are still to be added.
    mbarrier.arrive(barriers[1])
    slot, parity = slot_of(turn - 1, SLOTS)
    mbarrier.wait(barriers[4].index(slot), parity)
    acc = hopper.warpgroup_mma(p, v_buffers.index(slot), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(barriers[5].index(slot))
    return acc, peak, weight, turn


@gluon.jit
def _places(base, strides, block, batch, head, own):
    """Pointers to the `own` rows of a block."""
    run = run_of(block)
    # `own` counts rows within the block; these are rows of the tensor.
    rows = (run[0] + own * run[1]).to(gl.int64)
    return base + batch * strides[1] + head * strides[2] + rows * strides[0]


@gluon.jit
def _over_dims(pointers, DIM: gl.constexpr, layout: gl.constexpr):
    """Pointers to the values of each row."""
    return gl.expand_dims(pointers, 1) + gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _consume(
    WHICH: gl.constexpr, state, tables, sizes, strides, scale, buffers, barriers,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The attention updates of the first half of every block's rows, or of the second."""
    # The four warps of a consumer lie along the rows, 16 rows each.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    out, lse, result, sinks = state
    out_strides, result_strides, lse_strides = strides
    blocks, entries = tables
    block_count, slots, batches = sizes
    q_buffer, k_buffers, v_buffers = buffers
    ROWS: gl.constexpr = q_buffer.shape[0] // CONSUMERS
    # Two consumers share one Q buffer: each reads its own half.
    q_rows = q_buffer.slice(WHICH * ROWS, ROWS)
    own = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    # The same rows in the layout of the output product.
    own_out = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    items = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), block_count * slots * batches, gl.num_programs(0)):
        block, batch, head, live, first, last = work_of(blocks, item, block_count, slots)
        begins, ends = ends_of(block)
        live_out = gl.expand_dims(own_out < live, 1)
        # A FIRST block has no earlier state: it begins at lse = -inf, or at the sink.
        known = begins == 0
        acc = gl.zeros([ROWS, DIM], gl.float32, o_layout)
        if out is not None:
            out_at = _over_dims(_places(out, out_strides, block, batch, head, own_out), DIM, o_layout)
            acc = gl.load(out_at, mask=live_out & known, other=0.0)
        lse_at = _places(lse, lse_strides, block, batch, head, own)
        # A normalized state weighs 1 at its own peak; the weight of a row that saw no key drops to 0 with its first.
        peak = gl.load(lse_at, mask=(own < live) & known, other=float("-inf")) * LOG2_E
        weight = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, s_layout))
        if sinks is not None:
            peak = gl.where(begins, gl.load(sinks + head).to(gl.float32) * LOG2_E, peak)

        if first < last:
            mbarrier.wait(barriers[0], items & 1)
            items += 1
            acc, peak, weight, turn = _attend(
                acc, peak, weight, turn, first, last, entries, own, scale, q_rows, k_buffers, v_buffers, barriers,
                BLOCK_N, SLOTS, s_layout,
            )  # fmt: skip

        # A row that has seen no key: lse -inf and output 0, without a division by 0.
        blind = weight == 0.0
        whole = gl.where(blind, 1.0, weight)
        natural = gl.where(blind, float("-inf"), (peak + gl.log2(whole)) * LN_2)
        mean = _scaled(acc, 1.0 / whole)
        if result is not None:
            result_at = _over_dims(_places(result, result_strides, block, batch, head, own_out), DIM, o_layout)
            gl.store(result_at, mean.to(result.dtype.element_ty), mask=live_out & ends)
        if out is not None:
            out_at = _over_dims(_places(out, out_strides, block, batch, head, own_out), DIM, o_layout)
            gl.store(out_at, mean, mask=live_out & (ends == 0))
        gl.store(_places(lse, lse_strides, block, batch, head, own), natural, mask=own < live)


@gluon.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, out, lse, result, sinks, blocks, entries, block_count, slots, batches, group, first_kv_head, scale,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, out_row, out_batch, out_head,
    result_row, result_batch, result_head, lse_batch, lse_head, lse_row,
    DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """What `attention_gluon.forward_gluon` launches, with the warps of one consumer; the others are added here.

    Each of the 384 threads starts with 168 registers; the producer's warpgroup keeps 24, so that each consumer has 240.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, DIM], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], dtype)
    q_buffer = gl.allocate_shared_memory(dtype, [BLOCK_M, DIM], q_layout)
    k_buffers = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_N, DIM], kv_layout)
    v_buffers = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_N, DIM], kv_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    # Full: one arrival, the producer's. Empty: one of each consumer.
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=CONSUMERS)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=CONSUMERS)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=CONSUMERS)
    # The barriers are visible to TMA before any role begins.
    hopper.fence_async_shared()

    state, inputs, tables = (out, lse, result, sinks), (q, k, v), (blocks, entries)
    buffers, barriers = (q_buffer, k_buffers, v_buffers), (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes, all_sizes = (block_count, slots, batches), (block_count, slots, batches, group, first_kv_head)
    strides = q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head
    out_strides, result_strides = (out_row, out_batch, out_head), (result_row, result_batch, result_head)
    state_strides = out_strides, result_strides, (lse_row, lse_batch, lse_head)
    upper: gl.constexpr = 0
    lower: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (upper, state, tables, sizes, state_strides, scale, buffers, barriers, DIM, BLOCK_N, SLOTS)),
            (_consume, (lower, state, tables, sizes, state_strides, scale, buffers, barriers, DIM, BLOCK_N, SLOTS)),
            (_produce, (inputs, tables, all_sizes, strides, buffers, barriers, BLOCK_N, SLOTS)),
        ],
        [4, 1],
        [240, 24],
    )
