"""Multi-head latent attention over ranks against dense attention over the expanded keys and values, in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringattn.core.layout import make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.errors import InputError
from ringattn.planner.choose import latents_are_faster
from ringattn.planner.cluster import cluster_named
from ringattn.ring import Ring
from ringattn.testing import dense_attention, run_ranks
from tests.covering import thinned

HEADS, NOPE, ROPE, LATENT, VALUE = 3, 5, 2, 4, 6


class Inputs(NamedTuple):
    q: Tensor
    rotary: Tensor
    latents: Tensor
    w_k: Tensor
    w_v: Tensor


SHARDED = 3
"""The first fields of `Inputs` are sharded; the weights are the same on all ranks."""


def drawn_inputs(
    tokens: int, batch: int = 2, dtype: torch.dtype = torch.float64, latent: int = LATENT, value: int = VALUE
) -> Inputs:
    torch.manual_seed(tokens)
    shapes = [
        (batch, tokens, HEADS, NOPE + ROPE),
        (batch, tokens, ROPE),
        (batch, tokens, latent),
        (HEADS, NOPE, latent),
        (HEADS, value, latent),
    ]
    return Inputs(*(torch.randn(shape, dtype=dtype) for shape in shapes))


def reference(inputs: Inputs, weights: Tensor, **options: Any) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return out, lse and all gradients of a loss that reads both."""
    leaves = Inputs(*(x.clone().requires_grad_() for x in inputs))
    latents = leaves.latents
    keys = torch.einsum("btl,hkl->bthk", latents, leaves.w_k)
    rotary = torch.stack([leaves.rotary] * HEADS, 2)
    values = torch.einsum("btl,hvl->bthv", latents, leaves.w_v)
    out, lse = dense_attention(leaves.q, torch.cat([keys, rotary], 3), values, **options)
    loss = (out * weights).sum() + lse.sin().sum()
    return out.detach(), lse.detach(), torch.autograd.grad(loss, leaves)


DOCUMENTS = (0, 1, 2, 20, 20, 33, 37)
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (7, 0)},
    "softcap": {"causal": True, "softcap": 2.0, "scale": 0.3},
    "dropout": {"causal": True, "dropout_p": 0.3, "dropout_seed": 5},
    "documents": {"causal": True, "cu_seqlens": DOCUMENTS},
    "sinks": {"causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)},
}
SCHEDULES = ["auto", "ring", "all_gather", "direct", "double_ring:2"]
LAYOUTS = ["contiguous", "zigzag", "striped"]
CELLS = thinned(product(CASES, LAYOUTS, SCHEDULES, [2, 4]))


def over_ring(ring: Ring, inputs: Inputs, weights: Tensor, layout: str, wire: str, **options: Any) -> list[Tensor]:
    """Return out, lse and all gradients, gathered from all ranks."""
    seq = ring.sequence(inputs.q.shape[1], layout=layout, cu_seqlens=options.pop("cu_seqlens", None))
    local = [seq.shard(x) for x in inputs[:SHARDED]] + [x.clone() for x in inputs[SHARDED:]]
    leaves = [x.requires_grad_() for x in local]
    out, lse = ring.latent_attention(*leaves, seq, wire=wire, return_lse=True, **options)
    loss = (out * seq.shard(weights)).sum() + lse.sin().sum()
    grads = list(torch.autograd.grad(loss, leaves))
    ring.all_reduce(grads[SHARDED:])
    return [seq.gather(out), seq.gather(lse, 2), *(seq.gather(x) for x in grads[:SHARDED]), *grads[SHARDED:]]


