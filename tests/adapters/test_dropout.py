"""Dropout in hosts without seeds: each call derives a seed from the activation's, and recomputation uses it again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringattn import InputError, Ring, Sequence, UnsupportedError
from ringattn.adapters import dropout
from ringattn.adapters.context import recompute_context
from ringattn.adapters.context_parallel import context_parallel
from ringattn.adapters.context_parallel import recompute_context as redirected
from ringattn.adapters.dropout import default_seed, seed_from
from ringattn.adapters.sdpa import ring_sdpa
from ringattn.testing import run_ranks
from tests import oracle, philox

TOKENS, HEADS, P = 23, 2, 0.4


def make_input(seed: int = 0) -> Tensor:
    """Return an input (batch, heads, tokens, head_dim), the same on every rank."""
    return torch.randn(2, HEADS, TOKENS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(x: Tensor) -> Tensor:
    return ring_sdpa(x.sin(), x, x, dropout_p=P, is_causal=True)


def dense(x: Tensor, seed: int) -> Tensor:
    """Return what `layer` computes from whole tensors, with the dropout of `seed`."""
    kept = philox.kept(2, HEADS, TOKENS, TOKENS, seed, P)
    rows = x.transpose(1, 2)
    mask = oracle.allowed_mask(TOKENS, TOKENS, causal=True)
    out, _ = oracle.attention(rows.sin(), rows, rows, mask, x.shape[-1] ** -0.5, kept=kept)
    return out.transpose(1, 2)


def dense_steps(*seeds: int) -> tuple[Tensor, Tensor]:
    """Apply one layer per seed, one after another. Return the last output and the gradient of the input."""
    x = make_input().requires_grad_()
    out = x
    for seed in seeds:
        out = dense(out, seed)
    return out.detach(), torch.autograd.grad(out.sin().sum(), x)[0]


def close(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_a_seed_of_several_numbers() -> None:
    """`seed_from` returns what its docstring defines, so that users can reproduce the dropped weights of a call."""
    assert seed_from(7, 0).to_bytes(8, "little").hex() == "9fc5a7d9f8ce0cd9"  # printf "7 0" | sha256sum
    seeds = {seed_from(step, call) for step in range(100) for call in range(100)} | {seed_from(1, 2, 3), seed_from(123)}
    assert len(seeds) == 10_002 and all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layers_and_steps_have_seeds_of_their_own(ranks: int) -> None:
    """Two layers per step, a repeated step seed and another one drop differently, but alike on any number of ranks."""

    def body(ring: Ring) -> list[tuple[Tensor, Tensor]]:
        seq, actual = ring.sequence(TOKENS), []
        for step in (5, 5, 6):
            x = make_input().requires_grad_()
            with ring.activate(seq, dropout_seed=step):
                out = layer(layer(seq.shard(x, 2)))
            out.sin().sum().backward()
            assert x.grad is not None
            ring.all_reduce([x.grad])
            actual.append((seq.gather(out.detach(), 2), x.grad))
        return actual

    expected = [dense_steps(*(seed_from(*call) for call in calls))
                for calls in (((5, 0), (5, 1)), ((5, 2), (5, 3)), ((6, 0), (6, 1)))]  # fmt: skip
    for actual in run_ranks(ranks, body):
        for x, y in zip(actual, expected, strict=True):
            close(x, y)


def test_seeds_that_are_forgotten_and_marks_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "DRAWN_SEEDS", 2)
    monkeypatch.setattr(dropout, "KEPT_CALLS", 3)
    draws = dropout._Draws()
    assert [draws.draw(seed, mark) for mark, seed in enumerate((1, 2, 1, 3, 1, 2))] == [
        seed_from(*call) for call in ((1, 0), (2, 0), (1, 1), (3, 0), (1, 2), (2, 0))
    ]
    assert [*draws.seeds_by_mark] == [3, 4, 5]


def test_default_seed_comes_from_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default seed does not depend on the other ranks' generators, is derived once, and advances no generator."""

    def body(ring: Ring) -> tuple[int, int]:
        return default_seed(ring), default_seed(ring)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = run_ranks(2, body)
    assert torch.equal(torch.get_rng_state(), before) and run_ranks(2, body) == first
    torch.manual_seed(4)
    assert run_ranks(2, body) != first
    states = itertools.count()
    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.tensor([next(states)]))
    (seed, repeated), peer_seeds = run_ranks(2, body)
    assert seed == repeated and peer_seeds == (seed, seed)


# --- recomputation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [
    {"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": False, "context_fn": recompute_context},
])  # fmt: skip
def test_a_region_drops_the_same_when_it_is_computed_again(how: dict[str, Any]) -> None:
    """Recomputation drops the same weights, in regions of one and of two layers.

    Two forward passes precede the backward passes, which run in reverse order.
    """
    torch.manual_seed(1)
    with Ring() as ring:
        seq, steps = ring.sequence(TOKENS), []
        for step in (8, 9):
            x = make_input().requires_grad_()
            with ring.activate(seq, dropout_seed=step):
                out = checkpoint(layer, x, **how)
                out = checkpoint(lambda x: layer(layer(x)), out, **how)
            steps.append((x, out))
        torch.rand(3)  # the generator advances between forward and backward
        for number in (1, 0):
            x, out = steps[number]
            with ring.activate(seq, dropout_seed=1) if number else nullcontext():
                (grad,) = torch.autograd.grad(out.sin().sum(), x) if not how["use_reentrant"] else [_grad(out, x)]
            close((out.detach(), grad), dense_steps(*(seed_from(8 + number, call) for call in range(3))))


