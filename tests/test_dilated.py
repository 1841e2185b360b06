"""Dilated attention over rings: exact against the dense reference and torchscale, forward and all gradients.

Each option, layout and schedule; the fuzzer draws any branches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import InputError, Ring
from ringattn.schedule.routes import ROUTES
from ringattn.testing import run_ranks
from tests.core.dilated_reference import dilated_reference
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
    # Neighbouring causal squares of one shard belong to different heads.
    {"segment_lengths": [32, 64, 128], "dilation_rates": [1, 2, 4], "kv_heads": HEADS},
    {"segment_lengths": [64, 128], "dilation_rates": [1, 2], "documents": [0, 15, 20, 38, 61], "kv_heads": HEADS},
]


@pytest.mark.parametrize(("option", "causal", "engine"), thinned(product(range(len(OPTIONS)), (False, True), ENGINES)))
def test_every_option(option: int, causal: bool, engine: str) -> None:
    check(3, "zigzag" if causal else "contiguous", causal=causal, engine=engine, **OPTIONS[option])


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
        ({"causal": "no", "grad": "detached"}, "causal must be True or False, got 'no'"),
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
