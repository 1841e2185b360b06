"""The contract of all transports as one grid: every transport passes every check, and its attention is exact.

NCCL and peer run over simulated GPUs. The tests show that the real transports obey those rules of NCCL and of the CUDA
driver that the simulators check. NCCL and the driver may have other rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from ringattn.launch.measure.check import CheckConfig, check_rank, paired_cases
from ringattn.ring import Ring
from ringattn.transport.nccl.options import NcclOptions
from tests.contract import transport_contract as contract
from tests.contract.processes import Processes, rendezvous_store
from tests.contract.threads import on_threads
from tests.transport.nccl_rings import on_gpus, on_nodes, results
from tests.transport.process_rings import EARLY, EVEN, LATE, meet, on_node_threads
from tests.transport.simulated.world import SimWorld

CHECKS, ONE_AFTER_ANOTHER = contract.CHECKS, contract.ONE_AFTER_ANOTHER
# With "lazy", the simulated GPU copies bytes as late as possible. Only these checks compare bytes, so only they need
# it. The other checks, of failures, take seconds each.
BYTES = ONE_AFTER_ANOTHER[: ONE_AFTER_ANOTHER.index(contract.bad_messages_are_refused)]
QUICK_OVER_GLOO = (
    contract.shift_around, contract.order_is_kept, contract.agree_is_in_order, contract.deadline_is_kept,
    contract.first_cause_reaches_all, contract.forked_child_is_refused, contract.dropped_ring_is_closed,
    contract.default_device_is_ignored,
)  # fmt: skip
"""The checks over gloo that are not marked slow. All checks are quick over shm, the default on one machine."""

QUICK_OVER_PEER_AND_NCCL = ((EVEN, contract.many_in_flight), (EVEN, contract.order_is_kept))


class Cell(NamedTuple):
    """One transport and one check of the contract.

    `how`: "threads" or "processes" (how the ranks run), or "eager" or "lazy" (when the simulated GPU copies). `nodes`:
    the node of each rank.
    """

    transport: str
    check: contract.Check
    how: str = ""
    nodes: tuple[int, ...] = ()
    quick: bool = True


CELLS = [
    *(Cell("local", check) for check in CHECKS),
    *(Cell("shm", check) for check in CHECKS),
    *(Cell("gloo", check, quick=check in QUICK_OVER_GLOO) for check in CHECKS),
    *(Cell("peer", check) for check in ONE_AFTER_ANOTHER),
    *(Cell("nccl", check, "eager") for check in ONE_AFTER_ANOTHER),
    *(Cell("nccl", check, "lazy") for check in BYTES),
    *(Cell("shm+gloo", check, "threads", nodes) for nodes, check in (
        (EVEN, contract.many_in_flight), (EVEN, contract.first_cause_reaches_all), (LATE, contract.agree_is_in_order),
        (EARLY, contract.ends_may_lie_apart), (EARLY, contract.last_message_outlives_close),
    )),
    *(Cell("shm+gloo", check, "processes", nodes, quick=False) for nodes in (EVEN, LATE, EARLY) for check in CHECKS),
    *(
        Cell("peer+nccl", check, "", nodes, quick=(nodes, check) in QUICK_OVER_PEER_AND_NCCL)
        for nodes in (EVEN, LATE, EARLY)
        for check in ONE_AFTER_ANOTHER
    ),
]  # fmt: skip


def name_of(cell: Cell) -> str:
    nodes = "".join(map(str, cell.nodes))
    return "-".join(part for part in (cell.transport, cell.how, nodes, cell.check.__name__) if part)


def started_processes(ranks: int) -> Iterator[Processes]:
    with Processes(ranks) as processes:
        processes.run(start_up, hard_s=180.0)
        yield processes


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    yield from started_processes(3)


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    yield from started_processes(4)


def start_up(rank: int, world_size: int) -> None:
    """Do nothing. The answer to this call shows that the process runs; starting may take a minute on a busy machine."""


def run_check(rank: int, world_size: int, transport: str, nodes: tuple[int, ...], name: str) -> None:
    if nodes and rank >= len(nodes):
        rendezvous_store(rank, world_size, 60.0)  # every process must count the openings, so that the keys agree
        return
    check = getattr(contract, name)
    ring, _ = meet(transport, rank, world_size, contract.timeout_s(check), nodes)
    try:
        check(ring)
    finally:
        ring.close()


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[] if cell.quick else pytest.mark.slow, id=name_of(cell)) for cell in CELLS]
)
def test_contract(cell: Cell, request: pytest.FixtureRequest) -> None:
    check: Any = cell.check
    timeout_s = contract.timeout_s(check)
    if cell.transport == "local":
        on_threads(contract.WORLD_SIZE, check, timeout_s)
    elif cell.transport == "nccl":
        world = SimWorld(contract.WORLD_SIZE, lazy=cell.how == "lazy", any_memory=True, limit_s=8.0)
        results(on_gpus(world, check, timeout_s=timeout_s, options=NcclOptions(register=False)))
        assert world.violations == []
    elif cell.transport == "peer+nccl":
        results(on_nodes(cell.nodes, check, deadline_s=timeout_s, together=False)[0])
    elif cell.how == "threads":
        on_node_threads(cell.nodes, check)
    else:
        processes = request.getfixturevalue("four" if cell.nodes else "three")
        processes.run(run_check, cell.transport, cell.nodes, check.__name__)


# --- attention over every transport between processes ----------------------------------------------------------------


def check_pairs(rank: int, world_size: int, transport: str, config: dict[str, Any]) -> dict[str, Any]:
    with Ring(
        transport=meet(transport, rank, world_size, 30.0)[0], engine="plain", timeout_s=30.0, poison=True
    ) as ring:
        assert ring.transport.name == transport
        return check_rank(ring, config)


@pytest.mark.slow
def test_every_pair_of_mask_layout_and_schedule_is_exact_over_peer(three: Processes) -> None:
    """`tests/test_processes.py` and `tests/gpu/test_rehearsal.py` run the same cases over shm and gloo."""
    config = vars(CheckConfig(dtype="fp64", engine="plain", tokens=61, combinations="pairs"))
    answers = three.run(check_pairs, "peer", config, hard_s=240.0)
    assert {(answer["cases"], answer["failed"]) for answer in answers.values()} == {(len(list(paired_cases())), 0)}
