"""Failures in a pass, closing, and calls that are too late: every rank raises and names the cause."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import (
    ClosedError,
    DisagreementError,
    InputError,
    PeerLostError,
    Ring,
    RingMultiheadAttention,
    RingMultiheadDilatedAttention,
    Sequence,
    UnsupportedError,
)
from ringattn.adapters.torch_ops import ring_attention
from ringattn.engine.base import OPTIONAL, SoftmaxState
from ringattn.engine.plain import PlainEngine
from ringattn.testing import run_ranks
from tests.face import DEADLINE_S, RANKS, TOKENS, X, attend, errors, good_call


class Breaking(PlainEngine):
    """An engine that raises at the n-th call of a method."""

    def __init__(self, method: str, calls: int) -> None:
        self.left = defaultdict(int, {method: calls})

    def begin(self, *arguments: Any) -> SoftmaxState:
        self._count("begin")
        return super().begin(*arguments)

    def delta(self, *arguments: Any) -> Tensor:
        self._count("delta")
        return super().delta(*arguments)

    def attend(self, *arguments: Any) -> None:
        self._count("attend")
        super().attend(*arguments)

    def attend_grad(self, *arguments: Any) -> None:
        self._count("attend_grad")
        super().attend_grad(*arguments)

    def _count(self, method: str) -> None:
        self.left[method] -= 1
        if self.left[method] == 0:
            raise ArithmeticError("the kernel broke")


@pytest.mark.parametrize(
    ("method", "calls"),
    [("begin", 1), ("attend", 1), ("attend", 2), ("delta", 1), ("attend_grad", 1), ("attend_grad", 2)],
)
def test_a_rank_that_breaks_in_a_pass_ends_the_ring_everywhere(method: str, calls: int) -> None:
    after: dict[int, list[BaseException]] = {rank: [] for rank in range(RANKS)}

    def body(ring: Ring) -> None:
        if ring.rank == 1:
            engine = Breaking(method, calls)
            ring.engine_for = lambda *_: engine  # type: ignore[method-assign]
        q = ring.sequence(TOKENS).shard(X).requires_grad_()
        try:
            ring.attention(q, q, q, ring.sequence(TOKENS)).sum().backward()
        finally:
            for call in (lambda: attend(ring), ring.barrier, lambda: ring.all_reduce([torch.zeros(1)])):
                with pytest.raises(ClosedError) as caught:
                    call()
                after[ring.rank].append(caught.value)

    raised = errors(body)
    assert isinstance(raised[1], ArithmeticError)
    for rank in (0, 2):
        assert isinstance(raised[rank], PeerLostError)
        assert "rank 1 failed first: ArithmeticError: the kernel broke" in str(raised[rank])
        assert str(raised[rank]).startswith(f"rank {rank} ")
    for rank, closed in after.items():
        assert all(
            f"rank {rank}: this ring cannot be used any more because it was aborted" in str(error) for error in closed
        )
        assert all("the kernel broke" in str(error) for error in closed)


def test_an_error_of_the_user_inside_the_ring_wakes_the_others() -> None:
    def body(ring: Ring) -> None:
        if ring.rank == 2:
            with ring:
                raise KeyError("mine")
        attend(ring)

    raised = errors(body)
    assert isinstance(raised[2], KeyError)
    assert all(isinstance(raised[rank], PeerLostError) and "mine" in str(raised[rank]) for rank in (0, 1))


def test_calls_on_a_closed_ring_say_that_it_is_closed() -> None:
    def body(ring: Ring) -> list[str]:
        seq, arguments = ring.sequence(TOKENS), good_call(ring)
        ring.close()
        ring.close()
        calls: list[Callable[[], object]] = [
            lambda: ring.attention(**arguments), ring.barrier, lambda: ring.all_reduce([X.clone()]),
            lambda: ring.broadcast([X.clone()]), lambda: seq.gather(seq.shard(X)),
        ]  # fmt: skip
        messages = []
        for call in calls:
            with pytest.raises(ClosedError) as caught:
                call()
            messages.append(str(caught.value))
        return messages

    for ranks in (1, RANKS):
        for rank, messages in enumerate(run_ranks(ranks, body, engine="plain")):
            assert set(messages) == {
                (f"rank {rank}: this ring cannot be used any more because it was closed; open a new Ring")
            }


def test_backward_after_close() -> None:
    def body(ring: Ring) -> None:
        q = ring.sequence(TOKENS).shard(X).requires_grad_()
        out = ring.attention(q, q, q, ring.sequence(TOKENS))
        ring.barrier()
        ring.close()
        out.sum().backward()

    for rank, error in enumerate(errors(body)):
        assert isinstance(error, ClosedError) and f"rank {rank}: this ring cannot be used any more" in str(error)


CALLS: dict[str, Callable[[Ring, Tensor, Sequence[Ring]], Tensor]] = {
    "attention": lambda ring, x, seq: ring.attention(x, x, x, seq),
    "gather": lambda ring, x, seq: seq.gather(x),
    "halo": lambda ring, x, seq: ring.halo(x, seq, 1)[0],
}


@pytest.mark.parametrize("call", CALLS)
def test_second_derivatives_are_refused_on_all_ranks(call: str) -> None:
    """The gradient of a sum is a constant to autograd, so no later backward pass would reach the call."""

    def body(ring: Ring) -> None:
        x = ring.sequence(TOKENS).shard(X).requires_grad_()
        loss = CALLS[call](ring, x, ring.sequence(TOKENS)).sum() + x.pow(3).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=ring.rank == 1)
        if ring.rank == 1:
            torch.autograd.grad(grad.square().sum(), x)
        ring.barrier()

    for rank, error in enumerate(errors(body)):
        assert isinstance(error, UnsupportedError if rank == 1 else InputError)
        assert "rank 1: second derivatives of ringattn" in str(error)


def test_a_backward_that_was_freed() -> None:
    def body(ring: Ring) -> None:
        q = ring.sequence(TOKENS).shard(X).requires_grad_()
        out = ring.attention(q, q, q, ring.sequence(TOKENS)).sum()
        out.backward()
        out.backward()

    assert all(isinstance(e, RuntimeError) and "a second time" in str(e) for e in errors(body))


def test_vmap_is_refused() -> None:
    with Ring() as ring, pytest.raises(RuntimeError, match=r"functorch transforms"):
        torch.vmap(lambda q: ring.attention(q, q, q, ring.sequence(TOKENS)))(torch.stack([X, X]))


# --- what a single rank can do to the others -------------------------------------------------------------------------


class Odd:
    """An object that fails on every access."""

    def __getattr__(self, name: str) -> Any:
        raise TypeError("odd")

    def __bool__(self) -> bool:
        raise TypeError("odd")

    __eq__ = __hash__ = __lt__ = __gt__ = __len__ = __iter__ = __getattr__  # type: ignore[assignment]


SEVERAL = torch.tensor([True, False])


def arguments_odd_on_one_rank(ring: Ring, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a valid call, with changes on rank 1."""
    return {**good_call(ring), **(changes if ring.rank == 1 else {})}


