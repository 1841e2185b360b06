"""The forward ring step with a producer warp, split off by Triton's compiler (sm_90). Not tuned, never run on a GPU.

Guarantees the meaning of `attention_forward.forward` with descriptors, for q, k and v that are `describable` and tables
of `one_entry_each`, and the same bits for the same table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention_forward import closing, opening, update
from ringattn.kernels.attention_tiles import (
    ENTRY_COLUMNS,
    ends_of,
    entries_of,
    item_of,
    read_block,
    rows_and_band,
    rows_in,
    rows_of,
    run_of,
    visits,
)
from ringattn.kernels.configs import Configs, configs_for
from ringattn.kernels.launch_call import VARYING, BlockColumn, Config, LaunchCall

BLOCKS = {64: Config(128, 128, 4, 2, "specialized"), 128: Config(128, 64, 4, 2, "specialized")}
"""By head dimension, each serving those below it. The compiler splits four warps and 128 rows, and nothing else."""


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, out, lse, weights, result, sinks, blocks, entries, places, slopes, positions,
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
        kv_head = head // group - first_kv_head
        q_base = q + batch * q_batch + head * q_head
        # The producer warp brings the query rows as well, so they come by a descriptor.
        q_source = rows_of(q_base, q_row, run_of(block), D_K, PAD_K, BLOCK_M, DESCRIBED)
        q_rows = read_block(q_source, 0, BLOCK_M, D_K, PAD_K, BLOCK_M, DESCRIBED)
        out_base = out + batch * out_batch + head * out_head
        lse_rows = batch * lse_batch + head * lse_head + rows * lse_row
        acc, peak, weight = opening(
            out_base, lse, weights, sinks, None, head, live, begins, rows * out_row, lse_rows, D_V, PAD_V
        )

        k_base = k + batch * k_batch + kv_head * k_head
        v_base = v + batch * v_batch + kv_head * v_head
        first, _ = entries_of(block)
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
        closing(
            acc, peak, weight, out_base, lse, weights, result, None, block, batch, head, idle, ends, out_row,
            result_row, result_batch, result_head, lse_batch, lse_head, lse_row, D_V, PAD_V, BLOCK_M,
        )  # fmt: skip


def one_entry_each(blocks: Tensor) -> bool:
    """Whether every block of a table's `blocks` meets one entry, as this kernel needs it."""
    return bool((blocks[:, BlockColumn.END_ENTRY] - blocks[:, BlockColumn.FIRST_ENTRY] == 1).all())


def specialized(call: LaunchCall) -> LaunchCall:
    """By this kernel what `call`, a launch that `attention_forward.forward` gave for one of `BLOCKS`, does."""
    return call._replace(kernel=forward_kernel)


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
