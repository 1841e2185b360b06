"""The backward ring step: a launch for dQ by query blocks and one for dK and dV by key blocks, or one fused launch.

Guarantees, for float32, float16 and bfloat16 inputs:
- weights are recomputed from the merged lse;
- float32 gradients are added to the existing sums, so that dK and dV can travel between ranks and accumulate;
- the query heads of a group are summed inside the launch;
- rows that see no key add nothing;
- the two launches use no atomics, so equal tables give equal bits.
The fused launch, by key blocks, makes five matrix products instead of seven and adds to dQ atomically, in an order that
differs from run to run.
dQ needs no gradient from another rank. Launched first, it overlaps the transfer of dK and dV. The first block of a row
does not read the sum, and the last writes the result in the dtype of its tensor; the flags of each block mark them. The
kernels do not depend on positions, ranks, steps or how lse and delta were merged.
The scores of a key block are (keys, queries): a group of four warps with 64 keys keeps the weights and their gradients
in registers between the products.
"""

from __future__ import annotations

from typing import Any, Unpack

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention_options import (
    CallOptions,
    adds_raw,
    bias_of,
    draw_of,
    dropped,
    factor_of,
    shared_arguments,
    shared_constants,
    steps_of,
    with_bias,
)
from ringattn.kernels.attention_tiles import (
    ENTRY_COLUMNS,
    LN_2,
    LOG2_E,
    LOWEST,
    banded,
    ends_of,
    entries_of,
    grid_of,
    item_of,
    load_rows,
    logit_scales,
    logits,
    query_heads,
    read_block,
    rows_and_band,
    rows_in,
    rows_of,
    section_for,
    state_beside,
    store_rows,
    strides_of,
    through_cap,
    visits,
)
from ringattn.kernels.launch import VARYING, Config, LaunchCall, Table

# --- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _score_grads(p, capped, dp, delta, SOFTCAP: tl.constexpr):
    """Return the gradient of the products before scaling, from the weights `p`; `delta` broadcasts over the keys."""
    # The derivative of tanh comes first, so that the tanh need not be kept together with dP.
    p = through_cap(p, capped, SOFTCAP)
    # dS = P * (dP - delta), delta = sum(dout * out) - dlse.
    return p * (dp - delta)


