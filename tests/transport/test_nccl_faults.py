"""Scripted faults on simulated GPUs: every surviving rank blames only the culprit, within the deadline plus 2 s.

The transport is the real one. The simulated library of one rank dies, stalls or returns errors.
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
WARM_HOPS = 2  # the number of hops with which a ring opens
ASYNCHRONOUS = "gets an asynchronous error"


Change = Callable[[int], dict[str, Any]]
"""The arguments that only the culprit passes in its n-th call."""


@dataclass(frozen=True)
class Case:
    """A fault in the library of rank `culprit`, or a call of this rank that differs from the other ranks' calls."""

    name: str
    culprit: int
    ranks: int = 3
    fault: Fault | None = None
    change: Change | None = None
    schedule: str = "ring"

    def __str__(self) -> str:
        return f"{self.name}, rank {self.culprit} of {self.ranks}"


def arguments(ring: Ring, tokens: int = TOKENS, **options: Any) -> dict[str, Any]:
    """Return the arguments of a causal call."""
    seq = ring.sequence(tokens, layout="zigzag")
    x = torch.ones(1, seq.counts[ring.rank], 2, 8)
    return {"q": x, "k": x, "v": x, "seq": seq, "causal": True, "schedule": "ring", **options}


def all_cases() -> list[Case]:
    """Return all cases. A call has two hops on three ranks, and three hops on four ranks."""
    cases = []
    for ranks in (3, 4):
        for culprit in range(ranks):
            for hop in (WARM_HOPS + 1, WARM_HOPS + ranks):
                cases.append(Case(f"dies before hop {hop}", culprit, ranks, Die(culprit, hop)))
            cases.append(Case("dies after its first hop", culprit, ranks, Die(culprit, WARM_HOPS, after=True)))
    stuck_in = {"send": 4, "recv": 4, "group_end": 4, "group_start": 3}
    for culprit in range(3):
        for function, n in stuck_in.items():
            cases.append(Case(f"is stuck in {function}", culprit, 3 + culprit % 2, Stall(culprit, function, n)))
        for status in (Status.REMOTE_ERROR, Status.SYSTEM_ERROR, Status.UNHANDLED_CUDA_ERROR):
            answer = Answer(culprit, "group_end", status, 4)
            cases.append(Case(f"gets {status.name} from a launch", culprit, 4, answer))
        cases.append(Case(ASYNCHRONOUS, culprit, 3))
    different_calls: list[tuple[str, int, int, Change]] = [
        ("refuses its input", 1, 3, lambda n: {"window": (0, 5)} if n == 2 else {}),
        ("has another shape", 2, 3, lambda n: {"tokens": TOKENS + (n == 1)}),
        ("has a new plan for a cached one", 0, 3, lambda n: {"tokens": TOKENS + (n == 2)}),
        ("has a cached plan for a new one", 1, 3, lambda n: {}),
        ("is one call ahead", 2, 4, lambda n: {"tokens": TOKENS + (n >= 2)}),
    ]
    cases += [Case(name, culprit, ranks, change=change) for name, culprit, ranks, change in different_calls]
    # Opening connects neighbors only. Other pairs of ranks connect in their first hop, and hang there if the peer is
    # dead.
    for schedule in ("direct", "all_gather", "all_to_all"):
        for culprit in (0, 2):
            death = Die(culprit, WARM_HOPS)
            cases.append(Case(f"dies before the first hop of {schedule}", culprit, 4, death, schedule=schedule))
    return cases


def call(case: Case, ring: Ring, n: int) -> None:
    """Make the `n`-th call of this rank, which may differ between the culprit and the other ranks."""
    options: dict[str, Any] = {"schedule": case.schedule}
    if ring.rank == case.culprit:
        options |= case.change(n) if case.change else {}
    elif case.name == "has a cached plan for a new one":
        options |= {"tokens": TOKENS + (n == 2)}
    ring.attention(**arguments(ring, **options))
    ring.synchronize()


def break_communicator(world: SimWorld, rank: int) -> None:
    """Set an asynchronous error on the communicators of a rank, as NCCL does when it detects a failure."""
    with world.changed:
        for comm in world.registry.of(rank):
            comm.fail(Status.REMOTE_ERROR, "an asynchronous error")


def suffer(case: Case) -> tuple[list[Outcome], list[float]]:
    """Run a case. Return the outcome of each rank, and the time at which its last successful call ended."""
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
                time.sleep(0.05)  # so that a fault may occur between two calls too
        finally:
            left.discard(ring.rank)
            if left <= {case.culprit}:  # release the culprit after all others have failed; a timer might be too early
                world.release(case.culprit)

    outcomes = on_rings(world, body, deadline_s=DEADLINE_S, ring={"engine": "plain"}, hard_s=30.0)
    return outcomes, last_good


def verdict(case: Case) -> list[str]:
    """Run a case, and return a line for each rank that reacts wrongly to the fault."""
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
            wrong.append(f"{case}: rank {rank} does not name the culprit: {outcome.error}")
        if innocent := named_at_fault(str(outcome.error)) - {case.culprit}:
            wrong.append(f"{case}: rank {rank} blames {innocent}: {outcome.error}")
    return wrong


def test_all_cases_differ() -> None:
    assert len(all_cases()) == len({str(case) for case in all_cases()}) == 56


@pytest.fixture(autouse=True, scope="module")
def _ranks_take_turns_often() -> Iterator[None]:
    """Switch threads every 0.5 ms. Ranks are threads; with the default of 5 ms they would send heartbeats too late."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    run_ranks(2, lambda ring: ring.attention(**arguments(ring)))  # so that late imports do not count against a deadline
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(1, BATCHES))])
def test_every_survivor_names_only_the_culprit_in_time(batch: int) -> None:
    with ThreadPoolExecutor(2) as pool:  # more cases at once would slow each other down, and the deadlines are short
        wrong = [line for lines in pool.map(verdict, all_cases()[batch::BATCHES]) for line in lines]
    assert wrong == []
