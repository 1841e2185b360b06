"""The reference of dilated attention agrees with a loop over rows, tables by hand, finite differences and torchscale.

Guarantees: each promise of `tests/core/dilated_reference.py` is checked by code that shares no line with it.
"""

from __future__ import annotations

import json
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.core.dilated_reference import coverage, dilated_reference
from tests.torchscale_algorithm import CASES, GOLDENS, Case, inputs


def randoms(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


def qkv(tokens: int, q_heads: int, kv_heads: int, d_k: int = 3, d_v: int = 2) -> list[Tensor]:
    return randoms((2, tokens, q_heads, d_k), (2, tokens, kv_heads, d_k), (2, tokens, kv_heads, d_v))


def close(got: Tensor, expected: Tensor | np.ndarray, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got.detach(), torch.as_tensor(expected).detach(), rtol=0, atol=atol)


OVERLAPPING: dict[str, Any] = {"segment_lengths": [3, 8], "dilation_rates": [1, 2]}


def test_a_key_of_two_branches_counts_twice() -> None:
    """A key that a query attends to in two branches counts twice in the softmax.

    In the first case, token 0 attends to itself in both branches and to token 1 in one.
    """
    q, k, v = qkv(2, 1, 1)
    out, lse = dilated_reference(q, k, v, segment_lengths=[1, 2], dilation_rates=[1, 1], scale=1.0)
    s, (v0, v1) = torch.exp(torch.einsum("bhd,buhd->bu", q[:, 0], k)), v[:, :, 0].unbind(1)
    total = 2 * s[:, :1] + s[:, 1:]
    close(out[:, 0, 0], (2 * s[:, :1] * v0 + s[:, 1:] * v1) / total)
    close(lse[:, 0, :1], total.log())
    once, once_lse = dilated_reference(q, k, v, segment_lengths=[2], dilation_rates=[1])
    twice, twice_lse = dilated_reference(q, k, v, segment_lengths=[2, 2], dilation_rates=[1, 1])
    close(twice, once)
    close(twice_lse, once_lse + log(2))


def drawn(kept: Tensor) -> list[str]:
    return ["".join("x" if keeps else "." for keeps in row) for row in kept.tolist()]


@pytest.mark.parametrize(
    ("offset", "layer", "picture"),
    [
        ("mod", None, ["x..x.x..x.", ".x..x.x..x", "..x....x..", "x..x.x..x."]),
        ("block", None, ["x..x.x..x.", "x..x.x..x.", ".x..x.x..x", ".x..x.x..x"]),
        ("kv_head", None, ["x..x.x..x.", "x..x.x..x.", ".x..x.x..x", ".x..x.x..x"]),
        ("layer_rotated", 0, ["x..x.x..x.", ".x..x.x..x", "..x....x..", "x..x.x..x."]),
        ("layer_rotated", 1, [".x..x.x..x", "..x....x..", "x..x.x..x.", ".x..x.x..x"]),
        ("layer_rotated", 2, ["..x....x..", "x..x.x..x.", ".x..x.x..x", "..x....x.."]),
    ],
)
def test_coverage_by_hand(offset: str, layer: int | None, picture: list[str]) -> None:
    """`coverage` keeps the positions in the picture, which has a line per query head.

    There are two K/V heads, segments of five tokens, and the dilation rate 3.
    """
    assert drawn(coverage(10, 4, 2, [5], [3], offset, layer)[0]) == picture


def test_blocks_are_of_query_heads_and_segments_restart_in_documents() -> None:
    assert drawn(coverage(4, 3, 1, [4], [2], "block")[0]) == ["x.x.", "x.x.", ".x.x"]
    assert drawn(coverage(4, 3, 1, [4], [2], "kv_head")[0]) == ["x.x."] * 3
    both = coverage(9, 1, 1, [4, 9], [2, 3], documents=[0, 3, 3, 9])
    assert drawn(both[:, 0]) == ["x.xx.x.x.", "x..x..x.."]


@pytest.mark.parametrize("tail", ["ragged", "zero_pad"])
def test_documents_are_sequences_of_their_own(tail: str) -> None:
    q, k, v = qkv(13, 2, 1)
    options: dict[str, Any] = {"segment_lengths": [4, 9], "dilation_rates": [2, 3], "tail": tail}
    out, lse = dilated_reference(q, k, v, documents=[0, 5, 13], **options)
    for first, stop in ((0, 5), (5, 13)):
        alone, alone_lse = dilated_reference(*(x[:, first:stop] for x in (q, k, v)), **options)
        close(out[:, first:stop], alone)
        close(lse[..., first:stop], alone_lse)


@pytest.mark.parametrize(("tokens", "w", "r"), [(13, 8, 2), (7, 9, 3), (12, 6, 4), (10, 32, 4), (11, 4, 3), (9, 3, 2)])
@pytest.mark.parametrize("offset", ["mod", "block"])
def test_zero_pad_is_zero_rows_appended_to_each_segment(tokens: int, w: int, r: int, offset: str) -> None:
    leaves = qkv(tokens, 3, 3)
    real = min(w, tokens)
    padded = -(-real // r) * r
    places = torch.tensor([t // real * padded + t % real for t in range(tokens)])
    length = -(-tokens // real) * padded
    longer = [torch.zeros(2, length, *x.shape[2:]).double().index_copy(1, places, x) for x in leaves]
    expected, expected_lse = dilated_reference(*longer, segment_lengths=[padded], dilation_rates=[r], offset=offset)
    options: dict[str, Any] = {"segment_lengths": [w], "dilation_rates": [r], "offset": offset}
    out, lse = dilated_reference(*leaves, tail="zero_pad", **options)
    close(out, expected[:, places])
    close(lse, expected_lse[..., places])
    losses = out.square().sum(), expected[:, places].square().sum()
    for actual, reference_grad in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        close(actual, reference_grad)
    assert (out - dilated_reference(*leaves, **options)[0]).abs().max() > 1e-3
    causal = [dilated_reference(*leaves, causal=True, tail=tail, **options)[0] for tail in ("ragged", "zero_pad")]
    assert torch.equal(*causal)


def on_torchscales_terms(case: Case) -> dict[str, Tensor]:
    q, k, v, dout = inputs(case.shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rules: dict[str, Any] = {"offset": "block", "tail": "zero_pad", "grad": "detached", "causal": case.causal}
    out = dilated_reference(*leaves, segment_lengths=case.segment_lengths, dilation_rates=case.dilation_rates, **rules)[
        0
    ]
    return dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, leaves, dout)), strict=True))


def golden(name: str) -> dict[str, Any]:
    (golden,) = (case for case in json.loads(GOLDENS.read_text(encoding="utf-8")) if case["name"] == name)
    return golden


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("rows shift")])
def test_agrees_with_torchscales_goldens(name: str) -> None:
    for key, value in on_torchscales_terms(CASES[name]).items():
        close(value, torch.tensor(golden(name)[key], dtype=torch.float64).reshape(CASES[name].shape), 1e-10)
