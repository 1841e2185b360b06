"""The backward ring step in Gluon for Hopper (sm_90): what it takes, and its two launches, dQ and dK with dV.

Guarantees, for calls that `gluon_backward_takes`, the meaning of `attention_backward.grad_q` and `grad_kv`, tables and
flags alike, without atomics: the same bits for the same tables. Importing this needs no Gluon.
Tested by a simulator and by reading the machine code; no GPU has run it yet.
Not covered: softcap, ALiBi, dQ by atomic additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import e, log2

from torch import Tensor

from ringattn.kernels.attention_gluon import DIMS, gluon_missing
from ringattn.kernels.attention_tiles import compiled_with, describable, grid_of, section_for, state_beside, strides_of
from ringattn.kernels.launch_call import Config, LaunchCall, Table

GRAD_Q = {dim: Config(128, 128, 4, 2, "gluon") for dim in DIMS}
"""Blocks of 128 queries, 64 for each consumer, and buffers for two blocks of K and two of V, by head dimension."""

GRAD_KV = {dim: Config(64, 128, 4, 2, "gluon") for dim in DIMS}
"""Blocks of 128 keys, 64 for each consumer, and buffers for two blocks of q and two of dout, by head dimension.

A consumer of dimension 128 holds dK and dV in 128 registers of each thread, and has room for S and dP of 64 queries.
"""


def gluon_backward_takes(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, arch: int, options: Sequence[str] = ()
) -> str | None:
    """Why the kernels cannot take these tensors (rows, batch, heads, dim) on a GPU of architecture `arch`, or None."""
    d_k, d_v = q.shape[3], v.shape[3]
    if missing := gluon_missing(arch):
        return missing
    if options:
        return f"the Gluon backward has no {options[0]}"
    if d_k != d_v or d_k not in DIMS:
        return f"the Gluon backward takes head dimensions of 64 or 128, equal for keys and values, not {d_k} and {d_v}"
    if not describable(q, k, v, dout):
        return (
            "the Gluon backward takes float16 and bfloat16 with bases and strides that are multiples of 16 bytes, not "
            + ", ".join(f"{x.dtype} of strides {x.stride()}" for x in (q, k, v, dout))
        )
    return None


def grad_q_gluon(
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
    group: int = 1,
    first_kv_head: int = 0,
    result: Tensor | None = None,
    programs: int | None = None,
) -> LaunchCall:
    """The launch that adds to `dq`, float32 like q, what the table's pairs give.

    Arguments are those of `attention_backward.grad_q`, of which `gluon_backward_takes` says whether they fit; `config`
    is like one of `GRAD_Q`. The launch needs Triton's allocator: 512 bytes a program, for descriptors.
    Raises ValueError without `dq` and `result`.
    """
    from ringattn.kernels.attention_gluon_grad_q import grad_q_kernel

    _, strides = state_beside(dq, result, lse)
    args = (
        q, k, v, dout, lse, delta, dq, result, table.blocks, table.entries, table.blocks.shape[0], table.slots,
        q.shape[1], section_for(table, k, v, sharing=group), group, first_kv_head, scale, scale * log2(e),
        *strides_of(q, k, v, dout), *strides,
        *lse.stride(), *delta.stride(),
    )  # fmt: skip
    return LaunchCall(grad_q_kernel, grid_of(table, q.shape[1], programs), args, _meta(q, config))


def grad_kv_gluon(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    table: Table,
    config: Config,
    *,
    scale: float,
    group: int = 1,
    first_kv_head: int = 0,
    results: tuple[Tensor, Tensor] | None = None,
    programs: int | None = None,
) -> LaunchCall:
    """The launch that adds to `dk` and `dv`, float32 like k and v, what the table's pairs give.

    Arguments are those of `attention_backward.grad_kv`, of which `gluon_backward_takes` says whether they fit; `config`
    is like one of `GRAD_KV`. The launch needs Triton's allocator: 512 bytes a program, for descriptors.
    Raises ValueError without `dk`, `dv` and `results`.
    """
    from ringattn.kernels.attention_gluon_grad_kv import grad_kv_kernel

    dk_result, dv_result = results or (None, None)
    _, dk_strides = state_beside(dk, dk_result, lse)
    _, dv_strides = state_beside(dv, dv_result, lse)
    args = (
        q, k, v, dout, lse, delta, dk, dv, dk_result, dv_result, table.blocks, table.entries, table.blocks.shape[0],
        table.slots, q.shape[1], section_for(table, q, dout, reads=group), group, first_kv_head, scale,
        scale * log2(e), *strides_of(q, k, v, dout),
        *dk_strides[:3], *dv_strides[:3], *dk_strides[3:], *dv_strides[3:], *lse.stride(), *delta.stride(),
    )  # fmt: skip
    return LaunchCall(grad_kv_kernel, grid_of(table, q.shape[1], programs), args, _meta(q, config))


def _meta(q: Tensor, config: Config) -> dict[str, int]:
    """The compile-time constants of both kernels."""
    return {
        "DIM": q.shape[3], "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SLOTS": config.num_stages,
        **compiled_with(config),
    }  # fmt: skip
