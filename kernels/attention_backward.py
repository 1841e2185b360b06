"""The backward ring step in two launches, dQ by query blocks and dK, dV by key blocks, or in one by key blocks.

Guarantees, for float32, float16 and bfloat16 inputs, weights recomputed from the merged lse, float32 gradients that are
added to what is there (so that dK and dV travel and grow), query heads of a group summed inside the launch, and nothing
added for rows that see no key. Two launches use no atomics: the same bits for the same tables. One launch makes five
matrix products instead of seven and adds dQ atomically, in an order that differs from run to run.
dQ needs no gradient that travels: launched first, it hides their arrival. Of a pass, each gradient begins without
reading a state and ends by writing the result in the dtype of its tensor: the flags of each block say which.
Independent of positions, ranks, steps and of how lse and delta were merged.
The scores of a key block are (keys, queries): a group of four warps with 64 of its keys keeps weights and their
gradients in registers, between the products that make them and those that take them.
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
    biased,
    draw_of,
    dropped,
    shared_arguments,
    shared_constants,
    steps_of,
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
    visits,
)
from ringattn.kernels.launch import VARYING, Config, LaunchCall, Table

# --- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _with_bias(
    s, raw, factor, alibi, steps, at,
    OWN: tl.constexpr, OTHER: tl.constexpr, KEYS_OWN: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """(t, rest) as `biased` gives them of s, which is `raw` * `factor`; with RAW the bias is added before that."""
    if RAW:
        s, rest = biased(raw, alibi[0], alibi[1], steps, at, OWN, OTHER, KEYS_OWN)
        s, rest = s * factor, rest * factor
    else:
        s, rest = biased(s, alibi[0], alibi[1], steps, at, OWN, OTHER, KEYS_OWN)
    return s, rest


@triton.jit
def _score_grads(p, capped, dp, delta, SOFTCAP: tl.constexpr):
    """The gradient of the products before scaling, of weights `p`; `delta` broadcasts over the keys."""
    if SOFTCAP:
        # The derivative of tanh; first, so that the tanh need not be kept beside dP.
        p = p * (1.0 - capped * capped)
    # dS = P * (dP - delta), delta = sum(dout * out) - dlse.
    return p * (dp - delta)


@triton.jit
def _add_q(
    dq_rows, q_rows, dout_rows, peaks, deltas, k_source, v_source, count, band, at, edge, scale, softcap, bias, steps,
    draw, more,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, RAW_BIAS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """`dq_rows`, before scaling, after key block `at`, at an `edge` of the band or not, of an entry of `count` rows."""
    k_rows = read_block(k_source, at, count, D_K, PAD_K, BLOCK_N, DESCRIBED)
    # Recomputed rather than kept: scores of a whole pass would take rows x keys of memory.
    s, capped = logits(tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee"), scale, softcap, SOFTCAP)
    v_rows = read_block(v_source, at, count, D_V, PAD_V, BLOCK_N, DESCRIBED)
    # dP = dO V^T
    dp = tl.dot(dout_rows, tl.trans(v_rows), input_precision="ieee")
    if bias is not None:
        s, rest = _with_bias(
            s, capped, softcap if SOFTCAP else scale, bias, steps, at, BLOCK_M, BLOCK_N, False, RAW_BIAS
        )  # fmt: skip
        peaks -= rest
    # P = exp(S - lse): the final weights, since lse is over all keys of the row.
    p = tl.exp2(s - peaks[:, None])
    if edge:
        # Not before: the exponent is then one multiplication and addition. Weights that this hides may be infinite.
        cols = at * BLOCK_N + tl.arange(0, BLOCK_N)
        p = tl.where(banded(tl.arange(0, BLOCK_M), cols, count, band), p, 0.0)
    if draw is not None:
        # dP of what was dropped is 0, of the rest `more` times as great.
        dp = tl.where(dropped(draw, at, BLOCK_M, BLOCK_N, False, TOGETHER), 0.0, dp) * more
    ds = _score_grads(p, capped, dp, deltas[:, None], SOFTCAP)
    # dQ += dS K; the scale follows once, at the end.
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
    # A program may take several items, each so many programs after the last.
    for item in tl.range(tl.program_id(0), block_count * slots * batches, tl.num_programs(0), disable_licm=True):
        block, batch, head, idle = item_of(blocks, item, block_count, slots, batches, section)
        rows, live = rows_in(block, idle, BLOCK_M)
        begins, ends = ends_of(block)
        # K/V may be held from a later head than 0.
        kv_head = head // group - first_kv_head
        q_rows = load_rows(q + batch * q_batch + head * q_head, rows * q_row, live, D_K, PAD_K)
        # Kept in registers for all entries: q, dout, lse and delta of the block's own query rows.
        dout_base = dout + batch * dout_batch + head * dout_head
        dout_rows = load_rows(dout_base, rows * dout_row, live, D_V, PAD_V)
        peaks = tl.load(lse + batch * lse_batch + head * lse_head + rows * lse_row, mask=live, other=float("-inf"))
        # +inf makes every weight 0, of rows that saw no key or are not there.
        peaks = tl.where(peaks == float("-inf"), float("inf"), peaks * LOG2_E)
        deltas = tl.load(delta + batch * delta_batch + head * delta_head + rows * delta_row, mask=live, other=0.0)
        dq_rows = tl.zeros((BLOCK_M, PAD_K), tl.float32)
        k_base = k + batch * k_batch + kv_head * k_head
        v_base = v + batch * v_batch + kv_head * v_head
        first, last = entries_of(block)
        factor = softcap if SOFTCAP else in_scale
        # An idle item has no entry, but its loads and stores, all masked, are made.
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
            for at in tl.range(start, end):
                # Blocks start .. full - 1 and full_end .. end - 1 cross the band's edge and need the mask.
                dq_rows = _add_q(
                    dq_rows, q_rows, dout_rows, peaks, deltas, k_source, v_source, entry[2], band, at,
                    (at < full) | (at >= full_end), in_scale, softcap, bias, steps, draw, more,
                    D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED, RAW_BIAS, TOGETHER,
                )  # fmt: skip
        # Computed again: kept through the loop they would take registers of every thread.
        rows, live = rows_in(block, idle, BLOCK_M)
        dq_base = dq + batch * dq_batch + head * dq_head
        # dQ accumulates over the launches of a pass: a FIRST block starts from 0, a LAST one writes the result alone.
        total = load_rows(dq_base, rows * dq_row, live & (begins == 0), D_K, PAD_K) + dq_rows * scale
        if result is not None:
            result_base = result + batch * result_batch + head * result_head
            store_rows(result_base, rows * result_row, live & ends, total, D_K, PAD_K)
        # A block that is not LAST leaves its sum, in float32, to the next launch.
        store_rows(dq_base, rows * dq_row, live & (ends == 0), total, D_K, PAD_K)


@triton.jit
def _numbers_of(base, row, run):
    """Where the numbers of a run of rows lie, one a row: that of the first; the stride of the run; that of its rows."""
    return base + run[0].to(tl.int64) * row, run[1], row


@triton.jit
def _numbers_at(source, at, ROWS: tl.constexpr):
    """Addresses of the numbers of block `at` of the run."""
    # Products of 32 bits with a result of 64 are one instruction. A run of more than one block has all its rows below
    # 2^30, hence those between two of its blocks.
    before = at * (source[1] * ROWS).to(tl.int64)
    return source[0] + before * source[2] + (tl.arange(0, ROWS) * source[1]).to(tl.int64) * source[2]


@triton.jit
def _first_of(values, ROWS: tl.constexpr, COPIES: tl.constexpr):
    """One column of (ROWS, COPIES) equal ones; the others need not leave shared memory."""
    if COPIES == 1:
        one = tl.reshape(values, (ROWS,))
    else:
        half, _ = tl.split(tl.reshape(values, (ROWS, COPIES // 2, 2)))
        one = _first_of(half, ROWS, COPIES // 2)
    return one


@triton.jit
def _numbers(source, at, live, more, step, ROWS: tl.constexpr, COPIES: tl.constexpr, EDGE: tl.constexpr):
    """The numbers of block `at`, one a row: 0 where not `live`, if an EDGE. Row j has j * `step` * `more` more, if any.

    Read COPIES times, once by each thread of the program: of fewer elements than threads the compiler lets every thread
    load all that it needs.
    """
    where = _numbers_at(source, at, ROWS)[None, :] + tl.zeros((COPIES, 1), tl.int32)
    if EDGE:
        found = tl.load(where, mask=live[None, :], other=0.0)
    else:
        found = tl.load(where)
    if more is not None:
        # Here, where a thread holds one number.
        found += ((tl.arange(0, ROWS) * step).to(tl.float32) * more)[None, :]
    return _first_of(tl.trans(found), ROWS, COPIES)


@triton.jit
def _weights(s, lse, cols, count, band, ROWS: tl.constexpr, EDGE: tl.constexpr):
    """Of scores (keys, queries); 0 beyond an EDGE of the band."""
    # Finite where a row has no logit above -inf: its weights are 0, and not those of -inf less -inf. NaN stays.
    peaks = tl.maximum(lse * LOG2_E, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(s - peaks[None, :])
    if EDGE:
        # Not before: the exponent is then one multiplication and addition. Weights that this hides may be infinite.
        p = tl.where(banded(tl.arange(0, ROWS), cols, count, band), p, 0.0)
    return p


@triton.jit
def _add_kv(
    dk_rows, dv_rows, k_rows, v_rows, q_source, dout_source, lse_source, delta_source, dq_source, held, count, band, at,
    scale, in_scale, softcap, bias, draw, more,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, RAW_BIAS: tl.constexpr,
    TOGETHER: tl.constexpr,
    COPIES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """(`dk_rows`, before scaling, `dv_rows`) after query block `at` of an entry of `count` rows.

    Scores are (keys, queries) here. Without EDGE all of the block's rows see all keys, so no row is past the end.
    """
    # The entry holds queries here: `cols` count them within the entry.
    cols = at * BLOCK_M + tl.arange(0, BLOCK_M)
    live = cols < count
    q_rows = read_block(q_source, at, count, D_K, PAD_K, BLOCK_M, DESCRIBED)
    # S^T = K Q^T, so that dV = P^T dO and dK = dS^T Q need no transposed operand: P and dS stay in registers.
    s, capped = logits(tl.dot(k_rows, tl.trans(q_rows), input_precision="ieee"), in_scale, softcap, SOFTCAP)
    less, step = None, None
    if bias is not None:
        steps = steps_of(bias[1], True)
        s, rest = _with_bias(
            s, capped, softcap if SOFTCAP else in_scale, bias, steps, at, BLOCK_N, BLOCK_M, True, RAW_BIAS
        )  # fmt: skip
        # lse is a natural logarithm.
        less, step = rest * -LN_2, steps[2]
    # One number for each query: read with the query block, since a key block meets many.
    lse = _numbers(lse_source, at, live, less, step, BLOCK_M, COPIES, EDGE)
    if draw is not None:
        # Before the next product, and as the sign of a weight: draws and which are dropped else take its registers.
        p = _weights(s, lse, cols, count, band, BLOCK_N, EDGE)
        p = tl.where(dropped(draw, at, BLOCK_N, BLOCK_M, True, TOGETHER), -p, p)
    # dP^T = V dO^T
    dout_rows = read_block(dout_source, at, count, D_V, PAD_V, BLOCK_M, DESCRIBED)
    dp = tl.dot(v_rows, tl.trans(dout_rows), input_precision="ieee")
    # Not before: the product above needs the registers.
    deltas = _numbers(delta_source, at, live, None, None, BLOCK_M, COPIES, EDGE)
    if draw is None:
        p = _weights(s, lse, cols, count, band, BLOCK_N, EDGE)
        held_p = p
    else:
        gone, p = p < 0.0, tl.abs(p)
        # dV is multiplied by `more` at the end.
        held_p, dp = tl.where(gone, 0.0, p), tl.where(gone, 0.0, dp) * more
    ds = _score_grads(p, capped, dp, deltas[None, :], SOFTCAP)
    dv_rows = tl.dot(held_p.to(dout_rows.dtype), dout_rows, dv_rows, input_precision="ieee")
    dk_rows = tl.dot(ds.to(q_rows.dtype), q_rows, dk_rows, input_precision="ieee")
    if dq_source is not None:
        # The weights of rows that are not held may be infinite, and infinity times their zeros no number.
        of_held = tl.where(held[:, None], ds, 0.0).to(k_rows.dtype)
        dims = tl.arange(0, PAD_K)
        # Several key blocks add to one query row, so these additions must be atomic.
        at_dq = _numbers_at(dq_source, at, BLOCK_M)[:, None] + dims[None, :]
        # dQ = dS K from the transposed dS^T.
        more = tl.dot(tl.trans(of_held), k_rows, input_precision="ieee") * scale
        tl.atomic_add(at_dq, more, mask=live[:, None] & (dims < D_K)[None, :], sem="relaxed")
    return dk_rows, dv_rows


@triton.jit
def _end_kv(
    sums, base, result, offset, result_offset, row, result_row, rows, live, begins, ends,
    DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Add what the pass has so far, unless it `begins`, and store the sum or, where the pass `ends`, the result."""
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
        # K/V may be held from a later head than 0; gradients have the same heads.
        held = kv_head - first_kv_head
        k_rows = load_rows(k + batch * k_batch + held * k_head, rows * k_row, live, D_K, PAD_K)
        v_rows = load_rows(v + batch * v_batch + held * v_head, rows * v_row, live, D_V, PAD_V)
        dk_rows = tl.zeros((BLOCK_N, PAD_K), tl.float32)
        dv_rows = tl.zeros((BLOCK_N, PAD_V), tl.float32)
        first, last = entries_of(block)
        factor = softcap if SOFTCAP else in_scale
        for index in tl.range(first, tl.where(idle, first, last), disable_licm=True):
            entry, band = rows_and_band(entries + index * ENTRY_COLUMNS)
            start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
            before, reading = query_heads(entries + index * ENTRY_COLUMNS)
            first_head = kv_head * group + before
            # All query heads of the K/V head that read it, one after another in one program: no atomics for dK, dV.
            for served in tl.range(0, reading, disable_licm=True):
                head = first_head + served
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
                # Blocks at the band's edges first, the masked ones; then the others, in a loop without a mask:
                #    start | masked | full | unmasked | full_end | masked | end
                # With wide heads and most options registers are short: a loop computes again what it could keep.
                TIGHT: tl.constexpr = SOFTCAP or PAD_K > 128 or slopes is not None or positions is not None
                for edge in tl.range(start, end - (full_end - full), disable_licm=TIGHT):
                    dk_rows, dv_rows = _add_kv(
                        dk_rows, dv_rows, k_rows, v_rows, q_source, dout_source, lse_source, delta_source, dq_source,
                        live, entry[2], band, tl.where(edge < full, edge, edge + (full_end - full)), scale, in_scale,
                        softcap, bias, draw, more,
                        D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED, RAW_BIAS, TOGETHER,
                        COPIES, True,
                    )  # fmt: skip
                for at in tl.range(full, full_end, disable_licm=TIGHT):
                    dk_rows, dv_rows = _add_kv(
                        dk_rows, dv_rows, k_rows, v_rows, q_source, dout_source, lse_source, delta_source, dq_source,
                        live, entry[2], band, at, scale, in_scale, softcap, bias, draw, more,
                        D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED, RAW_BIAS, TOGETHER,
                        COPIES, False,
                    )  # fmt: skip
        # As in `grad_q_kernel`: computed again after the loop.
        rows, live = rows_in(block, idle, BLOCK_N)
        begins, ends = ends_of(block)
        if more is not None:
            dv_rows *= more
        _end_kv(
            dv_rows, dv, dv_result,
            batch * dv_batch + held * dv_head, batch * dv_result_batch + held * dv_result_head,
            dv_row, dv_result_row, rows, live, begins, ends, D_V, PAD_V,
        )  # fmt: skip
        _end_kv(
            dk_rows * scale, dk, dk_result,
            batch * dk_batch + held * dk_head, batch * dk_result_batch + held * dk_result_head,
            dk_row, dk_result_row, rows, live, begins, ends, D_K, PAD_K,
        )  # fmt: skip


