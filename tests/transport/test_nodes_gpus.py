"""A ring with copy engines within two nodes and NCCL between them: both real transports, over simulated GPUs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.errors import RingError
from ringattn.schedule.routes import NUMBERED, ROUTES
from ringattn.transport.base import Message
from ringattn.transport.nodes import DeviceNodesTransport
from tests.contract import transport_contract as contract
from tests.test_exact_nccl import EXACT, TRIALS
from tests.transport.attribution import named_at_fault
from tests.transport.nccl_rings import lose_rank, on_nodes, results
from tests.transport.process_rings import EARLY, EVEN
from tests.trial import greatest_error, joined, on_rank, reference


def test_each_message_uses_the_transport_of_its_pair(tmp_path: Path) -> None:
    def body(ring: DeviceNodesTransport) -> list[Any]:
        peers = [peer for peer in range(4) if peer != ring.rank]
        memory = ring.allocate(64 * 4).view(4, 64)
        sent = torch.full((64,), ring.rank, dtype=torch.uint8)
        ring.exchange([Message(p, sent, "k") for p in peers], [Message(p, memory[p], "k") for p in peers]).wait()
        ring.drain()
        assert [int(memory[peer][0]) for peer in peers] == peers
        assert ring.sm_margin == 8 and ring.name == "peer+nccl" and ring.stream is ring.between.stream
        entries = [entry for entry in ring.between.record.entries() if entry.label == "k"]
        return [(entry.transport, part.peer) for entry in entries for part in entry.parts]

    outcomes, gpus = on_nodes(EVEN, body)
    for rank, recorded in enumerate(results(outcomes)):
        expected = {(("peer" if EVEN[peer] == EVEN[rank] else "nccl"), peer) for peer in range(4) if peer != rank}
        assert set(recorded) == expected and len(recorded) == 6
        assert gpus[rank].driver.leftovers()["registered"] == 0


@pytest.mark.parametrize("nodes", [EVEN, pytest.param(EARLY, marks=pytest.mark.slow)], ids=str)
def test_attention_is_exact(nodes: tuple[int, ...]) -> None:
    trial, layout = TRIALS["causal"]
    schedules = [name for name in ROUTES if name not in NUMBERED or nodes == EVEN]  # numbered routes need equal nodes

    def body(ring: DeviceNodesTransport) -> list[Any]:
        with Ring(transport=ring, engine="plain", timeout_s=30.0, poison=True) as opened:
            return [on_rank(opened, trial, layout, schedule, torch.float64) for schedule in schedules]

    by_rank = results(on_nodes(nodes, body)[0])
    for schedule, parts in zip(schedules, zip(*by_rank, strict=True), strict=True):
        assert greatest_error(joined(list(parts)), reference(trial, torch.float64)) <= EXACT, schedule


def test_a_capture_is_refused_before_either_transport_has_started() -> None:
    def body(ring: DeviceNodesTransport) -> str:
        peers = [peer for peer in range(4) if peer != ring.rank]
        memory = ring.allocate(64 * 8).view(8, 64)
        hop = ring.bind([Message(p, memory[p], "k") for p in peers], [Message(p, memory[4 + p], "k") for p in peers])
        hop.start().wait()
        gpu, started = ring.inside.gpu, ring.between.record.count
        gpu.capturing = True  # type: ignore[attr-defined]
        with pytest.raises(RingError, match="transport='peer' cannot be captured") as caught:
            hop.start()
        assert ring.between.record.count == started
        with pytest.raises(RingError, match="cannot be captured"):
            ring.replay(lambda: None)
        gpu.capturing = False  # type: ignore[attr-defined]
        hop.start().wait()
        ring.drain()
        return str(caught.value)

    results(on_nodes(EVEN, body)[0])


def test_a_failure_is_poison_then_an_abort_of_nccl_then_paint() -> None:
    # In another order, wrong bytes could reach a rank through one transport before it reads the poison, which tells it
    # that the bytes may be wrong.
    steps: list[str] = []

    def record(target: Any, name: str, step: str) -> None:
        method = getattr(target, name)
        setattr(target, name, lambda *arguments: (steps.append(step), method(*arguments))[1])

    def body(ring: DeviceNodesTransport) -> None:
        if ring.rank:
            with pytest.raises(RingError, match="rank 0 failed first: ValueError: enough"):
                ring.all_gather_bytes(b"")
            return
        record(ring.inside.group, "fail", "poison")
        record(ring.between.communicator, "abort", "abort")
        record(ring.inside.lane, "_paint", "paint")
        ring.abort(ValueError("enough"))
        assert ring.inside.watch.ended.wait(5.0)

    results(on_nodes(EVEN, body)[0])
    assert steps[:3] == ["poison", "abort", "paint"], steps


# --- faults ----------------------------------------------------------------------------------------------------------

DEADLINE_S = 2.0
GRACE_S = 2.0


def exchange_until_failure(ring: DeviceNodesTransport, culprit: int, fault: str) -> None:
    """Exchange with both neighbors repeatedly, until the fault raises an error."""
    after, before = contract.neighbors(ring)
    memory = ring.allocate(4 << 12).view(4, -1)
    for number in range(100_000):
        if number == 3 and ring.rank == culprit:
            if fault == "aborts":
                raise ValueError("no such mask")
            if fault == "is busy":
                time.sleep(DEADLINE_S + GRACE_S + 1.0)
            else:
                lose_rank(ring, fault == "is killed")
        ring.announce(number, b"", f"call {number}")
        sent, received = memory[number % 2], memory[2 + number % 2]
        ring.exchange([Message(after, sent, f"hop {number}")], [Message(before, received, f"hop {number}")]).wait()
        if number % 3 == 0:
            ring.drain()


CASES = [("is killed", 1), ("is killed", 2), ("is stopped", 0), ("is stopped", 3), ("aborts", 1), ("is busy", 2)]
QUICK = ("is killed", 1)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("fault", "culprit"), [case if case == QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_every_survivor_names_only_the_culprit(fault: str, culprit: int) -> None:
    outcomes, _ = on_nodes(EVEN, lambda ring: exchange_until_failure(ring, culprit, fault), deadline_s=DEADLINE_S)
    for rank in {0, 1, 2, 3} - {culprit}:
        outcome = outcomes[rank]
        assert isinstance(outcome.error, RingError), outcome.error
        message = str(outcome.error)
        if fault == "aborts":
            assert f"rank {culprit} failed first: ValueError: no such mask" in message, message
        assert named_at_fault(message) == {culprit}, (rank, message)
        assert outcome.ended_s - outcome.began_s < DEADLINE_S + GRACE_S + 1.0, (rank, message)