@pytest.mark.parametrize(("case", "layout", "schedule", "ranks"), CELLS)
def test_out_and_gradients_are_those_of_expanded_keys(case: str, layout: str, schedule: str, ranks: int):
    inputs = drawn_inputs(37)
    weights = torch.randn(2, 37, HEADS, VALUE, dtype=torch.float64)
    out, lse, grads = reference(inputs, weights, **CASES[case])

    def body(ring: Ring) -> list[Tensor]:
        return over_ring(ring, inputs, weights, layout, "latents", schedule=schedule, **CASES[case])

    for results in run_ranks(ranks, body, engine="plain", poison=True):
        for actual, expected in zip(results, [out, lse, *grads], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_ranks_without_tokens_and_whole_sequences_on_one_rank(tokens: int):
    inputs = drawn_inputs(tokens)
    weights = torch.ones(2, tokens, HEADS, VALUE, dtype=torch.float64)
    expected = run_ranks(1, lambda ring: over_ring(ring, inputs, weights, "contiguous", "keys", causal=True))[0]
    for ranks in (1, 4):
        for results in run_ranks(
            ranks, lambda ring: over_ring(ring, inputs, weights, "contiguous", "latents", causal=True)
        ):
            for actual, one_rank in zip(results, expected, strict=True):
                torch.testing.assert_close(actual, one_rank, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_the_engine_that_auto_takes_gives_the_same_results(dtype: torch.dtype, tolerance: float):
    inputs = drawn_inputs(64, dtype=dtype)
    weights = torch.randn(2, 64, HEADS, VALUE, dtype=dtype)
    exact = Inputs(*(x.double() for x in inputs))
    out, lse, grads = reference(exact, weights.double(), causal=True)
    for wire in ("latents", "keys"):
        for results in run_ranks(
            3, lambda ring, wire=wire: over_ring(ring, inputs, weights, "zigzag", wire, causal=True)
        ):
            for actual, expected in zip(results, [out, lse, *grads], strict=True):
                error = (actual.double() - expected).abs().max() / expected.abs().max()
                assert error < tolerance


@pytest.mark.parametrize("wire", ["latents", "keys"])
@pytest.mark.parametrize("value", [4, 8])
def test_latents_of_one_number_are_expanded_with_a_contiguous_last_dimension(wire: str, value: int):
    """torch's operator for the CPU misreads values whose last dimension is not contiguous."""
    inputs = drawn_inputs(21, batch=1, latent=1, value=value)
    weights = torch.randn(1, 21, HEADS, value, dtype=torch.float64)
    out, lse, grads = reference(inputs, weights, causal=True)
    for results in run_ranks(2, lambda ring: over_ring(ring, inputs, weights, "zigzag", wire, causal=True)):
        for actual, expected in zip(results, [out, lse, *grads], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("wire", ["latents", "keys"])
def test_autocast_changes_nothing(wire: str):
    inputs = drawn_inputs(16, dtype=torch.float32)

    def body(ring: Ring, autocast: bool) -> list[Tensor]:
        seq = ring.sequence(16)
        leaves = [seq.shard(x).requires_grad_() for x in inputs[:SHARDED]]
        leaves += [x.clone().requires_grad_() for x in inputs[SHARDED:]]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = ring.latent_attention(*leaves, seq, wire=wire, causal=True)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    plain = run_ranks(2, lambda ring: body(ring, False))
    for results, expected in zip(run_ranks(2, lambda ring: body(ring, True)), plain, strict=True):
        assert all(torch.equal(actual, exact) for actual, exact in zip(results, expected, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_is_recomputed_in_checkpointed_code(reentrant: bool):
    inputs = drawn_inputs(16)

    def body(ring: Ring, recompute: bool) -> list[Tensor]:
        seq = ring.sequence(16, layout="zigzag")
        leaves = [
            x.requires_grad_() for x in [seq.shard(x) for x in inputs[:SHARDED]] + [x.clone() for x in inputs[3:]]
        ]

        def layer(*tensors: Tensor) -> Tensor:
            return ring.latent_attention(*tensors, seq, wire="latents", causal=True).sin()

        out = checkpoint(layer, *leaves, use_reentrant=reentrant) if recompute else layer(*leaves)
        return list(torch.autograd.grad(out.square().sum(), leaves)) if not reentrant else _backward(out, leaves)

    plain = run_ranks(3, lambda ring: body(ring, False))
    for grads, expected in zip(run_ranks(3, lambda ring: body(ring, True)), plain, strict=True):
        assert all(torch.equal(grad, other) for grad, other in zip(grads, expected, strict=True))


def _backward(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients by `backward`, which reentrant checkpoints need."""
    out.square().sum().backward()
    return [x.grad for x in leaves if x.grad is not None]


def test_bytes_are_those_of_latents_and_their_gradients():
    inputs = drawn_inputs(36, batch=1, dtype=torch.float32)

    def body(ring: Ring) -> list[int]:
        sent = []
        seq = ring.sequence(36, layout="contiguous")
        for wire in ("latents", "keys"):
            leaves = [seq.shard(x) for x in inputs[:SHARDED]] + list(inputs[SHARDED:])
            leaves = [x.clone().requires_grad_() for x in leaves]
            ring.reset_counters()
            out = ring.latent_attention(*leaves, seq, wire=wire, schedule="ring")
            sent.append(ring.counters()["bytes_sent"])
            out.sum().backward()
            sent.append(ring.counters()["bytes_sent"] - sent[-1])
        return sent

    record = {"latents": LATENT + ROPE, "keys": HEADS * (NOPE + ROPE + VALUE)}
    rows = 12 * 4  # of one rank, in bytes of one number
    for sent in run_ranks(3, body):
        assert sent[0] == 2 * rows * record["latents"] and sent[2] == 2 * rows * record["keys"]
        assert sent[1] * record["keys"] == sent[3] * record["latents"]


def deepseek(tokens: int, ranks: int, heads: int, latents: bool) -> Problem:
    """Return a call with some heads of DeepSeek-V3: 192 numbers of a key and 128 of a value, or 512 + 64 sent."""
    layout = make_layout("zigzag", tokens, ranks)
    kv_heads, dims = (1, (64, 512)) if latents else (heads, None)
    mask = Banded(causal=True).mask(tokens, tokens, None, None, heads, kv_heads)
    return Problem(layout, layout, mask, 1, heads, kv_heads, 192, 128, "bfloat16", latent_dims=dims)


@pytest.mark.parametrize(
    ("ranks", "heads", "per_node", "sends_latents"),
    [
        (8, 128, 1, True),
        (8, 128, 8, True),
        (8, 2, 8, False),  # 640 numbers and not 576, not worth the products
        (8, 1, 1, False),  # 320 numbers
        (1, 128, 8, False),
    ],
)
def test_auto_sends_latents_if_that_is_predicted_to_be_faster(
    ranks: int, heads: int, per_node: int, sends_latents: bool
):
    cluster = replace(cluster_named("h100"), ranks_per_node=per_node)
    both = [deepseek(65_536, ranks, heads, latents) for latents in (True, False)]
    assert latents_are_faster(*both, "ring", cluster) == sends_latents


def test_auto_sends_keys_for_a_schedule_that_sends_queries():
    inputs, weights = drawn_inputs(37), torch.ones(2, 37, HEADS, VALUE, dtype=torch.float64)
    out, lse, grads = reference(inputs, weights, causal=True)

    def body(ring: Ring) -> list[Tensor]:
        return over_ring(ring, inputs, weights, "zigzag", "auto", schedule="ulysses", causal=True)

    for results in run_ranks(2, body, engine="plain"):
        for actual, expected in zip(results, [out, lse, *grads], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


REFUSED = {
    "schedule='ulysses' sends queries": {"schedule": "ulysses"},
    "wire='values' is not known": {"wire": "values"},
    "dropout_p=0.5 needs a dropout_seed": {"dropout_p": 0.5},
    "w_k must have the shape .3, 5, 4.": {"w_k": torch.zeros(3, 4, 4, dtype=torch.float64)},
    "rotary must have 3 dimensions": {"rotary": torch.zeros(2, 4, 1, 2, dtype=torch.float64)},
    "q must have the shape .2, 4, 3, 7.": {"q": torch.zeros(2, 8, 3, 7, dtype=torch.float64)},
    "the last dimension of q must be contiguous": {"q": torch.zeros(2, 4, 7, 3, dtype=torch.float64).mT},
}


@pytest.mark.parametrize("message", REFUSED)
def test_calls_that_do_not_fit_are_refused(message: str):
    inputs = drawn_inputs(8)._asdict()

    def body(ring: Ring) -> None:
        seq = ring.sequence(8, layout="contiguous")
        call = {name: x if name.startswith("w") else seq.shard(x) for name, x in inputs.items()}
        call = {"wire": "latents", **call, **REFUSED[message]}
        with pytest.raises(InputError, match=message):
            ring.latent_attention(**call, seq=seq)

    run_ranks(2, body)
