"""If ranks need different gradients of a call, they get those that one process computes, or an error with the cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringattn import DisagreementError, Ring, Sequence
from ringattn.adapters.torch_ops import ring_attention
from ringattn.testing import dense_attention, run_ranks
from tests.transport.nccl_rings import on_rings, results
from tests.transport.simulated.world import SimWorld

TOKENS, RANKS = 13, 3
GENERATOR = torch.Generator().manual_seed(5)
WHOLE = [torch.randn(2, TOKENS, heads, 8, dtype=torch.float64, generator=GENERATOR) for heads in (4, 2, 2)]
SINKS = torch.randn(4, dtype=torch.float64, generator=GENERATOR)
WEIGHT = torch.randn(2, TOKENS, 4, 8, dtype=torch.float64, generator=GENERATOR)

Attend = Callable[[Ring, Tensor, Tensor, Tensor, Tensor, Sequence], Tensor]
ENTRIES: dict[str, Attend] = {
    "attention": lambda ring, q, k, v, sinks, seq: ring.attention(q, k, v, seq, causal=True, sinks=sinks),
    "dilated": lambda ring, q, k, v, sinks, seq: ring.dilated_attention(
        q, k, v, seq, segment_lengths=[TOKENS], dilation_rates=[1], causal=True, sinks=sinks
    ),
    "operator": lambda ring, q, k, v, sinks, seq: ring_attention(q, k, v, seq, causal=True, sinks=sinks),
    "checkpoint": lambda ring, q, k, v, sinks, seq: checkpoint(
        lambda *x: ring.attention(*x[:3], seq, causal=True, sinks=x[3]), q, k, v, sinks, use_reentrant=False
    ),
    "operator in a checkpoint": lambda ring, q, k, v, sinks, seq: checkpoint(
        lambda *x: ring_attention(*x[:3], seq, causal=True, sinks=x[3]) * 1.0, q, k, v, sinks, use_reentrant=False
    ),
}
PATTERNS = {
    "all on one rank": ("", "qkvs", ""),
    "queries on one rank, keys and values on another": ("", "kv", "q"),
    "values only": ("v", "", ""),
    "sinks only": ("", "", "s"),
}


def expected() -> list[Tensor]:
    """Return the gradients of q, k, v and the sinks, computed on one process."""
    leaves = [x.clone().requires_grad_() for x in (*WHOLE, SINKS)]
    out, _ = dense_attention(*leaves[:3], causal=True, sinks=leaves[3])
    return list(torch.autograd.grad((out * WEIGHT).sum(), leaves))


def step(ring: Ring, attend: Attend, needs: str) -> list[Tensor | None]:
    """Run a forward and a backward pass in which the leaves in `needs` (of "qkvs") need gradients.

    Return the gradients of q, k, v and the sinks, or None.
    """
    seq = ring.sequence(TOKENS)
    leaves = [x.clone().requires_grad_(name in needs) for name, x in zip("qkv", map(seq.shard, WHOLE), strict=True)]
    sinks = SINKS.clone().requires_grad_("s" in needs)
    (attend(ring, *leaves, sinks, seq) * seq.shard(WEIGHT)).sum().backward()
    return [x.grad for x in (*leaves, sinks)]


def check(pattern: tuple[str, ...], rows: list[Tensor], shards: list[list[Tensor | None]]) -> None:
    """Check that each rank has the gradients that one process computes where it needs them, and none elsewhere.

    `pattern`: what each rank needs; `rows`: the positions of each rank; `shards`: the gradients of each rank.
    """
    whole = expected()
    partial_sinks = [gradients[3] for gradients in shards]
    for needs, rank_rows, gradients in zip(pattern, rows, shards, strict=True):
        for name, gradient, reference in zip("qkv", gradients, whole, strict=False):
            assert (gradient is not None) == (name in needs)
            if gradient is not None:
                torch.testing.assert_close(gradient, reference[:, rank_rows], rtol=1e-10, atol=1e-10)
    assert [sink_gradient is not None for sink_gradient in partial_sinks] == ["s" in needs for needs in pattern]
    if all("s" in needs for needs in pattern):
        total = sum(sink_gradient for sink_gradient in partial_sinks if sink_gradient is not None)
        torch.testing.assert_close(total, whole[3], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_gradients_equal_those_of_one_process(entry: str, pattern: tuple[str, ...]) -> None:
    def body(ring: Ring) -> Any:
        # In the second step all ranks need all gradients. So a call that was compared before needs other gradients.
        steps = [step(ring, ENTRIES[entry], needs) for needs in (pattern[ring.rank], "qkvs", pattern[ring.rank])]
        return ring.sequence(TOKENS).positions(), steps

    by_rank = run_ranks(RANKS, body, poison=True)
    for index, needs in enumerate((pattern, ("qkvs",) * RANKS, pattern)):
        check(needs, [rows for rows, _ in by_rank], [steps[index] for _, steps in by_rank])


def test_forward_caches_inputs_also_on_a_rank_that_needs_no_gradient() -> None:
    """Forward caches remote inputs for backward on every rank, also on a rank that needs no gradient itself.

    Backward reads them for the gradients that other ranks need, instead of fetching them again.
    """
    x = torch.randn(1, 64, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def body(ring: Ring) -> Any:
        seq = ring.sequence(64, layout="contiguous")
        q, k, v = (seq.shard(x).clone() for _ in range(3))
        (v if ring.rank == 0 else torch.empty(0)).requires_grad_()
        ring.attention(q, k, v, seq, causal=True, window=(2, None), schedule="all_gather").sin().sum().backward()
        return seq.positions(), v.grad, ring.memory_info()["kept_bytes"]

    value = x.clone().requires_grad_()
    dense_attention(x, x, value, causal=True, window=(2, None))[0].sin().sum().backward()
    (rows, gradient, _), (*_, kept_bytes) = run_ranks(2, body, poison=True)
    assert kept_bytes > 0 and value.grad is not None
    torch.testing.assert_close(gradient, value.grad[:, rows], rtol=1e-10, atol=1e-10)


def test_without_gradients_no_output_carries_a_graph() -> None:
    def body(ring: Ring) -> bool:
        seq = ring.sequence(TOKENS)
        q, k, v = map(seq.shard, WHOLE)
        outs = [ring.attention(q, k, v, seq), ring_attention(q, k, v, seq), seq.gather(q)]
        return any(out.requires_grad for out in outs)

    assert run_ranks(RANKS, body) == [False] * RANKS


def test_the_gradient_of_a_gather_that_only_one_rank_needs() -> None:
    def body(ring: Ring) -> Any:
        seq = ring.sequence(TOKENS)
        shard = seq.shard(WHOLE[0]).requires_grad_(ring.rank == 2)
        ((ring.rank + 1) * seq.gather(shard) * WEIGHT).sum().backward()
        return seq.positions(), shard.grad

    for rank, (rows, gradient) in enumerate(run_ranks(RANKS, body)):
        assert (gradient is not None) == (rank == 2)
        if gradient is not None:
            torch.testing.assert_close(gradient, 6 * WEIGHT[:, rows])  # 1 + 2 + 3, the ranks' factors


def error_of_refusal(ring: Ring, call: Callable[[], object]) -> str:
    """Make a call that is refused. Check that the ring can still make another call, and return the error's message."""
    with pytest.raises(DisagreementError) as caught:
        call()
    step(ring, ENTRIES["attention"], "qkv")
    return str(caught.value)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("entry", ["attention", "dilated", "operator"])
