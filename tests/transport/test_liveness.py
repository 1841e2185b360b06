"""The liveness contract over every transport. The ranks are processes, or for NCCL threads with simulated GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ringattn.errors import InputError, PeerLostError
from ringattn.transport.health.verdict import Place
from ringattn.transport.nccl.binding import NcclError, Status
from ringattn.transport.nccl.transport import NcclTransport
from tests.contract import liveness_contract as contract
from tests.contract.processes import Processes
from tests.transport.nccl_rings import on_gpus, results
from tests.transport.process_rings import meet
from tests.transport.simulated.world import SimWorld

RANKS = 4
TRANSPORTS = ("shm", "gloo", "shm+gloo", "peer")


def suffer(rank: int, world_size: int, transport: str, case: str) -> contract.Outcome:
    return contract.suffer(*meet(transport, rank, world_size, contract.DEADLINE_S), case)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(RANKS) as started:
        yield started


QUICK = {("gloo", "store's host stopped"), ("shm", "cause in the store"), ("gloo", "cause in the store")}
CELLS: list[Any] = [
    pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow)
    for cell in ((transport, case) for transport in TRANSPORTS for case in contract.CASES if case != "killed")
]


@pytest.mark.alone
@pytest.mark.parametrize(("transport", "case"), CELLS)
def test_only_the_victim_is_named(processes: Processes, transport: str, case: str) -> None:
    outcomes = processes.run(suffer, transport, case)
    contract.assert_victim_named(case, outcomes)
    if case == "store's host stopped" and transport in ("gloo", "shm+gloo"):
        assert all(contract.STORE in outcomes[rank].message for rank in (1, 2, 3)), outcomes


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_only_a_killed_rank_is_named(transport: str) -> None:
    with Processes(RANKS) as mortals:
        contract.assert_victim_named("killed", mortals.run(suffer, transport, "killed", exits=contract.CASES["killed"]))


# --- NCCL, simulated (killed: `test_nccl_faults`; a hung store: `test_stopped_store`) ---------------------------------


@pytest.mark.alone
def test_nccl_reports_a_cause_that_is_in_the_store() -> None:
    reported = threading.Barrier(3)

    def body(ring: NcclTransport) -> str:
        ring.all_gather_bytes(b"")
        if ring.rank == 1:
            time.sleep(0.5)  # the others may still be in the all-gather
            ring.supervisor.health.publish(InputError("this rank belongs to another job"))
        message = contract.exchange_until_error(ring)
        reported.wait(10.0)
        return message

    # Not `results`: closing raises the failure again, if the exchange raised before this rank's supervisor saw it.
    for outcome in on_gpus(SimWorld(3), body, deadline_s=20.0):
        assert "rank 1 failed first: InputError: this rank belongs to another job" in outcome.result


def test_a_call_that_nccl_refuses_after_an_abort_raises_the_cause() -> None:
    def body(ring: NcclTransport) -> str:
        ring.all_gather_bytes(b"")
        if ring.rank == 1:
            ring.supervisor.health.publish(InputError("this rank belongs to another job"))

        def register(*_: object) -> None:
            while ring.supervisor.failure is None:
                time.sleep(0.01)
            raise NcclError("register", Status.INVALID_ARGUMENT, "NULL communicator")

        ring._memory.allocate = register  # type: ignore[assignment, method-assign]
        with pytest.raises(PeerLostError) as raised:
            ring.allocate(16)
        return str(raised.value)

    for outcome in on_gpus(SimWorld(2), body, deadline_s=20.0):
        assert "rank 1 failed first: InputError: this rank belongs to another job" in outcome.result


@pytest.mark.alone
def test_a_stopped_nccl_rank_blames_no_other_rank() -> None:
    ended = threading.Event()

    def hang() -> Place:
        if threading.current_thread().name.startswith("ringattn-health"):
            ended.wait(20.0)
        return Place()

    def body(ring: NcclTransport) -> str:
        ring.all_gather_bytes(b"")
        if ring.rank == 1:
            ring.supervisor.health._users[ring.supervisor] = hang, lambda cause: None
            message = contract.exchange_until_error(ring)
            ended.set()
            return message
        ended.wait(20.0)
        return contract.exchange_until_error(ring)

    for message in results(on_gpus(SimWorld(3), body, deadline_s=contract.DEADLINE_S)):
        assert (
            "rank 1 itself was stopped or got no processor time for"
        ) in message and "so it cannot report which rank failed" in message
