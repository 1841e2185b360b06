"""The reference of dilated attention against a loop over rows, hand-made tables, finite differences and torchscale.

Guarantees: what `tests/core/dilated_reference.py` says is checked by something that shares no line with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.core.dilated_reference import coverage, dilated_reference
from tests.covering import thinned
from tests.torchscale_algorithm import CASES, GOLDENS, Case, computed, inputs, torchscale_attention

Rule = Callable[[int, int], int]
"""(query head, r) -> the first row, counted from a segment's start, that the head keeps."""


def randoms(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


def qkv(tokens: int, q_heads: int, kv_heads: int, d_k: int = 3, d_v: int = 2) -> list[Tensor]:
    return randoms((2, tokens, q_heads, d_k), (2, tokens, kv_heads, d_k), (2, tokens, kv_heads, d_v))


def close(got: Tensor, wanted: Tensor | np.ndarray, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got.detach(), torch.as_tensor(wanted).detach(), rtol=0, atol=atol)


class BranchLoop:
    """One branch of one sequence, row by row in numpy: out (tokens, q_heads, d_v), lse (q_heads, tokens), pairs met."""

    def __init__(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        branch: tuple[int, int],
        rule: Rule,
        logit: Callable[[np.ndarray], np.ndarray],
        causal: bool,
        zero_pad: bool,
        bounds: Sequence[int],
    ) -> None:
        (tokens, heads), (w, r) = q.shape[:2], branch
        self.out = np.zeros((tokens, heads, v.shape[2]))
        self.lse = np.full((heads, tokens), -np.inf)
        self.met = np.zeros((heads, tokens, tokens))
        segments = [
            (start, min(start + w, stop), min(w, stop - first))
            for first, stop in pairwise(bounds)
            for start in range(first, stop, w)
        ]
        for start, stop, full in segments:
            for h in range(heads):
                rows = np.arange(start + rule(h, r), stop, r)
                keys, values = (x[rows, h * x.shape[1] // heads] for x in (k, v))
                if zero_pad:
                    keys, values = (np.pad(x, ((0, -(-full // r) - len(rows)), (0, 0))) for x in (keys, values))
                for row, t in enumerate(rows):
                    seen = row + 1 if causal else len(keys)
                    logits = logit(keys[:seen] @ q[t, h])
                    self.lse[h, t] = np.logaddexp.reduce(logits)
                    self.out[t, h] = np.exp(logits - self.lse[h, t]) @ values[:seen]
                    self.met[h, t, rows[:seen]] = 1


def merged(branches: list[BranchLoop], sinks: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Branch outputs weighted by their softmax denominators (LongNet, equations 9 and 10)."""
    lse = np.logaddexp.reduce([branch.lse for branch in branches])
    if sinks is not None:
        lse = np.logaddexp(lse, sinks[:, None])
    reached = np.where(np.isneginf(lse), 0, lse)
    return sum(np.exp(branch.lse - reached).T[..., None] * branch.out for branch in branches), lse


def rule_of(offset: str, q_heads: int, group: int, layer: int | None) -> Rule:
    return {
        "mod": lambda h, r: h % r,
        "block": lambda h, r: [block for block in range(r) for _ in range(-(-q_heads // r))][h],
        "kv_head": lambda h, r: (h // group) % r,
        "layer_rotated": lambda h, r: (h + (layer or 0) * q_heads) % r,
    }[offset]


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of `dilated_reference`, and `shape` = (tokens, q_heads, kv_heads)."""
    tokens, kv_heads, group = draw(st.integers(1, 18)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    branches = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=3))
    offset = draw(st.sampled_from(["mod", "block", "kv_head", "layer_rotated"]))
    cuts = draw(st.none() | st.lists(st.integers(0, tokens), max_size=2))
    return {
        "shape": (tokens, kv_heads * group, kv_heads),
        "segment_lengths": [w for w, _ in branches],
        "dilation_rates": [r for _, r in branches],
        "causal": draw(st.booleans()),
        "offset": offset,
        "layer": draw(st.integers(0, 3)) if offset == "layer_rotated" else None,
        "tail": draw(st.sampled_from(["ragged", "zero_pad"])),
        "documents": None if cuts is None else [0, *sorted(cuts), tokens],
        "scale": draw(st.sampled_from([None, 0.7])),
        "softcap": draw(st.sampled_from([None, 1.5])),
    }


def looped(q: Tensor, k: Tensor, v: Tensor, problem: dict[str, Any]) -> list[list[BranchLoop]]:
    """The branches of each batch row."""
    heads, kv_heads, cap = q.shape[2], k.shape[2], problem["softcap"]
    scale = problem["scale"] or q.shape[3] ** -0.5
    rule = rule_of(problem["offset"], heads, heads // kv_heads, problem["layer"])

    def logit(products: np.ndarray) -> np.ndarray:
        return products * scale if cap is None else cap * np.tanh(products * scale / cap)

    bounds = problem["documents"] or [0, q.shape[1]]
    pad = problem["tail"] == "zero_pad"
    return [
        [
            BranchLoop(*rows, branch, rule, logit, problem["causal"], pad, bounds)
            for branch in zip(problem["segment_lengths"], problem["dilation_rates"], strict=True)
        ]
        for rows in zip(*(x.detach().numpy() for x in (q, k, v)), strict=True)
    ]


@given(problem=problems(), sunk=st.booleans())
def test_agrees_with_a_loop_over_rows(problem: dict[str, Any], sunk: bool) -> None:
    shape = problem.pop("shape")
    q, k, v = qkv(*shape)
    sinks = torch.linspace(-1, 1, shape[1]) if sunk else None
    results = [merged(row, None if sinks is None else sinks.numpy()) for row in looped(q, k, v, problem)]
    out, lse = dilated_reference(q, k, v, sinks=sinks, **problem)
    close(out, np.stack([row[0] for row in results]))
    close(lse, np.stack([row[1] for row in results]))
    if not sunk:
        for got, wanted in zip(dilated_reference(q, k, v, grad="detached", **problem), (out, lse), strict=True):
            close(got, wanted)


@given(problem=problems())
def test_gradients_take_delta_from_the_whole_or_from_the_branch(problem: dict[str, Any]) -> None:
    """dS = P (dO V^T - delta), delta = dO.O of the merged out (exact) or of each branch's own out (detached)."""
    tokens, q_heads, kv_heads = problem.pop("shape")
    problem |= {"softcap": None, "scale": 0.7}
    q, k, v = qkv(tokens, q_heads, kv_heads)
    (dout,) = randoms((2, tokens, q_heads, 2), seed=1)
    branches = looped(q, k, v, problem)
    for grad in ("exact", "detached"):
        got = torch.autograd.grad(dilated_reference(q, k, v, grad=grad, **problem)[0], (q, k, v), dout)
        for b in range(2):
            wanted = backward(*(x[b].detach().numpy() for x in (q, k, v, dout)), branches[b], 0.7, grad)
            for mine, theirs in zip(got, wanted, strict=True):
                close(mine[b], theirs)


def backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, branches: list[BranchLoop], scale: float, grad: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk, dv of one sequence by the formula, branch by branch."""
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat(group, 1), v.repeat(group, 1)
    out, lse = merged(branches)
    weights = np.exp(np.einsum("thd,uhd->htu", q, wide_k) * scale - np.where(np.isneginf(lse), 0, lse)[..., None])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(wide_k), np.zeros_like(wide_v)
    for branch in branches:
        p = branch.met * weights
        delta = (dout * (out if grad == "exact" else branch.out)).sum(-1).T
        ds = p * (np.einsum("thd,uhd->htu", dout, wide_v) - delta[..., None]) * scale
        dq += np.einsum("htu,uhd->thd", ds, wide_k)
        dk += np.einsum("htu,thd->uhd", ds, q)
        dv += np.einsum("htu,thd->uhd", p, dout)
    return dq, *(x.reshape(len(x), -1, group, x.shape[2]).sum(2) for x in (dk, dv))


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {"softcap": 1.5, "offset": "layer_rotated", "layer": 1, "documents": [0, 5, 7]},
}
OVERLAPPING: dict[str, Any] = {"segment_lengths": [3, 8], "dilation_rates": [1, 2]}


@pytest.mark.parametrize(
    ("causal", "tail", "extras"), thinned(product((False, True), ("ragged", "zero_pad"), EXTRAS), strength=1)
)
def test_finite_differences(causal: bool, tail: str, extras: str) -> None:
    """Of out and lse, with rows without keys among them, by q, k, v and sinks."""
    branches = {"segment_lengths": [3, 6], "dilation_rates": [2, 3], "causal": causal, "tail": tail, **EXTRAS[extras]}
    leaves = qkv(7, 2, 1, d_k=2)
    lse = dilated_reference(*leaves, **branches)[1]
    assert lse.isneginf().any() and lse.isfinite().any()

    def values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = dilated_reference(q, k, v, **branches)
        return out, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(values, leaves)
    (sinks,) = randoms((2,), seed=2)
    assert torch.autograd.gradcheck(lambda *x: dilated_reference(*x[:3], sinks=x[3], **branches), (*leaves, sinks))


def test_detached_changes_dq_and_dk_and_not_dv() -> None:
    leaves = qkv(8, 2, 2)
    exact, detached = (
        torch.autograd.grad(dilated_reference(*leaves, grad=grad, **OVERLAPPING)[0].square().sum(), leaves)
        for grad in ("exact", "detached")
    )
    close(detached[2], exact[2])
    assert all((a - b).abs().max() > 0.05 for a, b in zip(exact[:2], detached[:2], strict=True))
    assert not dilated_reference(*leaves, grad="detached", **OVERLAPPING)[1].requires_grad


def test_a_key_of_two_branches_counts_twice() -> None:
    """Token 0 meets itself in both branches and token 1 in one."""
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


@pytest.mark.parametrize("grad", ["exact", "detached"])
@pytest.mark.parametrize("tail", ["ragged", "zero_pad"])
def test_a_future_token_changes_nothing_in_a_causal_call(grad: str, tail: str) -> None:
    q, k, v = qkv(11, 2, 1)
    options: dict[str, Any] = {"segment_lengths": [4, 16], "dilation_rates": [1, 2], "grad": grad, "tail": tail}
    for t in range(1, 11):
        moved = [x.detach().clone() for x in (q, k, v)]
        for x in moved:
            x[:, t] += 1
        before, after = (dilated_reference(*x, causal=True, **options) for x in ((q, k, v), moved))
        assert torch.equal(before[0][:, :t], after[0][:, :t]) and torch.equal(before[1][..., :t], after[1][..., :t])
        assert (before[0][:, t] - after[0][:, t]).abs().max() > 0.1
    assert not torch.equal(
        dilated_reference(q, k, v, **options)[0][:, :t], dilated_reference(*moved, **options)[0][:, :t]
    )


def test_an_lse_of_exactly_zero_counts() -> None:
    """Queries of zeros: every weight is e^0. A branch of one key then has lse 0, which torchscale takes for no key."""
    _, k, v = qkv(4, 1, 1, d_v=3)
    q = torch.zeros(2, 4, 1, 3, dtype=torch.float64)
    out, lse = dilated_reference(q, k, v, segment_lengths=[1], dilation_rates=[1])
    assert torch.equal(out, v) and torch.equal(lse, torch.zeros(2, 1, 4, dtype=torch.float64))
    mean = v.mean(1, keepdim=True).expand_as(v)
    for grad in ("exact", "detached"):
        out, lse = dilated_reference(q, k, v, segment_lengths=[1, 4], dilation_rates=[1, 1], grad=grad)
        close(out, (v + 4 * mean) / 5)
        close(lse, torch.full((2, 1, 4), log(5), dtype=torch.float64))
    close(torchscale_attention(q, k, v, [1, 4], [1, 1], False), mean)


@pytest.mark.parametrize("grad", ["exact", "detached"])
@pytest.mark.parametrize("tail", ["ragged", "zero_pad"])
def test_rows_without_keys_give_zero_and_zero_gradients(grad: str, tail: str) -> None:
    """Two heads reach two of four classes: exactly the positions that coverage names."""
    leaves = qkv(10, 2, 2)
    out, lse = dilated_reference(*leaves, segment_lengths=[5, 8], dilation_rates=[4, 4], grad=grad, tail=tail)
    kept = coverage(10, 2, 2, [5, 8], [4, 4]).any(0)
    assert drawn(kept) == ["x...xx..xx", ".x...xx..x"]
    assert torch.equal(lse.isfinite(), kept.expand(2, 2, 10)) and torch.equal(
        out.ne(0).all(-1), kept.T.expand(2, 10, 2)
    )
    assert not out[~out.ne(0).all(-1)].any() and lse[~lse.isfinite()].isneginf().all()
    loss = out.sum() + (lse.sum() if grad == "exact" else 0)
    dq, dk, dv = torch.autograd.grad(loss, leaves)
    assert torch.equal(dv.ne(0).all(-1), kept.T.expand(2, 10, 2))
    assert not torch.stack((dq, dk)).transpose(2, 3)[..., ~kept, :].any() and dq.any() and dk.any()


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
    """Four query heads, two K/V heads, segments of five, every third row."""
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
    wanted, wanted_lse = dilated_reference(*longer, segment_lengths=[padded], dilation_rates=[r], offset=offset)
    options: dict[str, Any] = {"segment_lengths": [w], "dilation_rates": [r], "offset": offset}
    out, lse = dilated_reference(*leaves, tail="zero_pad", **options)
    close(out, wanted[:, places])
    close(lse, wanted_lse[..., places])
    losses = out.square().sum(), wanted[:, places].square().sum()
    for mine, theirs in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        close(mine, theirs)
    assert (out - dilated_reference(*leaves, **options)[0]).abs().max() > 1e-3
    causal = [dilated_reference(*leaves, causal=True, tail=tail, **options)[0] for tail in ("ragged", "zero_pad")]
    assert torch.equal(*causal)


def test_refusals() -> None:
    q, k, v = qkv(4, 1, 1)
    bad: list[dict[str, Any]] = [
        {"tail": "zero"},
        {"grad": "none"},
        {"grad": "detached", "sinks": torch.zeros(1)},
        {"layer": 1},
        {"offset": "layer_rotated"},
    ]
    for options in bad:
        with pytest.raises(ValueError, match=r"no reference|does not go"):
            dilated_reference(q, k, v, **OVERLAPPING, **options)


def on_torchscales_terms(case: Case) -> dict[str, Tensor]:
    q, k, v, dout = inputs(case.shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rules: dict[str, Any] = {"offset": "block", "tail": "zero_pad", "grad": "detached", "causal": case.causal}
    out = dilated_reference(*leaves, segment_lengths=case.segment_lengths, dilation_rates=case.dilation_rates, **rules)[
        0
    ]
    return dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, leaves, dout)), strict=True))


def golden(name: str) -> dict[str, Any]:
    (found,) = (case for case in json.loads(GOLDENS.read_text(encoding="utf-8")) if case["name"] == name)
    return found


@pytest.mark.parametrize("name", CASES)
def test_goldens_are_what_torchscales_algorithm_gives(name: str) -> None:
    case, wanted = CASES[name], golden(name)
    assert Case(tuple(wanted["shape"]), *(wanted[field] for field in Case._fields[1:])) == case
    for key, value in computed(case).items():
        close(value, torch.tensor(wanted[key], dtype=torch.float64).reshape(case.shape), 1e-11)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("rows shift")])
def test_agrees_with_torchscales_goldens(name: str) -> None:
    for key, value in on_torchscales_terms(CASES[name]).items():
        close(value, torch.tensor(golden(name)[key], dtype=torch.float64).reshape(CASES[name].shape), 1e-10)


@pytest.mark.parametrize("name", ["rows shift", "rows shift, causal"])
def test_where_torchscale_moves_rows_it_is_another_operator(name: str) -> None:
    """w = 6, r = 4: six rows are padded to eight and not cropped, so that the second segment lies two rows late."""
    theirs = torch.tensor(golden(name)["out"], dtype=torch.float64).reshape(CASES[name].shape)
    mine = on_torchscales_terms(CASES[name])["out"]
    close(theirs[:, :6], mine[:, :6], 1e-10)
    close(theirs[:, 8:], mine[:, 6:10], 1e-10)
    assert (theirs - mine)[:, 6:].abs().max() > 1
