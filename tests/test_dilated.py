"""Dilated attention over rings: exact against the dense reference, forward and all gradients, whatever the branches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn import InputError, Ring
from ringattn.schedule.routes import ROUTES
from ringattn.testing import run_ranks
from tests.core.dilated_reference import coverage, dilated_reference
from tests.covering import thinned
from tests.schedules import NEWER
from tests.torchscale_algorithm import CASES, GOLDENS, inputs

TOKENS, HEADS, KV_HEADS = 61, 6, 3
MIXED: dict[str, Any] = {"segment_lengths": [8, 16, 40, 100], "dilation_rates": [1, 2, 6, 4]}
DOCUMENTS = [0, 11, 11, 12, 40, 61]
ENGINES = ("plain", "auto")
"""The one that all others are compared with, and the one that a user gets."""


def random_inputs(tokens: int = TOKENS, heads: int = HEADS, kv_heads: int = KV_HEADS) -> list[Tensor]:
    """q, k, v and dout of two sequences."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, tokens, n, d) for n, d in ((heads, 5), (kv_heads, 5), (kv_heads, 4), (heads, 4))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def on_a_ring(
    ranks: int,
    given_: Sequence[Tensor],
    layout: str,
    documents: list[int] | None,
    *,
    engine: str = "auto",
    **options: Any,
) -> list[Tensor]:
    """out, dq, dk, dv of whole sequences, and lse."""
    q, k, v, dout = given_

    def body(ring: Ring) -> list[Tensor]:
        seq = ring.sequence(None if documents else q.shape[1], cu_seqlens=documents, layout=layout, for_="dilated")
        mine = [seq.shard(x).clone().requires_grad_() for x in (q, k, v)]
        out, lse = ring.dilated_attention(*mine, seq, return_lse=True, **options)
        grads = torch.autograd.grad(out, mine, seq.shard(dout))
        return [*(seq.gather(x) for x in (out.detach(), *grads)), seq.gather(lse.detach(), dim=2)]

    return run_ranks(ranks, body, engine=engine)[0]


def of_the_reference(given_: Sequence[Tensor], documents: list[int] | None, **options: Any) -> list[Tensor]:
    """The same of the dense reference."""
    leaves = [x.clone().requires_grad_() for x in given_[:3]]
    out, lse = dilated_reference(*leaves, documents=documents, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, given_[3]), lse.detach()]


def check(ranks: int, layout: str, schedule: str = "auto", documents: list[int] | None = None, **options: Any) -> None:
    sizes = {name: options.pop(name) for name in ("tokens", "heads", "kv_heads") if name in options}
    engine, options = options.pop("engine", "auto"), MIXED | options
    made = random_inputs(**sizes)
    found = on_a_ring(ranks, made, layout, documents, engine=engine, schedule=schedule, **options)
    expected = of_the_reference(made, documents, **options)
    for name, ours, reference in zip(("out", "dq", "dk", "dv", "lse"), found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10, msg=lambda why, name=name: f"{name}: {why}")


@pytest.mark.parametrize(
    ("ranks", "layout", "causal", "engine"),
    thinned(
        product((1, 2, 3, 4, 8), ("contiguous", "zigzag", "striped"), (False, True), ENGINES),
        quick=lambda cell: cell[0] != 8,
    ),
)
def test_every_layout(ranks: int, layout: str, causal: bool, engine: str) -> None:
    check(ranks, layout, causal=causal, engine=engine)


@pytest.mark.parametrize(
    ("layout", "schedule", "engine"),
    thinned(product(("contiguous", "striped", "zigzag"), ROUTES, ENGINES), quick=lambda cell: cell[1] not in NEWER),
)
def test_every_schedule(layout: str, schedule: str, engine: str) -> None:
    check(4, layout, schedule, causal=layout == "zigzag", engine=engine)