def test_one_rank_without_gradient_mode_is_named(entry: str, mode: Any) -> None:
    def body(ring: Ring) -> str:
        def call() -> None:
            with mode() if ring.rank == 1 else nullcontext():
                step(ring, ENTRIES[entry], "kv" if ring.rank == 2 else "")

        return error_of_refusal(ring, call)

    for error in run_ranks(RANKS, body):
        assert error.startswith("rank 2 needs gradients of k, v, and rank 1 could not take part") and "no_grad" in error


def test_one_rank_with_inputs_of_inference_mode_is_named() -> None:
    def body(ring: Ring) -> str:
        seq = ring.sequence(TOKENS)
        with torch.inference_mode(ring.rank == 0):
            q, k, v = (seq.shard(x).clone() for x in WHOLE)
        return error_of_refusal(ring, lambda: ring.attention(q.requires_grad_() if ring.rank == 1 else q, k, v, seq))

    for error in run_ranks(2, body):
        assert "rank 1 needs gradients of q, and rank 0" in error and "pass q.clone()" in error


def test_compiled_code_without_inputs_that_need_gradients_is_named() -> None:
    compiled = torch.compile(lambda q, k, v, seq: ring_attention(q, k, v, seq), fullgraph=True, backend="aot_eager")

    def body(ring: Ring) -> str:
        seq = ring.sequence(TOKENS)
        q, k, v = map(seq.shard, WHOLE)
        return error_of_refusal(ring, lambda: compiled(q.requires_grad_() if ring.rank == 1 else q, k, v, seq))

    for error in run_ranks(2, body):
        assert "rank 1 needs gradients of q, and rank 0" in error and "x.requires_grad_() on one" in error


# --- NCCL, where a call that was compared is not compared again ------------------------------------------------------


def test_on_a_gpu_needs_that_change_between_steps_are_compared_at_every_step() -> None:
    patterns = [("q", ""), ("", "kv"), ("qkv", "qkv"), ("", ""), ("", "v"), ("q", "q")]

    def body(ring: Ring) -> Any:
        steps: list[Any] = []
        for pattern in patterns:
            if any(pattern):
                steps.append(step(ring, ENTRIES["attention"], pattern[ring.rank]))
            else:
                seq = ring.sequence(TOKENS)
                assert not ring.attention(*map(seq.shard, WHOLE), seq, causal=True, sinks=SINKS).requires_grad
        ring.synchronize()
        return ring.sequence(TOKENS).positions(), steps

    by_rank = results(on_rings(SimWorld(2), body, ring={"engine": "plain"}))
    for index, pattern in enumerate(filter(any, patterns)):
        check(pattern, [rows for rows, _ in by_rank], [steps[index] for _, steps in by_rank])


@pytest.mark.parametrize("before", ["qkv", ""], ids=["after calls with gradients", "after calls without and with"])
def test_on_a_gpu_needs_that_differ_after_equal_ones_end_the_ring_with_the_cause(before: str) -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        for needs in ("qkv", before):
            q, k, v = (seq.shard(x).clone().requires_grad_(bool(needs)) for x in WHOLE)
            ring.attention(q, k, v, seq)
        q, k, v = (seq.shard(x).clone().requires_grad_(ring.rank == 1) for x in WHOLE)
        out = ring.attention(q, k, v, seq)
        if ring.rank == 1:
            out.sum().backward()
        deadline_s = time.monotonic() + 10.0
        while time.monotonic() < deadline_s:
            ring.synchronize()
            time.sleep(0.02)

    outcomes = on_rings(SimWorld(2), body, ring={"engine": "plain"})
    assert any(isinstance(outcome.error, DisagreementError) for outcome in outcomes)
    for outcome in outcomes:
        assert "needs gradients on only one of the two ranks" in str(outcome.error)
        assert "q.requires_grad_()" in str(outcome.error)
        assert outcome.ended_s - outcome.began_s < 5.0
