"""The backward ring step in two launches, dQ by query blocks and dK, dV by key blocks, or in one by key blocks.

Guarantees, for float32, float16 and bfloat16 inputs, weights recomputed from the merged lse, float32 gradients that are
added to what is there (so that dK and dV travel and grow), query heads of a group summed inside the launch, and nothing
added for rows that see no key. Two launches use no atomics: the same bits for the same tables. One launch makes five
matrix products instead of seven and adds dQ atomically, in an order that differs from run to run.
dQ needs no gradient that travels: launched first, it hides their arrival. Of a pass, it begins without reading a state
and ends by writing the result in the dtype of q: the flags of each block say which.
Independent of positions, ranks, steps and of how lse and delta were merged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention_tiles import (
    ENTRY_COLUMNS,
    LOG2_E,
    banded,
    compiled_with,
    ends_of,
    entries_of,
    grid_of,
    item_of,
    load_rows,
    logit_scales,
    logits,
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
from ringattn.kernels.launch_call import VARYING, Config, LaunchCall, Table, padded


@triton.jit
def _peaks(lse, at, live):
    """Base-2 lse of rows; +inf, which makes every weight 0, for rows that saw no key or are not `live`."""
    found = tl.load(lse + at, mask=live, other=float("-inf")) * LOG2_E
    return tl.where(found == float("-inf"), float("inf"), found)


@triton.jit
def _score_grads(s, capped, peaks, dp, delta, SOFTCAP: tl.constexpr):
    """(weights, gradient of the products before scaling); `peaks` and `delta` broadcast over the keys."""
    # P = exp(S - lse): the final weights, since lse is over all keys of the row.
    p = tl.exp2(s - peaks)
    # dS = P * (dP - delta), delta = sum(dout * out) - dlse.
    ds = p * (dp - delta)
    if SOFTCAP:
        # The derivative of tanh.
        ds = ds * (1.0 - capped * capped)
    return p, ds


@triton.jit
def _add_q(
    dq_rows, q_rows, dout_rows, peaks, deltas, k_source, v_source, count, band, at, edge, scale, softcap,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """`dq_rows`, before scaling, after key block `at`, at an `edge` of the band or not, of an entry of `count` rows."""
    k_rows = read_block(k_source, at, count, D_K, PAD_K, BLOCK_N, DESCRIBED)
    # Recomputed rather than kept: scores of a whole pass would take rows x keys of memory.
    s, capped = logits(tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee"), scale, softcap, SOFTCAP)
    if edge:
        cols = at * BLOCK_N + tl.arange(0, BLOCK_N)
        s = tl.where(banded(tl.arange(0, BLOCK_M), cols, count, band), s, float("-inf"))
    v_rows = read_block(v_source, at, count, D_V, PAD_V, BLOCK_N, DESCRIBED)
    # dP = dO V^T
    dp = tl.dot(dout_rows, tl.trans(v_rows), input_precision="ieee")
    _, ds = _score_grads(s, capped, peaks[:, None], dp, deltas[:, None], SOFTCAP)
    # dQ += dS K; the scale follows once, at the end.
    return tl.dot(ds.to(k_rows.dtype), k_rows, dq_rows, input_precision="ieee")


@triton.jit(do_not_specialize=VARYING)
def _grad_q(
    q, k, v, dout, lse, delta, dq, result, blocks, entries, block_count, slots, batches, section, group, first_kv_head,
    scale, in_scale, softcap,
    q_row: tl.int64, q_batch: tl.int64, q_head: tl.int64, k_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    v_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, dout_row: tl.int64, dout_batch: tl.int64, dout_head: tl.int64,
    dq_row: tl.int64, dq_batch: tl.int64, dq_head: tl.int64,
    result_row: tl.int64, result_batch: tl.int64, result_head: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64, lse_row: tl.int64,
    delta_batch: tl.int64, delta_head: tl.int64, delta_row: tl.int64,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
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
        peaks = _peaks(lse, batch * lse_batch + head * lse_head + rows * lse_row, live)
        deltas = tl.load(delta + batch * delta_batch + head * delta_head + rows * delta_row, mask=live, other=0.0)
        dq_rows = tl.zeros((BLOCK_M, PAD_K), tl.float32)
        k_base = k + batch * k_batch + kv_head * k_head
        v_base = v + batch * v_batch + kv_head * v_head
        first, last = entries_of(block)
        # An idle item has no entry, but its loads and stores, all masked, are made.
        for index in tl.range(first, tl.where(idle, first, last), disable_licm=True):
            entry, band = rows_and_band(entries + index * ENTRY_COLUMNS)
            start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
            k_source = rows_of(k_base, k_row, entry, D_K, PAD_K, BLOCK_N, DESCRIBED)
            v_source = rows_of(v_base, v_row, entry, D_V, PAD_V, BLOCK_N, DESCRIBED)
            for at in tl.range(start, end):
                # Blocks start .. full - 1 and full_end .. end - 1 cross the band's edge and need the mask.
                dq_rows = _add_q(
                    dq_rows, q_rows, dout_rows, peaks, deltas, k_source, v_source, entry[2], band, at,
                    (at < full) | (at >= full_end), in_scale, softcap,
                    D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED,
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
def _add_kv(
    dk_rows, dv_rows, k_rows, v_rows, q_source, dout_source, lse, delta, dq, held, entry, band, at, edge, scale,
    in_scale, softcap, lse_row, delta_row, dq_row,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """(`dk_rows`, before scaling, `dv_rows`) after query block `at` of the entry. Scores are (keys, queries) here."""
    # The entry holds queries here: `cols` count them within the entry, `rows` are their rows in q.
    cols = at * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = (entry[0] + cols * entry[1]).to(tl.int64)
    live = cols < entry[2]
    q_rows = read_block(q_source, at, entry[2], D_K, PAD_K, BLOCK_M, DESCRIBED)
    # S^T = K Q^T, so that dV = P^T dO and dK = dS^T Q need no transposed operand.
    s, capped = logits(tl.dot(k_rows, tl.trans(q_rows), input_precision="ieee"), in_scale, softcap, SOFTCAP)
    if edge:
        s = tl.where(banded(tl.arange(0, BLOCK_N), cols, entry[2], band), s, float("-inf"))
    # Gathered with the query block, since a key block meets many; rows past the end weigh 0.
    peaks = _peaks(lse, rows * lse_row, live)
    deltas = tl.load(delta + rows * delta_row, mask=live, other=0.0)
    dout_rows = read_block(dout_source, at, entry[2], D_V, PAD_V, BLOCK_M, DESCRIBED)
    # dP^T = V dO^T
    dp = tl.dot(v_rows, tl.trans(dout_rows), input_precision="ieee")
    p, ds = _score_grads(s, capped, peaks[None, :], dp, deltas[None, :], SOFTCAP)
    dv_rows = tl.dot(p.to(dout_rows.dtype), dout_rows, dv_rows, input_precision="ieee")
    dk_rows = tl.dot(ds.to(q_rows.dtype), q_rows, dk_rows, input_precision="ieee")
    if dq is not None:
        # The weights of rows that are not held may be infinite, and infinity times their zeros no number.
        of_held = tl.where(held[:, None], ds, 0.0).to(k_rows.dtype)
        dims = tl.arange(0, PAD_K)
        # Several key blocks add to one query row, so these additions must be atomic.
        at_dq = dq + (rows * dq_row)[:, None] + dims[None, :]
        # dQ = dS K from the transposed dS^T.
        more = tl.dot(tl.trans(of_held), k_rows, input_precision="ieee") * scale
        tl.atomic_add(at_dq, more, mask=live[:, None] & (dims < D_K)[None, :], sem="relaxed")
    return dk_rows, dv_rows


@triton.jit(do_not_specialize=VARYING)
def _grad_kv(
    q, k, v, dout, lse, delta, dq, dk, dv, blocks, entries, block_count, slots, batches, section, group, first_kv_head,
    scale, in_scale, softcap,
    q_row: tl.int64, q_batch: tl.int64, q_head: tl.int64, k_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    v_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, dout_row: tl.int64, dout_batch: tl.int64, dout_head: tl.int64,
    dq_row: tl.int64, dq_batch: tl.int64, dq_head: tl.int64, dk_row: tl.int64, dk_batch: tl.int64, dk_head: tl.int64,
    dv_row: tl.int64, dv_batch: tl.int64, dv_head: tl.int64, lse_batch: tl.int64, lse_head: tl.int64, lse_row: tl.int64,
    delta_batch: tl.int64, delta_head: tl.int64, delta_row: tl.int64,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
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
        for index in tl.range(first, tl.where(idle, first, last), disable_licm=True):
            entry, band = rows_and_band(entries + index * ENTRY_COLUMNS)
            start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
            # Columns 11 and 12 of an entry: the first query head beyond kv_head * group, and how many.
            first_head = kv_head * group + tl.load(entries + index * ENTRY_COLUMNS + 11)
            # All query heads of the K/V head that read it, one after another in one program: no atomics for dK, dV.
            for served in tl.range(0, tl.load(entries + index * ENTRY_COLUMNS + 12), disable_licm=True):
                head = first_head + served
                q_base = q + batch * q_batch + head * q_head
                dout_base = dout + batch * dout_batch + head * dout_head
                q_source = rows_of(q_base, q_row, entry, D_K, PAD_K, BLOCK_M, DESCRIBED)
                dout_source = rows_of(dout_base, dout_row, entry, D_V, PAD_V, BLOCK_M, DESCRIBED)
                lse_base = lse + batch * lse_batch + head * lse_head
                delta_base = delta + batch * delta_batch + head * delta_head
                dq_base = None if dq is None else dq + batch * dq_batch + head * dq_head
                for at in tl.range(start, end):
                    dk_rows, dv_rows = _add_kv(
                        dk_rows, dv_rows, k_rows, v_rows, q_source, dout_source, lse_base, delta_base, dq_base, live,
                        entry, band, at, (at < full) | (at >= full_end), scale, in_scale, softcap, lse_row, delta_row,
                        dq_row,
                        D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED,
                    )  # fmt: skip
        # As in `_grad_q`: computed again after the loop.
        rows, live = rows_in(block, idle, BLOCK_N)
        dk_base = dk + batch * dk_batch + held * dk_head
        dv_base = dv + batch * dv_batch + held * dv_head
        # dK and dV add to what is there: sums of other ranks, or of earlier launches.
        dv_rows = load_rows(dv_base, rows * dv_row, live, D_V, PAD_V) + dv_rows
        store_rows(dv_base, rows * dv_row, live, dv_rows, D_V, PAD_V)
        dk_rows = load_rows(dk_base, rows * dk_row, live, D_K, PAD_K) + dk_rows * scale
        store_rows(dk_base, rows * dk_row, live, dk_rows, D_K, PAD_K)


def grad_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor | None,
    table: Table,
    config: Config,
    *,
    scale: float,
    softcap: float | None = None,
    group: int = 1,
    first_kv_head: int = 0,
    result: Tensor | None = None,
    programs: int | None = None,
) -> LaunchCall:
    """The launch that adds to `dq`, float32 like q, what the table's pairs give.

    `q`, `k`, `v`, `dout`: (rows, batch, heads, dim), any strides with a contiguous last dimension, float32 or half.
    `lse`, `delta`: (batch, query heads, rows) float32 over all keys, delta = sum(dout * out) - dlse. The table and the
    other keywords are those of `attention_forward.forward`. A FIRST block does not read `dq`; a LAST block writes the
    sum to `result`, like `dq` in the dtype of q, and leaves `dq` alone. Without `result` no block may be LAST; `dq` may
    be None where all blocks are both. The form "descriptors" needs `describable` k and v.
    Raises ValueError without `dq` and `result`.
    """
    # Where no block reads or writes dq, its argument is a stand-in that is never touched.
    state, strides = state_beside(dq, result, lse)
    in_scale, out_scale = logit_scales(scale, softcap)
    args = (
        q, k, v, dout, lse, delta, state, result, table.blocks, table.entries, table.blocks.shape[0], table.slots,
        q.shape[1], section_for(table, k, v, sharing=group), group, first_kv_head, scale, in_scale, out_scale,
        *strides_of(q, k, v, dout), *strides, *lse.stride(), *delta.stride(),
    )  # fmt: skip
    return LaunchCall(_grad_q, grid_of(table, q.shape[1], programs), args, _meta(q, v, config, softcap))


def grad_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    table: Table,
    config: Config,
    *,
    scale: float,
    softcap: float | None = None,
    group: int = 1,
    first_kv_head: int = 0,
    programs: int | None = None,
) -> LaunchCall:
    """The launch that adds to `dk` and `dv`, float32 like k and v, what the table's pairs give.

    As `grad_q`, but the table has key blocks of `config.block_n` rows and entries in blocks of `config.block_m`; its
    flags are not read. The form "descriptors" needs `describable` q and dout.
    """
    # Flags are of query rows: a key block always adds to what is there.
    facts = _Facts(scale, softcap, group, first_kv_head, programs)
    return _by_key((q, k, v, dout, lse, delta), None, dk, dv, table, config, facts)


def grad_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    table: Table,
    config: Config,
    *,
    scale: float,
    softcap: float | None = None,
    group: int = 1,
    first_kv_head: int = 0,
    programs: int | None = None,
) -> LaunchCall:
    """The launch that adds to `dq`, `dk` and `dv` what the table's pairs give; dq by float32 atomic additions.

    As `grad_kv`, and `dq` like q in float32. The bits of `dq` depend on the order in which programs end.
    """
    facts = _Facts(scale, softcap, group, first_kv_head, programs)
    return _by_key((q, k, v, dout, lse, delta), dq, dk, dv, table, config, facts)


class _Facts(NamedTuple):
    """What both launches by key blocks are told beside tensors."""

    scale: float
    softcap: float | None
    group: int
    first_kv_head: int
    programs: int | None


def _by_key(
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    dq: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    table: Table,
    config: Config,
    facts: _Facts,
) -> LaunchCall:
    """The launch of `grad_kv`, or with `dq` of `grad_fused`; `operands` as there."""
    q, k, v, dout, lse, delta = operands
    in_scale, out_scale = logit_scales(facts.scale, facts.softcap)
    args = (
        *operands, dq, dk, dv, table.blocks, table.entries, table.blocks.shape[0], table.slots, q.shape[1],
        section_for(table, q, dout, reads=facts.group), facts.group, facts.first_kv_head, facts.scale, in_scale,
        out_scale,
        # Without dq its strides are not read; dk's fill their place.
        *strides_of(q, k, v, dout, dk if dq is None else dq, dk, dv), *lse.stride(), *delta.stride(),
    )  # fmt: skip
    return LaunchCall(_grad_kv, grid_of(table, q.shape[1], facts.programs), args, _meta(q, v, config, facts.softcap))


def _meta(q: Tensor, v: Tensor, config: Config, softcap: float | None) -> dict[str, Any]:
    """The compile-time constants of both kernels."""
    d_k, d_v = q.shape[3], v.shape[3]
    return {
        "D_K": d_k, "D_V": d_v, "PAD_K": padded(d_k), "PAD_V": padded(d_v), "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "SOFTCAP": softcap is not None, "DESCRIBED": config.form != "pointers",
        **compiled_with(config),
    }  # fmt: skip
