"""The backward ring step in two launches, dQ by query blocks and dK, dV by key blocks, or in one by key blocks.

Guarantees, for float32, float16 and bfloat16 inputs, weights recomputed from the merged lse, float32 gradients that are
added to what is there (so that dK and dV travel and grow), query heads of a group summed inside the launch, and nothing
added for rows that see no key. Two launches use no atomics: the same bits for the same tables. One launch makes five
matrix products instead of seven and adds dQ atomically, in an order that differs from run to run.
dQ needs no gradient that travels: launched first, it hides their arrival. Of a pass, each gradient begins without
reading a state and ends by writing the result in the dtype of its tensor: the flags of each block say which.
Independent of positions, ranks, steps and of how lse and delta were merged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ringattn.kernels.attention_alibi import adds_raw
from ringattn.kernels.attention_backward_kernels import grad_kv_kernel, grad_q_kernel
from ringattn.kernels.attention_dropout import Dropout, arguments
from ringattn.kernels.attention_tiles import (
    compiled_with,
    grid_of,
    logit_scales,
    section_for,
    state_beside,
    strides_of,
)
from ringattn.kernels.launch_call import Config, LaunchCall, Table, padded


def grad_q(
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
    softcap: float | None = None,
    group: int = 1,
    first_kv_head: int = 0,
    result: Tensor | None = None,
    slopes: Tensor | None = None,
    dropout: Dropout | None = None,
    programs: int | None = None,
) -> LaunchCall:
    """The launch that adds to `dq`, float32 like q, what the table's pairs give.

    `q`, `k`, `v`, `dout`: (rows, batch, heads, dim), any strides with a contiguous last dimension, float32 or half.
    `lse`, `delta`: (batch, query heads, rows) float32 over all keys, delta = sum(dout * out) - dlse. The table and the
    other keywords are those of `attention_forward.forward`. A FIRST block does not read `dq`; a LAST block writes the
    sum to `result`, like `dq` in the dtype of q, and leaves `dq` alone. Without `result` no block may be LAST; `dq` may
    be None where all blocks are both. The form "descriptors" needs `describable` k and v.
    Raises ValueError without `dq` and `result`.
    """
    # Where no block reads or writes dq, its argument is a stand-in that is never touched.
    state, strides = state_beside(dq, result, lse)
    in_scale, out_scale = logit_scales(scale, softcap)
    args = (
        q, k, v, dout, lse, delta, state, result, table.blocks, table.entries, table.places, slopes,
        table.positions, *arguments(dropout), table.blocks.shape[0], table.slots, q.shape[1],
        section_for(table, k, v, sharing=group), group, first_kv_head, scale, in_scale, out_scale,
        *strides_of(q, k, v, dout), *strides, *lse.stride(), *delta.stride(),
    )  # fmt: skip
    meta = _meta(q, v, config, scale, softcap, table)
    return LaunchCall(grad_q_kernel, grid_of(table, q.shape[1], programs), args, meta, seed_at=13 if dropout else None)


def grad_kv(
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
    softcap: float | None = None,
    group: int = 1,
    first_kv_head: int = 0,
    results: tuple[Tensor, Tensor] | None = None,
    slopes: Tensor | None = None,
    dropout: Dropout | None = None,
    programs: int | None = None,
) -> LaunchCall:
    """The launch that adds to `dk` and `dv`, float32 like k and v, what the table's pairs give.

    As `grad_q`, but the table has key blocks of `config.block_n` rows and entries in blocks of `config.block_m`. Its
    flags are of dk and dv: a FIRST block does not read them, a LAST block writes the sums to `results`, like dk and dv
    in the dtype of k, and leaves `dk` and `dv` alone; a block without an entry does so with what is there, or with 0.
    The form "descriptors" needs `describable` q and dout.
    """
    facts = _Facts(scale, softcap, group, first_kv_head, slopes, dropout, programs)
    return _by_key((q, k, v, dout, lse, delta), None, (dk, dv), results or (None, None), table, config, facts)


def grad_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    table: Table,
    config: Config,
    *,
    scale: float,
    softcap: float | None = None,
    group: int = 1,
    first_kv_head: int = 0,
    results: tuple[Tensor, Tensor] | None = None,
    slopes: Tensor | None = None,
    dropout: Dropout | None = None,
    programs: int | None = None,
) -> LaunchCall:
    """The launch that adds to `dq`, `dk` and `dv` what the table's pairs give; dq by float32 atomic additions.

    As `grad_kv`, and `dq` like q in float32. The bits of `dq` depend on the order in which programs end.
    """
    facts = _Facts(scale, softcap, group, first_kv_head, slopes, dropout, programs)
    return _by_key((q, k, v, dout, lse, delta), dq, (dk, dv), results or (None, None), table, config, facts)


class _Facts(NamedTuple):
    """What both launches by key blocks are told beside tensors."""

    scale: float
    softcap: float | None
    group: int
    first_kv_head: int
    slopes: Tensor | None
    dropout: Dropout | None
    programs: int | None


def _by_key(
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    dq: Tensor | None,
    sums: tuple[Tensor | None, Tensor | None],
    results: tuple[Tensor | None, Tensor | None],
    table: Table,
    config: Config,
    facts: _Facts,
) -> LaunchCall:
    """The launch of `grad_kv`, or with `dq` of `grad_fused`; `operands` as there. `sums`, `results`: of dK and dV."""
    q, k, v, dout, lse, delta = operands
    # As in `grad_q`: where no block reads or writes dk and dv, their arguments are stand-ins.
    (dk, of_dk), (dv, of_dv) = (state_beside(*pair, lse) for pair in zip(sums, results, strict=True))
    in_scale, out_scale = logit_scales(facts.scale, facts.softcap)
    args = (
        *operands, dq, dk, dv, *results, table.blocks, table.entries, table.places, facts.slopes, table.positions,
        *arguments(facts.dropout), table.blocks.shape[0], table.slots, q.shape[1],
        section_for(table, q, dout, reads=facts.group), facts.group, facts.first_kv_head, facts.scale,
        in_scale, out_scale,
        # Without dq its strides are not read; those of q fill their place.
        *strides_of(q, k, v, dout, q if dq is None else dq), *of_dk, *of_dv, *lse.stride(), *delta.stride(),
    )  # fmt: skip
    # As many numbers of rows at once as there are threads.
    copies = max(1, 32 * config.num_warps // config.block_m)
    meta = _meta(q, v, config, facts.scale, facts.softcap, table) | {"COPIES": copies}
    seed_at = 16 if facts.dropout else None
    return LaunchCall(grad_kv_kernel, grid_of(table, q.shape[1], facts.programs), args, meta, seed_at=seed_at)


def _meta(q: Tensor, v: Tensor, config: Config, scale: float, softcap: float | None, table: Table) -> dict[str, Any]:
    """The compile-time constants of both kernels."""
    d_k, d_v, factors = q.shape[3], v.shape[3], logit_scales(scale, softcap)
    return {
        "D_K": d_k, "D_V": d_v, "PAD_K": padded(d_k), "PAD_V": padded(d_v), "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "SOFTCAP": softcap is not None, "DESCRIBED": config.form != "pointers",
        "RAW_BIAS": adds_raw(factors[softcap is not None]), "TOGETHER": table.together,
        **compiled_with(config),
    }  # fmt: skip
