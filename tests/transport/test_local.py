"""The local transport: mismatched messages, missing receives and the deadlock report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ringattn.errors import DeadlineError, InputError, PeerLostError, TransportError
from ringattn.transport.base import Message
from ringattn.transport.local import LocalTransport, LocalWorld
from tests.contract.threads import on_threads


def caught(call: Callable[[], object]) -> BaseException:
    """Return the error that `call` must raise."""
    with pytest.raises(TransportError) as info:
        call()
    return info.value


def exchanged(ring: LocalTransport, sends: list[Message], recvs: list[Message]) -> BaseException:
    return caught(lambda: ring.exchange(sends, recvs).wait())


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (torch.zeros(4), torch.ones(5)),
        (torch.zeros(4), torch.ones(4, dtype=torch.int32)),
        (torch.zeros(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.float16)),
    ],
    ids=["bytes", "dtype", "half dtype"],
)
@pytest.mark.parametrize("late", [0, 1])
def test_two_ends_must_match(sent: torch.Tensor, received: torch.Tensor, late: int) -> None:
    before = received.clone()

    def fn(ring: LocalTransport) -> str:
        if ring.rank == late:
            time.sleep(0.05)
        sends, recvs = [Message(1, sent, "kv 3")], [Message(0, received, "kv 4")]
        error = exchanged(ring, sends, []) if ring.rank == 0 else exchanged(ring, [], recvs)
        assert type(error) is TransportError
        return str(error)

    text, peer_text = on_threads(2, fn)
    assert text == peer_text
    assert f"rank 0 send to rank 1 'kv 3' ({sent.nbytes} bytes of {sent.dtype})" in text
    assert f"rank 1 recv from rank 0 'kv 4' ({received.nbytes} bytes of {received.dtype})" in text
    assert torch.equal(received, before)


def test_a_send_without_a_receive_reaches_its_deadline() -> None:
    def fn(ring: LocalTransport) -> None:
        if ring.rank == 0:
            error = exchanged(ring, [Message(1, torch.zeros(2), "forgotten")], [])
            assert isinstance(error, DeadlineError)
            assert "pending on rank 0: rank 0 send to rank 1 'forgotten' (8 bytes of torch.float32)" in str(error)
            assert "pending on rank 1: nothing pending" in str(error)
        else:
            time.sleep(1.0)

    on_threads(2, fn, timeout_s=0.3)


def test_nothing_is_read_before_the_receive_is_posted() -> None:
    buffer, received = torch.zeros(2), torch.zeros(2)
    world = LocalWorld(2)
    sender, receiver = world.transport(0), world.transport(1)
    handle = sender.exchange([Message(1, buffer)], [])
    buffer.fill_(7.0)  # a buffered copy would hold the zeros
    receiver.exchange([], [Message(0, received)]).wait()
    handle.wait()
    assert received.tolist() == [7.0, 7.0]


def test_a_deadlock_is_reported_immediately_with_the_pending_operations_of_all_ranks() -> None:
    def fn(ring: LocalTransport) -> BaseException:
        before = (ring.rank - 1) % 3
        if ring.rank == 2:
            return caught(lambda: ring.all_gather_bytes(b""))
        return exchanged(ring, [], [Message(before, torch.zeros(3, dtype=torch.float64), f"kv {ring.rank}")])

    start = time.monotonic()
    errors = on_threads(3, fn)
    assert time.monotonic() - start < 5.0
    assert sorted(type(error).__name__ for error in errors) == ["DeadlineError", "PeerLostError", "PeerLostError"]
    for error in errors:
        text = str(error)
        assert "deadlock, no rank can move" in text
        assert "pending on rank 0: rank 0 recv from rank 2 'kv 0' (24 bytes of torch.float64)" in text
        assert "pending on rank 1: rank 1 recv from rank 0 'kv 1' (24 bytes of torch.float64)" in text
        assert "pending on rank 2: all-gather 0" in text
        assert isinstance(error, DeadlineError) or isinstance(error.__cause__, DeadlineError)


def test_a_rank_that_has_left_counts_as_stuck() -> None:
    def fn(ring: LocalTransport) -> BaseException | None:
        if ring.rank == 2:
            time.sleep(0.2)
            ring.close()
            return None
        return exchanged(ring, [], [Message(1 - ring.rank, torch.zeros(1), "x")])

    start = time.monotonic()
    errors = on_threads(3, fn)
    assert time.monotonic() - start < 5.0
    assert any("pending on rank 2: closed" in str(error) for error in errors)


def test_no_false_alarm_while_one_rank_computes() -> None:
    def fn(ring: LocalTransport) -> float:
        for _ in range(200):
            after, before = (ring.rank + 1) % 4, (ring.rank - 1) % 4
            if ring.rank == 3:
                time.sleep(0.001)
            received = torch.zeros(1)
            ring.exchange([Message(after, torch.ones(1))], [Message(before, received)]).wait()
            ring.all_gather_bytes(b"x")
        return received.item()

    assert on_threads(4, fn) == [1.0] * 4


def test_a_closed_rank_is_never_written_to() -> None:
    world = LocalWorld(2)
    closing, peer = world.transport(0), world.transport(1)
    buffer = torch.zeros(2)
    closing.exchange([], [Message(1, buffer, "x")])
    closing.close()
    with pytest.raises(PeerLostError, match="rank 0 closed its ring"):
        peer.exchange([Message(0, torch.ones(2), "x")], []).wait()
    assert buffer.tolist() == [0.0, 0.0]


def test_finished_all_gathers_are_not_reported() -> None:
    def fn(ring: LocalTransport) -> str:
        for _ in range(3):
            ring.all_gather_bytes(b"")
        return str(exchanged(ring, [], [Message(1 - ring.rank, torch.zeros(1), "x")]))

    assert all("deadlock" in text and "all-gather" not in text for text in on_threads(2, fn))


def test_the_first_cause_is_chained() -> None:
    world = LocalWorld(2)
    failing, peer = world.transport(0), world.transport(1)
    cause = ValueError("odd")
    failing.abort(cause)
    with pytest.raises(PeerLostError, match=re.escape("rank 0 failed first: ValueError: odd")) as info:
        peer.all_gather_bytes(b"")
    assert info.value.__cause__ is cause


def test_world_refuses_invalid_arguments() -> None:
    for ranks in (0, 2.0, True, "2"):
        with pytest.raises(InputError, match="world_size must be a positive number of ranks, got"):
            LocalWorld(ranks)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="timeout_s must be positive, got"):
        LocalWorld(2, 0.0)
    assert type(LocalWorld(np.int64(2)).world_size) is int  # type: ignore[arg-type]
    world = LocalWorld(1)
    alone = world.transport(0)
    for rank in (0, 1, -1):
        with pytest.raises(InputError, match="already in use"):
            world.transport(rank)
    assert alone.all_gather_bytes(b"me") == [b"me"]
