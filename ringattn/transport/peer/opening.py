"""The opening of a ring over copy engines: the checks of its requirements, and the self-test.

Guarantees: all ranks open or all raise with the same message, which names the rank and the step that failed. A ring
opens only after a self-test: every pair of ranks has exchanged changing patterns, and all of them arrived intact.
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

ALTERNATIVE = "use transport='nccl' instead"
REACHABLE = (LinkClass.SAME_GPU, LinkClass.NVLINK)
NEEDED = {
    Attribute.VIRTUAL_MEMORY: "virtual memory management",
    Attribute.POSIX_HANDLES: "memory shared by file descriptors",
    Attribute.STREAM_MEMORY_OPERATIONS_64: "stream memory operations on 64-bit words",
}
ROUNDS = 64
"""Exchanges of the self-test: many, because each changes the pattern, and a stale byte shows only if it changed."""
PATTERN_BYTES = 1 << 20
SPREAD = 2_654_435_761
"""Odd, near 2^32 divided by the golden ratio: its multiples differ in all bytes."""
CONNECTIONS = 8
"""Hardware queues of a process by default. With fewer, unrelated streams share a queue and wait for each other."""
SYSTEM_NOT_READY = 802
"""`CUDA_ERROR_SYSTEM_NOT_READY`."""


@dataclass(frozen=True)
class Facts:
    """A rank's properties, gathered before opening. `problem`: why the rank cannot take part; empty if it can."""

    problem: str = ""
    version: int = 0
    partition: bool = False
    lacks: tuple[str, ...] = ()


def facts_of(make: Callable[[], tuple[CudaDriver, CudaDevice]]) -> tuple[Facts, list[Any]]:
    """Return this rank's facts, and the driver and device that `make` returned (an empty list if it raised)."""
    try:
        driver, gpu = make()
        lacks = tuple(description for attribute, description in NEEDED.items() if not driver.attribute(attribute))
        return Facts("", driver.version, driver.is_partition(), lacks), [driver, gpu]
    except RingError as error:
        return Facts(str(error)), []


def refusal(facts: Sequence[Facts], places: Sequence[Location]) -> str | None:
    """Return why these ranks cannot form a ring over copy engines, or None. The result is the same on every rank."""
    for rank, fact in enumerate(facts):
        if fact.problem:
            return f"rank {rank}: {fact.problem}"
    if reason := sharing_obstacle(places):
        return reason
    for rank, fact in enumerate(facts):
        if fact.version < FLOOR_VERSION:
            version = f"{fact.version // 1000}.{fact.version % 1000 // 10}"
            return f"rank {rank}: the CUDA driver is version {version}, but 12.0 is required"
        if fact.partition:
            return f"rank {rank} has an instance of a partitioned GPU (MIG), which no other GPU can access"
        if fact.lacks:
            return f"rank {rank}: the GPU lacks {' and '.join(fact.lacks)}"
    links = links_of(places)
    # Over PCIe an address-translating bridge may drop peer writes while CUDA reports success, so NVLink is required.
    # Ranks of different nodes exchange through NCCL and need no link.
    for rank in range(len(facts)):
        for peer in range(rank):
            if not places[peer].same_machine(places[rank]):
                continue
            if (link := links.of(peer, rank)) not in REACHABLE:
                return f"ranks {peer} and {rank} are connected by {link.value}; copies need NVLink or a common GPU"
    return None


def warnings_of(environ: Mapping[str, str], driver: CudaDriver) -> list[str]:
    """Return warnings about settings that cost time but not correctness."""
    warnings = []
    if driver.attribute(Attribute.MULTI_PROCESS_SERVER):
        warnings.append("transport='peer' is untested under MPS, whose clients share hardware queues")
    connections = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if connections.isdigit() and int(connections) < CONNECTIONS:
        warnings.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: a wait of transport='peer' blocks other streams in the same "
            f"hardware queue; leave it unset, or set it to {CONNECTIONS} or more"
        )
    return warnings


