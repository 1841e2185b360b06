"""The contract of every transport: checks that run on each rank of a ring of three or more.

Each check is a function that is called on all ranks at the same time, in any thread or process, with the rank's
transport. It raises `AssertionError` or another error if the transport violates the contract.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from ringattn.errors import ClosedError, DeadlineError, InputError, PeerLostError
from ringattn.ring import Ring
from ringattn.transport.base import Message, Transport
from ringattn.transport.collectives import all_reduce, barrier, broadcast

Check = Callable[[Transport], None]

WORLD_SIZE = 3
SHORT_S = 1.5
LONG_S = 30.0
WHOLE_EXCHANGES = {
    "nccl",
    "peer+nccl",
}  # these transports know only whether a whole exchange has arrived, so their errors name all its messages
PROMPT_S = 8.0  # far below LONG_S, far above the needs of a busy machine


def timeout_s(check: Check) -> float:
    """Return the deadline that the transport must have for `check`."""
    return SHORT_S if check in (deadline_is_kept, missing_rank_is_named) else LONG_S


def neighbors(ring: Transport) -> tuple[int, int]:
    return (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size


def receive(ring: Transport, peer: int, label: str = "x") -> torch.Tensor:
    """Receive sixteen floats from `peer`, and return them."""
    buffer = torch.full((16,), float("nan"))
    ring.exchange([], [Message(peer, buffer, label)]).wait()
    return buffer


def send(ring: Transport, peer: int, value: float, label: str = "x") -> None:
    ring.exchange([Message(peer, torch.full((16,), value), label)], []).wait()


def assert_dead(ring: Transport, reason: str) -> None:
    """Assert that `close` and `abort` do not raise, and that every other call raises `ClosedError` with `reason`."""
    ring.close()
    ring.abort(ValueError("too late"))
    calls: list[Callable[[], object]] = [
        lambda: ring.allocate(8),
        lambda: ring.all_gather_bytes(b""),
        lambda: ring.exchange([], []),
        lambda: send(ring, neighbors(ring)[0], 0.0),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match=reason):
            call()


# --- bytes -----------------------------------------------------------------------------------------------------------


def shift_around(ring: Transport) -> None:
    after, before = neighbors(ring)
    outgoing = torch.full((5, 7), float(ring.rank))
    for hop in range(1, ring.world_size):
        received = torch.full((5, 7), float("nan"))
        ring.exchange([Message(after, outgoing, f"hop {hop}")], [Message(before, received, f"hop {hop}")]).wait()
        assert torch.equal(received, torch.full((5, 7), float((ring.rank - hop) % ring.world_size)))
        outgoing = received


def order_is_kept(ring: Transport) -> None:
    # The k-th receive from a rank gets the k-th send, whatever its length, within one exchange and over several.
    _keep_order(ring, 3)


def ends_may_lie_apart(ring: Transport) -> None:
    # A message is sent in one exchange and received in the next.
    _keep_order(ring, 2)


def _keep_order(ring: Transport, received_first: int) -> None:
    """Check that the four messages of two exchanges arrive in order: three are sent in the first, one in the second.

    `received_first` messages are received in the first exchange, and the rest in the second.
    """
    after, before = neighbors(ring)
    sizes = [4096, 1, 70_000, 16]
    sent = [torch.full((size,), float(10 * ring.rank + k)) for k, size in enumerate(sizes)]
    received = [torch.full((size,), float("nan")) for size in sizes]
    first = ring.exchange(
        [Message(after, b) for b in sent[:3]], [Message(before, b) for b in received[:received_first]]
    )
    second = ring.exchange([Message(after, sent[3])], [Message(before, b) for b in received[received_first:]])
    second.wait()
    first.wait()
    first.wait()
    for k, buffer in enumerate(received):
        assert torch.equal(buffer, torch.full((sizes[k],), float(10 * before + k)))


def many_in_flight(ring: Transport) -> None:
    peers = [rank for rank in range(ring.world_size) if rank != ring.rank]
    received = {(peer, n): torch.zeros(100, dtype=torch.int64) for peer in peers for n in range(8)}
    handles = []
    for n in range(8):
        sends = [Message(peer, torch.full((100,), 100 * ring.rank + n), f"n {n}") for peer in peers]
        handles.append(ring.exchange(sends, [Message(peer, received[peer, n], f"n {n}") for peer in peers]))
    for handle in reversed(handles):
        handle.wait()
    assert all(bool((buffer == 100 * peer + n).all()) for (peer, n), buffer in received.items())


def nothing_is_nothing(ring: Transport) -> None:
    # Sender and receiver skip messages without bytes, so such a message needs no counterpart.
    after, before = neighbors(ring)
    nothing = torch.empty(0, 4)
    ring.exchange([], []).wait()
    ring.exchange([Message(after, nothing)], []).wait()
    received = torch.zeros(3)
    sends = [Message(after, nothing), Message(after, torch.full((3,), 1.0 + ring.rank))]
    ring.exchange(sends, [Message(before, received), Message(before, nothing)]).wait()
    assert received.tolist() == [1.0 + before] * 3


def all_dtypes(ring: Transport) -> None:
    after, before = neighbors(ring)
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    sent = [torch.tensor([[ring.rank, 1], [0, 1]]).to(dtype) for dtype in [*dtypes, torch.complex64]]
    sent.append(torch.tensor(float(ring.rank)))
    received = [torch.zeros_like(buffer) for buffer in sent]
    ring.exchange([Message(after, b) for b in sent], [Message(before, b) for b in received]).wait()
    for sent_buffer, received_buffer in zip(sent, received, strict=True):
        if sent_buffer.ndim:
            assert torch.equal(received_buffer, torch.tensor([[before, 1], [0, 1]]).to(sent_buffer.dtype))
    assert received[-1].item() == before


def bits_are_kept(ring: Transport) -> None:
    # Bits are kept: NaN payloads, negative zeros, and a leaf that requires grad.
    after, before = neighbors(ring)
    bits = torch.tensor([0x7FC12345, -0x80000000, 0x7F800001, ring.rank], dtype=torch.int32)
    sent = bits.view(torch.float32).clone().requires_grad_()
    received = torch.zeros(4).requires_grad_()
    ring.exchange([Message(after, sent)], [Message(before, received)]).wait()
    assert received.detach().view(torch.int32).tolist() == [*bits[:3].tolist(), before]


def big_both_ways(ring: Transport) -> None:
    peers = [rank for rank in range(ring.world_size) if rank != ring.rank]
    count = 16 * 2**20 // 4
    sent = torch.full((count,), float(ring.rank))
    memory = {peer: ring.allocate(4 * count) for peer in peers}
    assert all(m.dtype == torch.uint8 and m.shape == (4 * count,) for m in memory.values())
    received = {peer: memory[peer].view(torch.float32) for peer in peers}
    ring.exchange([Message(p, sent, "big") for p in peers], [Message(p, received[p], "big") for p in peers]).wait()
    assert all(bool((received[peer] == peer).all()) for peer in peers)


def bad_messages_are_refused(ring: Transport) -> None:
    after, before = neighbors(ring)
    good = torch.full((16,), float(ring.rank))
    for bad, why in [
        (Message(ring.rank, good, "k"), "itself"),
        (Message(ring.world_size, good, "k"), f"ranks 0 to {ring.world_size - 1}"),
        (Message(-1, good, "k"), f"ranks 0 to {ring.world_size - 1}"),
        (Message(after, torch.zeros(4, 4).t(), "k"), "contiguous"),
        (Message(after, torch.zeros(4, device="meta"), "k"), "meta"),
    ]:
        for sends, recvs in [([Message(after, good), bad], []), ([], [Message(after, good), bad])]:
            with pytest.raises(InputError, match=why):
                ring.exchange(sends, recvs)
    received = torch.zeros(16)
    # The refused exchanges have put no message in flight.
    ring.exchange([Message(after, good)], [Message(before, received)]).wait()
    assert received.tolist() == [float(before)] * 16


def collectives_agree(ring: Transport) -> None:
    ones = [torch.ones(2, 3), torch.full((7,), ring.rank), torch.full((1,), 0.5, dtype=torch.bfloat16)]
    all_reduce(ring, ones)
    assert ones[0].tolist() == [[float(ring.world_size)] * 3] * 2
    assert ones[1].tolist() == [sum(range(ring.world_size))] * 7
    assert ones[2].item() == 0.5 * ring.world_size
    matrix = torch.full((4, 4), float(ring.rank))
    broadcast(ring, [matrix.t()], 2)
    assert matrix.tolist() == [[2.0] * 4] * 4
    barrier(ring)


# --- all-gather ------------------------------------------------------------------------------------------------------


def agree_is_in_order(ring: Transport) -> None:
    for size in (0, 3, 247, 248, 249, 4000):
        payload = bytes([ring.rank]) * (size + ring.rank)
        assert ring.all_gather_bytes(payload) == [bytes([rank]) * (size + rank) for rank in range(ring.world_size)]
    # One payload is longer than the others. An all-gather does not disturb messages in flight.
    after, before = neighbors(ring)
    received = torch.zeros(16)
    handle = ring.exchange([Message(after, torch.full((16,), 5.0))], [Message(before, received)])
    sizes = (0, 9000, 248, 1)[: ring.world_size]
    assert ring.all_gather_bytes(bytes(sizes[ring.rank])) == [bytes(size) for size in sizes]
    handle.wait()
    assert received.tolist() == [5.0] * 16


def agree_passes_messages_by(ring: Transport) -> None:
    # Receives of many sizes are posted before an all-gather, and their sends after it.
    after, before = neighbors(ring)
    received = [torch.zeros(size, dtype=torch.uint8) for size in (8, 248, 256, 257, 512)]
    handle = ring.exchange([], [Message(before, buffer) for buffer in received])
    assert ring.all_gather_bytes(bytes(512)) == [bytes(512)] * ring.world_size
    ring.exchange([Message(after, torch.full_like(buffer, 7)) for buffer in received], []).wait()
    handle.wait()
    assert all(bool((buffer == 7).all()) for buffer in received)


def default_device_is_ignored(ring: Transport) -> None:
    # Programs set torch's default device. "meta" stands for one that is not the device of the transport.
    with torch.device("meta"):
        buffers = ring.allocate(8), ring.allocate(0)
        payloads = ring.all_gather_bytes(bytes([ring.rank]) * 1000)
    assert not any(buffer.is_meta for buffer in buffers)
    assert payloads == [bytes([rank]) * 1000 for rank in range(ring.world_size)]


def missing_rank_is_named(ring: Transport) -> None:
    ring.all_gather_bytes(b"from here on")  # on a busy machine ranks start seconds apart
    if ring.rank == 1:
        time.sleep(SHORT_S + 2.5)
        with pytest.raises(PeerLostError, match=r"DeadlineError.*no answer from ranks \[1\]"):
            ring.all_gather_bytes(b"late")
    else:
        start = time.monotonic()
        with pytest.raises((DeadlineError, PeerLostError), match=r"in all-gather 1.*no answer from ranks \[1\]"):
            ring.all_gather_bytes(b"here")
        assert SHORT_S - 0.3 < time.monotonic() - start < SHORT_S + 2.0
    assert_dead(ring, "no answer from ranks")


# --- failures --------------------------------------------------------------------------------------------------------


def deadline_is_kept(ring: Transport) -> None:
    if ring.rank in (1, 3):
        time.sleep(SHORT_S + 2.5)
        # A rank that was busy in the meantime gets the error at its next call.
        with pytest.raises(PeerLostError, match="rank 0 failed first: DeadlineError"):
            send(ring, 0, 1.0)
    elif ring.rank == 0:
        start = time.monotonic()
        late = torch.zeros(16)
        with pytest.raises(DeadlineError) as caught:
            ring.exchange([Message(2, torch.zeros(16), "k to 2")], [Message(1, late, "kv of 1")]).wait()
        assert SHORT_S - 0.3 < time.monotonic() - start < SHORT_S + 2.0
        assert "rank 0 recv from rank 1 'kv of 1' (64 bytes of torch.float32)" in str(caught.value)
        assert ring.name in WHOLE_EXCHANGES or "k to 2" not in str(caught.value)
        assert isinstance(caught.value, TimeoutError)
    else:
        assert receive(ring, 0, "k to 2").tolist() == [0.0] * 16
        time.sleep(SHORT_S + 2.5)
        with pytest.raises(PeerLostError, match=r"rank 0 failed first: DeadlineError.*kv of 1"):
            receive(ring, 0)
    assert_dead(ring, "DeadlineError|deadline|no answer")


def first_cause_reaches_all(ring: Transport) -> None:
    ring.all_gather_bytes(b"")
    start = time.monotonic()
    if ring.rank == 1:
        time.sleep(0.3)
        ring.abort(ValueError("k has no heads"))
        ring.abort(KeyError("second"))
        assert_dead(ring, "k has no heads")
    elif ring.rank == 0:
        with pytest.raises(PeerLostError) as caught:
            receive(ring, 1, "kv 7")
        assert "rank 0 recv from rank 1 'kv 7' (64 bytes of torch.float32)" in str(caught.value)
        assert "rank 1 failed first: ValueError: k has no heads" in str(caught.value)
        ring.abort(caught.value)
        assert_dead(ring, "k has no heads")
    else:
        # Rank 2 was busy, and then needs rank 0, which failed only because of rank 1.
        time.sleep(1.0)
        with pytest.raises(PeerLostError, match="rank 1 failed first: ValueError: k has no heads") as caught:
            receive(ring, 0)
        assert "rank 0 failed first" not in str(caught.value)
        assert_dead(ring, "k has no heads")
    assert time.monotonic() - start < PROMPT_S


def abort_wakes_agree(ring: Transport) -> None:
    start = time.monotonic()
    if ring.rank == 1:
        time.sleep(0.3)
        ring.abort(ValueError("no such mask"))
    else:
        with pytest.raises(PeerLostError, match=r"all-gather 0.*rank 1 failed first: ValueError: no such mask"):
            ring.all_gather_bytes(b"")
    assert_dead(ring, "no such mask")
    assert time.monotonic() - start < PROMPT_S


def abort_ends_waits(ring: Transport) -> None:
    # A handle in flight when its own rank ended must not report an arrival.
    before = neighbors(ring)[1]
    handle = ring.exchange([], [Message(before, torch.zeros(16))])

    def gather_and_wait() -> None:
        ring.all_gather_bytes(b"")
        handle.wait()

    if ring.rank == 0:
        ring.all_gather_bytes(b"")
        time.sleep(0.3)
        ring.abort(ValueError("enough"))
        with pytest.raises(ClosedError, match="enough"):
            handle.wait()
    else:
        # Rank 0 may leave the all-gather, and abort, before the last part has reached the other ranks.
        with pytest.raises(PeerLostError, match="rank 0 failed first: ValueError: enough"):
            gather_and_wait()


def close_is_final(ring: Transport) -> None:
    ring.all_gather_bytes(b"")
    start = time.monotonic()
    if ring.rank == 1:
        time.sleep(0.3)
        ring.close()
        ring.close()
        assert_dead(ring, "rank 1 closed its ring")
    else:
        with pytest.raises(PeerLostError, match="rank 1 closed its ring"):
            receive(ring, 1)
    assert time.monotonic() - start < PROMPT_S


def last_message_outlives_close(ring: Transport) -> None:
    big = torch.full((4 * 2**20,), float("nan"))
    if ring.rank == 0:
        ring.exchange([Message(1, torch.full((4 * 2**20,), 3.0), "last")], []).wait()
        ring.close()
    elif ring.rank == 1:
        handle = ring.exchange([], [Message(0, big, "last")])
        time.sleep(0.5)
        handle.wait()
        assert bool((big == 3.0).all())
        # Rank 0 has closed its ring, and the other two ranks continue.
        send(ring, 2, 4.0)
    elif ring.rank == 2:
        assert receive(ring, 1).tolist() == [4.0] * 16


# --- rings in forks, and dropped rings --------------------------------------------------------------------------------


CHILD_S = 8
"""The seconds after which a forked child is killed by SIGALRM."""


def forked_child_is_refused(ring: Transport) -> None:
    # Every rank forks while a message is in flight. The parents complete this message, and exchange another.
    after, before = (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size
    sent, received = torch.full((16,), float(ring.rank)), torch.zeros(16)
    hop = ring.bind([Message(after, sent)], [Message(before, received)])
    handle = hop.start()
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)
        os._exit(_count_refusals(ring, [handle.wait, hop.start]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    handle.wait()
    assert received.tolist() == [float(before)] * 16
    hop.start().wait()
    assert ring.all_gather_bytes(bytes([ring.rank])) == [bytes([rank]) for rank in range(ring.world_size)]


def _count_refusals(ring: Transport, calls: list[Callable[[], object]]) -> int:
    """Return how many of `calls`, and of four calls of `ring`, raise the error that a forked child must get.

    Return 99 if a call succeeds.
    """
    calls += [
        lambda: ring.allocate(8),
        lambda: ring.all_gather_bytes(b""),
        lambda: ring.exchange([], []),
        lambda: ring.bind([], []).start(),
    ]
    refused = 0
    for call in calls:
        try:
            call()
            return 99
        except ClosedError as error:
            refused += "a forked process cannot use the ring of its parent; open a ring after the fork" in str(error)
    ring.abort(ValueError("a failure of the child"))
    ring.close()
    return refused


def dropped_ring_is_closed(ring: Transport) -> None:
    ring.all_gather_bytes(b"")
    if ring.rank == 1:
        group = Ring(transport=ring)
        group.barrier()
        del group
        gc.collect()
        until = time.monotonic() + CHILD_S
        while ring._end is None:  # type: ignore[attr-defined]
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(ClosedError, match="rank 1 closed its ring"):
            ring.allocate(8)
    else:
        with Ring(transport=ring) as group:
            group.barrier()
            buffer = torch.zeros(16)
            with pytest.raises(PeerLostError, match="rank 1 closed its ring"):
                ring.exchange([], [Message(1, buffer)]).wait()


CHECKS: list[Check] = [
    shift_around,
    order_is_kept,
    ends_may_lie_apart,
    many_in_flight,
    nothing_is_nothing,
    all_dtypes,
    bits_are_kept,
    big_both_ways,
    bad_messages_are_refused,
    collectives_agree,
    agree_is_in_order,
    agree_passes_messages_by,
    default_device_is_ignored,
    missing_rank_is_named,
    deadline_is_kept,
    first_cause_reaches_all,
    abort_wakes_agree,
    abort_ends_waits,
    close_is_final,
    last_message_outlives_close,
    forked_child_is_refused,
    dropped_ring_is_closed,
]
ONE_AFTER_ANOTHER: list[Check] = [
    check for check in CHECKS if check not in (ends_may_lie_apart, agree_passes_messages_by)
]
"""The checks for a transport whose exchanges run one after another, so that both ranks of a message must have it in the
same exchange."""