@triton.jit
def _add_q(
    dq_rows, q_rows, dout_rows, peaks, deltas, k_source, v_source, count, band, n_block, edge, scale, softcap, bias,
    steps, draw, more,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, RAW_BIAS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Return `dq_rows`, before scaling, after key block `n_block` of an entry of `count` rows.

    `k_source`, `v_source`: the entry's rows, as `read_block` takes them. `peaks`: the base-2 lse of each query. `edge`:
    the block is at an edge of the band and needs the mask. `bias`, `steps`: for ALiBi, see `with_bias`; `draw`: for
    dropout, see `dropped`; None without it. `more`: the factor of the weights that dropout keeps.
    """
    k_rows = read_block(k_source, n_block, count, D_K, PAD_K, BLOCK_N, DESCRIBED)
    # Recompute the scores: storing those of a whole pass would need rows x keys of memory.
    s, capped = logits(tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee"), scale, softcap, SOFTCAP)
    v_rows = read_block(v_source, n_block, count, D_V, PAD_V, BLOCK_N, DESCRIBED)
    # dP = dO V^T
    dp = tl.dot(dout_rows, tl.trans(v_rows), input_precision="ieee")
    if bias is not None:
        s, rest = with_bias(
            s, capped, softcap if SOFTCAP else scale, bias, steps, n_block, tl.arange(0, BLOCK_M),
            tl.arange(0, BLOCK_N), BLOCK_M, False, RAW_BIAS,
        )  # fmt: skip
        peaks -= rest
    # P = exp(S - lse) are the final weights, because lse is over all keys of the row.
    p = tl.exp2(s - peaks[:, None])
    if edge:
        # Mask after exp2, so that the exponent is a single multiply-add. The masked weights may be infinite.
        cols = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        p = tl.where(banded(tl.arange(0, BLOCK_M), cols, count, band), p, 0.0)
    if draw is not None:
        # dP is 0 for dropped pairs and multiplied by `more` for the others.
        dp = tl.where(dropped(draw, n_block, BLOCK_M, BLOCK_N, False, TOGETHER), 0.0, dp) * more
    ds = _score_grads(p, capped, dp, deltas[:, None], SOFTCAP)
    # dQ += dS K; the scale is applied at the end.
    return tl.dot(ds.to(k_rows.dtype), k_rows, dq_rows, input_precision="ieee")


@triton.jit(do_not_specialize=VARYING)
def grad_q_kernel(
    q, k, v, dout, lse, delta, dq, result, blocks, entries, places, slopes, positions, seed_low, seed_high, threshold,
    kept, block_count, slots, batches, section, group, first_kv_head, scale, in_scale, softcap,
    q_row: tl.int64, q_batch: tl.int64, q_head: tl.int64, k_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    v_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, dout_row: tl.int64, dout_batch: tl.int64, dout_head: tl.int64,
    dq_row: tl.int64, dq_batch: tl.int64, dq_head: tl.int64,
    result_row: tl.int64, result_batch: tl.int64, result_head: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64, lse_row: tl.int64,
    delta_batch: tl.int64, delta_head: tl.int64, delta_row: tl.int64,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, RAW_BIAS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    more = None if kept is None else 1.0 / kept
    # A program may take several items, at a distance of the number of programs.
    for item in tl.range(tl.program_id(0), block_count * slots * batches, tl.num_programs(0), disable_licm=True):
        block, batch, head, idle = item_of(blocks, item, block_count, slots, batches, section)
        rows, live = rows_in(block, idle, BLOCK_M)
        begins, ends = ends_of(block)
        # The first K/V head in the buffer may be later than 0.
        kv_head = head // group - first_kv_head
        q_rows = load_rows(q + batch * q_batch + head * q_head, rows * q_row, live, D_K, PAD_K)
        # Keep q, dout, lse and delta of the block's own query rows in registers for all entries.
        dout_base = dout + batch * dout_batch + head * dout_head
        dout_rows = load_rows(dout_base, rows * dout_row, live, D_V, PAD_V)
        peaks = tl.load(lse + batch * lse_batch + head * lse_head + rows * lse_row, mask=live, other=float("-inf"))
        # A peak of +inf makes every weight 0: for rows that saw no key, and for rows past the end.
        peaks = tl.where(peaks == float("-inf"), float("inf"), peaks * LOG2_E)
        deltas = tl.load(delta + batch * delta_batch + head * delta_head + rows * delta_row, mask=live, other=0.0)
        dq_rows = tl.zeros((BLOCK_M, PAD_K), tl.float32)
        k_base = k + batch * k_batch + kv_head * k_head
        v_base = v + batch * v_batch + kv_head * v_head
        first, last = entries_of(block)
        factor = softcap if SOFTCAP else in_scale
        # An idle item has no entry. Its loads and stores still run, all masked.
        for index in tl.range(first, tl.where(idle, first, last), disable_licm=True):
            entry, band = rows_and_band(entries + index * ENTRY_COLUMNS)
            start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
            k_source = rows_of(k_base, k_row, entry, D_K, PAD_K, BLOCK_N, DESCRIBED)
            v_source = rows_of(v_base, v_row, entry, D_V, PAD_V, BLOCK_N, DESCRIBED)
            bias = None if slopes is None else bias_of(places, index, slopes, head, factor, RAW_BIAS)
            steps = None if bias is None else steps_of(bias[1], False)
            draw = None
            if positions is not None:
                draw = draw_of(positions, index, head, batch, seed_low, seed_high, threshold)
            for n_block in tl.range(start, end):
                # Blocks start .. full - 1 and full_end .. end - 1 are at the band's edges and need the mask.
                dq_rows = _add_q(
                    dq_rows, q_rows, dout_rows, peaks, deltas, k_source, v_source, entry[2], band, n_block,
                    (n_block < full) | (n_block >= full_end), in_scale, softcap, bias, steps, draw, more,
                    D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED, RAW_BIAS, TOGETHER,
                )  # fmt: skip
        # Compute these again: kept through the loop, they would take registers of every thread.
        rows, live = rows_in(block, idle, BLOCK_M)
        dq_base = dq + batch * dq_batch + head * dq_head
        # dQ accumulates over the launches of a pass. A FIRST block starts from 0; a LAST block writes only the result.
        total = load_rows(dq_base, rows * dq_row, live & (begins == 0), D_K, PAD_K) + dq_rows * scale
        if result is not None:
            result_base = result + batch * result_batch + head * result_head
            store_rows(result_base, rows * result_row, live & ends, total, D_K, PAD_K)
        # A block that is not LAST stores its sum in float32 for the next launch.
        store_rows(dq_base, rows * dq_row, live & (ends == 0), total, D_K, PAD_K)


@triton.jit
def _numbers_of(base, row, run):
    """Return the source of one number per row for `_numbers_at`.

    It consists of the address for the first row, the row stride of the run, and the distance of two rows in memory.
    """
    return base + run[0].to(tl.int64) * row, run[1], row


@triton.jit
def _numbers_at(source, index, ROWS: tl.constexpr):
    """Return the addresses of the numbers of block `index` of the run."""
    # A product of two 32-bit numbers with a 64-bit result is a single instruction. The distance of two blocks fits into
    # 32 bits, because a run of more than one block has all its rows below 2^30.
    before = index * (source[1] * ROWS).to(tl.int64)
    return source[0] + before * source[2] + (tl.arange(0, ROWS) * source[1]).to(tl.int64) * source[2]


@triton.jit
def _first_of(values, ROWS: tl.constexpr, COPIES: tl.constexpr):
    """Return one of the COPIES equal columns of `values` (ROWS, COPIES). The others need not leave shared memory."""
    if COPIES == 1:
        column = tl.reshape(values, (ROWS,))
    else:
        half, _ = tl.split(tl.reshape(values, (ROWS, COPIES // 2, 2)))
        column = _first_of(half, ROWS, COPIES // 2)
    return column


@triton.jit
def _numbers(source, index, live, more, step, ROWS: tl.constexpr, COPIES: tl.constexpr, EDGE: tl.constexpr):
    """Load the numbers of block `index`, one per row; with EDGE, 0 for rows not `live`.

    If `more` is given, j * `step` * `more` is added to row j. The load has COPIES copies, an element for each thread of
    the program. With fewer elements than threads, the compiler would make every thread load all that it needs.
    """
    where = _numbers_at(source, index, ROWS)[None, :] + tl.zeros((COPIES, 1), tl.int32)
    if EDGE:
        values = tl.load(where, mask=live[None, :], other=0.0)
    else:
        values = tl.load(where)
    if more is not None:
        # Add the number here, while a thread has a single number.
        values += ((tl.arange(0, ROWS) * step).to(tl.float32) * more)[None, :]
    return _first_of(tl.trans(values), ROWS, COPIES)


@triton.jit
def _weights(s, lse, cols, count, band, ROWS: tl.constexpr, EDGE: tl.constexpr):
    """Return the weights of scores (keys, queries); with EDGE, 0 outside the band."""
    # A row without a logit above -inf gets a finite peak, so that its weights are 0 and not exp2(-inf - (-inf)). A NaN
    # is preserved.
    peaks = tl.maximum(lse * LOG2_E, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(s - peaks[None, :])
    if EDGE:
        # Mask after exp2, so that the exponent is a single multiply-add. The masked weights may be infinite.
        p = tl.where(banded(tl.arange(0, ROWS), cols, count, band), p, 0.0)
    return p


@triton.jit
def _add_kv(
    dk_rows, dv_rows, k_rows, v_rows, q_source, dout_source, lse_source, delta_source, dq_source, key_live, count, band,
    m_block, scale, in_scale, softcap, bias, draw, more,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, RAW_BIAS: tl.constexpr,
    TOGETHER: tl.constexpr,
    COPIES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Return (`dk_rows` before scaling, `dv_rows`) after query block `m_block` of an entry of `count` rows.

    The sources are those of the entry's rows of q and dout (see `read_block`) and of lse, delta and dQ (see
    `_numbers_at`). Scores are (keys, queries). Without EDGE, every row of the block sees every key, so no row is past
    the end. `bias`, `draw`, `more`: as for `_add_q`.
    """
    # The entry's rows are queries; `cols` counts them within the entry.
    cols = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = cols < count
    q_rows = read_block(q_source, m_block, count, D_K, PAD_K, BLOCK_M, DESCRIBED)
    # S^T = K Q^T, so that dV = P^T dO and dK = dS^T Q need no transposed operand: P and dS stay in registers.
    s, capped = logits(tl.dot(k_rows, tl.trans(q_rows), input_precision="ieee"), in_scale, softcap, SOFTCAP)
    less, step = None, None
    if bias is not None:
        steps = steps_of(bias[1], True)
        s, rest = with_bias(
            s, capped, softcap if SOFTCAP else in_scale, bias, steps, m_block, tl.arange(0, BLOCK_N),
            tl.arange(0, BLOCK_M), BLOCK_N, True, RAW_BIAS,
        )  # fmt: skip
        # Convert to the natural logarithm of lse.
        less, step = rest * -LN_2, steps[2]
    # lse is loaded with each query block, because a key block goes through many of them.
    lse = _numbers(lse_source, m_block, live, less, step, BLOCK_M, COPIES, EDGE)
    if draw is not None:
        # Draw before the next product and keep the result in the sign of the weight: the random words and the mask
        # would otherwise take the registers of that product.
        p = _weights(s, lse, cols, count, band, BLOCK_N, EDGE)
        p = tl.where(dropped(draw, m_block, BLOCK_N, BLOCK_M, True, TOGETHER), -p, p)
    # dP^T = V dO^T
    dout_rows = read_block(dout_source, m_block, count, D_V, PAD_V, BLOCK_M, DESCRIBED)
    dp = tl.dot(v_rows, tl.trans(dout_rows), input_precision="ieee")
    # Load delta only now: the product above needs the registers.
    deltas = _numbers(delta_source, m_block, live, None, None, BLOCK_M, COPIES, EDGE)
    if draw is None:
        p = _weights(s, lse, cols, count, band, BLOCK_N, EDGE)
        kept_p = p
    else:
        gone, p = p < 0.0, tl.abs(p)
        # dV is multiplied by `more` at the end.
        kept_p, dp = tl.where(gone, 0.0, p), tl.where(gone, 0.0, dp) * more
    ds = _score_grads(p, capped, dp, deltas[None, :], SOFTCAP)
    dv_rows = tl.dot(kept_p.to(dout_rows.dtype), dout_rows, dv_rows, input_precision="ieee")
    dk_rows = tl.dot(ds.to(q_rows.dtype), q_rows, dk_rows, input_precision="ieee")
    if dq_source is not None:
        # The weights of keys past the end may be infinite, and infinity times their zeros is NaN.
        live_ds = tl.where(key_live[:, None], ds, 0.0).to(k_rows.dtype)
        dims = tl.arange(0, PAD_K)
        # Several key blocks add to the same query row, so these additions must be atomic.
        at_dq = _numbers_at(dq_source, m_block, BLOCK_M)[:, None] + dims[None, :]
        # dQ = dS K from the transposed dS^T.
        more = tl.dot(tl.trans(live_ds), k_rows, input_precision="ieee") * scale
        tl.atomic_add(at_dq, more, mask=live[:, None] & (dims < D_K)[None, :], sem="relaxed")
    return dk_rows, dv_rows


@triton.jit
def _end_kv(
    sums, base, result, offset, result_offset, row, result_row, rows, live, begins, ends,
    DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Add the sum of earlier launches unless the pass `begins`. Store the sum or, if the pass `ends`, the result."""
    total = load_rows(base + offset, rows * row, live & (begins == 0), DIM, PADDED) + sums
    if result is not None:
        store_rows(result + result_offset, rows * result_row, live & ends, total, DIM, PADDED)
    store_rows(base + offset, rows * row, live & (ends == 0), total, DIM, PADDED)


@triton.jit(do_not_specialize=VARYING)
def grad_kv_kernel(
    q, k, v, dout, lse, delta, dq, dk, dv, dk_result, dv_result, blocks, entries, places, slopes, positions, seed_low,
    seed_high, threshold, kept, block_count, slots, batches, section, group, first_kv_head, scale, in_scale, softcap,
    q_row: tl.int64, q_batch: tl.int64, q_head: tl.int64, k_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    v_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, dout_row: tl.int64, dout_batch: tl.int64, dout_head: tl.int64,
    dq_row: tl.int64, dq_batch: tl.int64, dq_head: tl.int64, dk_row: tl.int64, dk_batch: tl.int64, dk_head: tl.int64,
    dk_result_row: tl.int64, dk_result_batch: tl.int64, dk_result_head: tl.int64,
    dv_row: tl.int64, dv_batch: tl.int64, dv_head: tl.int64,
    dv_result_row: tl.int64, dv_result_batch: tl.int64, dv_result_head: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64, lse_row,
    delta_batch: tl.int64, delta_head: tl.int64, delta_row,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, RAW_BIAS: tl.constexpr,
    TOGETHER: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    more = None if kept is None else 1.0 / kept
    for item in tl.range(tl.program_id(0), block_count * slots * batches, tl.num_programs(0), disable_licm=True):
        block, batch, kv_head, idle = item_of(blocks, item, block_count, slots, batches, section)
        rows, live = rows_in(block, idle, BLOCK_N)
        # The first K/V head in the buffer may be later than 0; gradients have the same heads.
        buffer_head = kv_head - first_kv_head
        k_rows = load_rows(k + batch * k_batch + buffer_head * k_head, rows * k_row, live, D_K, PAD_K)
        v_rows = load_rows(v + batch * v_batch + buffer_head * v_head, rows * v_row, live, D_V, PAD_V)
        dk_rows = tl.zeros((BLOCK_N, PAD_K), tl.float32)
        dv_rows = tl.zeros((BLOCK_N, PAD_V), tl.float32)
        first, last = entries_of(block)
        factor = softcap if SOFTCAP else in_scale
        for index in tl.range(first, tl.where(idle, first, last), disable_licm=True):
            entry, band = rows_and_band(entries + index * ENTRY_COLUMNS)
            start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
            before, reading = query_heads(entries + index * ENTRY_COLUMNS)
            first_head = kv_head * group + before
            # One program processes all query heads of the K/V head in turn, so dK and dV need no atomics.
            for offset in tl.range(0, reading, disable_licm=True):
                head = first_head + offset
                q_base = q + batch * q_batch + head * q_head
                dout_base = dout + batch * dout_batch + head * dout_head
                q_source = rows_of(q_base, q_row, entry, D_K, PAD_K, BLOCK_M, DESCRIBED)
                dout_source = rows_of(dout_base, dout_row, entry, D_V, PAD_V, BLOCK_M, DESCRIBED)
                lse_source = _numbers_of(lse + batch * lse_batch + head * lse_head, lse_row, entry)
                delta_source = _numbers_of(delta + batch * delta_batch + head * delta_head, delta_row, entry)
                dq_source = None if dq is None else _numbers_of(dq + batch * dq_batch + head * dq_head, dq_row, entry)
                bias = None if slopes is None else bias_of(places, index, slopes, head, factor, RAW_BIAS)
                draw = None
                if positions is not None:
                    draw = draw_of(positions, index, head, batch, seed_low, seed_high, threshold)
                # First the masked blocks at the band's edges, then the others in a loop without a mask:
                #    start | masked | full | unmasked | full_end | masked | end
                # With wide heads or most options registers are scarce, so the loops recompute invariants.
                TIGHT: tl.constexpr = SOFTCAP or PAD_K > 128 or slopes is not None or positions is not None
                for edge in tl.range(start, end - (full_end - full), disable_licm=TIGHT):
                    dk_rows, dv_rows = _add_kv(
                        dk_rows, dv_rows, k_rows, v_rows, q_source, dout_source, lse_source, delta_source, dq_source,
                        live, entry[2], band, tl.where(edge < full, edge, edge + (full_end - full)), scale, in_scale,
                        softcap, bias, draw, more,
                        D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED, RAW_BIAS, TOGETHER,
                        COPIES, True,
                    )  # fmt: skip
                for m_block in tl.range(full, full_end, disable_licm=TIGHT):
                    dk_rows, dv_rows = _add_kv(
                        dk_rows, dv_rows, k_rows, v_rows, q_source, dout_source, lse_source, delta_source, dq_source,
                        live, entry[2], band, m_block, scale, in_scale, softcap, bias, draw, more,
                        D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED, RAW_BIAS, TOGETHER,
                        COPIES, False,
                    )  # fmt: skip
        # Compute these again after the loop, as in `grad_q_kernel`.
        rows, live = rows_in(block, idle, BLOCK_N)
        begins, ends = ends_of(block)
        if more is not None:
            dv_rows *= more
        _end_kv(
            dv_rows, dv, dv_result,
            batch * dv_batch + buffer_head * dv_head, batch * dv_result_batch + buffer_head * dv_result_head,
            dv_row, dv_result_row, rows, live, begins, ends, D_V, PAD_V,
        )  # fmt: skip
        _end_kv(
            dk_rows * scale, dk, dk_result,
            batch * dk_batch + buffer_head * dk_head, batch * dk_result_batch + buffer_head * dk_result_head,
            dk_row, dk_result_row, rows, live, begins, ends, D_K, PAD_K,
        )  # fmt: skip


# --- launches of the kernels -----------------------------------------------------------------------------------------


def grad_q(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dq: Tensor | None, table: Table,
    config: Config, *, result: Tensor | None = None, **options: Unpack[CallOptions],
) -> LaunchCall:  # fmt: skip
    """Return the launch that adds the gradient of the table's pairs to `dq`, shaped like q in float32.

    `q`, `k`, `v`, `dout`: (rows, batch, heads, dim), any strides with a contiguous last dimension, float32 or half.
    `lse`, `delta`: (batch, query heads, rows) float32 over all keys, delta = sum(dout * out) - dlse. The table is that
    of `attention_forward.forward`. A FIRST block does not read `dq`. A LAST block writes the sum to `result`, shaped
    like `dq` in the dtype of q, and does not touch `dq`. Without `result` no block may be LAST. If all blocks are both
    FIRST and LAST, `dq` may be None. The form "descriptors" needs `describable` k and v.
    Raises ValueError if both `dq` and `result` are None.
    """
    # If no block reads or writes dq, its argument is a stand-in that is never accessed.
    state, strides = state_beside(dq, result, lse)
    section = section_for(table, k, v, sharing=options.get("group", 1))
    args = (
        q, k, v, dout, lse, delta, state, result, *shared_arguments(table, q.shape[1], section, options),
        *_scales(options), *strides_of(q, k, v, dout), *strides, *lse.stride(), *delta.stride(),
    )  # fmt: skip
    meta, grid = _meta(q, v, config, table, options), grid_of(table, q.shape[1], options.get("programs"))
    return LaunchCall(grad_q_kernel, grid, args, meta, seed_at=13 if options.get("dropout") else None)


def grad_kv(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor | None, dv: Tensor | None,
    table: Table, config: Config, *, results: tuple[Tensor, Tensor] | None = None, dq: Tensor | None = None,
    **options: Unpack[CallOptions],
) -> LaunchCall:  # fmt: skip
    """Return the launch that adds the gradients of the table's pairs to `dk` and `dv`, shaped like k and v in float32.

    Like `grad_q`, but the table has key blocks of `config.block_n` rows and entries in blocks of `config.block_m`. Its
    flags refer to dk and dv: a FIRST block does not read them. A LAST block writes the sums to `results`, shaped like
    dk and dv in the dtype of k, and does not touch `dk` and `dv`. A block without entries writes the existing sums
    unchanged, or 0 if it is FIRST. If `dq`, shaped like q in float32, is given, the launch adds to it by float32
    atomics, so the bits of `dq` depend on the order in which programs end. The form "descriptors" needs `describable` q
    and dout.
    """
    # As in `grad_q`: if no block reads or writes dk and dv, their arguments are stand-ins.
    written = results or (None, None)
    (dk, of_dk), (dv, of_dv) = (state_beside(*pair, lse) for pair in zip((dk, dv), written, strict=True))
    section = section_for(table, q, dout, reads=options.get("group", 1))
    args = (
        q, k, v, dout, lse, delta, dq, dk, dv, *written, *shared_arguments(table, q.shape[1], section, options),
        # Without dq its strides are not read, so pass those of q.
        *_scales(options), *strides_of(q, k, v, dout, q if dq is None else dq), *of_dk, *of_dv, *lse.stride(),
        *delta.stride(),
    )  # fmt: skip
    # Copies, so that a load of a number per row has an element for each thread.
    copies = max(1, 32 * config.num_warps // config.block_m)
    meta = _meta(q, v, config, table, options) | {"COPIES": copies}
    grid = grid_of(table, q.shape[1], options.get("programs"))
    return LaunchCall(grad_kv_kernel, grid, args, meta, seed_at=16 if options.get("dropout") else None)


def _scales(options: CallOptions) -> tuple[float, float, float]:
    return options["scale"], *logit_scales(options["scale"], options.get("softcap"))


def _meta(q: Tensor, v: Tensor, config: Config, table: Table, options: CallOptions) -> dict[str, Any]:
    """Return the compile-time constants of both kernels."""
    return {**shared_constants(q, v, config, table, options), "RAW_BIAS": adds_raw(factor_of(options))}
