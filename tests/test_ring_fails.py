"""Failures in a pass, closing, and calls that come too late: every rank raises, and the ring says why it is dead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ringattn import ClosedError, DisagreementError, InputError, PeerLostError, Ring
from ringattn.adapters.torch_ops import ring_attention
from ringattn.engine.plain import PlainEngine
from ringattn.testing import run_ranks
from tests.face import RANKS, TOKENS, X, attend, errors, good_call


class Breaking(PlainEngine):
    """Raises at the n-th call."""

    def __init__(self, attend_calls: int = -1, grad_calls: int = -1) -> None:
        self.left = {"attend": attend_calls, "attend_grad": grad_calls}

    def attend(self, *arguments: Any) -> None:
        self._count("attend")
        super().attend(*arguments)

    def attend_grad(self, *arguments: Any) -> None:
        self._count("attend_grad")
        super().attend_grad(*arguments)

    def _count(self, what: str) -> None:
        self.left[what] -= 1
        if self.left[what] == 0:
            raise ArithmeticError("the kernel broke")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_rank_that_breaks_in_a_pass_ends_the_ring_everywhere(backward: bool, calls: int) -> None:
    after: dict[int, list[BaseException]] = {rank: [] for rank in range(RANKS)}

    def body(ring: Ring) -> None:
        if ring.rank == 1:
            engine = Breaking(grad_calls=calls) if backward else Breaking(attend_calls=calls)
            ring.engine_for = lambda *_: engine  # type: ignore[method-assign]
        q = ring.sequence(TOKENS).shard(X).requires_grad_()
        try:
            ring.attention(q, q, q, ring.sequence(TOKENS)).sum().backward()
        finally:
            for call in (lambda: attend(ring), ring.barrier, lambda: ring.all_reduce([torch.zeros(1)])):
                with pytest.raises(ClosedError) as caught:
                    call()
                after[ring.rank].append(caught.value)

    found = errors(body)
    assert isinstance(found[1], ArithmeticError)
    for rank in (0, 2):
        assert isinstance(found[rank], PeerLostError)
        assert "rank 1 failed first: ArithmeticError: the kernel broke" in str(found[rank])
        assert str(found[rank]).startswith(f"rank {rank} ")
    for rank, closed in after.items():
        assert all(f"rank {rank}: this ring cannot be used any more, it was aborted" in str(error) for error in closed)
        assert all("the kernel broke" in str(error) for error in closed)


def test_an_error_of_the_user_inside_the_ring_wakes_the_others() -> None:
    def body(ring: Ring) -> None:
        if ring.rank == 2:
            with ring:
                raise KeyError("mine")
        attend(ring)

    found = errors(body)
    assert isinstance(found[2], KeyError)
    assert all(isinstance(found[rank], PeerLostError) and "mine" in str(found[rank]) for rank in (0, 1))


def test_a_closed_ring_says_so() -> None:
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
            assert set(messages) == {f"rank {rank}: this ring cannot be used any more, it was closed; open a new Ring"}


def test_backward_after_close() -> None:
    def body(ring: Ring) -> None:
        q = ring.sequence(TOKENS).shard(X).requires_grad_()
        out = ring.attention(q, q, q, ring.sequence(TOKENS))
        ring.barrier()
        ring.close()
        out.sum().backward()

    for rank, error in enumerate(errors(body)):
        assert isinstance(error, ClosedError) and f"rank {rank}: this ring cannot be used any more" in str(error)


def test_double_backward_is_refused() -> None:
    def body(ring: Ring) -> None:
        q = ring.sequence(TOKENS).shard(X).requires_grad_()
        loss = ring.attention(q, q, q, ring.sequence(TOKENS)).square().sum()
        (grad,) = torch.autograd.grad(loss, q, create_graph=True)
        grad.sum().backward()

    assert all(isinstance(e, RuntimeError) and "differentiate twice" in str(e) for e in errors(body))


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


# --- what one rank alone can do to the others ------------------------------------------------------------------------


WRONG_TYPES = {"scale": "much", "softcap": "much", "sinks": [0.0] * 4, "schedule": ["ring"]}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_wrong_type_on_one_rank(name: str) -> None:
    def change(ring: Ring, arguments: dict[str, Any]) -> None:
        if ring.rank == 1:
            arguments[name] = WRONG_TYPES[name]

    for error in errors(lambda ring: attend(ring, change)):
        assert isinstance(error, InputError) and name in str(error)


def test_a_dimension_that_does_not_exist_on_one_rank() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        seq.gather(seq.shard(X), dim=9 if ring.rank == 1 else 1)

    for error in errors(body):
        assert isinstance(error, InputError) and "dimension 9 does not exist" in str(error)


def alike(ring: Ring, kind: str) -> list[torch.Tensor]:
    """Two calls that differ in nothing but the numbers in their tensors."""
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
def test_backwards_of_equal_calls_in_another_order(kind: str) -> None:
    """A ring that let it pass would give every rank gradients that mix the two calls."""

    def body(ring: Ring) -> None:
        outs = alike(ring, kind)
        for out in outs[::-1] if ring.rank == 1 else outs:
            out.sum().backward()

    for error in errors(body):
        assert isinstance(error, DisagreementError)
        for rank, forward in ((0, 1), (1, 2), (2, 1)):
            assert re.search(rf"rank {rank}: call 3: backward of call {forward}\b", str(error))


@pytest.mark.parametrize("kind", ["attention", "dilated", "operator", "gather"])
def test_backwards_of_equal_calls_in_any_order_that_all_ranks_keep(kind: str) -> None:
    def body(ring: Ring) -> list[torch.Tensor]:
        found = []
        for order in (1, -1):
            outs = alike(ring, kind)
            inputs = [out.grad_fn.next_functions[0][0].variable for out in outs]
            for out in outs[::order]:
                out.square().sum().backward()
            found.append(torch.stack([q.grad for q in inputs]))
        return found

    for one, other in run_ranks(RANKS, body, engine="plain"):
        assert torch.equal(one, other) and one.abs().sum() > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_calls_that_are_alike(reentrant: bool) -> None:
    """Backward makes their forward calls again, with new numbers, in the same order on every rank."""

    def body(ring: Ring) -> tuple[torch.Tensor, torch.Tensor]:
        seq = ring.sequence(TOKENS)
        grads = []
        for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=reentrant)):
            q = seq.shard(X).requires_grad_()
            x = q * 1.0
            for _ in range(3):
                x = run(lambda y: ring.attention(y, y, y, seq, causal=True), x)
            x.square().sum().backward()
            grads.append(q.grad)
        return grads[0], grads[1]

    for plain, again in run_ranks(2, body, engine="plain"):
        assert torch.equal(plain, again)


def test_backwards_in_another_order() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        q = seq.shard(X).requires_grad_()
        outs = [ring.attention(q, q, q, seq, causal=causal).sum() for causal in (False, True)]
        for out in outs[::-1] if ring.rank == 1 else outs:
            out.backward()

    for error in errors(body):
        assert isinstance(error, DisagreementError)
        assert "rank 0: call 3: backward of" in str(error) and "band -inf..inf" in str(error)
        assert "rank 1: call 3: backward of" in str(error) and "band 0..inf" in str(error)
