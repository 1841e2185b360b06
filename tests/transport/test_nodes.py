"""A ring over two nodes of processes or threads, with shared memory within a node and gloo between nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from ringattn import Ring
from ringattn.errors import DisagreementError, InputError, TransportError
from ringattn.launch.doctor.doctor import examine
from ringattn.transport.base import Message, Opening
from ringattn.transport.local import LocalWorld
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.nodes import HostNodesTransport, NodesTransport
from ringattn.transport.rendezvous import _open_peer
from tests.contract import transport_contract as contract
from tests.contract.processes import Processes, rendezvous_store
from tests.transport.attribution import named_at_fault
from tests.transport.process_rings import EVEN, LATE, locations, meet_nodes, on_node_threads


def start_up(rank: int, world_size: int) -> None:
    """Do nothing. The answer to this call shows that the process runs; starting may take a minute on a busy machine."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(4) as started:
        started.run(start_up, hard_s=180.0)
        yield started


# --- routes ----------------------------------------------------------------------------------------------------------


def test_the_flight_record_names_the_transport_of_each_message(tmp_path: Path) -> None:
    def body(ring: HostNodesTransport) -> list[tuple[str, str, int]]:
        """Exchange with all ranks twice. Return (transport, direction, peer) of each message in the flight record."""
        peers = [peer for peer in range(4) if peer != ring.rank]
        sent, received = ring.allocate(64), ring.allocate(64 * 4).view(4, 64)
        sent.fill_(ring.rank)
        hop = ring.bind([Message(p, sent, "k") for p in peers], [Message(p, received[p], "k") for p in peers])
        for _ in range(2):
            hop.start().wait()
        assert [received[peer][0].item() for peer in peers] == peers
        ring.all_gather_bytes(b"")
        record = ring.inside.record
        assert record is ring.between.record and record.transport == ring.name == "shm+gloo"
        left = json.loads(record.dump(tmp_path / str(ring.rank), "no cause").read_text())
        assert {row["transport"] for row in left["flights"]} == {"shm", "gloo"}
        return [(row.transport, part.op, part.peer) for row in record.entries() if row.lane == 0 for part in row.parts]

    for rank, rows in enumerate(on_node_threads(EVEN, body)):
        peers = {peer: "shm" if EVEN[peer] == EVEN[rank] else "gloo" for peer in range(4) if peer != rank}
        assert sorted(rows) == sorted(2 * [(way, op, peer) for peer, way in peers.items() for op in ("recv", "send")])


def crossed(ring: HostNodesTransport) -> None:
    """Let rank 1 wait for rank 2 before it waits for rank 0, which is on its node.

    Rank 2 sends only after it has received a message that rank 0 sends after its message to rank 1. So rank 0 must be
    able to continue while rank 1 waits between nodes.
    """
    buffer = torch.full((16,), float(ring.rank))
    ring.all_gather_bytes(b"")
    if ring.rank == 0:
        contract.send(ring, 1, 7.0)
        contract.send(ring, 2, 8.0)
    elif ring.rank == 1:
        inside = ring.exchange([], [Message(0, buffer, "x")])
        assert contract.receive(ring, 2).tolist() == [9.0] * 16
        inside.wait()
        assert buffer.tolist() == [7.0] * 16
    else:
        assert contract.receive(ring, 0).tolist() == [8.0] * 16
        contract.send(ring, 1, 9.0)
    ring.all_gather_bytes(b"")


def test_a_wait_between_nodes_does_not_block_exchanges_inside_a_node() -> None:
    on_node_threads(LATE, crossed)


def one_deadline(rank: int, world_size: int) -> tuple[float, str]:
    """Let rank 0 wait for rank 1, which is late, and for rank 2, which never sends.

    Return how long rank 0 waited, and its error; zero and "" on the other ranks.
    """
    if rank == 3:
        rendezvous_store(rank, world_size, 60.0)
        return 0.0, ""
    ring = meet_nodes(rank, world_size, LATE, 3.0)
    ring.all_gather_bytes(b"")
    began, buffers = time.monotonic(), torch.zeros(2, 16)
    if rank == 0:
        with pytest.raises(TransportError) as caught:
            ring.exchange([], [Message(1, buffers[0], "near"), Message(2, buffers[1], "far")]).wait()
        return time.monotonic() - began, str(caught.value)
    time.sleep(2.0 if rank == 1 else 7.0)
    try:
        if rank == 1:
            contract.send(ring, 0, 1.0, "near")
    finally:
        ring.close()
    return 0.0, ""


@pytest.mark.alone
@pytest.mark.slow
def test_an_exchange_over_both_transports_has_one_deadline(processes: Processes) -> None:
    waited_s, error = processes.run(one_deadline)[0]
    assert 2.7 < waited_s < 3.0 + 2.0, waited_s
    assert "no answer from ranks [2]" in error and "near" not in error, error


# --- failures --------------------------------------------------------------------------------------------------------


def abort_on_another_node(ring: HostNodesTransport) -> str:
    ring.all_gather_bytes(b"")
    if ring.rank == 2:
        ring.abort(ValueError("k has no heads"))
        return ""
    peer = {0: 2, 1: 0, 3: 2}[ring.rank]  # rank 1 waits only for a rank of its node
    with pytest.raises(TransportError) as caught:
        contract.receive(ring, peer)
    return str(caught.value)


def test_the_first_cause_of_another_node_is_reported_unchanged() -> None:
    error = on_node_threads(EVEN, abort_on_another_node)
    for rank in (0, 1, 3):
        assert "rank 2 failed first: ValueError: k has no heads" in error[rank] and named_at_fault(error[rank]) == {2}
        assert error[rank].count("failed first") == 1, error[rank]


def different_labels(ring: HostNodesTransport) -> str:
    buffer = torch.zeros(16)
    sends = [Message(1, buffer, "k")] if ring.rank == 0 else []
    recvs = [[], [Message(0, buffer, "v")], [Message(0, buffer, "late")], [Message(1, buffer, "late")]][ring.rank]
    # A rank whose exchange begins late finds the cause already published.
    with pytest.raises((TransportError, DisagreementError)) as caught:
        ring.exchange(sends, recvs).wait()
    return str(caught.value)


def test_a_disagreement_inside_one_node_reaches_the_other() -> None:
    for error in on_node_threads(EVEN, different_labels):
        assert "two ends of one message do not match" in error and "'k'" in error and "'v'" in error


# --- explain and doctor ----------------------------------------------------------------------------------------------


def test_explain_and_doctor_name_both_transports() -> None:
    ways = "local inside a node and local between nodes"
    alone = [LocalWorld(1).transport(0) for _ in range(2)]
    with Ring(transport=NodesTransport(*alone, [0]), engine="plain") as ring:
        explained = ring.explain(ring.sequence(16), q_heads=2, head_dim=8)
        assert explained.ways == ways and f"\nmessages use {ways}" in str(explained)
        assert examine(ring)["transport"] == ways
    with Ring(engine="plain") as ring:
        assert ring.explain(ring.sequence(16), q_heads=2, head_dim=8).ways == ""


def test_nccl_options_are_refused_if_no_message_uses_nccl() -> None:
    with pytest.raises(InputError, match="takes no NCCL options inside one node"):
        _open_peer(Opening(HashStore(), 0, 2, 1.0, locations=locations((0, 0))), NcclOptions(), 0)
