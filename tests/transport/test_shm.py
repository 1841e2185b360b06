"""The shared-memory transport: copies, killed ranks, memory, and ranks that disagree.

`test_contract.py` runs the contract of all transports over it.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ringattn.bench import shm_ways
from ringattn.errors import ClosedError, DisagreementError, PeerLostError, RingError, TransportError
from ringattn.observe.flight import DONE, FAILED
from ringattn.transport.base import Message, Opening
from ringattn.transport.deadline import Deadline, wait_until
from ringattn.transport.shared import transport as shm_transport
from ringattn.transport.shared.page import LOG_ENTRIES, Segment
from ringattn.transport.shared.transport import ShmTransport
from tests.contract import transport_contract as contract
from tests.contract.processes import Processes
from tests.transport.attribution import named_at_fault
from tests.transport.process_rings import meet_shm as meet
from tests.transport.test_shared import mappings, segments
from tests.transport.threads import on_each_rank


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(contract.WORLD_SIZE) as started:
        yield started


# --- the benchmark of bare copies ------------------------------------------------------------------------------------


def check_copies(rank: int, world_size: int, move: str) -> list[float]:
    ring = meet(rank, world_size, 30.0)
    try:
        way = shm_ways.copying(ring, 1 << 18)
        if move == "local":  # copies local memory instead of the neighbor's
            way = way._replace(move=lambda: way.into.copy_(way.sent))
        if move == "one rank late":
            copied = way.move
            way = way._replace(move=lambda: time.sleep(0.01 * (rank == 1)) or copied())
        shm_ways.BYTES_PER_SERIES = 1 << 20  # in these processes
        return shm_ways.copies(way)
    finally:
        ring.close()


def test_bare_copies_are_verified_and_timed_by_the_slowest_rank(processes: Processes) -> None:
    times = processes.run(check_copies, "")
    assert times[0] == times[1] == times[2] and len(times[0]) == shm_ways.BATCHES and min(times[0]) > 0
    late = processes.run(check_copies, "one rank late")
    assert late[0] == late[1] == late[2] and min(late[0]) >= 0.01  # per copy, not per batch
    with pytest.raises(AssertionError, match=r"GateError: rank 0: 262144 bytes over copy arrived wrong"):
        processes.run(check_copies, "local")


# --- killed -----------------------------------------------------------------------------------------------------------

LONG_S = 30.0


def dies_with_a_child(rank: int, world_size: int, folder: Path) -> tuple[str, str, list[str]]:
    """Kill rank 2 while its forked child lives; the other ranks must not mistake the child for rank 2.

    The child ends when each of the other ranks has its error and has put a file into `folder`.
    Return this rank's error message, the name of its socket, and those of its files that could outlive the process.
    """
    ring = meet(rank, world_size, LONG_S)
    kept.extend((ring, ring.allocate(1 << 24)))
    ring.all_gather_bytes(b"")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    targets = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    files = [line.split(maxsplit=5)[5] for line in maps if len(line.split()) > 5] + targets
    assert any(file.startswith("/memfd:ringattn-arena") for file in files)
    if rank == 2:
        if os.fork() == 0:
            wait_until(lambda: len(list(folder.iterdir())) == world_size - 1, Deadline(LONG_S))
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError) as caught:
        ring.all_gather_bytes(b"")
    (folder / str(rank)).touch()
    persistent = [file for file in files if file.startswith(("/dev/shm", "/tmp/ringattn"))]
    return str(caught.value), ring.group._service.name, persistent


kept: list[object] = []


def listening() -> set[str]:
    """Return the names of all open sockets of ringattn."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
    return {line.partition("@ringattn-")[2] for line in lines}


def test_a_killed_rank_whose_child_lives_is_named_and_leaves_no_files(tmp_path: Path) -> None:
    with Processes(contract.WORLD_SIZE) as mortals:
        answers = mortals.run(dies_with_a_child, tmp_path, exits=2).values()
    for message, name, files in answers:
        assert named_at_fault(message) == {2} and "is gone" in message
        assert name not in listening() and files == []


# --- rings on threads ------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[list[ShmTransport]]:
    store = HashStore()
    rings = on_each_rank(2, lambda rank: ShmTransport.open(Opening(store, rank, 2, 10.0)))
    yield rings
    for ring in rings:
        ring.close()


