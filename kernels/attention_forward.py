"""The forward ring step: one launch does the attention updates of all tiles of a step, in place on the softmax state.

Guarantees, for float32, float16 and bfloat16 inputs, online softmax in float32 and base 2 over the key blocks that the
table names and no other, masks on the blocks at a band's edges alone, (0, -inf) left as it is for rows that see no key,
or whose logits are all -inf, and the same bits for the same table. State between steps is `out` (normalized, float32)
and `lse` (natural log, float32), so that any other kernel can take the next step. A pass begins without reading a state
and ends by writing the result in the dtype of q: the flags of each block say which.
The grid is as large as its caller says, each program taking every n-th block: a launch can leave multiprocessors free.
Independent of positions, ranks, steps and of where the table comes from.
The specialized form has a producer warp, split off by Triton's compiler (sm_90): the same meaning and bits as with
descriptors, for q, k and v that are `describable` and tables of `one_entry_each`. Not tuned, never run on a GPU.
"""

from __future__ import annotations

from typing import Unpack

import torch
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
    keeps_order,
    load_rows,
    logit_scales,
    logits,
    read_block,
    rows_and_band,
    rows_in,
    rows_of,
    run_of,
    section_for,
    state_beside,
    store_rows,
    strides_of,
    visits,
)
from ringattn.kernels.configs import Configs, configs_for
from ringattn.kernels.launch import VARYING, BlockColumn, Config, LaunchCall, Table