# --- their launches --------------------------------------------------------------------------------------------------


def grad_q(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dq: Tensor | None, table: Table,
    config: Config, *, result: Tensor | None = None, **options: Unpack[CallOptions],
) -> LaunchCall:  # fmt: skip
    """The launch that adds to `dq`, float32 like q, what the table's pairs give.

    `q`, `k`, `v`, `dout`: (rows, batch, heads, dim), any strides with a contiguous last dimension, float32 or half.
    `lse`, `delta`: (batch, query heads, rows) float32 over all keys, delta = sum(dout * out) - dlse. The table is that
    of `attention_forward.forward`. A FIRST block does not read `dq`; a LAST block writes the sum to `result`, like `dq`
    in the dtype of q, and leaves `dq` alone. Without `result` no block may be LAST; `dq` may be None where all blocks
    are both. The form "descriptors" needs `describable` k and v.
    Raises ValueError without `dq` and `result`.
    """
    # Where no block reads or writes dq, its argument is a stand-in that is never touched.
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
    """The launch that adds to `dk` and `dv`, float32 like k and v, what the table's pairs give.

    As `grad_q`, but the table has key blocks of `config.block_n` rows and entries in blocks of `config.block_m`. Its
    flags are of dk and dv: a FIRST block does not read them, a LAST block writes the sums to `results`, like dk and dv
    in the dtype of k, and leaves `dk` and `dv` alone; a block without an entry does so with what is there, or with 0.
    With `dq`, like q in float32, the launch adds to it too, by float32 atomic additions: the bits of `dq` depend on the
    order in which programs end. The form "descriptors" needs `describable` q and dout.
    """
    # As in `grad_q`: where no block reads or writes dk and dv, their arguments are stand-ins.
    written = results or (None, None)
    (dk, of_dk), (dv, of_dv) = (state_beside(*pair, lse) for pair in zip((dk, dv), written, strict=True))
    section = section_for(table, q, dout, reads=options.get("group", 1))
    args = (
        q, k, v, dout, lse, delta, dq, dk, dv, *written, *shared_arguments(table, q.shape[1], section, options),
        # Without dq its strides are not read; those of q fill their place.
        *_scales(options), *strides_of(q, k, v, dout, q if dq is None else dq), *of_dk, *of_dv, *lse.stride(),
        *delta.stride(),
    )  # fmt: skip
    # As many numbers of rows at once as there are threads.
    copies = max(1, 32 * config.num_warps // config.block_m)
    meta = _meta(q, v, config, table, options) | {"COPIES": copies}
    grid = grid_of(table, q.shape[1], options.get("programs"))
    return LaunchCall(grad_kv_kernel, grid, args, meta, seed_at=16 if options.get("dropout") else None)


def _scales(options: CallOptions) -> tuple[float, float, float]:
    return options["scale"], *logit_scales(options["scale"], options.get("softcap"))


def _meta(q: Tensor, v: Tensor, config: Config, table: Table, options: CallOptions) -> dict[str, Any]:
    """The compile-time constants of both kernels."""
    factor = logit_scales(options["scale"], options.get("softcap"))[options.get("softcap") is not None]
    return {**shared_constants(q, v, config, table, options), "RAW_BIAS": adds_raw(factor)}
