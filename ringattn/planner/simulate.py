"""How long the plans of all ranks take together, on machines described by a handful of constants.

A step's messages run while its work runs; a rank enters its next step when both are done. A message starts when both
ends have reached their exchange, and a rank's outgoing messages share its link.
Does not know: torch, what is installed here.
"""

from __future__ import annotations

from typing import NamedTuple

from ringattn.plan import Fold, Plan, Recv, Send, Serve
from ringattn.planner.cluster import Cluster
from ringattn.problem import Problem

FORWARD_FLOPS_PER_DIM = 4
BACKWARD_OVER_FORWARD = 2.5


class Timeline(NamedTuple):
    """Predicted times in microseconds: of the slowest rank, and per rank spent computing and waiting."""

    total_us: float
    busy_us: tuple[float, ...]
    waiting_us: tuple[float, ...]


def simulate(plans: tuple[Plan, ...], cluster: Cluster) -> Timeline:
    """Play the plans of all ranks of one pass against each other."""
    clock = [0.0] * len(plans)
    busy = [0.0] * len(plans)
    at = [0] * len(plans)
    begun: list[dict[int, float]] = [{} for _ in plans]  # by rank: step number -> when its exchange was posted
    sends = [_by_peer(plan, receiving=False) for plan in plans]
    recvs = [_by_peer(plan, receiving=True) for plan in plans]
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            while at[rank] < len(plan.steps):
                now = at[rank]
                begun[rank].setdefault(now, clock[rank])
                arrival = _exchanged(rank, now, plans, begun, sends, recvs, cluster)
                if arrival is None:
                    break
                work = _work_s(plan, now, cluster)
                busy[rank] += work
                clock[rank] = max(clock[rank] + work, arrival)
                at[rank] += 1
                moved = True
    total = max(clock)
    return Timeline(total * 1e6, tuple(b * 1e6 for b in busy), tuple((total - b) * 1e6 for b in busy))


Numbered = dict[int, list[tuple[int, Send | Recv]]]
"""By peer: (plan step, message) in order."""


def _by_peer(plan: Plan, receiving: bool) -> Numbered:
    found: Numbered = {}
    for now, step in enumerate(plan.steps):
        for message in step.recvs if receiving else step.sends:
            found.setdefault(message.peer, []).append((now, message))
    return found


def _exchanged(
    rank: int,
    now: int,
    plans: tuple[Plan, ...],
    begun: list[dict[int, float]],
    sends: list[Numbered],
    recvs: list[Numbered],
    cluster: Cluster,
) -> float | None:
    """When all messages of a rank's step have left and arrived; None while some peer has not reached its end."""
    done = begun[rank][now]
    for ours, theirs, outgoing in ((sends, recvs, True), (recvs, sends, False)):
        for peer, numbered in ours[rank].items():
            for place, (step, _) in enumerate(numbered):
                if step != now:
                    continue
                peer_step = theirs[peer][rank][place][0]
                if peer_step not in begun[peer]:
                    return None
                sender, sent_in = (rank, now) if outgoing else (peer, peer_step)
                start = max(begun[rank][now], begun[peer][peer_step])
                done = max(done, start + _link_s(plans[sender], sent_in, cluster))
    return done


def _link_s(plan: Plan, now: int, cluster: Cluster) -> float:
    """Seconds in which a rank's link carries all that it sends in one step."""
    nbytes = sum(send.elements * plan.element_bytes(send.buffer) for send in plan.steps[now].sends)
    return cluster.latency_s + nbytes / cluster.bandwidth


def _work_s(plan: Plan, now: int, cluster: Cluster) -> float:
    """Seconds of a step's attention; merges and packing are not counted."""
    pairs = sum(item.tiles.area() for item in plan.steps[now].work if isinstance(item, (Fold, Serve)))
    return attention_s(plan.problem, pairs, cluster) * (BACKWARD_OVER_FORWARD if plan.backward else 1)


def attention_s(problem: Problem, pairs: float, cluster: Cluster) -> float:
    """Seconds of a forward pass over so many (q, k) pairs times query heads, in each batch."""
    flops = pairs * problem.batch * (problem.head_dim + problem.value_dim) / 2 * FORWARD_FLOPS_PER_DIM
    return flops / cluster.flops
