"""The ring step in Gluon for Hopper (sm_90) and for Blackwell (sm_100), forward and backward.

This module has the supported calls and the launches.

Guarantees: the forward computes the same as `attention_forward.forward` for the calls that `gluon_takes`, but not with
the same bits: the other forms round each logit a second time. The backward computes the same as
`attention_backward.grad_q` and `grad_kv`. Tables and flags are the same. Equal tables give equal bits, except in a dQ
that `grad_kv_gluon` adds to. Importing this module does not need Gluon; an unsupported version of Triton is refused by
name.
Tested by a simulator, by reading the machine code, by executing the PTX, and on an H200. No B200 has run the kernels
for sm_100 (`attention_tcgen05_forward`, `attention_tcgen05_backward`), so only a call that names the form uses them.
Not covered: dropout, the raw state; on sm_100 and with a dQ that is added to, softcap, ALiBi and dimensions above 128;
with keys of 192, softcap and ALiBi.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Unpack

import torch
import triton
from torch import Tensor

from ringattn.kernels.attention_options import CallOptions, adds_raw, factor_of, peaks_raw
from ringattn.kernels.attention_tiles import (
    aligned,
    compiled_with,
    describable,
    grid_of,
    logit_scales,
    section_for,
    state_beside,
    strides_of,
)
from ringattn.kernels.configs import Configs
from ringattn.kernels.launch import Config, LaunchCall, Table

VERSIONS = {90: ((3, 6), (3, 9)), 100: ((3, 6), (3, 7))}
"""The first and the last supported version of Triton, by architecture."""

GLUON = "triton.experimental.gluon.language.nvidia.hopper"
DIMS = 64, 128, 256
"""The supported head dimensions of calls whose keys and values have the same."""

WIDE_KEYS = 192, 128
"""The head dimensions of keys and values in latent attention (DeepSeek V2, V3 and Kimi); on sm_90, without options."""

OPTIONS = "softcap", "alibi_slopes"
"""The supported options of the softmax."""

CONFIG = Config(128, 128, 4, 2, "gluon")
"""Two warpgroups of `num_warps` warps with 64 query rows each, and buffers for two blocks of K and two of V."""

TENSOR_MEMORY = (100,)
"""The architectures whose kernels have scores and sums in tensor memory."""

TENSOR_MEMORY_CONFIGS = Configs(
    Config(256, 128, 4, 2, "gluon"), Config(128, 128, 4, 2, "gluon"), Config(128, 128, 4, 2, "gluon"),
)  # fmt: skip
"""The block sizes on these. In forward, each of two warpgroups has 128 query rows; in backward, all 128 rows of a block
and half of the rows of the other side. There is no kernel that adds to dQ."""

GRAD_Q = {
    64: Config(128, 128, 4, 2, "gluon"), 128: Config(128, 128, 4, 2, "gluon"), 192: Config(128, 64, 4, 2, "gluon"),
    256: Config(128, 32, 4, 2, "gluon"),
}  # fmt: skip
"""Blocks of 128 queries, 64 for each consumer, and buffers for two blocks of K and two of V, by dimension of keys."""

GRAD_KV = {
    64: Config(64, 128, 4, 2, "gluon"), 128: Config(64, 128, 4, 2, "gluon"), 192: Config(32, 128, 4, 4, "gluon"),
    256: Config(64, 64, 4, 2, "gluon"),
}  # fmt: skip
"""Blocks of 128 keys, 64 for each consumer, and buffers for two blocks of q and two of dout, by dimension of keys.

