"""The forward ring step: a launch does the attention updates of all tiles of a step, in place on the softmax state.

Guarantees, for float32, float16 and bfloat16 inputs:
- online softmax in float32 and base 2, over exactly the key blocks that the table lists;
- masks only in the blocks at the edges of a band;
- rows that see no key, or whose logits are all -inf, keep (0, -inf);
- equal bits for equal tables.
The state between steps is `out` (normalized, float32) and `lse` (natural log, float32), so any other kernel can run the
next step. The first block of a row does not read the state, and the last writes the result in the dtype of q; the flags
of each block mark them. The caller chooses the size of the grid and each program takes every n-th block, so a launch
can leave multiprocessors free. The kernel does not depend on positions, ranks, steps or the origin of the table.
"""

from __future__ import annotations

from typing import Unpack

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention_options import (
    CallOptions,
    bias_of,
    biased,
    draw_of,
    dropped,
    peaks_raw,
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


@triton.jit
def update(
    acc, peak, weight, q_rows, k_source, v_source, count, band, n_block, edge, scale, softcap, bias, draw,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, RAW_PEAK: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Return the state (acc, peak, weight) after key block `n_block` of an entry of `count` rows.

    `edge`: the block is at an edge of the band and needs the mask. RAW_PEAK: find the peak among the products, or with
    SOFTCAP among their tanh, before scaling; this requires that the scale `keeps_order`. `bias`: None, or the slope,
    place and steps for `biased`; with RAW_PEAK the bias is added before scaling. `draw`: None, or the argument of
    `dropped`.
    """
    k_rows = read_block(k_source, n_block, count, D_K, PAD_K, BLOCK_N, DESCRIBED)
    # Scores (BLOCK_M, BLOCK_N) in base 2, because exp2 needs a multiplication less than exp.
    s, raw = logits(tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee"), scale, softcap, SOFTCAP)
    factor = softcap if SOFTCAP else scale
    if RAW_PEAK:
        s = raw
    if bias is not None:
        s, rest = biased(
            s, bias[0], bias[1], bias[2], n_block, tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), BLOCK_M, False
        )
        rest = rest * factor if RAW_PEAK else rest
    if edge:
        cols = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        s = tl.where(banded(tl.arange(0, BLOCK_M), cols, count, band), s, float("-inf"))
    # Online softmax: the state is (acc, peak, weight) with  out = acc / weight  and  lse = peak + log2(weight).
    highest = tl.max(s, 1) * factor if RAW_PEAK else tl.max(s, 1)
    new_peak = tl.maximum(peak, highest if bias is None else highest + rest)
    # A row without a logit above -inf keeps its peak of -inf, and -inf must not be subtracted from an exponent.
    shift = tl.maximum(new_peak, LOWEST)
    # The product and the difference become a single instruction.
    p = tl.exp2((s * factor if RAW_PEAK else s) - (shift if bias is None else shift - rest)[:, None])
    # A higher peak scales the accumulated values down; for a row without any key so far, exp2(-inf) = 0.
    keep = tl.exp2(peak - shift)
    # The sum, and so lse, includes dropped weights.
    weight = weight * keep + tl.sum(p, 1)
    if draw is not None:
        p = tl.where(dropped(draw, n_block, BLOCK_M, BLOCK_N, False, TOGETHER), 0.0, p)
    v_rows = read_block(v_source, n_block, count, D_V, PAD_V, BLOCK_N, DESCRIBED)
    # P is converted to the dtype of v for the matrix unit; the sum stays float32.
    acc = tl.dot(p.to(v_rows.dtype), v_rows, acc * keep[:, None], input_precision="ieee")
    return acc, new_peak, weight


@triton.jit
def _update_entry(
    acc, peak, weight, q_rows, k, v, k_row, v_row, at_entry, scale, softcap, alibi, draw,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, RAW_PEAK: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Return the state (acc, peak, weight) after the entry at `at_entry`."""
    entry, band = rows_and_band(at_entry)
    start, full, full_end, end = visits(at_entry)
    k_source = rows_of(k, k_row, entry, D_K, PAD_K, BLOCK_N, DESCRIBED)
    v_source = rows_of(v, v_row, entry, D_V, PAD_V, BLOCK_N, DESCRIBED)
    bias = None if alibi is None else (alibi[0], alibi[1], steps_of(alibi[1], False))
    # The blocks of keys that some row sees. Only blocks before `full` and from `full_end` on need the mask:
    #    start | masked | full | unmasked | full_end | masked | end
    for n_block in tl.range(start, end):
        edge = (n_block < full) | (n_block >= full_end)
        acc, peak, weight = update(
            acc, peak, weight, q_rows, k_source, v_source, entry[2], band, n_block, edge, scale, softcap, bias, draw,
            D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED, RAW_PEAK, TOGETHER,
        )  # fmt: skip
    return acc, peak, weight


@triton.jit
def opening(
    out, lse, sinks, kept, head, live, begins, out_rows, lse_rows, D_V: tl.constexpr, PAD_V: tl.constexpr
):  # fmt: skip
    """Return (acc, peak, weight) of `live` rows: the stored state, or the state over no key if the pass `begins`."""
    # A FIRST block must not read the state: nothing has written it.
    stored = live & (begins == 0)
    acc = load_rows(out, out_rows, stored, D_V, PAD_V)
    # A normalized state has weight 1 at its peak. For a row without a key, the first update sets this weight to 0.
    peak = tl.load(lse + lse_rows, mask=stored, other=float("-inf")) * LOG2_E
    weight = tl.full(peak.shape, 1.0, tl.float32)
    # `closing` divides by `kept`, the share that dropout keeps.
    if kept is not None:
        acc *= kept
    # A sink is a key of value 0: peak = its logit, weight 1, acc 0.
    if sinks is not None:
        peak = tl.where(begins, tl.load(sinks + head).to(tl.float32) * LOG2_E, peak)
        weight = tl.where(begins, 1.0, weight)
    return acc, peak, weight


@triton.jit
def closing(
    acc, peak, weight, out_base, lse, result, kept, block, batch, head, idle, ends, out_row,
    result_row, result_batch, result_head, lse_batch, lse_head, lse_row,
    D_V: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the state of a block's rows or, if the pass `ends`, its result and lse."""
    rows, live = rows_in(block, idle, BLOCK_M)
    lse_rows = batch * lse_batch + head * lse_head + rows * lse_row
    # A row that saw no key gets out 0 and lse -inf, without a division by 0.
    blind = weight == 0.0
    whole = tl.where(blind, 1.0, weight)
    natural = tl.where(blind, float("-inf"), (peak + tl.log2(whole)) * LN_2)
    mean = acc / (whole if kept is None else whole * kept)[:, None]
    if result is not None:
        result_base = result + batch * result_batch + head * result_head
        store_rows(result_base, rows * result_row, live & ends, mean, D_V, PAD_V)
    store_rows(out_base, rows * out_row, live & (ends == 0), mean, D_V, PAD_V)
    tl.store(lse + lse_rows, natural, mask=live)


@triton.jit(do_not_specialize=VARYING)
def _forward(
    q, k, v, out, lse, result, sinks, blocks, entries, places, slopes, positions,
    seed_low, seed_high, threshold, kept, block_count, slots, batches, section, group, first_kv_head, scale, softcap,
    q_row: tl.int64, q_batch: tl.int64, q_head: tl.int64, k_row: tl.int64, k_batch: tl.int64, k_head: tl.int64,
    v_row: tl.int64, v_batch: tl.int64, v_head: tl.int64, out_row: tl.int64, out_batch: tl.int64, out_head: tl.int64,
    result_row: tl.int64, result_batch: tl.int64, result_head: tl.int64,
    lse_batch: tl.int64, lse_head: tl.int64, lse_row: tl.int64,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, RAW_PEAK: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    for item in tl.range(tl.program_id(0), block_count * slots * batches, tl.num_programs(0), disable_licm=True):
        block, batch, head, idle = item_of(blocks, item, block_count, slots, batches, section)
        rows, live = rows_in(block, idle, BLOCK_M)
        begins, ends = ends_of(block)
        # The first K/V head in the buffer may be later than 0.
        kv_head = head // group - first_kv_head
        q_rows = load_rows(q + batch * q_batch + head * q_head, rows * q_row, live, D_K, PAD_K)
        out_base = out + batch * out_batch + head * out_head
        lse_rows = batch * lse_batch + head * lse_head + rows * lse_row
        acc, peak, weight = opening(
            out_base, lse, sinks, kept, head, live, begins, rows * out_row, lse_rows, D_V, PAD_V
        )

        k_base = k + batch * k_batch + kv_head * k_head
        v_base = v + batch * v_batch + kv_head * v_head
        first, last = entries_of(block)
        factor = softcap if SOFTCAP else scale
        for index in tl.range(first, tl.where(idle, first, last), disable_licm=True):
            alibi = None if slopes is None else bias_of(places, index, slopes, head, factor, RAW_PEAK)
            draw = None
            if positions is not None:
                draw = draw_of(positions, index, head, batch, seed_low, seed_high, threshold)
            acc, peak, weight = _update_entry(
                acc, peak, weight, q_rows, k_base, v_base, k_row, v_row, entries + index * ENTRY_COLUMNS, scale,
                softcap, alibi, draw, D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED, RAW_PEAK,
                TOGETHER,
            )  # fmt: skip
        closing(
            acc, peak, weight, out_base, lse, result, kept, block, batch, head, idle, ends, out_row,
            result_row, result_batch, result_head, lse_batch, lse_head, lse_row, D_V, PAD_V, BLOCK_M,
        )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor, table: Table, config: Config, *,
    result: Tensor | None = None, sinks: Tensor | None = None, **options: Unpack[CallOptions],
) -> LaunchCall:  # fmt: skip
    """Return the launch that updates the softmax state (`out`, `lse`) with the table's pairs, in place.

    `q`, `k`, `v`: (rows, batch, heads, dim), any strides with a contiguous last dimension, float32 or half. `out`:
    (rows, batch, query heads, d_v) float32; `lse`: (batch, query heads, rows) float32, natural log. The table has
    query blocks of `config.block_m` rows and entries in blocks of `config.block_n`. Query head h reads K/V head
    h // group; the first K/V head in the buffer is `first_kv_head`.
    A FIRST block of the table does not read the state. With `sinks`, (query heads,), its rows start with a logit that
    takes weight but has no value: lse = sink, out 0. A LAST block writes `lse` and `result`, which has the shape of
    `out` and the dtype of q, and does not touch `out`. Without `result` no block may be LAST. If all blocks are both
    FIRST and LAST, `out` may be None. The form "descriptors" needs `describable` k and v.
    Raises ValueError if both `out` and `result` are None.
    """
    state, strides = state_beside(out, result, lse)
    softcap, batches = options.get("softcap"), q.shape[1]
    in_scale, out_scale = logit_scales(options["scale"], softcap)
    section = section_for(table, k, v, sharing=options.get("group", 1))
    args = (
        q, k, v, state, lse, result, sinks, *shared_arguments(table, batches, section, options), in_scale,
        out_scale, *strides_of(q, k, v), *strides, *lse.stride(),
    )  # fmt: skip
    meta = {**shared_constants(q, v, config, table, options), "RAW_PEAK": peaks_raw(options)}
    grid = grid_of(table, batches, options.get("programs"))
    return LaunchCall(_forward, grid, args, meta, seed_at=12 if options.get("dropout") else None)
