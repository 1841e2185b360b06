"""Opens a ring over copy engines, or refuses by name where they cannot do it.

Guarantees: all ranks open or all raise, with the same words, which name the rank and the step that failed; a ring opens
only after every pair of ranks has exchanged changing patterns which arrived without a difference.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ringattn.errors import RingError, UnsupportedError
from ringattn.planner.cluster import LinkClass
from ringattn.transport.base import Message, Opening
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.device import CudaDevice
from ringattn.transport.location import Location, links_of, node_of, sharing_obstacle
from ringattn.transport.peer.arena import ArenaPlace
from ringattn.transport.peer.driver import FLOOR_VERSION, Attribute, CudaDriver, DriverError
from ringattn.transport.peer.transport import PeerTransport
from ringattn.transport.shared.group import SharedGroup

ANSWER = "transport='nccl' does without"
REACHABLE = (LinkClass.SAME_GPU, LinkClass.NVLINK)
NEEDED = {
    Attribute.VIRTUAL_MEMORY: "virtual memory management",
    Attribute.POSIX_HANDLES: "memory that is shared by file descriptors",
    Attribute.STREAM_MEMORY_OPERATIONS_64: "stream memory operations on 64-bit words",
}
ROUNDS = 64
PATTERN_BYTES = 1 << 20
SPREAD = 2_654_435_761
"""Odd, near 2^32 divided by the golden ratio: its multiples differ in all bytes."""
CONNECTIONS = 8
SYSTEM_NOT_READY = 802
"""`CUDA_ERROR_SYSTEM_NOT_READY`."""


@dataclass(frozen=True)
class Facts:
    """What a rank says of itself before it opens. `problem`: why it cannot, empty where it can."""

    problem: str = ""
    version: int = 0
    partition: bool = False
    lacks: tuple[str, ...] = ()


def facts_of(make: Callable[[], tuple[CudaDriver, CudaDevice]]) -> tuple[Facts, list[Any]]:
    """This rank's facts, and what `make` gave, empty where it could not."""
    try:
        driver, gpu = make()
        lacks = tuple(words for which, words in NEEDED.items() if not driver.attribute(which))
        return Facts("", driver.version, driver.is_partition(), lacks), [driver, gpu]
    except RingError as error:
        return Facts(str(error)), []


def refusal(facts: Sequence[Facts], places: Sequence[Location]) -> str | None:
    """Why these ranks cannot form a ring over copy engines; the same on every rank."""
    for rank, each in enumerate(facts):
        if each.problem:
            return f"rank {rank}: {each.problem}"
    if why := sharing_obstacle(places):
        return why
    for rank, each in enumerate(facts):
        if each.version < FLOOR_VERSION:
            version = f"{each.version // 1000}.{each.version % 1000 // 10}"
            return f"rank {rank}: the CUDA driver is of version {version}, and 12.0 is needed"
        if each.partition:
            return f"rank {rank} has an instance of a partitioned GPU (MIG), which no other GPU can reach"
        if each.lacks:
            return f"rank {rank}: the GPU lacks {' and '.join(each.lacks)}"
    links = links_of(places)
    for rank in range(len(facts)):
        for peer in range(rank):
            if not places[peer].same_machine(places[rank]):
                continue
            if (link := links.of(peer, rank)) not in REACHABLE:
                return (
                    f"ranks {peer} and {rank} are joined by {link.value}, and copies are safe over NVLink or on one GPU"
                )
    return None


def warnings_of(environ: Mapping[str, str], driver: CudaDriver) -> list[str]:
    """What costs time and no correctness."""
    found = []
    if driver.attribute(Attribute.MULTI_PROCESS_SERVER):
        found.append("transport='peer' is not known to work under MPS, whose clients share hardware queues")
    connections = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if connections.isdigit() and int(connections) < CONNECTIONS:
        found.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: a wait of transport='peer' holds up other streams that share "
            f"its hardware queue; leave it unset, or at {CONNECTIONS} or more"
        )
    return found


