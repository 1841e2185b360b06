"""A plain attention kernel in Triton, to compare with: the textbook loop over key blocks, by tensor descriptors.

It does what Triton's tutorial 06 does forward without a mask, and nothing of what a ring step needs: no tables, bands,
entries or earlier state. Written for the estimates (`estimate.py`); nothing else uses it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ringattn.kernels.launch_call import Config, LaunchCall


@triton.jit
def plain_forward(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, tokens, scale, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1) * tokens
    own = row + tl.program_id(0) * BLOCK_M
    q_rows = q.load([own, 0])
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    for at in range(0, tokens, BLOCK_N):
        s = tl.dot(q_rows, k.load([row + at, 0]).T)
        new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_peak[:, None])
        keep = tl.exp2(peak - new_peak)
        weight = weight * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(q_rows.dtype), v.load([row + at, 0]), acc * keep[:, None])
        peak = new_peak
    tl.store(lse + own + tl.arange(0, BLOCK_M), peak + tl.log2(weight))
    out.store([own, 0], (acc / weight[:, None]).to(q_rows.dtype))


def plain_call(dim: int, config: Config) -> LaunchCall:
    """A launch over one head of 4,096 tokens."""
    rows = torch.zeros(4096, dim, dtype=torch.bfloat16)
    of_queries, of_keys = (
        TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [block, dim])
        for block in (config.block_m, config.block_n)
    )
    args = of_queries, of_keys, of_keys, of_queries, torch.zeros(4096), 4096, 0.1
    meta = {"DIM": dim, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    launched = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return LaunchCall(plain_forward, (32,), args, meta | launched)