def _grad(out: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `x` by `backward`, because reentrant checkpoints do not support `torch.autograd.grad`."""
    out.sin().sum().backward()
    assert x.grad is not None
    return x.grad


def test_hidden_dropout_stays_as_it_was_in_the_first_run() -> None:
    """Attention draws from the generator in the first run and in recomputation, so that later dropout draws alike."""

    def block(x: Tensor) -> Tensor:
        return F.dropout(layer(F.dropout(x, 0.5)), 0.5)

    def grad(again: bool) -> Tensor:
        torch.manual_seed(2)
        x = make_input().requires_grad_()
        with Ring() as ring, ring.activate(ring.sequence(TOKENS), dropout_seed=1):
            out = checkpoint(block, x, use_reentrant=False) if again else block(x)
            return torch.autograd.grad(out.sin().sum(), x)[0]

    assert torch.equal(grad(True), grad(False))


def test_context_parallel() -> None:
    def attend(x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        return F.scaled_dot_product_attention(y.sin(), y, y, dropout_p=P, is_causal=True)

    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    expected = dense(make_input() * w, seed_from(2**64 - 1, 0))
    expected_grad = torch.autograd.grad(expected.sin().sum(), w)[0]
    with Ring() as ring:
        x = make_input()
        with context_parallel(ring, buffers=[x], buffer_seq_dims=[2], dropout_seed=2**64 - 1):
            out = checkpoint(attend, x, w, use_reentrant=False, context_fn=redirected)
            grad = torch.autograd.grad(out.sin().sum(), w)[0]
    close((out.detach(), grad), (expected.detach(), expected_grad))


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(message: str, call: Callable[[Ring, Sequence], Any], kind: type[Exception] = InputError) -> None:
    with Ring() as ring, pytest.raises(kind, match=message):
        call(ring, ring.sequence(TOKENS))


def test_a_region_whose_generator_was_not_kept() -> None:
    def call(ring: Ring, seq: Sequence) -> None:
        with ring.activate(seq, dropout_seed=1):
            out = checkpoint(layer, make_input().requires_grad_(), use_reentrant=False, preserve_rng_state=False)
            out.sum().backward()

    refused("the seed of its forward pass is not known: .* checkpoint with preserve_rng_state=True", call)


def test_two_calls_from_the_same_state_of_the_generator() -> None:
    """Recomputation is refused: it cannot tell the two calls apart, and they dropped different weights."""

    def call(ring: Ring, seq: Sequence) -> None:
        with ring.activate(seq, dropout_seed=1):
            outs = []
            for _ in range(2):
                torch.manual_seed(0)
                outs.append(checkpoint(layer, make_input().requires_grad_(), use_reentrant=False))
            assert not torch.equal(*outs)
            outs[0].sum().backward()

    refused("was in the same state at two calls; remove the manual_seed", call)


def test_no_seed_and_seeds_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(ring: Ring, seq: Sequence) -> None:
        with ring.activate(seq):
            layer(make_input())

    refused(r"dropout_p=0\.4, and .* no dropout_seed: .*`with ring\.activate\(seq, dropout_seed=step\):`", drop)

    def shard(ring: Ring, seed: Any) -> None:
        context_parallel(ring, buffers=[make_input()], buffer_seq_dims=[2], dropout_seed=seed).__enter__()

    for seed in (-1, 2**64, True, 0.5):
        refused("dropout_seed must be a whole number", lambda ring, seq, s=seed: ring.activate(seq, dropout_seed=s))  # type: ignore[misc]
        refused("dropout_seed must be", lambda ring, seq, s=seed: shard(ring, s))  # type: ignore[misc]
    refused("leave dropout_seed out of activate", lambda ring, seq: ring.activate(None, dropout_seed=1))

    def captured(ring: Ring, seq: Sequence) -> None:
        with ring.activate(seq, dropout_seed=1):
            layer(make_input())

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refused("would drop the same weights at each replay", captured)


def test_one_rank_with_another_seed_or_none() -> None:
    """If one rank has another dropout seed or none, all ranks raise, and none waits for the deadline."""

    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        with ring.activate(seq, dropout_seed=None if ring.rank else 1), pytest.raises(InputError, match="dropout_seed"):
            layer(seq.shard(make_input(), 2))
        with (
            ring.activate(seq, dropout_seed=ring.rank),
            pytest.raises(Exception, match="the ranks made different calls"),
        ):
            layer(seq.shard(make_input(), 2))

    run_ranks(2, body, timeout_s=10.0)


def test_compiled_sdpa() -> None:
    """Compiled SDPA with dropout is refused, because its seed would be a constant of the compiled code."""
    with Ring() as ring, ring.activate(ring.sequence(TOKENS), dropout_seed=1):
        with pytest.raises(Exception, match="one seed for all its calls") as raised:
            torch.compile(layer, backend="eager", fullgraph=True)(make_input())
        assert UnsupportedError.__name__ in str(raised.value)