def open_peer(
    opening: Opening,
    make: Callable[[], tuple[CudaDriver, CudaDevice]],
    *,
    leave: Callable[[str], None] | None = None,
    rounds: int = ROUNDS,
) -> PeerTransport:
    """This rank's end, for messages to the ranks of its node.

    All ranks of the ring call it at once. `make` gives this rank's driver and device, or raises why there is none.
    `rounds`: exchanges of the self-test.
    Raises `UnsupportedError` on all ranks where one cannot, `DeadlineError` that names the ranks which are missing.
    """
    opening.name = opening.name or PeerTransport.name
    mine, made = facts_of(make)
    answers = opening.control.gather("peer/facts", json.dumps(asdict(mine)).encode(), Deadline(opening.timeout_s))
    facts = [Facts(**json.loads(answer)) for answer in answers]
    if why := refusal(facts, opening.locations):
        raise UnsupportedError(f"transport='peer' cannot join these ranks: {why}; {ANSWER}")
    driver, gpu = made
    ring: PeerTransport | None = None
    opening.until = Deadline(opening.timeout_s)
    node = node_of(opening.rank, opening.locations)
    group = SharedGroup.open(opening, node)
    try:
        problem = ""
        try:
            ring = PeerTransport(group, driver, gpu, leave)
        except DriverError as error:
            problem = f"registering the shared pages: {error}"
        until = Deadline(opening.timeout_s)

        def all_can(step: str, problem: str) -> None:
            _all_can(opening.control, f"peer/{step}", problem, until, group.check)

        all_can("registered", problem)
        assert ring is not None
        all_can("reached", _reach(ring, until))
        all_can("tested", _self_test(ring, rounds))
    except BaseException as error:
        if ring is None:
            group.drop()
        else:
            ring.abort(error)
        raise
    if len(node) == opening.world_size:
        opening.leave_store()
    return ring


def _all_can(control: ControlStore, step: str, problem: str, deadline: Deadline, watch: Callable[[], None]) -> None:
    """Raise `UnsupportedError` on all ranks of the ring, of whichever node, where one has a problem."""
    answers = control.gather(step, problem.encode(), deadline, watch)
    told = "; ".join(f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers) if answer)
    if told:
        raise UnsupportedError(f"transport='peer' cannot join these ranks: {told}; {ANSWER}")


def _reach(ring: PeerTransport, deadline: Deadline) -> str:
    """Map memory of every other rank of the node once. The step that failed, by its name; empty where none has."""
    group, problem, place = ring.group, "", None
    memory = None
    try:
        memory = ring.allocate(1)
        place = ring.arena.place(memory.data_ptr(), 1)
    except (RingError, RuntimeError) as error:
        problem = f"memory for exchanges: {error}"
    what, until = f"rank {group.rank} opening transport='peer'", time.monotonic() + deadline.left_s
    answers = group.all_gather(json.dumps([problem, place]).encode(), lambda: None, lambda: what, until)
    for rank, answer in zip(group.ranks, answers, strict=True):
        failed, theirs = json.loads(answer)
        if not problem and not failed and rank != ring.rank:
            try:
                ring.lane.imports.address(rank, ArenaPlace(*theirs))
            except DriverError as error:
                problem = f"the memory of rank {rank}: {error}"
                if error.code == SYSTEM_NOT_READY:
                    problem += " (is the fabric manager running?)"
    return problem


def _self_test(ring: PeerTransport, rounds: int) -> str:
    """Changing patterns between all pairs of ranks of the node, compared right behind the waits. What is wrong."""
    peers = [rank for rank in ring.group.ranks if rank != ring.rank]
    count = PATTERN_BYTES // 4
    memory = ring.allocate((2 + 2 * len(peers)) * PATTERN_BYTES).view(torch.int32).view(2 + 2 * len(peers), count)
    # Every byte of every word changes from round to round, so one that does not arrive is seen.
    base = (torch.arange(count, dtype=torch.int64, device=ring.device) * SPREAD).to(torch.int32)
    differs = torch.zeros((), dtype=torch.bool, device=ring.device)
    memory.zero_()
    # Before the first exchange: loading a kernel may wait for the whole device.
    differs |= (base + 1 != base + 1).any()
    # Two rows for sends, then two for each peer: a round never writes what the round before may still read.
    for number in range(rounds):
        sent = memory[number % 2]
        torch.add(base, _mark(ring.rank, number), out=sent)
        received = {peer: memory[2 + 2 * at + number % 2] for at, peer in enumerate(peers)}
        label = f"self-test {number}"
        ring.exchange(
            [Message(peer, sent, label) for peer in peers], [Message(peer, received[peer], label) for peer in peers]
        ).wait()
        for peer in peers:
            differs |= (received[peer] != base + _mark(peer, number)).any()
    ring.drain()
    return "patterns of the self-test arrived with differences" if bool(differs) else ""


def _mark(rank: int, number: int) -> int:
    """What a rank adds to its pattern in one round, as a signed number of 32 bits."""
    return (SPREAD * (number + 1) + 7_919 * rank + 2**31) % 2**32 - 2**31
