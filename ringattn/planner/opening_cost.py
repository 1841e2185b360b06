"""Which opening of a backward pass costs less: keys fetched anew, own work split for it, or keys kept (decision 0022).

Guarantees: the same answer on all ranks, for it is found from the problem and the cluster alone, by the last rank's
part: under a causal mask that rank reads the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringattn.core.problem import ITEM_BYTES, Problem
from ringattn.planner.cluster import REFERENCE, Cluster
from ringattn.planner.plan import record_bytes
from ringattn.planner.work import attention_s
from ringattn.schedule.content import size
from ringattn.schedule.opening import Opening, arrived, last_read, split_keys
from ringattn.schedule.ops import Attend, Kind
from ringattn.schedule.routes import Route, forward_of_rank


class OpeningFacts(NamedTuple):
    """What the last rank does, as far as it counts: backward seconds of the work that may be split off, and of all.

    `kept_bytes`, `owners`: what may be kept, all of it and whose it is; `messages`, `rows`: what it receives forward,
    rows times heads.
    """

    early_s: float
    all_s: float
    kept_bytes: float
    owners: tuple[int, ...]
    messages: float
    rows: float


def cheapest_opening(problem: Problem, route: Route, cluster: Cluster) -> Opening:
    """Kept where that saves a greater share of the pass's time than it adds to what a forward pass saves anyway.

    Memory of every layer is not spent on the word of `REFERENCE`, which describes no machine, nor of a preset that
    nobody named. Else split, unless the call of its own takes longer than what it hides.
    """
    facts = opening_facts(problem, route, cluster)
    return "fetched" if facts is None else cheapest_by(facts, problem, cluster)


def opening_facts(problem: Problem, route: Route, cluster: Cluster) -> OpeningFacts | None:
    """None where nothing can be hidden."""
    rank = problem.world_size - 1
    if not rank or route.keeps or not route.transposed:
        return None
    part = forward_of_rank(problem, route, rank)
    kept = arrived(part, (one for one in last_read(part) if one[0] == rank))
    if not kept:
        return None
    work = [item for step in part.steps for item in step.work if isinstance(item, Attend)]
    own = next((item.tiles for item in work if item.kv.owner == rank), ())
    early_s, all_s = (
        attention_s(problem, sum(table.area() for _, table in tiles), cluster, backward=True)
        for tiles in (split_keys(own, problem.kv_layout.counts[rank])[0], [one for item in work for one in item.tiles])
    )
    kept_bytes = sum(size(content) for *_, content in kept) * record_bytes(problem, problem.kv_dtype)
    rows = [size(content) for at, _, content in arrived(part) if at == rank]
    return OpeningFacts(
        early_s, all_s, kept_bytes, tuple(block.owner for _, block, _ in kept), len(rows), sum(rows)
    )  # fmt: skip


def cheapest_by(facts: OpeningFacts, problem: Problem, cluster: Cluster) -> Opening:
    """`cheapest_opening` of what is known of the last rank."""
    rank, early_s, kept_bytes = problem.world_size - 1, facts.early_s, facts.kept_bytes
    links = (cluster.link(cluster.link_class(owner, rank)) for owner in facts.owners)
    latency_s, rate = max(links, key=lambda link: link[0] + kept_bytes / link[1])
    fetch_s = latency_s + kept_bytes / rate
    exposed_s = max(0.0, fetch_s - early_s) + cluster.call_s
    # The pass takes as long as its work, or as K/V there and dK/dV back.
    back = record_bytes(problem, problem.wire_dtype or problem.accumulator_dtype, Kind.DKV)
    hops_s = facts.messages * latency_s + facts.rows * (record_bytes(problem, problem.kv_dtype) + back) / rate
    share = exposed_s / (max(facts.all_s, hops_s) + exposed_s)
    if cluster.name != REFERENCE.name and not cluster.recognised and share > kept_bytes / _saved_bytes(problem, rank):
        return "kept"
    return "split" if min(early_s, fetch_s) > cluster.call_s else "fetched"


def opening_beyond(fewer: Sequence[tuple[int, OpeningFacts | None]], problem: Problem, cluster: Cluster) -> Opening:
    """`cheapest_opening` on more ranks, with shards as long, from what is known of two smaller numbers of ranks.

    What the last rank works and receives grows evenly with ranks; so does the distance to who sends it last.
    """
    facts = facts_beyond(fewer, problem.world_size)
    return "fetched" if facts is None else cheapest_by(facts, problem, cluster)


def facts_beyond(fewer: Sequence[tuple[int, OpeningFacts | None]], world_size: int) -> OpeningFacts | None:
    """`opening_facts` on more ranks, for `opening_beyond`."""
    (ranks, here), (more, there) = fewer[:2]
    if here is None or there is None:
        return None
    share = (world_size - ranks) / (more - ranks)

    def beyond(a: float, b: float) -> float:
        return a + (b - a) * share

    # Of more that arrives at once than before, links to the first are as those to the others.
    owners = {round(beyond(a, b)) for a, b in zip(here.owners, there.owners, strict=False)}
    return OpeningFacts(
        here.early_s, beyond(here.all_s, there.all_s), beyond(here.kept_bytes, there.kept_bytes), tuple(sorted(owners)),
        beyond(here.messages, there.messages), beyond(here.rows, there.rows),
    )  # fmt: skip


def _saved_bytes(problem: Problem, rank: int) -> int:
    """What a forward pass saves for its backward in any case: q, k, v, out and lse."""
    dims = problem.head_dim + problem.value_dim
    queries = problem.q_layout.counts[rank] * problem.q_heads
    keys = problem.kv_layout.counts[rank] * problem.kv_heads
    values = (queries + keys) * dims * ITEM_BYTES[problem.dtype]
    return max(1, problem.batch * (values + queries * ITEM_BYTES[problem.accumulator_dtype]))