def transfer(pair: list[ShmTransport], sent: torch.Tensor, into: torch.Tensor, label: str = "x") -> list[Any]:
    """Send from rank 0 to rank 1. Return the errors of both ranks' waits, or None for success."""
    receive = pair[1].exchange([], [Message(0, into, label)])
    send = pair[0].exchange([Message(1, sent, label)], [])
    return on_each_rank(2, lambda rank: (send, receive)[rank].wait())


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 65537, 3 * 2**20 + 1])
@pytest.mark.parametrize("shared", [True, False])
def test_every_byte_arrives_and_no_other_byte_changes(pair: list[ShmTransport], nbytes: int, shared: bool) -> None:
    sent, into = (ring.allocate(nbytes + 24) if shared else torch.empty(nbytes + 24).byte() for ring in pair)
    sent.copy_(random_bytes(nbytes + 24))
    into.zero_()
    for first, last in ((13, 5), (3, 2)):
        into.zero_()
        assert transfer(pair, sent[first : first + nbytes], into[last : last + nbytes]) == [None, None]
        assert torch.equal(into[last : last + nbytes], sent[first : first + nbytes])
        assert not into[:last].any() and not into[last + nbytes :].any()


def test_only_buffers_outside_the_arenas_are_staged(pair: list[ShmTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[int] = []
    stage = shm_transport.Arenas.stage
    monkeypatch.setattr(
        shm_transport.Arenas,
        "stage",
        lambda self, address, nbytes: staged.append(nbytes) or stage(self, address, nbytes),
    )
    into = torch.zeros(100, dtype=torch.uint8)
    transfer(pair, pair[0].allocate(100), into)
    assert staged == []
    sent = random_bytes(100)
    transfer(pair, sent, into)
    assert staged == [100] and torch.equal(sent, into)


def test_a_plain_buffer_may_be_bound_once_and_changed_between_starts(pair: list[ShmTransport]) -> None:
    sent, into = torch.zeros(1000), torch.zeros(1000)
    send, receive = pair[0].bind([Message(1, sent, "kv")], []), pair[1].bind([], [Message(0, into, "kv")])
    for n in range(5):
        sent.fill_(n)
        handles = send.start(), receive.start()
        on_each_rank(2, lambda rank, handles=handles: handles[rank].wait())
        assert bool((into == n).all())
    assert mappings_of_stages(pair[0]) == 1


def mappings_of_stages(ring: ShmTransport) -> int:
    return len(ring._arenas._unused)


def test_more_messages_than_the_log_holds(pair: list[ShmTransport]) -> None:
    count = 3 * LOG_ENTRIES + 5
    sent, into = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    receive = pair[1].exchange([], [Message(0, into[n : n + 1], f"n {n}") for n in range(count)])
    send = pair[0].exchange([Message(1, sent[n : n + 1], f"n {n}") for n in range(count)], [])
    assert on_each_rank(2, lambda rank: (send, receive)[rank].wait()) == [None, None]
    assert torch.equal(sent, into)


def test_waits_in_opposite_orders_do_not_deadlock(pair: list[ShmTransport]) -> None:
    # Each rank first waits for the exchange whose other half its peer waits for last.
    into = [torch.zeros(4), torch.zeros(4)]

    def body(rank: int) -> None:
        ring, peer = pair[rank], 1 - rank
        receive = ring.exchange([], [Message(peer, into[rank], "x")])
        send = ring.exchange([Message(peer, torch.full((4,), 1.0 + rank), "x")], [])
        for handle in (send, receive) if rank else (receive, send):
            handle.wait()

    assert on_each_rank(2, body) == [None, None]
    assert [buffer[0].item() for buffer in into] == [2.0, 1.0]


# --- memory ----------------------------------------------------------------------------------------------------------


def test_growth_frees_the_old_memory_on_both_ranks(pair: list[ShmTransport]) -> None:
    into = torch.zeros(50, dtype=torch.uint8)
    transfer(pair, pair[0].allocate(50), into)
    gc.collect()
    before = mappings(), segments()
    for nbytes in (1 << 16, 1 << 18, 1 << 20):
        arena = pair[0].allocate(nbytes)
        arena.copy_(random_bytes(nbytes))
        transfer(pair, arena[-50:], into)
        assert torch.equal(into, arena[-50:])
        del arena
        gc.collect()
    transfer(pair, pair[0].allocate(50), into)
    gc.collect()
    assert (mappings(), segments()) == before


def test_staging_memory_is_bounded(pair: list[ShmTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_transport, "STAGES_KEPT_BYTES", 1 << 20)
    for nbytes in (100, 1 << 19, 1 << 20, 1 << 18, 1 << 21):
        sent, into = random_bytes(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
        transfer(pair, sent, into)
        assert torch.equal(sent, into)
    kept = sum(segment.nbytes for _, segment in pair[0]._arenas._unused)
    assert 0 < kept <= 1 << 20


def test_a_failed_allocation_is_a_memory_error(pair: list[ShmTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, nbytes: int) -> Segment:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shm_transport.Segment, "create", full)
    with pytest.raises(MemoryError, match="no 4096 bytes of shared memory"):
        pair[0].allocate(4096)


# --- ends that differ, and senders that fail -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "received", "labels"),
    [
        (torch.zeros(16), torch.zeros(17), ("kv", "kv")),
        (torch.zeros(16), torch.zeros(16, dtype=torch.int32), ("kv", "kv")),
        (torch.zeros(16), torch.zeros(16), ("KV0", "KV1")),
    ],
    ids=["bytes", "dtype", "label"],
)
def test_ends_that_differ_are_named_on_both_ranks(
    pair: list[ShmTransport], sent: torch.Tensor, received: torch.Tensor, labels: tuple[str, str]
) -> None:
    receive = pair[1].exchange([], [Message(0, received, labels[1])])
    send = pair[0].exchange([Message(1, sent, labels[0])], [])
    for error in on_each_rank(2, lambda rank: (send, receive)[rank].wait()):
        assert isinstance(error, DisagreementError)
        assert f"rank 1 recv from rank 0 '{labels[1]}' ({received.nbytes} bytes of {received.dtype})" in str(error)
        assert f"rank 0 sends it '{labels[0]}' ({sent.nbytes} bytes of {sent.dtype})" in str(error)
    assert not received.any()
    with pytest.raises(ClosedError, match="do not match"):
        pair[0].exchange([], [])


def test_labels_may_differ_in_the_peer_that_they_name(pair: list[ShmTransport]) -> None:
    into = torch.zeros(4)
    receive = pair[1].exchange([], [Message(0, into, "step 1: KV0 from rank 0")])
    send = pair[0].exchange([Message(1, torch.ones(4), "step 1: KV0 to rank 1")], [])
    assert on_each_rank(2, lambda rank: (send, receive)[rank].wait()) == [None, None]
    assert into.tolist() == [1.0] * 4


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_copy_from_a_sender_that_ended_meanwhile_is_an_error(
    pair: list[ShmTransport], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pair[0].allocate(64)
    sent.fill_(1)
    pair[0].exchange([Message(1, sent, "kv")], [])
    address = shm_transport.Imports.address

    def end_sender(self: shm_transport.Imports, *facts: Any) -> int:
        source = address(self, *facts)
        # The sender ends after the receiver has checked that it is alive, and before the copy.
        pair[0].abort(ValueError("no heads")) if end == "abort" else pair[0].close()
        sent.fill_(99)
        return source

    monkeypatch.setattr(shm_transport.Imports, "address", end_sender)
    message = "rank 0 failed first: ValueError: no heads" if end == "abort" else "rank 0 closed its ring"
    with pytest.raises(PeerLostError, match=message):
        pair[1].exchange([], [Message(0, torch.zeros(64, dtype=torch.uint8), "kv")]).wait()


def test_a_failure_leaves_flight_records(tmp_path: Any) -> None:
    store = HashStore()
    rings = on_each_rank(2, lambda rank: ShmTransport.open(Opening(store, rank, 2, 0.3, tmp_path / str(rank))))
    into = torch.zeros(4)
    assert transfer(rings, torch.ones(4), into, "kv 0") == [None, None]
    assert [entry.state for entry in rings[0].record.entries()] == [DONE]
    errors = on_each_rank(2, lambda rank: rings[rank].exchange([], [Message(1 - rank, into, "kv 1")]).wait())
    for rank, error in enumerate(errors):
        assert isinstance(error, RingError) and f"flight record of rank {rank}: {tmp_path / str(rank)}" in str(error)
        assert (tmp_path / str(rank) / f"flight-{rank}.json").exists()
        assert [entry.state for entry in rings[rank].record.entries()] == [DONE, FAILED]


def test_a_long_message_arrives_in_a_buffer_created_in_inference_mode(
    pair: list[ShmTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_transport, "VECTOR_BYTES", 4096)
    for count in (4095, 4096, 10_007):
        sent = random_bytes(count)
        with torch.inference_mode():
            into = pair[1].allocate(count)
        assert transfer(pair, sent, into) == [None, None]
        assert torch.equal(into, sent)