LONGNET = {"segment_lengths": [32, 64, 128], "dilation_rates": [1, 2, 4]}
WIDE = {"segment_lengths": [64, 128, 256], "dilation_rates": [1, 2, 4]}
CAUSAL_CASES: dict[str, dict[str, Any]] = {
    "nine tokens": {"ranks": 1, "tokens": 9, "heads": 4, "segment_lengths": [16], "dilation_rates": [2]},
    "two ranks": {"ranks": 2, "tokens": 18, "heads": 3, "segment_lengths": [18], "dilation_rates": [2]},
    **{f"{n} tokens": {"ranks": 1, "tokens": n, "heads": 8, **LONGNET} for n in (1, 9, 22, 30, 38, 46, 62, 129)},
    "four documents": {
        "ranks": 1, "layout": "per_document", "heads": 8, "tokens": 214, "documents": [0, 21, 23, 92, 214], **WIDE
    },
    "four documents on two ranks": {
        "ranks": 2, "layout": "per_document", "heads": 4, "tokens": 234, "documents": [0, 145, 205, 216, 234], **WIDE
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSAL_CASES)
def test_causal_branches_of_several_offsets_on_the_default_engine(name: str) -> None:
    """Neighbouring causal squares of one shard belong to different heads."""
    case = CAUSAL_CASES[name]
    check(**{"layout": "zigzag", "kv_heads": case["heads"], **case, "causal": True})


OPTIONS: list[dict[str, Any]] = [
    {"offset": "block"},
    {"offset": "kv_head"},
    {"offset": "layer_rotated", "layer": 3},
    {"softcap": 2.0, "scale": 0.7},
    {"documents": DOCUMENTS},
    {"documents": DOCUMENTS, "tail": "zero_pad", "dilation_rates": [1, 2, 4, 4]},
    {"grad": "detached"},
    {"grad": "detached", "tail": "zero_pad", "offset": "block", "dilation_rates": [1, 2, 4, 4]},
    {"tail": "zero_pad", "dilation_rates": [1, 2, 4, 4]},
    {"sinks": torch.linspace(-1, 2, HEADS, dtype=torch.float64)},
    {"alibi_slopes": torch.linspace(-0.02, 0.4, HEADS, dtype=torch.float64), "documents": DOCUMENTS},
    {"alibi_slopes": torch.linspace(-0.02, 0.4, HEADS, dtype=torch.float64), "grad": "detached", "softcap": 2.0},
    {"segment_lengths": [200], "dilation_rates": [3]},
    {"segment_lengths": [5], "dilation_rates": [9]},
    {"segment_lengths": [16, 16], "dilation_rates": [4, 4]},
]


@pytest.mark.parametrize(("option", "causal", "engine"), thinned(product(range(len(OPTIONS)), (False, True), ENGINES)))
def test_every_option(option: int, causal: bool, engine: str) -> None:
    check(3, "zigzag" if causal else "contiguous", causal=causal, engine=engine, **OPTIONS[option])


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Any branches: ragged, longer than the sequence, sparser than their segments, nested or not, several alike."""
    tokens, kv_heads = draw(st.integers(1, 40)), draw(st.sampled_from([1, 2, 3]))
    branches = draw(st.lists(st.tuples(st.integers(1, tokens + 9), st.integers(1, 9)), min_size=1, max_size=4))
    offset = draw(st.sampled_from(["mod", "block", "kv_head", "layer_rotated"]))
    inner = draw(st.one_of(st.none(), st.lists(st.integers(0, tokens), max_size=3)))
    return {
        "ranks": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "layout": draw(st.sampled_from(["contiguous", "zigzag", "striped"])),
        "schedule": draw(st.sampled_from(["auto", *ROUTES])),
        "documents": None if inner is None else [0, *sorted(inner), tokens],
        "tokens": tokens,
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "segment_lengths": [w for w, _ in branches],
        "dilation_rates": [r for _, r in branches],
        "causal": draw(st.booleans()),
        "offset": offset,
        "layer": draw(st.integers(0, 5)) if offset == "layer_rotated" else None,
        "engine": draw(st.sampled_from(ENGINES)),
    }


@settings(max_examples=15)
@given(calls())
def test_any_branches(call: dict[str, Any]) -> None:
    check(**call)


@pytest.mark.parametrize("offset", ["mod", "block", "kv_head"])
def test_who_is_reached_is_what_coverage_says(offset: str) -> None:
    """Without a rate of 1 some queries see nothing: their lse is -inf, and nobody else's."""
    branches = {"segment_lengths": [10, 24], "dilation_rates": [3, 8]}
    made = random_inputs()
    out, _, _, _, lse = on_a_ring(3, made, "contiguous", None, offset=offset, **branches)
    reached = coverage(TOKENS, HEADS, KV_HEADS, *branches.values(), offset).any(0)
    assert torch.equal(lse.isfinite(), reached.expand_as(lse)) and not reached.all()
    assert torch.equal((out != 0).any(-1).transpose(1, 2), reached.expand_as(lse))


def test_the_future_changes_nothing() -> None:
    q, k, v, dout = random_inputs()
    whole = on_a_ring(3, (q, k, v, dout), "zigzag", None, causal=True, **MIXED)[0]
    for token in (7, 30, TOKENS - 1):
        k_new, v_new = k.clone(), v.clone()
        k_new[:, token] += 1
        v_new[:, token] -= 1
        changed = on_a_ring(3, (q, k_new, v_new, dout), "zigzag", None, causal=True, **MIXED)[0]
        assert torch.equal(changed[:, :token], whole[:, :token]) and not torch.equal(changed[:, token], whole[:, token])


def test_gradients_are_those_of_finite_differences() -> None:
    """Along random directions of q, k and v, three ranks, without any other derivation of a gradient."""
    made, step = random_inputs(), 1e-5
    q, k, v, dout = made
    _, dq, dk, dv, _ = on_a_ring(3, made, "contiguous", None, **MIXED)
    for at, grad in enumerate((dq, dk, dv)):
        direction = torch.randn(grad.shape, generator=torch.Generator().manual_seed(at), dtype=grad.dtype)
        losses = []
        for sign in (1, -1):
            moved = [x + sign * step * direction if n == at else x for n, x in enumerate((q, k, v))]
            losses.append((on_a_ring(3, (*moved, dout), "contiguous", None, **MIXED)[0] * dout).sum())
        slope = (losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close(slope, (grad * direction).sum(), rtol=1e-7, atol=1e-7)


def test_an_lse_of_exactly_zero_counts() -> None:
    """One key with logit 0 is a key, where torchscale drops the branch: out is its value."""
    q, v = torch.zeros(1, 4, 1, 2, dtype=torch.float64), torch.arange(8.0, dtype=torch.float64).view(1, 4, 1, 2)
    branches = {"segment_lengths": [1], "dilation_rates": [1]}
    out, *_, lse = on_a_ring(2, (q, q, v, q), "contiguous", None, **branches)
    assert not lse.any() and torch.equal(out, v)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", [name for name in CASES if "shift" not in name])
def test_like_torchscale(name: str, ranks: int) -> None:
    """Its published algorithm's results and gradients, from golden vectors."""
    case = CASES[name]
    golden = next(one for one in json.loads(GOLDENS.read_text(encoding="utf-8")) if one["name"] == name)
    found = on_a_ring(
        ranks, inputs(case.shape), "contiguous", None, segment_lengths=case.segment_lengths,
        dilation_rates=case.dilation_rates, causal=case.causal, offset="block", grad="detached", tail="zero_pad",
    )  # fmt: skip
    for part, ours in zip(("out", "dq", "dk", "dv"), found, strict=False):
        reference = torch.tensor(golden[part], dtype=torch.float64).view_as(ours)
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"offset": "modulo"}, "choose one of mod, block, kv_head, layer_rotated"),
        ({"offset": "layer_rotated"}, "layer goes with"),
        ({"layer": 1}, "layer goes with"),
        ({"offset": "layer_rotated", "layer": -1}, "whole number from 0 on"),
        ({"dilation_rates": [1]}, "4 segment_lengths"),
        ({"segment_lengths": 8}, "segment_lengths must be a list"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"causal": "no", "grad": "detached"}, "causal must be True or False, got 'no'"),
        ({"scale": float("nan")}, "scale must be a finite number or None, got nan"),
        ({"softcap": float("inf"), "grad": "detached"}, "softcap must be positive and finite"),
        ({"sinks": torch.zeros(HEADS, dtype=torch.int32)}, "sinks are torch.int32"),
        ({"grad": "none"}, "choose one of exact, detached"),
        ({"tail": "pad"}, "choose one of ragged, zero_pad"),
        ({"tail": "zero_pad"}, "segments of 40 and rate 6: torchscale fills"),
        ({"tail": "zero_pad", "dilation_rates": [1, 2, 4, 4], "alibi_slopes": [0.5] * HEADS}, "takes no alibi_slopes"),
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes must be 6 numbers"),
        ({"grad": "detached", "sinks": torch.zeros(HEADS, dtype=torch.float64)}, "takes no sinks"),
    ],
)
def test_refusals_reach_all_ranks(options: dict[str, Any], told: str) -> None:
    q, k, v, _ = random_inputs()

    def body(ring: Ring) -> str:
        seq = ring.sequence(TOKENS, layout="contiguous")
        wrong = options if ring.rank == 1 else {}
        with pytest.raises(InputError) as caught:
            ring.dilated_attention(*(seq.shard(x) for x in (q, k, v)), seq, **(MIXED | wrong))
        ring.barrier()  # it lives on
        return str(caught.value)

    found = run_ranks(2, body, engine="plain")
    assert told in found[1] and "rank 1" in found[0]
