"""Dilated attention over rings equals torchscale's if both define a result. Options without a meaning are refused.

`tests/fuzz` compares each option, layout, engine and schedule with the dense reference.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import InputError, Ring, Sequence
from ringattn.core.dilation import Dilated
from ringattn.dilated import zero_keys
from ringattn.testing import run_ranks
from tests.torchscale_algorithm import CASES, GOLDENS, inputs

TOKENS, HEADS, KV_HEADS = 61, 6, 3
MIXED: dict[str, Any] = {"segment_lengths": [8, 16, 40, 100], "dilation_rates": [1, 2, 6, 4]}


def random_inputs() -> list[Tensor]:
    """Return q, k, v and dout of two sequences."""
    generator = torch.Generator().manual_seed(TOKENS)
    shapes = [(2, TOKENS, n, d) for n, d in ((HEADS, 5), (KV_HEADS, 5), (KV_HEADS, 4), (HEADS, 4))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def run_on_ring(ranks: int, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> list[Tensor]:
    """Run dilated attention on a ring. Return out, dq, dk, dv and lse of the whole sequence."""

    def body(ring: Ring) -> list[Tensor]:
        seq = ring.sequence(q.shape[1], layout="contiguous")
        local = [seq.shard(x).clone().requires_grad_() for x in (q, k, v)]
        out, lse = ring.dilated_attention(*local, seq, return_lse=True, **options)
        grads = torch.autograd.grad(out, local, seq.shard(dout))
        return [*(seq.gather(x) for x in (out.detach(), *grads)), seq.gather(lse.detach(), dim=2)]

    return run_ranks(ranks, body)[0]


def test_an_lse_of_exactly_zero_counts() -> None:
    """A row with a single key of logit 0 has lse 0 and returns the key's value; torchscale would drop its branch."""
    q, v = torch.zeros(1, 4, 1, 2, dtype=torch.float64), torch.arange(8.0, dtype=torch.float64).view(1, 4, 1, 2)
    branches = {"segment_lengths": [1], "dilation_rates": [1]}
    out, *_, lse = run_on_ring(2, q, q, v, q, **branches)
    assert not lse.any() and torch.equal(out, v)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", [name for name in CASES if "shift" not in name])
def test_results_equal_torchscales(name: str, ranks: int) -> None:
    """Results and gradients equal the golden vectors of torchscale's published algorithm."""
    case = CASES[name]
    golden = next(entry for entry in json.loads(GOLDENS.read_text(encoding="utf-8")) if entry["name"] == name)
    results = run_on_ring(
        ranks, *inputs(case.shape), segment_lengths=case.segment_lengths, dilation_rates=case.dilation_rates,
        causal=case.causal, offset="block", grad="detached", tail="zero_pad",
    )  # fmt: skip
    for part, ours in zip(("out", "dq", "dk", "dv"), results, strict=False):
        reference = torch.tensor(golden[part], dtype=torch.float64).view_as(ours)
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10)


def test_zero_keys_are_counted_on_the_device_of_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are on the ring's device, for which the device "meta" stands: it has shapes and no values."""
    monkeypatch.setattr(Sequence, "positions", lambda seq: torch.arange(seq.length, device="meta"))
    with Ring() as ring:
        counts = zero_keys(Dilated((8, 16), (1, 2), causal=False), ring.sequence(TOKENS), HEADS, KV_HEADS)
    assert counts.is_meta and counts.shape == (HEADS, TOKENS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offset": "modulo"}, "choose one of mod, block, kv_head, layer_rotated"),
        ({"offset": "layer_rotated"}, "only 'layer_rotated' takes a layer"),
        ({"layer": 1}, "only 'layer_rotated' takes a layer"),
        ({"offset": "layer_rotated", "layer": -1}, "whole number of at least 0"),
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
def test_refusals_reach_all_ranks(options: dict[str, Any], message: str) -> None:
    q, k, v, _ = random_inputs()

    def body(ring: Ring) -> str:
        seq = ring.sequence(TOKENS, layout="contiguous")
        wrong = options if ring.rank == 1 else {}
        with pytest.raises(InputError) as caught:
            ring.dilated_attention(*(seq.shard(x) for x in (q, k, v)), seq, **(MIXED | wrong))
        ring.barrier()  # the ring stays usable
        return str(caught.value)

    messages = run_ranks(2, body, engine="plain")
    assert message in messages[1] and "rank 1" in messages[0]