ODD_CALLS: dict[str, Callable[[Ring, Any], object]] = {
    **{
        f"attention, {name}": lambda ring, odd, name=name: ring.attention(
            **arguments_odd_on_one_rank(ring, **{name: odd})
        )
        for name in (*"q k v seq causal window scale softcap sinks kv_seq schedule".split(), *OPTIONAL, "dropout_seed")
    },
    **{
        f"dilated, {name}": lambda ring, odd, name=name: ring.dilated_attention(
            **{"segment_lengths": [4], "dilation_rates": [2], **arguments_odd_on_one_rank(ring, **{name: odd})}
        )
        for name in ("segment_lengths", "dilation_rates", "causal", "offset", "layer", "grad", "tail")
    },
    **{
        f"operator, {name}": lambda ring, odd, name=name: ring_attention(
            **arguments_odd_on_one_rank(ring, **{name: odd})
        )
        for name in ("causal", "window", "scale", "softcap", "sinks", "alibi_slopes", "schedule")
    },
    "layer": lambda ring, odd: call_layer(RingMultiheadAttention(8, 1), ring, odd),
    "dilated layer": lambda ring, odd: call_layer(RingMultiheadDilatedAttention(8, 1, [4], [1]), ring, odd),
    "dilated layer, detached": lambda ring, odd: call_layer(
        RingMultiheadDilatedAttention(8, 1, [4], [1], grad="detached", offset="block"), ring, odd
    ),
    "gather": lambda ring, odd: ring.sequence(TOKENS).gather(odd if ring.rank == 1 else good_call(ring)["q"]),
    "gather, dim": lambda ring, odd: ring.sequence(TOKENS).gather(good_call(ring)["q"], odd if ring.rank == 1 else 1),
    "all_reduce": lambda ring, odd: ring.all_reduce([odd if ring.rank == 1 else torch.ones(2)]),
    "all_reduce, list": lambda ring, odd: ring.all_reduce(odd if ring.rank == 1 else [torch.ones(2)]),
    "broadcast, src": lambda ring, odd: ring.broadcast([torch.ones(2)], odd if ring.rank == 1 else 0),
}


