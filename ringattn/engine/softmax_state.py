"""The state of the online softmax and its merge.

The state is `(out, lse)`: `out` (rows, batch, heads, dim) is normalised over the keys seen so far and `lse` (batch,
heads, rows) is the natural log of their summed exponentials, both in the accumulator dtype (float32; float64 for
float64 inputs). The identity is (0, -inf); the merge is associative and commutative up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax states and gradients of `dtype` inputs are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def identity(rows: int, batch: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """A state that has seen no key, in the accumulator dtype of `like`.

    Returns `out` as a (rows, batch, heads, dim) view of a contiguous (batch, rows, heads, dim) tensor, and `lse`
    (batch, heads, rows).
    """
    dtype = accumulator_dtype(like.dtype)
    out = torch.zeros(batch, rows, heads, dim, dtype=dtype, device=like.device)
    lse = torch.full((batch, heads, rows), NEG_INF, dtype=dtype, device=like.device)
    return out.transpose(0, 1), lse


def uninitialized(rows: int, batch: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for a state, laid out as that of `identity`."""
    dtype = accumulator_dtype(like.dtype)
    out = torch.empty(batch, rows, heads, dim, dtype=dtype, device=like.device)
    return out.transpose(0, 1), torch.empty((batch, heads, rows), dtype=dtype, device=like.device)


def begin_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, sinks: Tensor | None) -> None:
    """Make `(out, lse)`, which hold nothing yet, the state over the first keys, and over `sinks` (heads,) if any."""
    if sinks is None:
        out.copy_(part_out)
        lse.copy_(part_lse)
        return
    torch.logaddexp(sinks.to(lse.dtype)[None, :, None], part_lse, out=lse)
    torch.mul(part_out, by_row(weights(part_lse, lse)), out=out)


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge the state over further keys into `(out, lse)`, in place.

    `out`, `part_out`: (rows, batch, heads, dim); `lse`, `part_lse`: (batch, heads, rows). A row that neither has seen
    stays (0, -inf).
    """
    merged = torch.logaddexp(lse, part_lse)
    # Finite where neither has seen a key, so that both shares are exp(-inf) = 0 there.
    whole = merged.clamp_min(torch.finfo(merged.dtype).min)
    keep, add = (lse - whole).exp_(), (part_lse - whole).exp_()
    out.mul_(by_row(keep)).addcmul_(part_out, by_row(add))
    lse.copy_(merged)


def weights(lse: Tensor, merged: Tensor) -> Tensor:
    """exp(lse - merged), 0 where nothing was seen: the share of one state in the merged one."""
    return torch.where(lse == NEG_INF, 0.0, torch.exp(lse - merged))


def by_row(per_row: Tensor) -> Tensor:
    """(batch, heads, rows) as (rows, batch, heads, 1), to scale a row-first tensor."""
    return per_row.permute(2, 0, 1).unsqueeze(-1)
