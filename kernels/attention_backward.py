"""The backward ring step in two launches, dQ by query blocks and dK, dV by key blocks.

Promises, for float32, float16 and bfloat16 inputs, weights recomputed from the merged lse, float32 gradients that are
added to what is there (so that dK and dV travel and grow), no atomics and thus the same bits for the same tables, query
heads of a group summed inside the launch, and nothing added for rows that see no key.
dQ needs no gradient that travels: launched first, it hides their arrival.
Does not know: positions, ranks, steps, how lse and delta were merged.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention_forward import (
    ENTRY_COLUMNS,
    LOG2_E,
    banded,
    block_of,
    grid_of,
    item_of,
    load_rows,
    logit_scales,
    logits,
    rows_and_band,
    visits,
)
from ringattn.kernels.launch_call import Config, LaunchCall, Table, padded


@triton.jit
def _peaks(lse, at, live):
    """Base-2 lse of rows; +inf, which makes every weight 0, for rows that saw no key or are not `live`."""
    found = tl.load(lse + at, mask=live, other=float("-inf")) * LOG2_E
    return tl.where(found == float("-inf"), float("inf"), found)


@triton.jit
def _score_grads(s, capped, peaks, dp, delta, SOFTCAP: tl.constexpr):
    """(weights, gradient of the products before scaling); `peaks` and `delta` broadcast over the keys."""
    p = tl.exp2(s - peaks)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * (1.0 - capped * capped)
    return p, ds


@triton.jit
def _add_q(
    dq_rows, q_rows, dout_rows, peaks, deltas, k, v, k_row, v_row, entry, band, at, scale, softcap,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`dq_rows`, before scaling, after key block `at` of the entry."""
    cols = at * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = (entry[0] + cols * entry[1]).to(tl.int64)
    live = cols < entry[2]
    k_rows = load_rows(k, rows * k_row, live, D_K, PAD_K, MASKED)
    s, capped = logits(tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee"), scale, softcap, SOFTCAP)
    if MASKED:
        s = tl.where(banded(tl.arange(0, BLOCK_M), cols, entry[2], band), s, float("-inf"))
    v_rows = load_rows(v, rows * v_row, live, D_V, PAD_V, MASKED)
    dp = tl.dot(dout_rows, tl.trans(v_rows), input_precision="ieee")
    _, ds = _score_grads(s, capped, peaks[:, None], dp, deltas[:, None], SOFTCAP)
    return tl.dot(ds.to(k_rows.dtype), k_rows, dq_rows, input_precision="ieee")


@triton.jit
def _grad_q(
    q, k, v, dout, lse, delta, dq, blocks, entries, block_count, slots, batches, group, first_kv_head, scale, in_scale,
    softcap, q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch, dout_head,
    lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row, dq_row, dq_batch, dq_head,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    for item in tl.range(tl.program_id(0), block_count * slots * batches, tl.num_programs(0)):
        block, batch, head = item_of(blocks, item, block_count, slots)
        rows, live, first, last = block_of(block, head, BLOCK_M)
        kv_head = head // group - first_kv_head
        q_rows = load_rows(q + batch * q_batch + head * q_head, rows * q_row, live, D_K, PAD_K, True)
        dout_rows = load_rows(dout + batch * dout_batch + head * dout_head, rows * dout_row, live, D_V, PAD_V, True)
        peaks = _peaks(lse, batch * lse_batch + head * lse_head + rows * lse_row, live)
        deltas = tl.load(delta + batch * delta_batch + head * delta_head + rows * delta_row, mask=live, other=0.0)
        dq_rows = tl.zeros((BLOCK_M, PAD_K), tl.float32)
        k_base = k + batch * k_batch + kv_head * k_head
        v_base = v + batch * v_batch + kv_head * v_head
        for index in tl.range(first, last):
            entry, band = rows_and_band(entries + index * ENTRY_COLUMNS)
            start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
            for at in tl.range(full, full_end):
                dq_rows = _add_q(
                    dq_rows, q_rows, dout_rows, peaks, deltas, k_base, v_base, k_row, v_row, entry, band, at, in_scale,
                    softcap, D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, False,
                )  # fmt: skip
            for at in tl.range(start, end - (full_end - full)):
                dq_rows = _add_q(
                    dq_rows, q_rows, dout_rows, peaks, deltas, k_base, v_base, k_row, v_row, entry, band,
                    tl.where(at < full, at, at + (full_end - full)), in_scale, softcap,
                    D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, True,
                )  # fmt: skip
        _add(dq + batch * dq_batch + head * dq_head, rows * dq_row, live, dq_rows * scale, D_K, PAD_K)


@triton.jit
def _add(base, offsets, live, values, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Add `values` (rows, PADDED) to the `live` rows at `offsets` from `base`."""
    dims = tl.arange(0, PADDED)
    at = base + offsets[:, None] + dims[None, :]
    inside = live[:, None] & (dims < DIM)[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + values, mask=inside)


@triton.jit
def _add_kv(
    dk_rows, dv_rows, k_rows, v_rows, q, dout, lse, delta, q_row, dout_row, lse_row, delta_row, entry, band, at, scale,
    softcap,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(`dk_rows`, before scaling, `dv_rows`) after query block `at` of the entry. Scores are (keys, queries) here."""
    cols = at * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = (entry[0] + cols * entry[1]).to(tl.int64)
    live = cols < entry[2]
    q_rows = load_rows(q, rows * q_row, live, D_K, PAD_K, MASKED)
    s, capped = logits(tl.dot(k_rows, tl.trans(q_rows), input_precision="ieee"), scale, softcap, SOFTCAP)
    if MASKED:
        s = tl.where(banded(tl.arange(0, BLOCK_N), cols, entry[2], band), s, float("-inf"))
    peaks = _peaks(lse, rows * lse_row, live)
    deltas = tl.load(delta + rows * delta_row, mask=live, other=0.0)
    dout_rows = load_rows(dout, rows * dout_row, live, D_V, PAD_V, MASKED)
    dp = tl.dot(v_rows, tl.trans(dout_rows), input_precision="ieee")
    p, ds = _score_grads(s, capped, peaks[None, :], dp, deltas[None, :], SOFTCAP)
    dv_rows = tl.dot(p.to(dout_rows.dtype), dout_rows, dv_rows, input_precision="ieee")
    dk_rows = tl.dot(ds.to(q_rows.dtype), q_rows, dk_rows, input_precision="ieee")
    return dk_rows, dv_rows


@triton.jit
def _grad_kv(
    q, k, v, dout, lse, delta, dk, dv, blocks, entries, block_count, slots, batches, group, first_kv_head, scale,
    in_scale, softcap, q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, dout_row, dout_batch,
    dout_head, lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row, dk_row, dk_batch, dk_head, dv_row,
    dv_batch, dv_head,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    for item in tl.range(tl.program_id(0), block_count * slots * batches, tl.num_programs(0)):
        block, batch, kv_head = item_of(blocks, item, block_count, slots)
        rows, live, first, last = block_of(block, kv_head, BLOCK_N)
        held = kv_head - first_kv_head
        k_rows = load_rows(k + batch * k_batch + held * k_head, rows * k_row, live, D_K, PAD_K, True)
        v_rows = load_rows(v + batch * v_batch + held * v_head, rows * v_row, live, D_V, PAD_V, True)
        dk_rows = tl.zeros((BLOCK_N, PAD_K), tl.float32)
        dv_rows = tl.zeros((BLOCK_N, PAD_V), tl.float32)
        for index in tl.range(first, last):
            entry, band = rows_and_band(entries + index * ENTRY_COLUMNS)
            start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
            first_head = kv_head * group + tl.load(entries + index * ENTRY_COLUMNS + 11)
            for served in tl.range(tl.load(entries + index * ENTRY_COLUMNS + 12)):
                head = first_head + served
                q_base = q + batch * q_batch + head * q_head
                dout_base = dout + batch * dout_batch + head * dout_head
                lse_base = lse + batch * lse_batch + head * lse_head
                delta_base = delta + batch * delta_batch + head * delta_head
                for at in tl.range(full, full_end):
                    dk_rows, dv_rows = _add_kv(
                        dk_rows, dv_rows, k_rows, v_rows, q_base, dout_base, lse_base, delta_base, q_row, dout_row,
                        lse_row, delta_row, entry, band, at, in_scale, softcap,
                        D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, False,
                    )  # fmt: skip
                for at in tl.range(start, end - (full_end - full)):
                    dk_rows, dv_rows = _add_kv(
                        dk_rows, dv_rows, k_rows, v_rows, q_base, dout_base, lse_base, delta_base, q_row, dout_row,
                        lse_row, delta_row, entry, band, tl.where(at < full, at, at + (full_end - full)), in_scale,
                        softcap, D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, True,
                    )  # fmt: skip
        _add(dk + batch * dk_batch + held * dk_head, rows * dk_row, live, dk_rows * scale, D_K, PAD_K)
        _add(dv + batch * dv_batch + held * dv_head, rows * dv_row, live, dv_rows, D_V, PAD_V)


def grad_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    table: Table,
    config: Config,
    *,
    scale: float,
    softcap: float | None = None,
    group: int = 1,
    first_kv_head: int = 0,
    programs: int | None = None,
) -> LaunchCall:
    """The launch that adds to `dq`, float32 like q, what the table's pairs give.

    `q`, `k`, `v`, `dout`: (rows, batch, heads, dim), any strides with a contiguous last dimension, float32 or half.
    `lse`, `delta`: (batch, query heads, rows) float32 over all keys, delta = sum(dout * out) - dlse. The table and the
    keywords are those of `attention_forward.forward`.
    """
    in_scale, out_scale = logit_scales(scale, softcap)
    args = (
        q, k, v, dout, lse, delta, dq, table.blocks, table.entries, table.blocks.shape[0], table.slots, q.shape[1],
        group, first_kv_head, scale, in_scale, out_scale, *_strides(q, k, v, dout), *lse.stride(), *delta.stride(),
        *_strides(dq),
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

    As `grad_q`, but the table has key blocks of `config.block_n` rows and entries in blocks of `config.block_m`.
    """
    in_scale, out_scale = logit_scales(scale, softcap)
    args = (
        q, k, v, dout, lse, delta, dk, dv, table.blocks, table.entries, table.blocks.shape[0], table.slots, q.shape[1],
        group, first_kv_head, scale, in_scale, out_scale, *_strides(q, k, v, dout), *lse.stride(), *delta.stride(),
        *_strides(dk, dv),
    )  # fmt: skip
    return LaunchCall(_grad_kv, grid_of(table, q.shape[1], programs), args, _meta(q, v, config, softcap))


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """(row, batch, head) strides of each."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _meta(q: Tensor, v: Tensor, config: Config, softcap: float | None) -> dict[str, Any]:
    """The compile-time constants of both kernels."""
    d_k, d_v = q.shape[3], v.shape[3]
    return {
        "D_K": d_k, "D_V": d_v, "PAD_K": padded(d_k), "PAD_V": padded(d_v), "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "SOFTCAP": softcap is not None,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
