"""The forward ring step: one launch folds all tiles of a step into the carried softmax.

Promises, for float32, float16 and bfloat16 inputs, online softmax in float32 and base 2 over the key blocks that the
table names and no other, masks on the blocks at a band's edges alone, (0, -inf) left as it is for rows that see no
key, the same bits for the same table, and offsets in 64 bits. State between steps is `out` (normalized, float32) and
`lse` (natural log, float32), so that any other kernel can take the next step; or raw, which R carried steps bring to
the very bits of one launch over the same keys.
The grid is as large as its caller says, each program taking every n-th block: a launch can leave multiprocessors free.
Does not know: positions, ranks, steps, where the table comes from.
"""

from __future__ import annotations

from math import e, log2

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.launch_call import Config, LaunchCall, Table, padded

BLOCK_COLUMNS = tl.constexpr(8)
ENTRY_COLUMNS = tl.constexpr(16)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(base, offsets, live, DIM: tl.constexpr, PADDED: tl.constexpr, CHECK: tl.constexpr):
    """(rows, PADDED) values of rows at int64 `offsets` from `base`: 0 beyond DIM, and where not `live` if CHECK."""
    dims = tl.arange(0, PADDED)
    at = base + offsets[:, None] + dims[None, :]
    if CHECK:
        rows = tl.load(at, mask=live[:, None] & (dims < DIM)[None, :], other=0.0)
    elif PADDED != DIM:
        rows = tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    else:
        rows = tl.load(at)
    return rows


@triton.jit
def logits(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Base-2 logits of q . k, and where SOFTCAP the capped tanh in [-1, 1]; scaled as `logit_scales` says."""
    s, capped = products * scale, products
    if SOFTCAP:
        # tanh x = 1 - 2 / (1 + e^2x), right at both infinities.
        capped = 1.0 - 2.0 / (1.0 + tl.exp2(s))
        s = softcap * capped
    return s, capped


@triton.jit
def item_of(blocks, item, block_count, slots):
    """(block, batch, head) of an item; heads beyond the block's own are its idle slots."""
    block = blocks + item % block_count * BLOCK_COLUMNS
    rest = item // block_count
    return block, (rest // slots).to(tl.int64), (tl.load(block + 3) + rest % slots).to(tl.int64)


@triton.jit
def block_of(block, head, ROWS: tl.constexpr):
    """(int64 rows, which of them live, first entry, one past the last one); an idle slot has no row and no entry."""
    idle = head >= tl.load(block + 3) + tl.load(block + 4)
    at = tl.arange(0, ROWS)
    rows = (tl.load(block) + at * tl.load(block + 1)).to(tl.int64)
    last = tl.load(block + 6)
    return rows, at < tl.where(idle, 0, tl.load(block + 2)), tl.where(idle, last, tl.load(block + 5)), last


@triton.jit
def rows_and_band(entry):
    """Of an entry: (first row, row stride, rows), and (own step, other step, lo, hi)."""
    rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    return rows, (tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6))


@triton.jit
def visits(entry):
    """Of an entry's blocks of rows: the first visible and full ones, one past the last full and visible ones."""
    return tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 9), tl.load(entry + 10)


@triton.jit
def banded(own, other, count, band):
    """The pairs, (own rows, other rows), that the band allows among the `count` rows of an entry."""
    distance = own[:, None] * band[0] - (other * band[1])[None, :]
    return (distance >= band[2]) & (distance <= band[3]) & (other < count)[None, :]


