"""The reference of the fuzzer: dense attention in float64 on one process, written from the definitions alone.

Which pairs meet is a tensor of counts, a softmax runs over them, and autograd gives the gradients.
Guarantees: nothing of ringattn is imported. Memory grows with tokens squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# --- who owns which token --------------------------------------------------------------------------------------------


def shards(layout: str, length: int, ranks: int, documents: Sequence[int] | None) -> list[Tensor]:
    """The positions of each rank, in the order of its rows.

    contiguous: one chunk a rank. zigzag: two chunks a rank, r and 2 * ranks - 1 - r. striped: every ranks-th token.
    per_document: zigzag in each document, where the chunks that are a token longer go on where the last document's
    ended; elsewhere the first chunks are.
    """
    if layout == "striped":
        return [torch.arange(length)[rank::ranks] for rank in range(ranks)]
    chunks = ranks if layout == "contiguous" else 2 * ranks
    cuts = documents if layout == "per_document" and documents is not None else (0, length)
    owned: list[list[int]] = [[] for _ in range(ranks)]
    longer = 0
    for start, stop in pairwise(cuts):
        at, spare = start, (stop - start) % chunks
        for chunk in range(chunks):
            size = (stop - start) // chunks + ((chunk - longer) % chunks < spare)
            owned[min(chunk, 2 * ranks - 1 - chunk)].extend(range(at, at + size))
            at += size
        longer += spare
    return [torch.tensor(rows, dtype=torch.int64) for rows in owned]


def layout_of(name: str, purpose: str, documents: Sequence[int] | None) -> str:
    """What `layout="auto"` is for a purpose: causal, full, window or dilated."""
    if name != "auto":
        return name
    if purpose in ("window", "dilated"):
        return "contiguous"
    return "per_document" if documents is not None else "zigzag" if purpose == "causal" else "contiguous"


# --- which pairs meet ------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Of each token: the number of its document, the document's start and its stop."""

    document: Tensor
    start: Tensor
    stop: Tensor

    @property
    def within(self) -> Tensor:
        """The position counted from the document's start."""
        return torch.arange(len(self.start)) - self.start


def places(length: int, documents: Sequence[int] | None) -> Places:
    """Where each token lies. `documents`: bounds 0, ..., length; a document may be empty."""
    cuts = torch.tensor([0, length] if documents is None else list(documents))
    document = torch.searchsorted(cuts, torch.arange(length), right=True) - 1
    return Places(document, cuts[document], cuts[document + 1])


class Counts(NamedTuple):
    """How often a query meets a key, (branches, heads or 1, q tokens, k tokens); zero keys, (branches, heads, q)."""

    pairs: Tensor
    zero_keys: Tensor | None = None


