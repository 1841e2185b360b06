"""Dilated attention over a ring: one exact call, or torchscale's variants put together from several.

Guarantees: with exact gradients one pass over all branches, merged as it goes; the variants give what torchscale's
published algorithm gives, and refuse where that moves rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from ringattn.attention import agreed, apply_attention, check_tensors, checked_call
from ringattn.core.dilation import Dilated
from ringattn.core.presets import Offset, head_offsets
from ringattn.engine.softmax_state import accumulator_dtype
from ringattn.errors import InputError
from ringattn.runtime.runtime import AttentionCall, Runtime
from ringattn.runtime.spec import AttentionSpec, DropoutOptions
from ringattn.sequence import Sequence

GRADIENTS, TAILS = ("exact", "detached"), ("ragged", "zero_pad")
BranchGradient = Literal["exact", "detached"]
Tail = Literal["ragged", "zero_pad"]


def dilated_attention(
    ring: Runtime,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: Sequence,
    *,
    segment_lengths: Many[int],
    dilation_rates: Many[int],
    causal: bool = False,
    offset: Offset | str = "mod",
    grad: BranchGradient = "exact",
    tail: Tail = "ragged",
    layer: int | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **softmax: Unpack[DropoutOptions],
) -> Any:
    """LongNet's dilated attention (arXiv 2307.02486), exact: one softmax over the keys of all branches; differentiable.

    Branch i cuts the sequence, or each document, into segments of `segment_lengths[i]` tokens; in each a head's queries
    meet the keys at its `offset` modulo `dilation_rates[i]`. A pair that several branches have counts once for each. A
    collective call.

    Args:
        ring: The ring; as a method, `Ring.dilated_attention`, the ring itself.
        q: Queries, this rank's shard of `seq`: float64, float32, float16 or bfloat16.
        k: Keys, this rank's shard of `seq`, in q's dtype. q_heads is a multiple of kv_heads.
        v: Values, like k.
        seq: The sequence, made by this ring.
        segment_lengths: Tokens of a segment, for each branch; positive.
        dilation_rates: Of so many tokens a head keeps one, for each branch; positive.
        causal: A query meets the keys at its position and before.
        offset: Which of the tokens a head keeps. mod: head % rate (LongNet). block: runs of ceil(heads / rate) heads
            share one (torchscale). kv_head: K/V head % rate. layer_rotated: (head + layer * heads) % rate.
        grad: exact; detached takes the branches' shares as constants, as torchscale does, and its lse has no gradient.
        tail: ragged; zero_pad lets queries meet the zero keys with which torchscale fills short segments.
        layer: Index of the layer from 0 on, with offset="layer_rotated"; None otherwise.
        sinks: Logits, one for each query head, that take weight and give no value; with grad="exact". None: no sinks.
        return_lse: Also return lse.
        scale: Factor of the scores, any finite number. None: 1 / sqrt(d_k).
        softcap: Scores become softcap * tanh(score / softcap). None: no cap.
        alibi_slopes: As for `attention`; distances count tokens, whatever the rate. With tail="ragged". None: no bias.
        dropout_p: As for `attention`; a pair that several branches have is dropped from all of them, or from none.
        dropout_seed: As for `attention`.
        schedule: How blocks travel, see docs/schedules.md. auto: the fastest as predicted.

    Shape:
        q: (batch, tokens, q_heads, d_k)
        k: (batch, tokens, kv_heads, d_k)
        v: (batch, tokens, kv_heads, d_v)
        sinks: (q_heads,)
        alibi_slopes: (q_heads,)
        out: (batch, tokens, q_heads, d_v)
        lse: (batch, q_heads, tokens)

    Returns:
        out in q's dtype; with `return_lse` (out, lse), as `attention` returns them.

    Raises:
        InputError: A tensor, a branch or an option is wrong, on any rank; every rank raises.
        UnsupportedError: The engine does not compute this call, or a tensor is a DTensor.
        DisagreementError: The ranks do not make the same call, or some need gradients and another uses torch.no_grad.
        ClosedError: The ring was closed or has failed.
        TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
        OutOfMemoryError: A rank had no memory for the pass.

    Example:
        out = ring.dilated_attention(q, k, v, seq, segment_lengths=[2048, 8192], dilation_rates=[1, 4], causal=True)
    """
    chosen: list[AttentionSpec] = []

    def attended(branch: int | None) -> tuple[Tensor, Tensor]:
        """The attention of one branch, or of all: (out, lse), zero keys and all."""

        def described() -> AttentionCall:
            check_tensors(ring, q, k, v, seq, None, sinks)
            spec = AttentionSpec.dilated(
                segment_lengths, dilation_rates, causal, offset, layer, sinks=sinks, **softmax
            )  # fmt: skip
            assert isinstance(spec.mask, Dilated)
            _check_variant(spec, spec.mask, seq, grad, tail)
            chosen[:] = [spec if branch is None else replace(spec, mask=spec.mask.branches()[branch])]
            return checked_call(ring, q, k, v, seq, None, chosen[0])

        inputs = {"q": q, "k": k, "v": v, "sinks": sinks}
        call = agreed(ring, described, sinks, inputs, f"grad {grad}", f"tail {tail}")
        out, lse = apply_attention(ring, call, q, k, v, sinks)
        if tail == "zero_pad" and not causal:
            assert isinstance(chosen[0].mask, Dilated)
            out, lse = _with_zero_keys(out, lse, zero_keys(chosen[0].mask, seq, q.shape[2], k.shape[2]))
        return out, lse

    if isinstance(grad, str) and grad == "detached":
        first = attended(0)  # which refuses what is no list of branches
        out, lse = _mixed([first, *(attended(branch) for branch in range(1, len(segment_lengths)))])
    else:
        out, lse = attended(None)
    return (out, lse) if return_lse else out


def zero_keys(pairs: Dilated, seq: Sequence, q_heads: int, kv_heads: int) -> Tensor:
    """How many zero keys torchscale lets this rank's queries see: (q_heads, tokens), int64.

    It fills every segment up to the full length, or to that of a shorter sequence, and from there up to a multiple of
    the rate (torchscale at 4d1e0e8, dilated_attention.py: `gathering`, `dense_to_sparse`).
    """
    positions, bounds = seq.positions(), torch.tensor(_bounds(seq))
    document = torch.searchsorted(bounds, positions, right=True) - 1
    start, stop = bounds[document], bounds[document + 1]
    found = torch.zeros(q_heads, len(positions), dtype=torch.int64)
    for length, rate in zip(pairs.segment_lengths, pairs.dilation_rates, strict=True):
        width = (stop - start).clamp(max=length)
        begin = start + (positions - start) // width * width
        size = torch.minimum(stop, begin + width) - begin
        for head, offset in enumerate(head_offsets(pairs.offset, rate, q_heads, kv_heads, pairs.layer or 0)):
            held = (size - offset + rate - 1) // rate
            kept = (positions - begin) % rate == offset
            found[head] += torch.where(kept, (width + rate - 1) // rate - held, 0)
    return found


def _bounds(seq: Sequence) -> tuple[int, ...]:
    return seq.documents or (0, seq.length)


def _check_variant(spec: AttentionSpec, pairs: Dilated, seq: Sequence, grad: str, tail: str) -> None:
    for name, value, known in (("grad", grad, GRADIENTS), ("tail", tail, TAILS)):
        if value not in known:
            raise InputError(f"{name}={value!r} is not known; choose one of {', '.join(known)}")
    if grad == "detached" and spec.sinks is not None:
        raise InputError("grad='detached' takes no sinks, which torchscale does not have; use grad='exact'")
    if tail == "zero_pad":
        if spec.alibi_slopes is not None:
            raise InputError(
                "tail='zero_pad' takes no alibi_slopes: torchscale's zero keys have no positions; use tail='ragged'"
            )
        longest = max(stop - start for start, stop in pairwise(_bounds(seq)))
        for length, rate in zip(pairs.segment_lengths, pairs.dilation_rates, strict=True):
            if length % rate and length < longest:
                raise InputError(
                    f"tail='zero_pad' with segments of {length} and rate {rate}: torchscale fills segments up to a "
                    f"multiple of {rate} and then writes later ones back to other positions; use tail='ragged', or "
                    f"segments of a multiple of {rate}"
                )


def _with_zero_keys(out: Tensor, lse: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` after `count` more keys with logit 0 and value 0."""
    count = count.to(lse.device, lse.dtype)
    more = count > 0
    before = torch.where(more, lse, 0.0)
    after = torch.logaddexp(before, torch.where(more, count, 1.0).log())
    share = torch.where(more, (before - after).exp(), 1.0).transpose(1, 2)[..., None]
    return (out.to(lse.dtype) * share).to(out.dtype), torch.where(more, after, lse)


def _mixed(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The branches weighted by their softmax denominators, as constants; an lse that carries no gradient."""
    outs, lses = zip(*parts, strict=True)
    every = torch.stack(lses).detach()
    lse = every.logsumexp(0)
    shares = torch.where(lse.isneginf(), 0.0, (every - lse).exp()).transpose(2, 3)[..., None]
    dtype = accumulator_dtype(outs[0].dtype)
    mixed = sum(out.to(dtype) * share for out, share in zip(outs, shares, strict=True))
    return mixed.to(outs[0].dtype), lse