@triton.jit
def _fold(
    acc, peak, weight, q_rows, k, v, k_step, v_step, entry, band, at, scale, softcap,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The state (acc, peak, weight) after key block `at` of the entry."""
    cols = at * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = (entry[0] + cols * entry[1]).to(tl.int64)
    live = cols < entry[2]
    k_rows = load_rows(k, rows * k_step, live, D_K, PAD_K, MASKED)
    s, _ = logits(tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee"), scale, softcap, SOFTCAP)
    if MASKED:
        s = tl.where(banded(tl.arange(0, BLOCK_M), cols, entry[2], band), s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1))
    # A row that has seen no key so far keeps its peak of -inf, which no exponent may be taken from.
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    p = tl.exp2(s - shift[:, None])
    keep = tl.exp2(peak - shift)
    weight = weight * keep + tl.sum(p, 1)
    v_rows = load_rows(v, rows * v_step, live, D_V, PAD_V, MASKED)
    acc = tl.dot(p.to(v_rows.dtype), v_rows, acc * keep[:, None], input_precision="ieee")
    return acc, new_peak, weight


@triton.jit
def _forward(
    q, k, v, out, lse, weights, blocks, entries, block_count, slots, batches, group, first_kv_head, scale, softcap,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, out_row, out_batch, out_head, lse_batch,
    lse_head, lse_row,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, FIRST: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    for item in tl.range(tl.program_id(0), block_count * slots * batches, tl.num_programs(0)):
        block, batch, head = item_of(blocks, item, block_count, slots)
        rows, live, first, last = block_of(block, head, BLOCK_M)
        kv_head = head // group - first_kv_head
        q_rows = load_rows(q + batch * q_batch + head * q_head, rows * q_row, live, D_K, PAD_K, True)
        lse_at = batch * lse_batch + head * lse_head + rows * lse_row
        dims = tl.arange(0, PAD_V)
        out_at = out + batch * out_batch + head * out_head + rows[:, None] * out_row + dims[None, :]
        out_live = live[:, None] & (dims < D_V)[None, :]
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, PAD_V), tl.float32)
        if not FIRST:
            peak = tl.load(lse + lse_at, mask=live, other=float("-inf"))
            acc = tl.load(out_at, mask=out_live, other=0.0)
            if RAW:
                weight = tl.load(weights + lse_at, mask=live, other=0.0)
            else:
                # A normalized state weighs 1 at its own peak; the weight of a row that saw no key drops to 0 below.
                peak = peak * LOG2_E
                weight = tl.full((BLOCK_M,), 1.0, tl.float32)

        k_base = k + batch * k_batch + kv_head * k_head
        v_base = v + batch * v_batch + kv_head * v_head
        for index in tl.range(first, last):
            entry, band = rows_and_band(entries + index * ENTRY_COLUMNS)
            start, full, full_end, end = visits(entries + index * ENTRY_COLUMNS)
            for at in tl.range(full, full_end):
                acc, peak, weight = _fold(
                    acc, peak, weight, q_rows, k_base, v_base, k_row, v_row, entry, band, at, scale, softcap,
                    D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, False,
                )  # fmt: skip
            # The blocks before and after the full ones, in one loop so that its body is compiled once.
            for at in tl.range(start, end - (full_end - full)):
                acc, peak, weight = _fold(
                    acc, peak, weight, q_rows, k_base, v_base, k_row, v_row, entry, band,
                    tl.where(at < full, at, at + (full_end - full)), scale, softcap,
                    D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, True,
                )  # fmt: skip

        if RAW:
            tl.store(weights + lse_at, weight, mask=live)
        else:
            blind = weight == 0.0
            acc = acc / tl.where(blind, 1.0, weight)[:, None]
            peak = tl.where(blind, float("-inf"), (peak + tl.log2(tl.where(blind, 1.0, weight))) * LN_2)
        tl.store(lse + lse_at, peak, mask=live)
        tl.store(out_at, acc, mask=out_live)


def logit_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """What `logits` multiplies by: (of the products, of the capped tanh), both with the change to base 2."""
    if softcap is None:
        return scale * log2(e), 0.0
    return 2 * scale / softcap * log2(e), softcap * log2(e)


def grid_of(table: Table, batches: int, programs: int | None) -> tuple[int]:
    """One program for each block, head and batch, or `programs` if these are fewer; none for an empty table."""
    items = table.blocks.shape[0] * table.slots * batches
    return (items if programs is None else min(items, programs),)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Table,
    config: Config,
    *,
    scale: float,
    softcap: float | None = None,
    group: int = 1,
    first_kv_head: int = 0,
    first: bool = False,
    weights: Tensor | None = None,
    programs: int | None = None,
) -> LaunchCall:
    """The launch that folds the table's pairs into the state (`out`, `lse`), in place.

    `q`, `k`, `v`: (rows, batch, heads, dim), any strides with a contiguous last dimension, float32 or half. `out`:
    (rows, batch, query heads, d_v) float32; `lse`: (batch, query heads, rows) float32, natural log. The table has
    query blocks of `config.block_m` rows and entries in blocks of `config.block_n`. Query head h reads K/V head
    h // group, of which `first_kv_head` is the first held. `first`: nothing was seen yet, so the state is not read.
    `weights`: like `lse`, with its strides; the state is then raw, `out` unnormalized, `lse` the peak of the base-2
    logits and `weights` the sum of 2 ** (logit - peak). `programs`: the size of the grid, by default a program a block.
    """
    in_scale, out_scale = logit_scales(scale, softcap)
    blocks, batches = table.blocks.shape[0], q.shape[1]
    args = (
        q, k, v, out, lse, lse if weights is None else weights, table.blocks, table.entries,
        blocks, table.slots, batches, group, first_kv_head, in_scale, out_scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride(),
    )  # fmt: skip
    d_k, d_v = q.shape[3], v.shape[3]
    meta = {
        "D_K": d_k, "D_V": d_v, "PAD_K": padded(d_k), "PAD_V": padded(d_v), "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "SOFTCAP": softcap is not None, "FIRST": first, "RAW": weights is not None,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    return LaunchCall(_forward, grid_of(table, batches, programs), args, meta)