def plain_counts(
    length: int,
    documents: Sequence[int] | None,
    kv_length: int,
    kv_documents: Sequence[int] | None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    mask: str | None = None,
) -> Counts:
    """Queries meet keys of the document of the same number; positions are counted from the two documents' starts.

    `window` = (l, r): l keys before the query's own position and r after it; None or -1 is unbounded. `mask`: the
    text of a mask. chunked: both documents are cut into chunks of so many tokens, and those of the same number meet.
    prefix: of each document so many first keys meet all its queries. global_tokens: of both documents so many first
    tokens pass by the window.
    """
    kind, _, numbers = (mask or "").partition(":")
    tokens = [int(number) for number in numbers.split(",") if number]
    q, k = places(length, documents), places(kv_length, kv_documents)
    ahead = k.within[None, :] - q.within[:, None]
    left, right = (float("inf") if side is None or side == -1 else side for side in window or (None, None))
    meets = (-ahead <= left) & (ahead <= right)
    if kind == "global_tokens":
        meets = meets | (q.within < tokens[0])[:, None] | (k.within < tokens[0])[None, :]
    if causal:
        meets = meets & (ahead <= 0)
    if kind == "prefix":
        each = torch.tensor(tokens if "," in numbers else tokens * (len(documents or (0, 0)) - 1))
        meets = meets | (k.within < each[k.document])[None, :]
    meets = meets & (q.document[:, None] == k.document[None, :])
    if kind == "chunked":
        meets = meets & (q.within[:, None] // tokens[0] == k.within[None, :] // tokens[0])
    return Counts(meets.double()[None, None])


def dilated_counts(
    length: int,
    documents: Sequence[int] | None,
    heads: tuple[int, int],
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    causal: bool = False,
    offset: str = "mod",
    layer: int | None = None,
    tail: str = "ragged",
) -> Counts:
    """LongNet (arXiv 2307.02486): a branch (w, r) cuts each document into segments of w; of each a head keeps every
    r-th position from its own offset on, as queries and as keys.

    tail="zero_pad", not causal: torchscale fills a segment with zero keys, to ceil(min(w, document) / r) kept rows.
    """
    at = places(length, documents)
    pairs, zero_keys = [], []
    for w, r in zip(segment_lengths, dilation_rates, strict=True):
        kept, segment = kept_rows(at, heads, w, r, offset, layer), at.start + at.within // w * w
        meets = (segment[:, None] == segment[None, :]) & kept[:, :, None] & kept[:, None, :]
        filled = -(-(at.stop - at.start).clamp(max=w) // r)
        zero_keys.append(kept * (filled - meets.sum(-1)))
        pairs.append(meets.tril() if causal else meets)
    padded = tail == "zero_pad" and not causal
    return Counts(torch.stack(pairs).double(), torch.stack(zero_keys).double() if padded else None)


def kept_rows(at: Places, heads: tuple[int, int], w: int, r: int, offset: str, layer: int | None) -> Tensor:
    """(q heads, tokens): which positions each query head keeps of the segments of a branch."""
    q_heads, head = heads[0], torch.arange(heads[0])
    residue = {
        "mod": head % r,
        "block": head // -(-q_heads // r),
        "kv_head": head // (q_heads // heads[1]) % r,
        "layer_rotated": (head + (layer or 0) * q_heads) % r,
    }[offset]
    return at.within % w % r == residue[:, None]


def alibi(slopes: Sequence[float], q: Places, k: Places) -> Tensor:
    """(heads, q tokens, k tokens): what ALiBi (arXiv 2108.12409) adds to scores, symmetric; positions in documents."""
    distance = (q.within[:, None] - k.within[None, :]).abs()
    return -torch.tensor(list(slopes), dtype=torch.float64)[:, None, None] * distance


# --- attention -------------------------------------------------------------------------------------------------------


class Rounded(NamedTuple):
    """K and V as other ranks see them, and which pairs are of one rank: booleans (q tokens, k tokens)."""

    k: Tensor
    v: Tensor
    own: Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Counts,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    detached: bool = False,
    rounded: Rounded | None = None,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One softmax over the counted keys: out (batch, q tokens, heads, d_v) and lse (batch, heads, q tokens), float64.

    A zero key has score and value 0; a sink is a score of each head without a value. Without any key out is 0 and lse
    -inf. `detached`: the branches are mixed by shares that carry no gradient, nor does lse. `bias`: (heads, q tokens, k
    tokens), added to the scores. `kept`: (batch, heads, q tokens, k tokens), by which dropout multiplies weights.
    """
    group = q.shape[2] // max(k.shape[2], 1)
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k)
    if rounded is not None:
        far_k, far_v = (x.double().repeat_interleave(group, 2) for x in rounded[:2])
        scores = torch.where(rounded.own, scores, torch.einsum("bnhd,bmhd->bhnm", q, far_k))
    scores = scores * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias

    def softmax(pairs: Tensor, zero_keys: Tensor | None) -> tuple[Tensor, Tensor]:
        # A pair that does not count takes no part, even if its score is NaN.
        logits = [torch.where(pairs > 0, scores + pairs.log(), -torch.inf)]
        extras = [] if zero_keys is None else [zero_keys.log()]
        extras += [] if sinks is None else [sinks.double()[:, None]]
        logits += [extra[None, :, :, None].expand(*scores.shape[:3], 1) for extra in extras]
        every = torch.cat(logits, -1)
        blind = every.isneginf().all(-1)
        lse = every.masked_fill(blind[..., None], 0.0).logsumexp(-1)  # finite, so that its gradient is no NaN
        p = torch.exp(every - lse[..., None])[..., : k.shape[1]] * (1.0 if kept is None else kept)
        if rounded is None:
            out = torch.einsum("bhnm,bmhd->bnhd", p, v)
        else:
            own, far = torch.where(rounded.own, p, 0.0), torch.where(rounded.own, 0.0, p)
            out = torch.einsum("bhnm,bmhd->bnhd", own, v) + torch.einsum("bhnm,bmhd->bnhd", far, far_v)
        return out, lse.masked_fill(blind, -torch.inf)

    if not detached:
        return softmax(counts.pairs.sum(0), None if counts.zero_keys is None else counts.zero_keys.sum(0))
    zero_keys = [None] * len(counts.pairs) if counts.zero_keys is None else counts.zero_keys
    outs, lses = zip(*(softmax(*branch) for branch in zip(counts.pairs, zero_keys, strict=True)), strict=True)
    branches = torch.stack(lses).detach()
    lse = branches.logsumexp(0)
    shares = (branches - lse).masked_fill(lse.isneginf(), -torch.inf).exp()
    return torch.einsum("ibhn,ibnhd->bnhd", shares, torch.stack(outs)), lse


# --- what a layer does around it -------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each head of x (..., head_dim) over its root mean square, times the weight."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotary(x: Tensor, style: str, base: float, xpos: float | None = None, key: bool = False) -> Tensor:
    """x (batch, tokens, heads, dim) rotated by its positions 0, 1, ... (RoFormer); with `xpos` scaled (XPos).

    neox turns element j against j + dim / 2, interleaved 2j against 2j + 1, by position * base ** (-2j / dim).
    """
    half = x.shape[-1] // 2
    j = torch.arange(half, dtype=torch.float64)
    position = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None]
    angle = position * base ** (-2 * j / x.shape[-1])
    factor = torch.ones(())
    if xpos is not None:
        zeta = (2 * j / x.shape[-1] + 0.4) / 1.4
        factor = zeta ** ((position - (x.shape[1] - 1) / 2) / xpos * (-1 if key else 1))
    a, b = (x[..., :half], x[..., half:]) if style == "neox" else (x[..., 0::2], x[..., 1::2])
    a, b = factor * (a * angle.cos() - b * angle.sin()), factor * (b * angle.cos() + a * angle.sin())
    return torch.cat((a, b), -1) if style == "neox" else torch.stack((a, b), -1).flatten(-2)


# --- rounding to eight bits ------------------------------------------------------------------------------------------


def eight_bits(x: Tensor, code: str, dtype: torch.dtype) -> Tensor:
    """What x of `dtype`, held in float64, is after the wire: codes with one float32 scale for each token and head.

    The gradient goes straight through.
    """
    full = x.detach().float()
    scale = (full.abs().amax(-1, keepdim=True) / (127.0 if code == "int8" else 448.0)).clamp(min=2.0**-126)
    steps = full / scale
    codes = (steps + 0.5).floor() if code == "int8" else steps.to(torch.float8_e4m3fn).float()
    return x + ((codes * scale).to(dtype).double() - x.detach())