def open_peer(
    opening: Opening,
    make: Callable[[], tuple[CudaDriver, CudaDevice]],
    *,
    leave: Callable[[str], None] | None = None,
    rounds: int = ROUNDS,
) -> PeerTransport:
    """Open this rank's transport, for messages to the ranks of its node.

    All ranks of the ring call it together. `make` returns this rank's driver and device, or raises an error that says
    why the rank has none. `rounds`: the number of exchanges in the self-test.
    Raises `UnsupportedError` on all ranks if any rank cannot take part, and `DeadlineError`, which names the missing
    ranks.
    """
    opening.name = opening.name or PeerTransport.name
    # A rank that cannot open reports its facts too: otherwise the others would wait for it until the deadline.
    local_facts, driver_and_gpu = facts_of(make)
    payload = json.dumps(asdict(local_facts)).encode()
    answers = opening.control.gather("peer/facts", payload, Deadline(opening.timeout_s))
    facts = [Facts(**json.loads(answer)) for answer in answers]
    if reason := refusal(facts, opening.locations):
        raise UnsupportedError(f"transport='peer' cannot connect these ranks: {reason}; {ALTERNATIVE}")
    driver, gpu = driver_and_gpu
    ring: PeerTransport | None = None
    # Each stage gets the whole deadline. Waiting for ranks that start late should not shorten the next stage.
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

        # Each step is confirmed by all ranks before the next one. A rank that fails reports it instead of raising, so
        # that no rank waits for it in a later step.
        def all_can(step: str, problem: str) -> None:
            _all_can(opening.control, f"peer/{step}", problem, until, group.check)

        all_can("registered", problem)
        assert ring is not None
        all_can("reached", _reach(ring, until))
        all_can("tested", _self_test(ring, rounds))
    except BaseException as error:
        # Once there is a ring, streams may wait on words of the pages: only an abort releases those waits.
        if ring is None:
            group.drop()
        else:
            ring.abort(error)
        raise
    # In a ring of several nodes, the transport between nodes opens next and needs the store.
    if len(node) == opening.world_size:
        opening.leave_store()
    return ring


def _all_can(control: ControlStore, step: str, problem: str, deadline: Deadline, watch: Callable[[], None]) -> None:
    """Raise `UnsupportedError` on all ranks of the ring, on every node, if any rank has a problem.

    `step`: the name of this check in the store. `problem`: the problem of this rank, or "".
    """
    answers = control.gather(step, problem.encode(), deadline, watch)
    problems = "; ".join(f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers) if answer)
    if problems:
        raise UnsupportedError(f"transport='peer' cannot connect these ranks: {problems}; {ALTERNATIVE}")


def _reach(ring: PeerTransport, deadline: Deadline) -> str:
    """Map memory of every other rank of the node once. Return a description of the failure; empty if there is none."""
    group, problem, place = ring.group, "", None
    # Peers may map this memory after this rank has returned. That is safe: only the next `allocate` frees memory
    # without a view, and all ranks confirm this step before they call it.
    memory = None
    try:
        memory = ring.allocate(1)
        place = ring.arena.place(memory.data_ptr(), 1)
    except (RingError, RuntimeError) as error:
        problem = f"memory for exchanges: {error}"
    label, until = f"rank {group.rank} opening transport='peer'", time.monotonic() + deadline.left_s
    answers = group.all_gather(json.dumps([problem, place]).encode(), lambda: None, lambda: label, until)
    # Map eagerly: a missing fabric manager or a denied descriptor should fail here, not in the first attention call.
    for rank, answer in zip(group.ranks, answers, strict=True):
        problem_of_peer, place_of_peer = json.loads(answer)
        if not problem and not problem_of_peer and rank != ring.rank:
            try:
                ring.lane.imports.address(rank, ArenaPlace(*place_of_peer))
            except DriverError as error:
                problem = f"the memory of rank {rank}: {error}"
                if error.code == SYSTEM_NOT_READY:
                    problem += " (is the fabric manager running?)"
    return problem


def _self_test(ring: PeerTransport, rounds: int) -> str:
    """Exchange changing patterns between all pairs of ranks of the node.

    Return a description of the failure; empty if every pattern arrived intact.
    """
    peers = [rank for rank in ring.group.ranks if rank != ring.rank]
    count = PATTERN_BYTES // 4
    memory = ring.allocate((2 + 2 * len(peers)) * PATTERN_BYTES).view(torch.int32).view(2 + 2 * len(peers), count)
    # Every byte of every word changes from round to round, so a byte that does not arrive is noticed.
    base = (torch.arange(count, dtype=torch.int64, device=ring.device) * SPREAD).to(torch.int32)
    differs = torch.zeros((), dtype=torch.bool, device=ring.device)
    memory.zero_()
    # Load the kernels before the first exchange: loading a kernel may wait for the whole device.
    differs |= (base + 1 != base + 1).any()
    # Two rows for sends, then two for each peer: a round never overwrites what the previous round may still read.
    for number in range(rounds):
        sent = memory[number % 2]
        torch.add(base, _mark(ring.rank, number), out=sent)
        received = {peer: memory[2 + 2 * index + number % 2] for index, peer in enumerate(peers)}
        label = f"self-test {number}"
        ring.exchange(
            [Message(peer, sent, label) for peer in peers], [Message(peer, received[peer], label) for peer in peers]
        ).wait()
        # Compare on the device right after the wait: a host copy would synchronize and so hide a missing fence.
        for peer in peers:
            differs |= (received[peer] != base + _mark(peer, number)).any()
    ring.drain()
    return "self-test patterns arrived with differences" if bool(differs) else ""


def _mark(rank: int, number: int) -> int:
    """Return the 32-bit signed number that a rank adds to its pattern in one round."""
    # The number differs between all ranks of a node and between all rounds, so bytes of another rank or of an earlier
    # round are noticed. The last terms wrap the sum into the signed range, as int32 additions on the device do.
    return (SPREAD * (number + 1) + 7_919 * rank + 2**31) % 2**32 - 2**31
