"""The reference of the fuzzer: dense attention in float64 on one process, written only from the definitions.

A tensor of counts holds how often each query attends to each key. A softmax runs over these pairs, and autograd
computes the gradients.
Guarantees: nothing of ringattn is imported. Memory grows with the square of the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# --- which rank owns which token -------------------------------------------------------------------------------------


def shards(layout: str, length: int, ranks: int, documents: Sequence[int] | None) -> list[Tensor]:
    """Return the positions of each rank, in the order of its rows.

    contiguous: one chunk per rank. zigzag: rank r has the chunks r and 2 * ranks - 1 - r. striped: rank r has every
    token whose position is r modulo ranks. per_document: zigzag in each document. If the chunks cannot be equal, the
    first ones have one token more. In per_document, the first longer chunk of a document follows, cyclically, the last
    longer chunk of the previous document.
    """
    if layout == "striped":
        return [torch.arange(length)[rank::ranks] for rank in range(ranks)]
    chunks = ranks if layout == "contiguous" else 2 * ranks
    cuts = documents if layout == "per_document" and documents is not None else (0, length)
    owned: list[list[int]] = [[] for _ in range(ranks)]
    longer = 0
    for start, stop in pairwise(cuts):
        position, spare = start, (stop - start) % chunks
        for chunk in range(chunks):
            size = (stop - start) // chunks + ((chunk - longer) % chunks < spare)
            owned[min(chunk, 2 * ranks - 1 - chunk)].extend(range(position, position + size))
            position += size
        longer += spare
    return [torch.tensor(rows, dtype=torch.int64) for rows in owned]


def layout_of(name: str, purpose: str, documents: Sequence[int] | None) -> str:
    """Return the layout that `layout="auto"` selects for a purpose: causal, full, window or dilated."""
    if name != "auto":
        return name
    if purpose in ("window", "dilated"):
        return "contiguous"
    return "per_document" if documents is not None else "zigzag" if purpose == "causal" else "contiguous"


# --- which query attends to which key --------------------------------------------------------------------------------


class Places(NamedTuple):
    """For each token, the number of its document, and the start and stop of that document."""

    document: Tensor
    start: Tensor
    stop: Tensor

    @property
    def within(self) -> Tensor:
        """The position of each token, counted from the start of its document."""
        return torch.arange(len(self.start)) - self.start


def places(length: int, documents: Sequence[int] | None) -> Places:
    """Return the document of each token. `documents`: bounds 0, ..., length; a document may be empty."""
    cuts = torch.tensor([0, length] if documents is None else list(documents))
    document = torch.searchsorted(cuts, torch.arange(length), right=True) - 1
    return Places(document, cuts[document], cuts[document + 1])


class Counts(NamedTuple):
    """How often queries attend to keys.

    `pairs`: (branches, heads or 1, q tokens, k tokens). `zero_keys`: the number of zero keys of each query,
    (branches, heads, q tokens).
    """

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
    """Count which queries attend to which keys: those of the document with the same number, limited by the options.

    Positions are counted from the starts of the two documents. `window` = (l, r): l keys before the query's position
    and r after it; None or -1 is unbounded. `mask`: the text of a mask with a number n. chunked: both documents are cut
    into chunks of n tokens, and queries attend to the chunk with the same number. prefix: all queries of a document
    also attend to its first n keys. global_tokens: the first n tokens of both documents are exempt from the window.
    bidirectional_blocks: n are the starts and ends of blocks, whose queries also attend to later keys of their block.
    slices, tree: see `slice_pairs` and `tree_pairs`; `causal` changes neither. by_head: a mask for each group of heads.
    """
    kind, _, numbers = (mask or "").partition(":")
    if kind == "by_head":
        groups = [group.partition("=") for group in numbers.split(";")]
        pairs = [
            plain_counts(length, documents, kv_length, kv_documents, causal, window, text or None).pairs
            .expand(1, int(heads), length, kv_length)
            for heads, _, text in groups
        ]  # fmt: skip
        return Counts(torch.cat(pairs, dim=1))
    if kind == "slices":
        return Counts(slice_pairs(length, kv_length, numbers).double()[None, None])
    if kind == "tree":
        left = window[0] if window and window[0] not in (None, -1) else None
        return Counts(tree_pairs(numbers, left).double()[None, None])
    tokens = [int(number) for number in numbers.split(",") if number]
    q, k = places(length, documents), places(kv_length, kv_documents)
    ahead = k.within[None, :] - q.within[:, None]
    left, right = (float("inf") if side is None or side == -1 else side for side in window or (None, None))
    attends = (-ahead <= left) & (ahead <= right)
    if kind == "global_tokens":
        attends = attends | (q.within < tokens[0])[:, None] | (k.within < tokens[0])[None, :]
    if causal:
        attends = attends & (ahead <= 0)
    if kind == "prefix":
        prefix_tokens = torch.tensor(tokens if "," in numbers else tokens * (len(documents or (0, 0)) - 1))
        attends = attends | (k.within < prefix_tokens[k.document])[None, :]
    if kind == "bidirectional_blocks":
        for start, stop in zip(tokens[::2], tokens[1::2], strict=True):
            for query in range(start, stop):
                attends[query, query + 1 : stop] = True
    attends = attends & (q.document[:, None] == k.document[None, :])
    if kind == "chunked":
        attends = attends & (q.within[:, None] // tokens[0] == k.within[None, :] // tokens[0])
    return Counts(attends.double()[None, None])


def slice_pairs(length: int, kv_length: int, text: str) -> Tensor:
    """Return the pairs of slices "q-q_stopxk-k_stop" and a letter: MagiAttention's four kinds, and one more.

    In a slice of n queries and m keys, query i attends to key j. f: always. c: j <= i + m - n. s: j <= i. i: j >= i.
    b: both c and i.
    """
    pairs = torch.zeros(length, kv_length, dtype=torch.bool)
    for item in filter(None, text.split(",")):
        q_range, _, k_range = item[:-1].partition("x")
        (q, q_stop), (k, k_stop) = (map(int, side.split("-")) for side in (q_range, k_range))
        for i in range(q_stop - q):
            for j in range(k_stop - k):
                ends, starts, later = j - i <= (k_stop - k) - (q_stop - q), j <= i, j >= i
                if {"f": True, "c": ends, "s": starts, "i": later, "b": ends and later}[item[-1]]:
                    assert not pairs[q + i, k + j], "a pair is in two slices"
                    pairs[q + i, k + j] = True
    return pairs


def tree_pairs(text: str, left: int | None) -> Tensor:
    """Return the pairs of a tree: a token attends to those on the path from the root to itself, at most `left` before.

    `text`: lengths of nodes, with children in brackets, and 3*n for three equal nodes.
    """
    paths: list[list[int]] = []

    def read(index: int, path: list[int]) -> int:
        """Add the paths of the tokens of the nodes from `index` on, up to the bracket that closes. Return its place."""
        while index < len(text) and text[index] != ")":
            times = re.match(r"(\d+)\*", text[index:])
            begin = index + (times.end() if times else 0)
            for _ in range(int(times[1]) if times else 1):
                length = re.match(r"\d+", text[begin:])
                assert length
                inner, index = list(path), begin + length.end()
                for _ in range(int(length[0])):
                    inner.append(len(paths))
                    paths.append(list(inner))
                if text[index : index + 1] == "(":
                    index = read(index + 1, inner) + 1
            index += text[index : index + 1] == ","
        return index

    read(0, [])
    pairs = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for query, path in enumerate(paths):
        pairs[query, path if left is None else path[-left - 1 :]] = True
    return pairs


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
    """Count which queries attend to which keys in LongNet's dilated attention (arXiv 2307.02486).

    A branch (w, r) cuts each document into segments of w tokens. In each segment, a head keeps every r-th position from
    its offset on, as queries and as keys. With tail="zero_pad" and without `causal`, torchscale adds zero keys to a
    segment, up to ceil(min(w, document length) / r) kept rows.
    """
    token_places = places(length, documents)
    pairs, zero_keys = [], []
    for w, r in zip(segment_lengths, dilation_rates, strict=True):
        kept, segment = (
            kept_rows(token_places, heads, w, r, offset, layer),
            token_places.start + token_places.within // w * w,
        )
        attends = (segment[:, None] == segment[None, :]) & kept[:, :, None] & kept[:, None, :]
        filled = -(-(token_places.stop - token_places.start).clamp(max=w) // r)
        zero_keys.append(kept * (filled - attends.sum(-1)))
        pairs.append(attends.tril() if causal else attends)
    padded = tail == "zero_pad" and not causal
    return Counts(torch.stack(pairs).double(), torch.stack(zero_keys).double() if padded else None)


def kept_rows(token_places: Places, heads: tuple[int, int], w: int, r: int, offset: str, layer: int | None) -> Tensor:
    """Return a mask of the positions that each query head keeps in the segments of a branch, (q heads, tokens).

    `w`, `r`: the branch's segment length and dilation rate. `offset`: the rule that gives each head its positions.
    """
    q_heads, head = heads[0], torch.arange(heads[0])
    residue = {
        "mod": head % r,
        "block": head // -(-q_heads // r),
        "kv_head": head // (q_heads // heads[1]) % r,
        "layer_rotated": (head + (layer or 0) * q_heads) % r,
    }[offset]
    return token_places.within % w % r == residue[:, None]


def alibi(slopes: Sequence[float], q: Places, k: Places) -> Tensor:
    """Return the bias that ALiBi (arXiv 2108.12409) adds to scores, (heads, q tokens, k tokens).

    Positions count from the start of each document. The bias is symmetric in the positions of query and key.
    """
    distance = (q.within[:, None] - k.within[None, :]).abs()
    return -torch.tensor(list(slopes), dtype=torch.float64)[:, None, None] * distance


# --- attention -------------------------------------------------------------------------------------------------------


class Rounded(NamedTuple):
    """K and V as other ranks receive them, and which pairs are on one rank: booleans (q tokens, k tokens)."""

    k: Tensor
    v: Tensor
    same_rank: Tensor


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
    """Return out (batch, q tokens, heads, d_v) and lse (batch, heads, q tokens) in float64.

    One softmax covers all counted keys. A zero key has score and value 0; a sink is a score per head without a value.
    Without any key, out is 0 and lse -inf. `detached`: each branch has a separate softmax, the branches are mixed by
    shares without gradients, and lse has no gradient. `bias`: (heads, q tokens, k tokens), added to the scores. `kept`:
    (batch, heads, q tokens, k tokens), the factors by which dropout multiplies weights.
    """
    group = q.shape[2] // max(k.shape[2], 1)
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k)
    if rounded is not None:
        remote_k, remote_v = (x.double().repeat_interleave(group, 2) for x in rounded[:2])
        scores = torch.where(rounded.same_rank, scores, torch.einsum("bnhd,bmhd->bhnm", q, remote_k))
    scores = scores * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias

    def softmax(pairs: Tensor, zero_keys: Tensor | None) -> tuple[Tensor, Tensor]:
        # A pair with count 0 does not contribute, even if its score is NaN.
        logits = [torch.where(pairs > 0, scores + pairs.log(), -torch.inf)]
        extras = [] if zero_keys is None else [zero_keys.log()]
        extras += [] if sinks is None else [sinks.double()[:, None]]
        logits += [extra[None, :, :, None].expand(*scores.shape[:3], 1) for extra in extras]
        every = torch.cat(logits, -1)
        blind = every.isneginf().all(-1)
        lse = every.masked_fill(blind[..., None], 0.0).logsumexp(-1)  # finite, so that its gradient is not NaN
        p = torch.exp(every - lse[..., None])[..., : k.shape[1]] * (1.0 if kept is None else kept)
        if rounded is None:
            out = torch.einsum("bhnm,bmhd->bnhd", p, v)
        else:
            local_p, remote_p = torch.where(rounded.same_rank, p, 0.0), torch.where(rounded.same_rank, 0.0, p)
            out = torch.einsum("bhnm,bmhd->bnhd", local_p, v) + torch.einsum("bhnm,bmhd->bnhd", remote_p, remote_v)
        return out, lse.masked_fill(blind, -torch.inf)

    if not detached:
        return softmax(counts.pairs.sum(0), None if counts.zero_keys is None else counts.zero_keys.sum(0))
    zero_keys = [None] * len(counts.pairs) if counts.zero_keys is None else counts.zero_keys
    outs, lses = zip(*(softmax(*branch) for branch in zip(counts.pairs, zero_keys, strict=True)), strict=True)
    branches = torch.stack(lses).detach()
    lse = branches.logsumexp(0)
    shares = (branches - lse).masked_fill(lse.isneginf(), -torch.inf).exp()
    return torch.einsum("ibhn,ibnhd->bnhd", shares, torch.stack(outs)), lse


# --- other operations of a layer -------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each head of x (..., head_dim) by its root mean square, and multiply by the weight."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotary(x: Tensor, style: str, base: float, xpos: float | None = None, key: bool = False) -> Tensor:
    """Rotate x (batch, tokens, heads, dim) by its positions 0, 1, ... (RoFormer); with `xpos` also scale it (XPos).

    Both styles rotate pairs of elements by the angle position * base ** (-2j / dim). "neox" pairs element j with
    j + dim / 2, "interleaved" pairs 2j with 2j + 1.
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
    """Return x, sent in eight bits and decoded to `dtype`, as float64.

    The wire carries codes and one float32 scale per token and head. The gradient is that of the identity.
    """
    full = x.detach().float()
    scale = (full.abs().amax(-1, keepdim=True) / (127.0 if code == "int8" else 448.0)).clamp(min=2.0**-126)
    steps = full / scale
    codes = (steps + 0.5).floor() if code == "int8" else steps.to(torch.float8_e4m3fn).float()
    return x + ((codes * scale).to(dtype).double() - x.detach())
