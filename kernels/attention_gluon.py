"""The ring step in Gluon for Hopper (sm_90), forward and backward: the supported calls, and the launches.

Guarantees: the forward computes the same as `attention_forward.forward` for the calls that `gluon_takes`, but not with
the same bits: the other forms round each logit a second time. The backward computes the same as
`attention_backward.grad_q` and `grad_kv`, without atomics. Tables and flags are the same, and equal tables give equal
bits. Importing this module does not need Gluon; an unsupported version of Triton is refused by name.
Tested by a simulator, by reading the machine code, and on an H200.
Not covered: softcap, ALiBi, dropout, the raw state, dQ by atomic additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from math import e, log2
from typing import Any

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

VERSIONS = (3, 6), (3, 8)
"""The first and the last supported version of Triton; 3.9 renamed Gluon's copies."""

GLUON = "triton.experimental.gluon.language.nvidia.hopper"
DIMS = 64, 128

CONFIG = Config(128, 128, 4, 2, "gluon")
"""Two warpgroups of `num_warps` warps with 64 query rows each, and buffers for two blocks of K and two of V."""


GRAD_Q = {dim: Config(128, 128, 4, 2, "gluon") for dim in DIMS}
"""Blocks of 128 queries, 64 for each consumer, and buffers for two blocks of K and two of V, by head dimension."""

GRAD_KV = {dim: Config(64, 128, 4, 2, "gluon") for dim in DIMS}
"""Blocks of 128 keys, 64 for each consumer, and buffers for two blocks of q and two of dout, by head dimension.

With dimension 128, dK and dV take 128 registers of each thread of a consumer, which leaves room for S and dP of 64
queries.
"""