@triton.jit
def update(
    acc, peak, weight, q_rows, k_source, v_source, count, band, at, edge, scale, softcap, bias, draw,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, RAW_PEAK: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """The state (acc, peak, weight) after key block `at`, at an `edge` of the band or not, of `count` rows.

    RAW_PEAK finds the peak among products, or with SOFTCAP their tanh, before they are scaled: the scale `keeps_order`.
    `bias`: None or slope, place and steps for `biased`, of what is then to be scaled. `draw`: None or for `dropped`.
    """
    k_rows = read_block(k_source, at, count, D_K, PAD_K, BLOCK_N, DESCRIBED)
    # Scores (BLOCK_M, BLOCK_N) in base 2, as exp2 needs a multiplication less than exp.
    s, raw = logits(tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee"), scale, softcap, SOFTCAP)
    factor = softcap if SOFTCAP else scale
    if RAW_PEAK:
        s = raw
    if bias is not None:
        s, rest = biased(s, bias[0], bias[1], bias[2], at, BLOCK_M, BLOCK_N, False)
        rest = rest * factor if RAW_PEAK else rest
    if edge:
        cols = at * BLOCK_N + tl.arange(0, BLOCK_N)
        s = tl.where(banded(tl.arange(0, BLOCK_M), cols, count, band), s, float("-inf"))
    # Online softmax: the state is (acc, peak, weight) with  out = acc / weight  and  lse = peak + log2(weight).
    highest = tl.max(s, 1) * factor if RAW_PEAK else tl.max(s, 1)
    new_peak = tl.maximum(peak, highest if bias is None else highest + rest)
    # A row without a logit above -inf so far keeps its peak of -inf, which no exponent may be taken from.
    shift = tl.maximum(new_peak, LOWEST)
    # A product and a difference become one instruction.
    p = tl.exp2((s * factor if RAW_PEAK else s) - (shift if bias is None else shift - rest)[:, None])
    # A greater peak scales down what was accumulated: exp2(-inf) = 0 for a row without any key so far.
    keep = tl.exp2(peak - shift)
    # Dropped weights count in the sum, and so in lse.
    weight = weight * keep + tl.sum(p, 1)
    if draw is not None:
        p = tl.where(dropped(draw, at, BLOCK_M, BLOCK_N, False, TOGETHER), 0.0, p)
    v_rows = read_block(v_source, at, count, D_V, PAD_V, BLOCK_N, DESCRIBED)
    # P in the dtype of v for the matrix unit; the sum stays float32.
    acc = tl.dot(p.to(v_rows.dtype), v_rows, acc * keep[:, None], input_precision="ieee")
    return acc, new_peak, weight


@triton.jit
def _update_entry(
    acc, peak, weight, q_rows, k, v, k_row, v_row, at_entry, scale, softcap, alibi, draw,
    D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DESCRIBED: tl.constexpr, RAW_PEAK: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """The state (acc, peak, weight) after the entry at `at_entry`."""
    entry, band = rows_and_band(at_entry)
    start, full, full_end, end = visits(at_entry)
    k_source = rows_of(k, k_row, entry, D_K, PAD_K, BLOCK_N, DESCRIBED)
    v_source = rows_of(v, v_row, entry, D_V, PAD_V, BLOCK_N, DESCRIBED)
    bias = None if alibi is None else (alibi[0], alibi[1], steps_of(alibi[1], False))
    # Blocks of keys that some row sees; only those before `full` and from `full_end` on need the mask:
    #    start | masked | full | unmasked | full_end | masked | end
    for at in tl.range(start, end):
        edge = (at < full) | (at >= full_end)
        acc, peak, weight = update(
            acc, peak, weight, q_rows, k_source, v_source, entry[2], band, at, edge, scale, softcap, bias, draw,
            D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED, RAW_PEAK, TOGETHER,
        )  # fmt: skip
    return acc, peak, weight


@triton.jit
def opening(
    out, lse, sinks, kept, head, live, begins, out_rows, lse_rows, D_V: tl.constexpr, PAD_V: tl.constexpr
):  # fmt: skip
    """(acc, peak, weight) of `live` rows: what an earlier launch left or, where the pass `begins`, nothing seen."""
    # A FIRST block does not read memory that nothing has written.
    known = live & (begins == 0)
    acc = load_rows(out, out_rows, known, D_V, PAD_V)
    # A normalized state weighs 1 at its own peak; the weight of a row that saw no key drops to 0 with its first.
    peak = tl.load(lse + lse_rows, mask=known, other=float("-inf")) * LOG2_E
    weight = tl.full(peak.shape, 1.0, tl.float32)
    # What dropout leaves is divided by `kept` at the end.
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
    """Store the state of a block's rows or, where the pass `ends`, its result and lse."""
    rows, live = rows_in(block, idle, BLOCK_M)
    lse_rows = batch * lse_batch + head * lse_head + rows * lse_row
    # A row that saw no key: out 0 and lse -inf, without dividing by 0.
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
    TOGETHER: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """SPLIT: with a producer warp, by Triton's compiler; then a block has one entry and rows come by descriptors."""
    for item in tl.range(tl.program_id(0), block_count * slots * batches, tl.num_programs(0), disable_licm=True):
        block, batch, head, idle = item_of(blocks, item, block_count, slots, batches, section)
        rows, live = rows_in(block, idle, BLOCK_M)
        begins, ends = ends_of(block)
        # The held K/V may begin at a later head than 0.
        kv_head = head // group - first_kv_head
        q_base = q + batch * q_batch + head * q_head
        if SPLIT:
            # The producer warp brings the query rows as well, so they come by a descriptor.
            q_source = rows_of(q_base, q_row, run_of(block), D_K, PAD_K, BLOCK_M, DESCRIBED)
            q_rows = read_block(q_source, 0, BLOCK_M, D_K, PAD_K, BLOCK_M, DESCRIBED)
        else:
            q_rows = load_rows(q_base, rows * q_row, live, D_K, PAD_K)
        out_base = out + batch * out_batch + head * out_head
        lse_rows = batch * lse_batch + head * lse_head + rows * lse_row
        acc, peak, weight = opening(
            out_base, lse, sinks, kept, head, live, begins, rows * out_row, lse_rows, D_V, PAD_V
        )

        k_base = k + batch * k_batch + kv_head * k_head
        v_base = v + batch * v_batch + kv_head * v_head
        first, last = entries_of(block)
        if SPLIT:
            # One entry a block: the compiler does not split a loop whose state comes from another around it.
            at_entry = entries + first * ENTRY_COLUMNS
            entry, band = rows_and_band(at_entry)
            start, _, _, end = visits(at_entry)
            k_source = rows_of(k_base, k_row, entry, D_K, PAD_K, BLOCK_N, DESCRIBED)
            v_source = rows_of(v_base, v_row, entry, D_V, PAD_V, BLOCK_N, DESCRIBED)
            for at in tl.range(start, end, warp_specialize=True):
                # Masked at every block, since the compiler does not split a loop that holds a branch either.
                acc, peak, weight = update(
                    acc, peak, weight, q_rows, k_source, v_source, entry[2], band, at, True, scale, softcap, None, None,
                    D_K, D_V, PAD_K, PAD_V, BLOCK_M, BLOCK_N, SOFTCAP, DESCRIBED, RAW_PEAK, TOGETHER,
                )  # fmt: skip
        else:
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
    """The launch that updates the softmax state (`out`, `lse`) by the table's pairs, in place.

    `q`, `k`, `v`: (rows, batch, heads, dim), any strides with a contiguous last dimension, float32 or half. `out`:
    (rows, batch, query heads, d_v) float32; `lse`: (batch, query heads, rows) float32, natural log. The table has
    query blocks of `config.block_m` rows and entries in blocks of `config.block_n`. Query head h reads K/V head
    h // group, of which `first_kv_head` is the first held.
    A FIRST block of the table does not read the state; with `sinks`, (query heads,), its rows begin with a logit that
    takes weight and gives no value: lse = sink, out 0. A LAST block writes `result`, like `out` in the dtype of q, and
    `lse`, and leaves `out` alone. Without `result` no block may be LAST; `out` may be None where all blocks are both.
    The form "descriptors" needs `describable` k and v, "specialized" one of `BLOCKS`, q too and `one_entry_each`.
    Raises ValueError without `out` and `result`.
    """
    state, strides = state_beside(out, result, lse)
    softcap, batches = options.get("softcap"), q.shape[1]
    in_scale, out_scale = logit_scales(options["scale"], softcap)
    section = section_for(table, k, v, sharing=options.get("group", 1))
    args = (
        q, k, v, state, lse, result, sinks, *shared_arguments(table, batches, section, options), in_scale,
        out_scale, *strides_of(q, k, v), *strides, *lse.stride(),
    )  # fmt: skip
    factor = in_scale if softcap is None else out_scale
    raw_peak = keeps_order(factor) and (options.get("slopes") is None or adds_raw(factor))
    meta = {**shared_constants(q, v, config, table, options), "RAW_PEAK": raw_peak}
    meta["SPLIT"] = config.form == "specialized"
    grid = grid_of(table, batches, options.get("programs"))
    return LaunchCall(_forward, grid, args, meta, seed_at=12 if options.get("dropout") else None)


# --- the specialized form --------------------------------------------------------------------------------------------


BLOCKS = {64: Config(128, 128, 4, 2, "specialized"), 128: Config(128, 64, 4, 2, "specialized")}
"""By head dimension, each serving those below it. The compiler splits four warps and 128 rows, and nothing else."""


def one_entry_each(blocks: Tensor) -> bool:
    """Whether every block of a table's `blocks` meets one entry, as this kernel needs it."""
    return bool((blocks[:, BlockColumn.END_ENTRY] - blocks[:, BlockColumn.FIRST_ENTRY] == 1).all())


def specialized_configs(arch: int, dtype: torch.dtype, dim: int) -> Configs:
    """One of `BLOCKS` for the forward kernel, and the entry with descriptors for the others.

    Arguments are those of `configs_for`. Raises LookupError where there is none.
    """
    width = next((one for one in BLOCKS if dim <= one), None)
    if arch != 90 or dtype not in (torch.float16, torch.bfloat16) or width is None:
        raise LookupError(
            f"form 'specialized' is for sm_90, half precision and head dimensions to {max(BLOCKS)}, "
            f"not sm_{arch}, {dtype} and {dim}"
        )
    return configs_for(arch, dtype, dim, "descriptors")._replace(forward=BLOCKS[width])
