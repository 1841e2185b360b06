"""Scripted faults on simulated GPUs: every survivor names the culprit and no other within the deadline and 2 s.

The real transport runs; what dies, stalls or answers wrongly is the simulated library under one rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.errors import RingError
from ringattn.testing import run_ranks
from ringattn.transport.nccl.binding import Status
from tests.transport.attribution import named_at_fault, names_as_culprit
from tests.transport.nccl_rings import Outcome, on_rings
from tests.transport.simulated.world import Answer, Die, Died, Fault, SimWorld, Stall

pytestmark = pytest.mark.alone

DEADLINE_S = 2.0
GRACE_S = 2.0
TOKENS = 24
BATCHES = 5
WARM_HOPS = 2  # of opening
ASYNCHRONOUS = "meets an asynchronous error"


Change = Callable[[int], dict[str, Any]]
"""What the culprit asks for otherwise than the others in its n-th call."""


@dataclass(frozen=True)
class Case:
    """A fault in the library of one rank, or a call that it makes otherwise than the others."""

    name: str
    culprit: int
    ranks: int = 3
    fault: Fault | None = None
    change: Change | None = None
    schedule: str = "ring"

    def __str__(self) -> str:
        return f"{self.name}, rank {self.culprit} of {self.ranks}"


def arguments(ring: Ring, tokens: int = TOKENS, **options: Any) -> dict[str, Any]:
    """A causal call."""
    seq = ring.sequence(tokens, layout="zigzag")
    x = torch.ones(1, seq.counts[ring.rank], 2, 8)
    return {"q": x, "k": x, "v": x, "seq": seq, "causal": True, "schedule": "ring", **options}


def cases() -> list[Case]:
    """Over ranks, hops and functions. A call of three ranks has two hops, of four ranks three."""
    found = []
    for ranks in (3, 4):
        for culprit in range(ranks):
            for hop in (WARM_HOPS + 1, WARM_HOPS + ranks):
                found.append(Case(f"dies before hop {hop}", culprit, ranks, Die(culprit, hop)))
            found.append(Case("dies after its first hop", culprit, ranks, Die(culprit, WARM_HOPS, after=True)))
    stuck_in = {"send": 4, "recv": 4, "group_end": 4, "group_start": 3}
    for culprit in range(3):
        for function, n in stuck_in.items():
            found.append(Case(f"is stuck in {function}", culprit, 3 + culprit % 2, Stall(culprit, function, n)))
        for status in (Status.REMOTE_ERROR, Status.SYSTEM_ERROR, Status.UNHANDLED_CUDA_ERROR):
            answer = Answer(culprit, "group_end", status, 4)
            found.append(Case(f"is told {status.name} by a launch", culprit, 4, answer))
        found.append(Case(ASYNCHRONOUS, culprit, 3))
    otherwise: list[tuple[str, int, int, Change]] = [
        ("refuses its input", 1, 3, lambda n: {"window": (0, 5)} if n == 2 else {}),
        ("has another shape", 2, 3, lambda n: {"tokens": TOKENS + (n == 1)}),
        ("has a new plan for a cached one", 0, 3, lambda n: {"tokens": TOKENS + (n == 2)}),
        ("has a cached plan for a new one", 1, 3, lambda n: {}),
        ("is one call ahead", 2, 4, lambda n: {"tokens": TOKENS + (n >= 2)}),
    ]
    found += [Case(name, culprit, ranks, change=change) for name, culprit, ranks, change in otherwise]
    # Opening connects neighbors only; other ranks connect in their first hop, and hang there if one never arrives.
    for schedule in ("direct", "all_gather", "all_to_all"):
        for culprit in (0, 2):
            death = Die(culprit, WARM_HOPS)
            found.append(Case(f"dies before the first hop of {schedule}", culprit, 4, death, schedule=schedule))
    return found


def call(case: Case, ring: Ring, n: int) -> None:
    """The `n`-th call of a rank."""
    options: dict[str, Any] = {"schedule": case.schedule}
    if ring.rank == case.culprit:
        options |= case.change(n) if case.change else {}
    elif case.name == "has a cached plan for a new one":
        options |= {"tokens": TOKENS + (n == 2)}
    ring.attention(**arguments(ring, **options))
    ring.synchronize()


def break_communicator(world: SimWorld, rank: int) -> None:
    """NCCL finds by itself that a communicator is broken."""
    with world.changed:
        for comm in world.registry.of(rank):
            comm.fail(Status.REMOTE_ERROR, "an asynchronous error")


def suffer(case: Case) -> tuple[list[Outcome], list[float]]:
    """Run the case; the outcomes, and when each rank made its last call that worked."""
    world = SimWorld(case.ranks, faults=[case.fault] if case.fault else [], limit_s=20.0, connects=True)
    last_good, left = [0.0] * case.ranks, set(range(case.ranks))

    def body(ring: Ring) -> None:
        last_good[ring.rank] = time.monotonic()
        try:
            for n in range(40):
                if case.name == ASYNCHRONOUS and n == 2 and ring.rank == case.culprit:
                    break_communicator(world, ring.rank)
                call(case, ring, n)
                last_good[ring.rank] = time.monotonic()
                time.sleep(0.05)  # so that a fault that counts polls falls between two calls as well as into one
        finally:
            left.discard(ring.rank)
            if left <= {case.culprit}:  # the others have given up; a clock would release it too early on a busy machine
                world.release(case.culprit)

    outcomes = on_rings(world, body, deadline_s=DEADLINE_S, ring={"engine": "plain"}, hard_s=30.0)
    return outcomes, last_good


def verdict(case: Case) -> list[str]:
    """What is wrong with how the ranks took the fault."""
    outcomes, last_good = suffer(case)
    wrong = []
    for rank, outcome in enumerate(outcomes):
        if rank == case.culprit and isinstance(outcome.error, Died):
            continue
        if not isinstance(outcome.error, RingError):
            wrong.append(f"{case}: rank {rank} ended with {outcome.error!r}")
            continue
        if rank == case.culprit:
            continue
        took_s = outcome.ended_s - last_good[rank]
        if took_s > DEADLINE_S + GRACE_S:
            wrong.append(f"{case}: rank {rank} took {took_s:.2f} s: {outcome.error}")
        if not names_as_culprit(case.culprit, str(outcome.error)):
            wrong.append(f"{case}: rank {rank} names nobody: {outcome.error}")
        if innocent := named_at_fault(str(outcome.error)) - {case.culprit}:
            wrong.append(f"{case}: rank {rank} blames {innocent}: {outcome.error}")
    return wrong


def test_they_differ() -> None:
    assert len(cases()) == len({str(case) for case in cases()}) == 56


@pytest.fixture(autouse=True, scope="module")
def _ranks_take_turns_often() -> Iterator[None]:
    """Ranks are threads here: one that waits 5 ms for each turn sends its heartbeats too late."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    run_ranks(2, lambda ring: ring.attention(**arguments(ring)))  # what is imported late takes none of a deadline
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(1, BATCHES))])
def test_every_survivor_names_the_culprit_alone_in_time(batch: int) -> None:
    with ThreadPoolExecutor(2) as pool:  # more of them would wait for each other's turn, and deadlines are short
        wrong = [line for lines in pool.map(verdict, cases()[batch::BATCHES]) for line in lines]
    assert wrong == []
