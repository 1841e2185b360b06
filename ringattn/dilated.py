"""Dilated attention over a ring: one exact call, or the variants of torchscale, which combine several calls.

Guarantees: exact gradients take a single pass over all branches; the variants compute what torchscale's published
algorithm computes, and refuse the cases in which that algorithm moves rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ringattn.attention import agreed, apply_attention, checked_call
from ringattn.core.dilation import Dilated, head_offsets
from ringattn.engine.base import accumulator_dtype
from ringattn.errors import InputError
from ringattn.options import AttentionOptions
from ringattn.runtime.call import AttentionCall
from ringattn.runtime.runtime import Runtime
from ringattn.sequence import Sequence

GRADIENTS, TAILS = ("exact", "detached"), ("ragged", "zero_pad")
BranchGradient = Literal["exact", "detached"]
Tail = Literal["ragged", "zero_pad"]

REFUSED = {name: f"dilated attention takes no {name}; leave it out" for name in ("window", "mask")}
"""Options of attention that dilated attention does not have."""


def attend_dilated(
    ring: Runtime,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: Sequence,
    dilated: Dilated,
    options: AttentionOptions,
    grad: BranchGradient = "exact",
    tail: Tail = "ragged",
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of dilated attention; see `Ring.dilated_attention`."""
    inputs = {"q": q, "k": k, "v": v, "sinks": options.sinks}

    def attend_to(branches: Dilated) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of these branches, with the zero keys of the variant."""

        def describe() -> AttentionCall:
            call = checked_call(ring, q, k, v, seq, None, options, branches)
            _check_variant(options, dilated, seq, grad, tail)
            return call

        call = agreed(ring, describe, options.sinks, inputs, f"grad {grad}", f"tail {tail}")
        out, lse = apply_attention(ring, call, q, k, v, options.sinks)
        if tail == "zero_pad" and not branches.causal:
            out, lse = _with_zero_keys(out, lse, zero_keys(branches, seq, q.shape[2], k.shape[2]))
        return out, lse

    if isinstance(grad, str) and grad == "detached":
        return _mixed([attend_to(branch) for branch in dilated.branches()])
    return attend_to(dilated)


def zero_keys(pairs: Dilated, seq: Sequence, q_heads: int, kv_heads: int) -> Tensor:
    """Return how many of torchscale's zero keys each of this rank's queries attends to: (q_heads, tokens), int64.

    torchscale pads every segment to the full segment length (or to the length of a shorter sequence), and then to a
    multiple of the rate (torchscale at 4d1e0e8, dilated_attention.py: `gathering`, `dense_to_sparse`).
    """
    positions = seq.positions()
    bounds = torch.tensor(_bounds(seq), device=positions.device)
    document = torch.searchsorted(bounds, positions, right=True) - 1
    start, stop = bounds[document], bounds[document + 1]
    counts = torch.zeros(q_heads, len(positions), dtype=torch.int64, device=positions.device)
    for length, rate in zip(pairs.segment_lengths, pairs.dilation_rates, strict=True):
        width = (stop - start).clamp(max=length)
        begin = start + (positions - start) // width * width
        size = torch.minimum(stop, begin + width) - begin
        for head, offset in enumerate(head_offsets(pairs.offset, rate, q_heads, kv_heads, pairs.layer or 0)):
            real_keys = (size - offset + rate - 1) // rate
            kept = (positions - begin) % rate == offset
            counts[head] += torch.where(kept, (width + rate - 1) // rate - real_keys, 0)
    return counts


def _bounds(seq: Sequence) -> tuple[int, ...]:
    return seq.documents or (0, seq.length)


def _check_variant(options: AttentionOptions, dilated: Dilated, seq: Sequence, grad: str, tail: str) -> None:
    """Raise InputError unless `grad` and `tail` are known and can be combined with the branches, options and `seq`."""
    for name, value, names in (("grad", grad, GRADIENTS), ("tail", tail, TAILS)):
        if value not in names:
            raise InputError(f"{name}={value!r} is not known; choose one of {', '.join(names)}")
    if grad == "detached" and options.sinks is not None:
        raise InputError("grad='detached' takes no sinks, which torchscale does not have; use grad='exact'")
    if tail == "zero_pad":
        if options.alibi_slopes is not None:
            raise InputError(
                "tail='zero_pad' takes no alibi_slopes: torchscale's zero keys have no positions; use tail='ragged'"
            )
        longest = max(stop - start for start, stop in pairwise(_bounds(seq)))
        for length, rate in zip(dilated.segment_lengths, dilated.dilation_rates, strict=True):
            if length % rate and length < longest:
                raise InputError(
                    f"tail='zero_pad' with segments of {length} and rate {rate}: torchscale fills segments up to a "
                    f"multiple of {rate} and then writes later ones back to other positions; use tail='ragged', or "
                    f"segments of a multiple of {rate}"
                )


def _with_zero_keys(out: Tensor, lse: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` with `count` additional keys of logit 0 and value 0."""
    count = count.to(lse.device, lse.dtype)
    more = count > 0
    before = torch.where(more, lse, 0.0)
    after = torch.logaddexp(before, torch.where(more, count, 1.0).log())
    share = torch.where(more, (before - after).exp(), 1.0).transpose(1, 2)[..., None]
    return (out.to(lse.dtype) * share).to(out.dtype), torch.where(more, after, lse)


def _mixed(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the sum of the branches weighted by their softmax denominators. The weights and lse have no gradient."""
    outs, lses = zip(*parts, strict=True)
    every = torch.stack(lses).detach()
    lse = every.logsumexp(0)
    shares = torch.where(lse.isneginf(), 0.0, (every - lse).exp()).transpose(2, 3)[..., None]
    dtype = accumulator_dtype(outs[0].dtype)
    mixed = sum(out.to(dtype) * share for out, share in zip(outs, shares, strict=True))
    return mixed.to(outs[0].dtype), lse
