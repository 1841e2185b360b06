"""torchscale's dilated attention retold: what its published algorithm computes on one device, faults included.

Source: microsoft/torchscale at 4d1e0e8, `DilatedAttention` in torchscale/component/dilated_attention.py, between its
projections; the steps are its own, the words are ours. Dense float64 attention stands in for its flash kernel.
`python -m tests.torchscale_algorithm` writes tests/golden/torchscale_dilated.json.
Guarantees: the four traps are kept. Zero rows that fill a segment are attended where no causal mask hides them; rows
that fill the last stride of a segment stay in it, which moves every later segment; a row whose lse is exactly 0 counts
as not attended; the weights that mix the branches carry no gradient.
Not covered: documents, GQA, padding masks, ranks; `tests/core/dilated_reference.py`, which is judged by this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

GOLDENS = Path(__file__).parent / "golden" / "torchscale_dilated.json"
NOT_ATTENDED = -1e8
"""The lse that torchscale gives to rows that a branch skips."""


class Case(NamedTuple):
    """Settings of one golden; `shape` is (batch, tokens, heads, dim)."""

    shape: tuple[int, int, int, int]
    segment_lengths: list[int]
    dilation_rates: list[int]
    causal: bool


CASES = {
    "whole segments": Case((2, 8, 4, 2), [4, 8], [1, 2], causal=False),
    "whole segments, causal": Case((1, 16, 4, 3), [4, 16], [1, 2], causal=True),
    "r does not divide H": Case((1, 12, 3, 2), [4, 12], [1, 2], causal=False),
    "r > H, causal": Case((1, 16, 2, 3), [4, 8, 16], [1, 2, 4], causal=True),
    "short last segment": Case((1, 13, 3, 2), [4, 8], [1, 2], causal=False),
    "short last segment, causal": Case((1, 13, 3, 2), [3, 9], [1, 3], causal=True),
    "w > N, r does not divide N": Case((1, 10, 4, 2), [5, 32], [1, 4], causal=False),
    "rows shift": Case((1, 12, 3, 2), [6], [4], causal=False),
    "rows shift, causal": Case((1, 12, 3, 2), [6], [4], causal=True),
}


def torchscale_attention(
    q: Tensor, k: Tensor, v: Tensor, segment_lengths: list[int], dilation_rates: list[int], causal: bool
) -> Tensor:
    """All three tensors and the result are (batch, tokens, heads, dim) in float64; differentiable as torchscale is."""
    outs, lses = zip(
        *(_branch(q, k, v, w, r, causal) for w, r in zip(segment_lengths, dilation_rates, strict=True)), strict=True
    )
    with torch.no_grad():
        shares = torch.stack(lses).softmax(0)
    return (shares.unsqueeze(-1) * torch.stack(outs)).sum(0)


def _branch(q: Tensor, k: Tensor, v: Tensor, w: int, r: int, causal: bool) -> tuple[Tensor, Tensor]:
    """One branch over all tokens: out (batch, tokens, heads, dim), lse (batch, tokens, heads)."""
    batch, tokens, heads, dim = q.shape
    w = min(w, tokens)
    out, lse = _attend(*(_kept(_segments(x, w), r) for x in (q, k, v)), causal)

    rows, block = out.shape[1] * r, -(-heads // r)
    wide_out, wide_lse = out.new_zeros(len(out), rows, heads, dim), lse.new_full((len(out), rows, heads), NOT_ATTENDED)
    for head in range(heads):
        wide_out[:, head // block :: r, head] = out[:, :, head]
        wide_lse[:, head // block :: r, head] = lse[:, :, head].masked_fill(lse[:, :, head] == 0, NOT_ATTENDED)
    # Segments are `rows` long here, not w: where r does not divide w, all but the first come to lie too far back.
    return wide_out.reshape(batch, -1, heads, dim)[:, :tokens], wide_lse.reshape(batch, -1, heads)[:, :tokens]


def _segments(x: Tensor, w: int) -> Tensor:
    """(batch, tokens, heads, dim) -> (batch * segments, w, heads, dim), the last segment filled with zero rows."""
    tokens, heads, dim = x.shape[1:]
    return pad(x, (0, 0, 0, 0, 0, -tokens % w)).reshape(-1, w, heads, dim)


def _kept(x: Tensor, r: int) -> Tensor:
    """Every r-th row of each segment, zero rows filling the last stride; each ceil(H/r) heads take the same rows.

    (segments, w, heads, dim) -> (segments, ceil(w / r), heads, dim).
    """
    block = -(-x.shape[2] // r)
    x = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % r))
    return torch.stack([x[:, head // block :: r, head] for head in range(x.shape[2])], 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Dense attention of (segments, rows, heads, dim): out of that shape, lse (segments, rows, heads)."""
    scores = torch.einsum("snhd,smhd->snhm", q, k) * q.shape[3] ** -0.5
    if causal:
        behind = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
        scores = scores.masked_fill(behind[:, None, :], -torch.inf)
    return torch.einsum("snhm,smhd->snhd", scores.softmax(-1), v), scores.logsumexp(-1)


def inputs(shape: tuple[int, ...]) -> list[Tensor]:
    """q, k, v and dout of a case: 1.5 sin(c n^2), n = 1, 2, ... in row-major order, c = 0.3, 0.5, 0.7, 1.1."""
    squares = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape) ** 2
    return [1.5 * torch.sin(c * squares) for c in (0.3, 0.5, 0.7, 1.1)]


def computed(case: Case) -> dict[str, Tensor]:
    """out, dq, dk and dv of a case, each of its shape."""
    q, k, v, dout = inputs(case.shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = torchscale_attention(q, k, v, *case[1:])
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))


def main() -> None:
    """Write the goldens: each case's settings, and its tensors as flat row-major lists rounded to 12 decimals."""
    goldens = []
    for name, case in CASES.items():
        tensors = {key: [round(x, 12) for x in value.flatten().tolist()] for key, value in computed(case).items()}
        golden = {"name": name} | case._asdict() | tensors
        goldens.append("{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(golden[key])}" for key in golden) + "\n}")
    GOLDENS.write_text("[\n" + ",\n".join(goldens) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
