"""Which calls ranks must compare on a transport whose heartbeats already notice that ranks make different calls."""

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


class NoticingTransport:
    """A fake transport that says that it notices different calls, and records the announced calls."""

    def __init__(self) -> None:
        self.announced: list[bytes] = []

    def announce(self, call: int, digest: bytes, words: str, gradients: str = "") -> bool:
        self.announced.append(digest)
        return True


def needs_comparison(side: ConsistencyCheck, words: str, backward_of: int | None = None) -> bool:
    """Make a call on one rank, and return whether the ranks had to compare it. If so, all ranks agree."""
    message = side.announced(words, None, False, backward_of)
    if message is not None:
        side.settle(words, backward_of, [json.dumps([f"{side.calls}: {message}", None])] * 2)
    return message is not None


def needs_gradient_comparison(side: ConsistencyCheck, words: str, needs: str, other_needs: str) -> bool:
    """Make a call that needs the gradients `needs`, and return whether the ranks had to compare it.

    If so, the other rank needs the gradients `other_needs`.
    """
    message = side.announced(words, None, False, None, GradientNeeds(tuple(needs)))
    if message is not None:
        call = f"{side.calls}: {message}"
        answers = [json.dumps([call, GradientNeeds(tuple(each))]) for each in (needs, other_needs)]
        assert side.settle(words, None, answers, GradientNeeds(tuple(needs))) == bool(needs or other_needs)
    return message is not None


def test_calls_with_and_without_gradients_are_compared_separately() -> None:
    side = ConsistencyCheck(NoticingTransport())  # type: ignore[arg-type]
    rounds = [needs_gradient_comparison(side, "a", needs, needs) for needs in ("q", "", "kv", "", "q")]
    assert rounds == [True, True, False, False, False]


def test_calls_with_different_gradient_needs_are_compared_every_time() -> None:
    sides = [ConsistencyCheck(NoticingTransport()) for _ in range(2)]  # type: ignore[arg-type]
    for needs in (("q", "q"), ("", ""), ("q", ""), ("", "q"), ("q", "q"), ("", "")):
        asks = [needs_gradient_comparison(side, "a", needs[rank], needs[1 - rank]) for rank, side in enumerate(sides)]
        if needs[0] != needs[1] and sides[0].calls == 3:  # both skip the comparison, so only the heartbeat can notice
            assert asks == [False, False]
            for side in sides:
                side._agreed.clear()
        else:
            assert asks == [True, True], needs
    assert list(sides[0]._agreed) == list(sides[1]._agreed)


def test_one_comparison_is_enough_for_backward_of_all_equal_calls() -> None:
    transport = NoticingTransport()
    side = ConsistencyCheck(transport)  # type: ignore[arg-type]
    assert [
        needs_comparison(side, "a"),
        needs_comparison(side, "a"),
        needs_comparison(side, "a", 2),
        needs_comparison(side, "a", 1),
    ] == [True, False, True, False]
    forward, again, second, first = transport.announced
    assert forward == again and len({forward, second, first}) == 3


def test_comparisons_are_forgotten_in_the_order_of_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "KEPT_AGREEMENTS", 3)
    side = ConsistencyCheck(NoticingTransport())  # type: ignore[arg-type]
    assert all(needs_comparison(side, words) for words in "abc")
    assert not needs_comparison(side, "a") and needs_comparison(side, "d")  # d evicts b
    assert not needs_comparison(side, "a") and not needs_comparison(side, "c") and needs_comparison(side, "b")
    for number in range(100):
        needs_comparison(side, str(number))
    assert len(side._agreed) == 3


def attend_repeatedly(ring: Ring, count: int) -> list[torch.Tensor]:
    """Make `count` attention calls that differ only in the values of their tensors, and return the outputs."""
    seq = ring.sequence(12)
    shape = 1, seq.counts[ring.rank], 2, 8
    inputs = [torch.full(shape, float(n), requires_grad=True) for n in range(count)]
    return [ring.attention(x, x, x, seq) for x in inputs]


def test_on_a_gpu_backward_of_equal_calls_needs_two_comparisons_in_all() -> None:
    def body(ring: Ring) -> int:
        agreements, agree = [], ring.transport.all_gather_bytes
        ring.transport.all_gather_bytes = lambda payload: agreements.append(payload) or agree(payload)  # type: ignore[method-assign]
        for order in (1, -1, 1):
            for out in attend_repeatedly(ring, 3)[::order]:
                out.sum().backward()
        ring.synchronize()
        return len(agreements)

    assert results(on_rings(SimWorld(2), body, ring={"engine": "plain"})) == [2, 2]


def test_on_a_gpu_backward_passes_in_another_order_end_the_ring() -> None:
    def body(ring: Ring) -> Any:
        for out in attend_repeatedly(ring, 2):
            out.sum().backward()
        ring.synchronize()
        for out in attend_repeatedly(ring, 2)[:: -1 if ring.rank == 1 else 1]:
            out.sum().backward()
        deadline_s = time.monotonic() + 10.0
        while time.monotonic() < deadline_s:
            ring.synchronize()
            time.sleep(0.02)

    outcomes = on_rings(SimWorld(2), body, ring={"engine": "plain"})
    errors = [outcome.error for outcome in outcomes]
    assert any(isinstance(error, DisagreementError) for error in errors)
    for error in errors:
        assert "call 7 differs" in str(error) and "backward of call " in str(error)


@pytest.mark.parametrize("refuses", [True, False], ids=["one rank refuses", "another option on one rank"])
def test_on_a_gpu_the_ring_stays_usable_after_a_call_that_all_ranks_refused(refuses: bool) -> None:
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


def test_a_call_without_gradients_on_another_rank_is_distinguished_from_another_call() -> None:
    def history(*calls: tuple[bytes, str]) -> CallHistory:
        call_history = CallHistory()
        for number, (digest, gradients) in enumerate(calls, 1):
            call_history.announce(number, digest, "words", gradients)
        return call_history

    usual = (b"a", "compared"), (b"a", "needed")
    local = history(*usual, (b"b", "compared"))
    assert "call 2 needs gradients on only one" in str(local.differs(history(usual[0], (b"a", "not needed")).report()))
    assert "call 2 needs gradients on only one" in str(local.differs(history(usual[0], (b"a", "compared")).report()))
    assert "call 2 differs" in str(local.differs(history(usual[0], (b"x", "needed")).report()))
    assert local.differs(history(*usual, (b"x", "compared")).report()) is None  # ranks compare it directly