@cache
def gluon_missing(arch: int) -> str | None:
    """Return why a GPU of architecture `arch` (10 * major + minor) cannot run the kernels with this Triton, or None."""
    first, last = (".".join(map(str, version)) for version in VERSIONS)
    if arch != 90:
        return f"the Gluon kernel is for sm_90, not sm_{arch}"
    if not VERSIONS[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= VERSIONS[1]:
        return f"the Gluon kernel needs Triton {first} to {last}, not {triton.__version__}"
    try:
        spec = find_spec(GLUON)
    except ModuleNotFoundError:
        spec = None
    return None if spec else f"Triton {triton.__version__} has no {GLUON}; install a build that has it"


def gluon_lacks(arch: int, dtype: torch.dtype, dims: tuple[int, int], options: Sequence[str] = ()) -> str | None:
    """Return why the kernels do not support a call on architecture `arch`, or None.

    `dims`: the head dimensions of keys and values. `options`: the softmax options that the call uses, by name; none of
    them is supported.
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


def gluon_takes(
    q: Tensor, k: Tensor, v: Tensor, arch: int, options: Sequence[str] = (), dout: Tensor | None = None
) -> str | None:
    """Return why a kernel does not support these tensors (rows, batch, heads, dim) on architecture `arch`, or None.

    `dout`: the output gradient in a backward pass; None in a forward pass.
    """
    rows = (q, k, v) if dout is None else (q, k, v, dout)
    if why := gluon_lacks(arch, q.dtype, (q.shape[3], v.shape[3]), options):
        return why
    if not describable(*rows):
        return (
            "the Gluon kernel takes float16 and bfloat16 with bases and strides that are multiples of 16 bytes, not "
            + ", ".join(f"{x.dtype} of strides {x.stride()}" for x in rows)
        )
    return None


def forward_gluon(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor, table: Table, config: Config, *, scale: float,
    group: int = 1, first_kv_head: int = 0, result: Tensor | None = None, sinks: Tensor | None = None,
    programs: int | None = None,
) -> LaunchCall:  # fmt: skip
    """Return the launch that updates the softmax state (`out`, `lse`) with the table's pairs, in place.

    Arguments are those of `attention_forward.forward`; `gluon_takes` must accept them. `config` is like `CONFIG`. With
    a program per multiprocessor, a program takes the next free block when it has loaded all rows of its current block.
    While it still sums the current block, it loads the first rows of the next block and prefetches the next block's
    state into L2. The launch allocates 384 bytes per program for descriptors with Triton's allocator.
    Raises ValueError if both `out` and `result` are None.
    """
    from ringattn.kernels.attention_gluon_forward import forward_kernel

    _, strides = state_beside(out, result, lse)
    in_base_2, counter = scale * log2(e), _counter(q)
    args = (
        q, k, v, out, lse, result, sinks, table.blocks, table.entries, counter,
        *_sizes(table, q, section_for(table, k, v, sharing=group), group, first_kv_head), in_base_2,
        *strides_of(q, k, v), *strides, *lse.stride(),
    )  # fmt: skip
    meta, grid = _meta(q, config) | {"RAW_PEAK": keeps_order(in_base_2)}, grid_of(table, q.shape[1], programs)
    return LaunchCall(forward_kernel, grid, args, meta, persistent=True, counter=counter)


def grad_q_gluon(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dq: Tensor | None, table: Table,
    config: Config, *, scale: float, group: int = 1, first_kv_head: int = 0, result: Tensor | None = None,
    programs: int | None = None,
) -> LaunchCall:  # fmt: skip
    """Return the launch that adds the gradient of the table's pairs to `dq`, shaped like q in float32.

    Arguments are those of `attention_backward.grad_q`; `gluon_takes` must accept them. `config` is like those of
    `GRAD_Q`. Programs take free blocks as in `forward_gluon`. The launch allocates 512 bytes per program for
    descriptors with Triton's allocator.
    Raises ValueError if both `dq` and `result` are None.
    """
    from ringattn.kernels.attention_gluon_grad_q import grad_q_kernel

    _, strides = state_beside(dq, result, lse)
    counter = _counter(q)
    args = (
        q, k, v, dout, lse, delta, dq, result, table.blocks, table.entries, counter,
        *_sizes(table, q, section_for(table, k, v, sharing=group), group, first_kv_head), scale, scale * log2(e),
        *strides_of(q, k, v, dout), *strides, *lse.stride(), *delta.stride(),
    )  # fmt: skip
    return LaunchCall(
        grad_q_kernel, grid_of(table, q.shape[1], programs), args, _meta(q, config), persistent=True, counter=counter
    )


def grad_kv_gluon(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor | None, dv: Tensor | None,
    table: Table, config: Config, *, scale: float, group: int = 1, first_kv_head: int = 0,
    results: tuple[Tensor, Tensor] | None = None, programs: int | None = None,
) -> LaunchCall:  # fmt: skip
    """Return the launch that adds the gradients of the table's pairs to `dk` and `dv`, shaped like k and v in float32.

    Arguments are those of `attention_backward.grad_kv`; `gluon_takes` must accept them. `config` is like those of
    `GRAD_KV`. Programs take free blocks as in `forward_gluon`. The launch allocates 512 bytes per program for
    descriptors with Triton's allocator.
    Raises ValueError if `results` is None and `dk` or `dv` is None.
    """
    from ringattn.kernels.attention_gluon_grad_kv import grad_kv_kernel

    dk_result, dv_result = results or (None, None)
    _, dk_strides = state_beside(dk, dk_result, lse)
    _, dv_strides = state_beside(dv, dv_result, lse)
    counter = _counter(q)
    args = (
        q, k, v, dout, lse, delta, dk, dv, dk_result, dv_result, table.blocks, table.entries, counter,
        *_sizes(table, q, section_for(table, q, dout, reads=group), group, first_kv_head), scale, scale * log2(e),
        *strides_of(q, k, v, dout), *dk_strides[:3], *dv_strides[:3], *dk_strides[3:], *dv_strides[3:],
        *lse.stride(), *delta.stride(),
    )  # fmt: skip
    return LaunchCall(
        grad_kv_kernel, grid_of(table, q.shape[1], programs), args, _meta(q, config), persistent=True, counter=counter
    )


def _counter(like: Tensor) -> Tensor:
    """Return the counter from which programs take items; see `LaunchCall.counter`."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def _sizes(table: Table, q: Tensor, section: int, group: int, first_kv_head: int) -> tuple[int, ...]:
    """Return the arguments from `block_count` to `first_kv_head`, which all three kernels have."""
    return table.blocks.shape[0], table.slots, q.shape[1], section, group, first_kv_head


def _meta(q: Tensor, config: Config) -> dict[str, Any]:
    """Return the compile-time constants of all three kernels."""
    return {
        "DIM": q.shape[3], "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SLOTS": config.num_stages,
        **compiled_with(config),
    }  # fmt: skip
