"""Multiplies x by the rows of a projection's weight and finishes the heads before they leave the registers.

One program makes one head of a block of tokens, so that normalization and rotation need no other program. Beside the
epilogue kernel it saves writing and reading the product once.
Guarantees: float32 accumulation, and products of float32 inputs are not rounded to tf32; launches are described.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.launch_call import LaunchCall
from ringattn.kernels.qkv_epilogue import COUNTS, Finish, finish_heads, load_weight

GROUP = 8  # blocks of tokens that share the weights in the L2 cache


def projection_call(
    x: Tensor, weight: Tensor, bias: Tensor | None, finish: Finish, rows: Tensor | None = None
) -> LaunchCall:
    """Project x (batch, tokens, model) with `weight` (heads * dim, model); the last dimensions are contiguous.

    `bias`: (heads * dim,), added in float32. `rows`: (kept,) int64, contiguous, the tokens of x to project, so many as
    the places of `finish` have; None for all.
    """
    kept = finish.first.shape[0] * finish.first.shape[1]
    config = _config(x.dtype, finish)
    args = (x, weight, bias, rows, x.shape[2], x.stride(0), x.stride(1), weight.stride(0), *finish.args())
    grid = (triton.cdiv(kept, config["BLOCK_TOKENS"]) * finish.heads,)
    return LaunchCall(project_heads, grid, args, {**finish.meta(), **config, "GROUP": GROUP})


def _config(dtype: torch.dtype, finish: Finish) -> dict[str, int]:
    """Tile sizes that compile without spills on sm_80 and sm_90; not yet tuned for speed."""
    if dtype == torch.float32:
        return {"BLOCK_TOKENS": 32, "BLOCK_MODEL": 32, "num_warps": 8 if finish.dim > 128 else 4, "num_stages": 2}
    return {"BLOCK_TOKENS": 64 if finish.dim > 128 else 128, "BLOCK_MODEL": 64, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=COUNTS)
def project_heads(
    x, weight, bias, rows, model, x_batch, x_token, weight_row,
    norm, cos, sin, first, second,
    total, tokens, heads, turned, eps,
    first_batch, first_token, first_head, second_batch, second_token, second_head,
    DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_MODEL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program: one head of BLOCK_TOKENS tokens; see `Finish` for the arguments from `norm` on."""
    # GROUP blocks of tokens and all heads form a band; within one, blocks vary fastest, so the programs that run at the
    # same time share the weights of one head (L2 cache). The last band may have fewer blocks.
    #    program   0      1      2      3      ...      GROUP 2
    #    block     0      1      0      1
    #    head      0      0      1      1
    blocks = tl.cdiv(total, BLOCK_TOKENS)
    band = tl.program_id(0) // (GROUP * heads)
    height = tl.minimum(blocks - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * heads)
    head = within // height
    at = (band * GROUP + within % height) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = (at < total)[:, None]
    token = (at % tokens).to(tl.int64)
    if rows is not None:
        token = tl.load(rows + token, mask=at < total, other=0)
    from_x = x + ((at // tokens).to(tl.int64) * x_batch + token * x_token)[:, None]

    # Both half tiles of a head are columns of one product: larger steps of the matrix unit, and what rotates together
    # ends in one thread.
    across = tl.arange(0, 2 * HALF)
    if APART == 1:
        # Columns: interleaved pairs as they lie, 0 1 2 3 ...; else the first half head and then the second, each
        # padded.
        element, real = across, across < DIM
    else:
        element, real = across // HALF * APART + across % HALF, across % HALF < APART
    from_weight = weight + ((head * DIM + element).to(tl.int64) * weight_row)[None, :]
    both = tl.zeros((BLOCK_TOKENS, 2 * HALF), tl.float32)
    for start in range(0, model, BLOCK_MODEL):
        column = start + tl.arange(0, BLOCK_MODEL)
        held = column < model
        piece = tl.load(from_x + column[None, :], mask=inside & held[None, :], other=0.0)
        # The weight is (heads * dim, model): read transposed, (model, columns of the head).
        of_head = tl.load(from_weight + column[:, None], mask=real[None, :] & held[:, None], other=0.0)
        both = tl.dot(piece, of_head, both, input_precision="ieee")
    if APART == 1:
        a, b = tl.split(tl.reshape(both, (BLOCK_TOKENS, HALF, 2)))
    else:
        a, b = tl.split(tl.permute(tl.reshape(both, (BLOCK_TOKENS, 2, HALF)), (0, 2, 1)))
    if bias is not None:
        of_a, of_b = load_weight(bias + head * DIM, DIM, HALF, APART)
        a += of_a
        b += of_b
    finish_heads(
        a, b, at, head, norm, cos, sin, first, second,
        total, tokens, heads, turned, eps,
        first_batch, first_token, first_head, second_batch, second_token, second_head,
        DIM, HALF, APART,
    )  # fmt: skip