def call_layer(module: torch.nn.Module, ring: Ring, odd: Any) -> object:
    seq = ring.sequence(TOKENS)
    return module(odd if ring.rank == 1 else seq.shard(X[..., 0, :]), seq)


@pytest.mark.parametrize("odd", [Odd(), SEVERAL], ids=["object", "tensor"])
@pytest.mark.parametrize("call", ODD_CALLS)
def test_an_odd_argument_on_one_rank_is_refused_by_all_at_once(call: str, odd: Any) -> None:
    """All ranks refuse the call at once, wherever its description fails on one rank, and the ring stays usable."""

    def body(ring: Ring) -> tuple[Exception | None, torch.Tensor]:
        raised = None
        try:
            ODD_CALLS[call](ring, odd)
        except Exception as error:
            raised = error
        return raised, attend(ring)

    began = time.monotonic()
    for rank, (error, out) in enumerate(run_ranks(2, body, engine="plain", timeout_s=DEADLINE_S)):
        assert isinstance(error, InputError), error
        assert isinstance(error, DisagreementError) or str(error).startswith("rank 1 refused the call") == (rank != 1)
        assert out.isfinite().all()
    assert time.monotonic() - began < DEADLINE_S / 2


def equal_calls(ring: Ring, kind: str) -> list[torch.Tensor]:
    """Make two calls that differ only in the values of their tensors, and return their outputs."""
    seq, outs = ring.sequence(TOKENS), []
    for factor in (1.0, 3.0):
        q = seq.shard(X * factor).requires_grad_()
        if kind == "attention":
            outs.append(ring.attention(q, q, q, seq))
        elif kind == "dilated":
            outs.append(ring.dilated_attention(q, q, q, seq, segment_lengths=[6], dilation_rates=[2]))
        elif kind == "operator":
            outs.append(ring_attention(q, q, q, seq))
        else:
            outs.append(seq.gather(q))
    return outs


@pytest.mark.parametrize("kind", ["attention", "dilated", "operator", "gather"])
def test_backwards_of_equal_calls_in_another_order_are_refused(kind: str) -> None:
    """Ranks that run the backward passes of equal calls in different orders are refused.

    Otherwise every rank would get gradients that mix the two calls.
    """

    def body(ring: Ring) -> None:
        outs = equal_calls(ring, kind)
        for out in outs[::-1] if ring.rank == 1 else outs:
            out.sum().backward()

    for error in errors(body):
        assert isinstance(error, DisagreementError)
        for rank, forward in ((0, 1), (1, 2), (2, 1)):
            assert re.search(rf"rank {rank}: call 3: backward of call {forward}\b", str(error))
