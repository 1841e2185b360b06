"""When the ranks have to agree on a call, where the transport itself notices one that makes another."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from ringattn import DisagreementError, InputError, Ring
from ringattn.runtime import consistency as agreement
from ringattn.runtime.consistency import ConsistencyCheck, GradientNeeds
from ringattn.transport.nccl.supervisor import CallHistory
from tests.transport.nccl_rings import on_rings, results
from tests.transport.simulated.world import SimWorld


class Noticing:
    """A transport that notices calls that differ; it keeps what it is told."""

    def __init__(self) -> None:
        self.announced: list[bytes] = []

    def announce(self, call: int, digest: bytes, words: str, gradients: str = "") -> bool:
        self.announced.append(digest)
        return True


def said(side: ConsistencyCheck, words: str, backward_of: int | None = None) -> bool:
    """Whether this call needed an agreement, in which all ranks then said the same."""
    mine = side.announced(words, None, False, backward_of)
    if mine is not None:
        side.settle(words, backward_of, [json.dumps([f"{side.calls}: {mine}", None])] * 2)
    return mine is not None


def compared(side: ConsistencyCheck, words: str, needs: str, others: str) -> bool:
    """Whether this call needed a comparison, in which another rank then needed the gradients `others`."""
    message = side.announced(words, None, False, None, GradientNeeds(tuple(needs)))
    if message is not None:
        call = f"{side.calls}: {message}"
        answers = [json.dumps([call, GradientNeeds(tuple(each))]) for each in (needs, others)]
        assert side.settle(words, None, answers, GradientNeeds(tuple(needs))) == bool(needs or others)
    return message is not None


def test_calls_with_and_without_gradients_are_compared_separately() -> None:
    side = ConsistencyCheck(Noticing())  # type: ignore[arg-type]
    rounds = [compared(side, "a", needs, needs) for needs in ("q", "", "kv", "", "q")]
    assert rounds == [True, True, False, False, False]


def test_words_whose_gradients_some_ranks_needed_and_others_did_not_are_compared_at_every_call() -> None:
    sides = [ConsistencyCheck(Noticing()) for _ in range(2)]  # type: ignore[arg-type]
    for needs in (("q", "q"), ("", ""), ("q", ""), ("", "q"), ("q", "q"), ("", "")):
        asks = [compared(side, "a", needs[rank], needs[1 - rank]) for rank, side in enumerate(sides)]
        if needs[0] != needs[1] and sides[0].calls == 3:  # which both skip, so that only the heartbeat can notice
            assert asks == [False, False]
            for side in sides:
                side._agreed.clear()
        else:
            assert asks == [True, True], needs
    assert list(sides[0]._agreed) == list(sides[1]._agreed)


def test_one_agreement_is_enough_for_the_backward_passes_of_all_calls_that_are_alike() -> None:
    transport = Noticing()
    side = ConsistencyCheck(transport)  # type: ignore[arg-type]
    assert [said(side, "a"), said(side, "a"), said(side, "a", 2), said(side, "a", 1)] == [True, False, True, False]
    forward, again, second, first = transport.announced
    assert forward == again and len({forward, second, first}) == 3


def test_agreements_are_forgotten_in_the_order_of_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "KEPT_AGREEMENTS", 3)
    side = ConsistencyCheck(Noticing())  # type: ignore[arg-type]
    assert all(said(side, words) for words in "abc")
    assert not said(side, "a") and said(side, "d")  # which drops b
    assert not said(side, "a") and not said(side, "c") and said(side, "b")
    for number in range(100):
        said(side, str(number))
    assert len(side._agreed) == 3


def attended(ring: Ring, count: int) -> list[torch.Tensor]:
    """So many calls that differ in nothing but the numbers in their tensors."""
    seq = ring.sequence(12)
    shape = 1, seq.counts[ring.rank], 2, 8
    inputs = [torch.full(shape, float(n), requires_grad=True) for n in range(count)]
    return [ring.attention(x, x, x, seq) for x in inputs]


def test_on_a_gpu_backward_passes_of_calls_that_are_alike_need_two_agreements_in_all() -> None:
    def body(ring: Ring) -> int:
        agreements, agree = [], ring.transport.all_gather_bytes
        ring.transport.all_gather_bytes = lambda payload: agreements.append(payload) or agree(payload)  # type: ignore[method-assign]
        for order in (1, -1, 1):
            for out in attended(ring, 3)[::order]:
                out.sum().backward()
        ring.synchronize()
        return len(agreements)

    assert results(on_rings(SimWorld(2), body, ring={"engine": "plain"})) == [2, 2]


def test_on_a_gpu_backward_passes_in_another_order_end_the_ring() -> None:
    def body(ring: Ring) -> Any:
        for out in attended(ring, 2):
            out.sum().backward()
        ring.synchronize()
        for out in attended(ring, 2)[:: -1 if ring.rank == 1 else 1]:
            out.sum().backward()
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            ring.synchronize()
            time.sleep(0.02)

    outcomes = on_rings(SimWorld(2), body, ring={"engine": "plain"})
    errors = [outcome.error for outcome in outcomes]
    assert any(isinstance(error, DisagreementError) for error in errors)
    for error in errors:
        assert "call 7 is another there" in str(error) and "backward of call " in str(error)


@pytest.mark.parametrize("refuses", [True, False], ids=["one rank refuses", "another option on one rank"])
def test_on_a_gpu_the_ring_lives_on_after_a_call_that_all_ranks_refused(refuses: bool) -> None:
    def body(ring: Ring) -> int:
        seq = ring.sequence(12)
        x = torch.ones(1, seq.counts[ring.rank], 2, 8)
        for n in range(20):
            if n == 3:
                scale = (float("nan") if refuses else 0.5) if ring.rank else None
                with pytest.raises(InputError):
                    ring.attention(x, x, x, seq, causal=True, scale=scale)  # not compared before
            ring.attention(x, x, x, seq)
            time.sleep(0.05)  # several heartbeats
        ring.synchronize()
        return ring.counters()["passes"]

    assert results(on_rings(SimWorld(2), body, ring={"engine": "plain"})) == [20, 20]


def test_a_call_without_gradients_on_another_rank_is_told_from_another_call() -> None:
    def history(*calls: tuple[bytes, str]) -> CallHistory:
        made = CallHistory()
        for number, (digest, gradients) in enumerate(calls, 1):
            made.announce(number, digest, "words", gradients)
        return made

    usual = (b"a", "compared"), (b"a", "needed")
    local = history(*usual, (b"b", "compared"))
    assert "call 2 needs gradients on one of" in str(local.differs(history(usual[0], (b"a", "not needed")).told()))
    assert "call 2 needs gradients on one of" in str(local.differs(history(usual[0], (b"a", "compared")).told()))
    assert "call 2 is another there" in str(local.differs(history(usual[0], (b"x", "needed")).told()))
    assert local.differs(history(*usual, (b"x", "compared")).told()) is None  # which the ranks compare themselves