With dimension 128, dK and dV take 128 registers of each thread of a consumer, which leaves room for S and dP of 64
queries. With keys of 192 and values of 128 they take 160, which leaves room for 32 queries. With dimension 256, one
gradient takes 128, and each consumer computes one, of all 64 keys of a block. The kernel that also adds to dQ has the
same blocks up to dimension 128.
"""


def gluon_configs(dim: int, options: Sequence[str] = (), arch: int = 90) -> Configs:
    """Return the block sizes of the kernels for a supported dimension of keys and the call's options, by name.

    With ALiBi, and in backward with either option, a block has fewer rows of the other side, so that no loop spills.
    """
    if arch in TENSOR_MEMORY:
        return TENSOR_MEMORY_CONFIGS
    forward, grad_q, grad_kv = CONFIG, GRAD_Q[dim], GRAD_KV[dim]
    if dim == 256:
        forward = forward._replace(block_n=64)
    elif "alibi_slopes" in options:
        forward = forward._replace(block_n=64, num_stages=4)
    if options and dim < 256:
        grad_q = grad_q._replace(block_n=64, num_stages=4)
    if options and dim > 64:
        grad_kv = grad_kv._replace(block_m=32, num_stages=4)
    return Configs(forward, grad_q, grad_kv, grad_kv)


@cache
def gluon_missing(arch: int) -> str | None:
    """Return why a GPU of architecture `arch` (10 * major + minor) cannot run the kernels with this Triton, or None."""
    if arch not in VERSIONS:
        return f"the Gluon kernel is for sm_90 and sm_100, not sm_{arch}"
    versions = VERSIONS[arch]
    first, last = (".".join(map(str, version)) for version in versions)
    if not versions[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= versions[1]:
        return f"the Gluon kernel needs Triton {first} to {last}, not {triton.__version__}"
    try:
        spec = find_spec(GLUON)
    except ModuleNotFoundError:
        spec = None
    return None if spec else f"Triton {triton.__version__} has no {GLUON}; install a build that has it"


def gluon_lacks(arch: int, dtype: torch.dtype, dims: tuple[int, int], options: Sequence[str] = ()) -> str | None:
    """Return why the kernels do not support a call on architecture `arch`, or None.

    `dims`: the head dimensions of keys and values. `options`: the softmax options that the call uses, by name.
    """
    if missing := gluon_missing(arch):
        return missing
    if lacking := [name for name in options if name not in OPTIONS]:
        return f"the Gluon kernel has no {lacking[0]}"
    if arch in TENSOR_MEMORY and (options or max(dims) > 128):
        return f"the Gluon kernel for sm_{arch} takes no options, and head dimensions of 64 or 128"
    if dims == WIDE_KEYS and options:
        return f"the Gluon kernel has no {options[0]} for keys of 192"
    if max(dims) > 128 and "alibi_slopes" in options:
        return f"the Gluon kernel has alibi_slopes for head dimensions to 128, not {max(dims)}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the Gluon kernel takes float16 and bfloat16, not {dtype}"
    if dims != WIDE_KEYS and (dims[0] != dims[1] or dims[0] not in DIMS):
        return (
            "the Gluon kernel takes head dimensions of 64, 128 or 256, equal for both, or keys of 192 with values of "
            f"128, not {dims[0]} and {dims[1]}"
        )
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
    return unreadable(*rows)


def unreadable(*rows: Tensor) -> str | None:
    """Return why the kernels cannot read the rows of these tensors (rows, batch, heads, dim), or None."""
    if describable(*rows):
        return None
    return (
        "the Gluon kernel takes float16 and bfloat16 with bases and strides that are multiples of 16 bytes, not "
        + ", ".join(f"{x.dtype} of strides {x.stride()}" for x in rows)
    )


def gluon_adds(dq: Tensor, arch: int, options: Sequence[str] = ()) -> str | None:
    """Return why `grad_kv_gluon` cannot add to dQ (rows, batch, heads, dim) in a call with these options, or None."""
    if arch in TENSOR_MEMORY:
        return f"the Gluon kernel that adds to dQ is for sm_90, not sm_{arch}"
    if options or dq.shape[3] > 128:
        return "the Gluon kernel that adds to dQ takes no options, and head dimensions of 64 or 128"
    if dq.dtype == torch.float32 and dq.stride(3) == 1 and aligned(dq):
        return None
    return (
        "the Gluon kernel adds to a dQ of float32 with a base and strides that are multiples of 16 bytes, not "
        f"{dq.dtype} of strides {dq.stride()}"
    )


def forward_gluon(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor, table: Table, config: Config, *,
    result: Tensor | None = None, sinks: Tensor | None = None, **options: Unpack[CallOptions],
) -> LaunchCall:  # fmt: skip
    """Return the launch that updates the softmax state (`out`, `lse`) with the table's pairs, in place.

    Arguments are those of `attention_forward.forward`; `gluon_takes` must accept them. `config` is like `CONFIG`, or
    `TENSOR_MEMORY_CONFIGS.forward`, whose number of query rows selects the kernel for sm_100.
    With a program per multiprocessor, a program takes the next free block when it has loaded all rows of its current
    block. While it still sums the current block, it loads the first rows of the next block and prefetches the next
    block's state into L2. The launch allocates 384 bytes per program for descriptors with Triton's allocator.
    Raises ValueError if both `out` and `result` are None, and for dropout.
    """
    _, strides = state_beside(out, result, lse)
    counter, section = _counter(q), section_for(table, k, v, sharing=options.get("group", 1))
    tables, scales = _tables(table, options), _scales(options)
    narrow = config.block_m < TENSOR_MEMORY_CONFIGS.forward.block_m
    if narrow:
        from ringattn.kernels.attention_gluon_forward import forward_kernel as kernel
    else:
        from ringattn.kernels.attention_tcgen05_forward import tcgen05_forward_kernel as kernel

        tables, scales = tables[:2], scales[:1]
    args = (
        q, k, v, out, lse, result, sinks, *tables, counter, *_sizes(table, q, section, options), *scales,
        *strides_of(q, k, v), *strides, *lse.stride(),
    )  # fmt: skip
    # With wider keys two buffers for Q do not fit.
    meta = _meta(q, v, config) | {"RAW_PEAK": peaks_raw(options), "Q_SLOTS": 2 if narrow and q.shape[3] <= 128 else 1}
    grid = grid_of(table, q.shape[1], options.get("programs"))
    return LaunchCall(kernel, grid, args, meta, persistent=True, counter=counter)


def grad_q_gluon(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dq: Tensor | None, table: Table,
    config: Config, *, result: Tensor | None = None, arch: int = 90, **options: Unpack[CallOptions],
) -> LaunchCall:  # fmt: skip
    """Return the launch that adds the gradient of the table's pairs to `dq`, shaped like q in float32.

    Arguments are those of `attention_backward.grad_q`; `gluon_takes` must accept them. `config` is one of `GRAD_Q`, or
    the one of `TENSOR_MEMORY_CONFIGS`; `arch` selects the kernel. Programs take free blocks as in `forward_gluon`. The
    launch allocates 512 bytes per program for descriptors with Triton's allocator.
    Raises ValueError if both `dq` and `result` are None, and for dropout.
    """
    _, strides = state_beside(dq, result, lse)
    counter, section = _counter(q), section_for(table, k, v, sharing=options.get("group", 1))
    tables, scales, meta = _tables(table, options), _scales(options), _meta(q, v, config)
    if arch in TENSOR_MEMORY:
        from ringattn.kernels.attention_tcgen05_backward import tcgen05_grad_q_kernel as kernel

        tables, scales = tables[:2], scales[:1]
    else:
        from ringattn.kernels.attention_gluon_grad_q import grad_q_kernel as kernel

        meta |= {"RAW_BIAS": adds_raw(factor_of(options))}
    args = (
        q, k, v, dout, lse, delta, dq, result, *tables, counter, *_sizes(table, q, section, options),
        options["scale"], *scales, *strides_of(q, k, v, dout), *strides, *lse.stride(), *delta.stride(),
    )  # fmt: skip
    grid = grid_of(table, q.shape[1], options.get("programs"))
    return LaunchCall(kernel, grid, args, meta, persistent=True, counter=counter)


def grad_kv_gluon(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor | None, dv: Tensor | None,
    table: Table, config: Config, *, results: tuple[Tensor, Tensor] | None = None, dq: Tensor | None = None,
    arch: int = 90, **options: Unpack[CallOptions],
) -> LaunchCall:  # fmt: skip
    """Return the launch that adds the gradients of the table's pairs to `dk` and `dv`, shaped like k and v in float32.

    Arguments are those of `attention_backward.grad_kv`. `gluon_takes` must accept them, and `gluon_adds` must accept
    `dq`. `config` is one of `GRAD_KV`, or the one of `TENSOR_MEMORY_CONFIGS`; `arch` selects the kernel. Programs take
    free blocks as in `forward_gluon`. The launch allocates 512 bytes per program for descriptors with Triton's
    allocator, and 640 with `dq`.
    Raises ValueError if `results` is None and `dk` or `dv` is None, and for dropout.
    """
    dk_result, dv_result = results or (None, None)
    _, dk_strides = state_beside(dk, dk_result, lse)
    _, dv_strides = state_beside(dv, dv_result, lse)
    counter, section = _counter(q), section_for(table, q, dout, reads=options.get("group", 1))
    tables, scales, meta = _tables(table, options), _scales(options), _meta(q, v, config)
    of_dq: tuple[Tensor, ...] = ()
    dq_strides: tuple[int, ...] = ()
    if arch in TENSOR_MEMORY:
        from ringattn.kernels.attention_tcgen05_backward import tcgen05_grad_kv_kernel as kernel

        tables, scales = tables[:2], scales[:1]
    elif dq is None:
        from ringattn.kernels.attention_gluon_grad_kv import grad_kv_kernel as kernel

        # Both gradients of 64 keys do not fit into the registers of a consumer at dimension 256.
        meta |= {"RAW_BIAS": adds_raw(factor_of(options)), "APART": v.shape[3] > 128}
    else:
        from ringattn.kernels.attention_gluon_grad_all import grad_all_kernel as kernel

        tables, scales, of_dq, dq_strides = tables[:2], scales[:1], (dq,), dq.stride()[:3]
    args = (
        q, k, v, dout, lse, delta, *of_dq, dk, dv, dk_result, dv_result, *tables, counter,
        *_sizes(table, q, section, options), options["scale"], *scales, *strides_of(q, k, v, dout), *dq_strides,
        *dk_strides[:3], *dv_strides[:3], *dk_strides[3:], *dv_strides[3:], *lse.stride(), *delta.stride(),
    )  # fmt: skip
    grid = grid_of(table, q.shape[1], options.get("programs"))
    return LaunchCall(kernel, grid, args, meta, persistent=True, counter=counter)


def _counter(like: Tensor) -> Tensor:
    """Return the counter from which programs take items; see `LaunchCall.counter`."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def _tables(table: Table, options: CallOptions) -> tuple[Tensor | None, ...]:
    """Return the arguments from `blocks` to `slopes`, which all three kernels have. Raises ValueError for dropout."""
    if options.get("dropout") is not None:
        raise ValueError("the Gluon kernels have no dropout; use another form")
    return table.blocks, table.entries, table.places, options.get("slopes")


def _sizes(table: Table, q: Tensor, section: int, options: CallOptions) -> tuple[int, ...]:
    """Return the arguments from `block_count` to `first_kv_head`, which all three kernels have."""
    group, first_kv_head = options.get("group", 1), options.get("first_kv_head", 0)
    return table.blocks.shape[0], table.slots, q.shape[1], section, group, first_kv_head


def _scales(options: CallOptions) -> tuple[float | None, ...]:
    """Return the factors of `logits`. Without softcap the second is None, and the kernel has no tanh."""
    in_scale, out_scale = logit_scales(options["scale"], options.get("softcap"))
    return in_scale, None if options.get("softcap") is None else out_scale


def _meta(q: Tensor, v: Tensor, config: Config) -> dict[str, Any]:
    """Return the compile-time constants of all three kernels."""
    return {
        "D_K": q.shape[3], "D_V": v.shape[3], "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "SLOTS": config.num_stages, **compiled_with(config),
    }  # fmt: skip
