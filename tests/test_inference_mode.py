"""Validation under `torch.inference_mode()` before, between and after training steps does not affect them.

Whatever a ring keeps between calls is created outside of inference mode, in whichever mode the call is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import InputError, Ring, RingMultiheadAttention, Sequence
from ringattn.adapters.torch_ops import ring_attention
from ringattn.engine.plain import PlainEngine
from ringattn.testing import dense_attention, run_ranks
from tests.face import errors

Attend = Callable[[Tensor, Sequence], Tensor]
"""A way to attend: maps this rank's x (batch, tokens, 4, 8) to a tensor of the same shape."""


def data(tokens: int, seed: int = 1) -> Tensor:
    return torch.randn(1, tokens, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attend_causally(x: Tensor, seq: Sequence) -> Tensor:
    return seq.ring.attention(x, x[:, :, :2], x[:, :, :2], seq, causal=True)


def attend_dilated(x: Tensor, seq: Sequence) -> Tensor:
    out: Tensor = seq.ring.dilated_attention(x, x, x, seq, segment_lengths=[4, 8], dilation_rates=[1, 2])
    return out


def attend_after_gather(x: Tensor, seq: Sequence) -> Tensor:
    return attend_causally(seq.shard(seq.gather(x)), seq)


def attend_in_layer(x: Tensor, seq: Sequence) -> Tensor:
    layer = RingMultiheadAttention(32, 4, rope="neox", qk_norm=True, causal=True).double()
    generator = torch.Generator().manual_seed(0)  # the threads of all ranks share the default generator
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.3, generator=generator)
    return layer(x.flatten(2), seq).unflatten(2, (4, 8))


def attend_by_operator(x: Tensor, seq: Sequence) -> Tensor:
    return ring_attention(x, x, x, seq, window=(3, 1))


WAYS = [attend_causally, attend_dilated, attend_after_gather, attend_in_layer, attend_by_operator]


def step(seq: Sequence, attend: Attend) -> Tensor:
    """Run a training step; return this rank's gradient."""
    x = seq.shard(data(seq.length)).requires_grad_()
    attend(x, seq).sin().sum().backward()
    assert x.grad is not None
    return x.grad


def validate(seq: Sequence, attend: Attend) -> Tensor:
    with torch.inference_mode():
        return attend(seq.shard(data(seq.length, seed=2)), seq)


@pytest.mark.parametrize(("ranks", "engine"), [(1, "auto"), (2, "auto"), (2, "plain")])
@pytest.mark.parametrize("attend", WAYS, ids=[attend.__name__ for attend in WAYS])
def test_validation_leaves_no_trace_in_training(attend: Attend, ranks: int, engine: str) -> None:
    """Validation does not change the gradients of training.

    It runs first, needs more memory than the steps before it, and creates plans that training uses later.
    """
    lengths = (10, 24, 24, 40)

    def trained(ring: Ring) -> list[Tensor]:
        return [step(ring.sequence(length), attend) for length in lengths]

    def validated(ring: Ring) -> list[Tensor]:
        validate(ring.sequence(10), attend)
        gradients = []
        for length in lengths:
            gradients.append(step(ring.sequence(length), attend))
            outs = [validate(ring.sequence(validation_length), attend) for validation_length in (length, length + 30)]
            assert all(out.isfinite().all() for out in outs)
        return gradients

    plain = run_ranks(ranks, trained, engine=engine, poison=True)
    for gradients, expected in zip(run_ranks(ranks, validated, engine=engine, poison=True), plain, strict=True):
        assert all(
            torch.equal(gradient, expected_gradient)
            for gradient, expected_gradient in zip(gradients, expected, strict=True)
        )


def test_ranks_in_different_modes_attend_together() -> None:
    """Each rank may be in a different mode, even if another rank's thread writes into its memory."""

    def body(ring: Ring) -> list[Tensor]:
        seq = ring.sequence(24)
        with torch.inference_mode(ring.rank == 0), torch.set_grad_enabled(ring.rank == 2):
            return [seq.gather(attend_causally(seq.shard(data(24)), seq)) for _ in range(2)]

    expected = dense_attention(data(24), data(24)[:, :, :2], data(24)[:, :, :2], causal=True)[0]
    for outs in run_ranks(3, body, engine="plain"):
        for out in outs:
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_tensors_of_inference_mode_attend_outside_of_it() -> None:
    def body(ring: Ring) -> tuple[Tensor, Tensor]:
        seq = ring.sequence(24)
        with torch.inference_mode():
            x = seq.shard(data(24)) * 1
            inside = attend_causally(x, seq)
        return inside, attend_causally(x, seq)

    for inside, outside in run_ranks(2, body, engine="plain"):
        assert torch.equal(inside, outside) and not outside.is_inference()


def test_engines_prepare_outside_of_inference_mode() -> None:
    """`prepare` of an engine runs outside of inference mode, because engines on a GPU cache tables of rows in it."""
    modes = []

    class Noting(PlainEngine):
        def prepare(self, *arguments: Any, **options: Any) -> list[Any]:
            modes.append(torch.is_inference_mode_enabled())
            return super().prepare(*arguments, **options)

    with Ring(engine=Noting()) as ring:
        validate(ring.sequence(24), attend_causally)
    assert modes == [False]


@pytest.mark.parametrize("layer", [False, True])
def test_tensors_of_inference_mode_that_backward_would_need_are_refused_by_all(layer: bool) -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(24)
        with torch.inference_mode(ring.rank == 1):
            x = seq.shard(data(24)) * 1
        if layer:
            attend_in_layer(x, seq)
        else:
            ring.attention(seq.shard(data(24)).requires_grad_(), x, x, seq)

    name = "x" if layer else "k"
    for error in errors(body):
        assert isinstance(error, InputError)
        assert (f"rank 1: {name} was created under torch.inference_mode") in str(error) and f"{name}.clone()" in str(
            error
        )
