"""The ring step in Gluon for Hopper (sm_90), forward and backward: what it takes, and its launches.

Guarantees: forward, for calls that `gluon_takes`, the meaning of `attention_forward.forward` with its normalized state;
not the bits of the other forms, which round each logit once more. Backward, for calls that `gluon_backward_takes`, the
meaning of `attention_backward.grad_q` and `grad_kv`, without atomics. Tables and flags are alike, and the same table
gives the same bits. Importing this needs no Gluon; a wrong Triton is refused by name.
The backward is tested by a simulator and by reading the machine code; no GPU has run it yet.
Not covered: softcap, ALiBi, dropout, the raw state, dQ by atomic additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from math import e, log2

import torch
import triton
from torch import Tensor

from ringattn.kernels.attention_tiles import (
    compiled_with,
    describable,
    grid_of,
    keeps_order,
    section_for,
    state_beside,
    strides_of,
)
from ringattn.kernels.launch import Config, LaunchCall, Table

# --- forward ---------------------------------------------------------------------------------------------------------


VERSIONS = (3, 6), (3, 8)
"""The first and the last Triton whose Gluon this is written in; 3.9 renamed the copies."""

GLUON = "triton.experimental.gluon.language.nvidia.hopper"
DIMS = 64, 128

CONFIG = Config(128, 128, 4, 2, "gluon")
"""Two warpgroups (of `num_warps` each) with 64 query rows each, and buffers for two blocks of K and two of V."""


@cache
def gluon_missing(arch: int) -> str | None:
    """Why a GPU of architecture `arch` (10 * major + minor) cannot run this kernel with this Triton, or None."""
    first, last = (".".join(map(str, version)) for version in VERSIONS)
    if arch != 90:
        return f"the Gluon kernel is for sm_90, not sm_{arch}"
    if not VERSIONS[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= VERSIONS[1]:
        return f"the Gluon kernel needs Triton {first} to {last}, not {triton.__version__}"
    try:
        found = find_spec(GLUON)
    except ModuleNotFoundError:
        found = None
    return None if found else f"Triton {triton.__version__} has no {GLUON}; install a build that has it"


def gluon_lacks(arch: int, dtype: torch.dtype, dims: tuple[int, int], options: Sequence[str] = ()) -> str | None:
    """Why the kernel takes no call with head dimensions `dims` (keys', values') on architecture `arch`, or None.

    `options`: of the softmax that the call uses, by name; it has none of them.
    """
    if missing := gluon_missing(arch):
        return missing
    if options:
        return f"the Gluon kernel has no {options[0]}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the Gluon kernel takes float16 and bfloat16, not {dtype}"
    if dims[0] != dims[1] or dims[0] not in DIMS:
        return f"the Gluon kernel takes head dimensions of 64 or 128, equal for both, not {dims[0]} and {dims[1]}"
    return None


def gluon_takes(q: Tensor, k: Tensor, v: Tensor, arch: int, options: Sequence[str] = ()) -> str | None:
    """Why the kernel cannot take these tensors (rows, batch, heads, dim) on a GPU of architecture `arch`, or None."""
    if why := gluon_lacks(arch, q.dtype, (q.shape[3], v.shape[3]), options):
        return why
    if not describable(q, k, v):
        return (
            "the Gluon kernel takes float16 and bfloat16 with bases and strides that are multiples of 16 bytes, not "
            + ", ".join(f"{x.dtype} of strides {x.stride()}" for x in (q, k, v))
        )
    return None


def forward_gluon(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor,
    table: Table,
    config: Config,
    *,
    scale: float,
    group: int = 1,
    first_kv_head: int = 0,
    result: Tensor | None = None,
    sinks: Tensor | None = None,
    programs: int | None = None,
) -> LaunchCall:
    """The launch that updates the softmax state (`out`, `lse`) by the table's pairs, in place.

    Arguments are those of `attention_forward.forward`, of which `gluon_takes` says whether they fit; `config` is like
    `CONFIG`. A grid of as many `programs` as there are multiprocessors brings a block's first rows, and its state into
    L2, while the one before it is still summed; a program that is done takes the next block that none has. The launch
    needs Triton's allocator: 384 bytes a program, for descriptors.
    Raises ValueError without `out` and `result`.
    """
    from ringattn.kernels.attention_gluon_forward import forward_kernel

    _, strides = state_beside(out, result, lse)
    in_base_2 = scale * log2(e)
    blocks, batches = table.blocks.shape[0], q.shape[1]
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    args = (
        q, k, v, out, lse, result, sinks, table.blocks, table.entries, counter, blocks, table.slots, batches,
        section_for(table, k, v, sharing=group), group,
        first_kv_head, in_base_2, *strides_of(q, k, v), *strides, *lse.stride(),
    )  # fmt: skip
    meta = {
        "DIM": q.shape[3], "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SLOTS": config.num_stages,
        "RAW_PEAK": keeps_order(in_base_2), **compiled_with(config),
    }  # fmt: skip
    return LaunchCall(forward_kernel, grid_of(table, batches, programs), args, meta, persistent=True, counter=counter)


# --- backward --------------------------------------------------------------------------------------------------------


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
