"""Which opening of a backward pass costs less: keys fetched anew, own work split for it, or keys kept (decision 0022).

Guarantees: the same answer on all ranks, for it is found from the problem and the cluster alone, by the last rank's
part: under a causal mask that rank reads the most.
"""

from __future__ import annotations

from ringattn.core.problem import ITEM_BYTES, Problem
from ringattn.planner.cluster import REFERENCE, Cluster
from ringattn.planner.plan import record_bytes
from ringattn.planner.work import attention_s
from ringattn.schedule.content import size
from ringattn.schedule.opening import Opening, arrived, last_read, split_keys
from ringattn.schedule.ops import Attend, Kind
from ringattn.schedule.routes import Route, forward_of_rank


def cheapest_opening(problem: Problem, route: Route, cluster: Cluster) -> Opening:
    """Kept where that saves a greater share of the pass's time than it adds to what a forward pass saves anyway.

    Memory of every layer is not spent on the word of `REFERENCE`, which describes no machine, nor of a preset that
    nobody named. Else split, unless the
    call of its own takes longer than what it hides.
    """
    rank = problem.world_size - 1
    if not rank or route.keeps or not route.transposed:
        return "fetched"
    part = forward_of_rank(problem, route, rank)
    kept = arrived(part, (one for one in last_read(part) if one[0] == rank))
    if not kept:
        return "fetched"
    work = [item for step in part.steps for item in step.work if isinstance(item, Attend)]
    own = next((item.tiles for item in work if item.kv.owner == rank), ())
    early_s, all_s = (
        attention_s(problem, sum(table.area() for _, table in tiles), cluster, backward=True)
        for tiles in (split_keys(own, problem.kv_layout.counts[rank])[0], [one for item in work for one in item.tiles])
    )
    record = record_bytes(problem, problem.kv_dtype)
    kept_bytes = sum(size(content) for *_, content in kept) * record
    links = (cluster.link(cluster.link_class(block.owner, rank)) for _, block, _ in kept)
    latency_s, rate = max(links, key=lambda link: link[0] + kept_bytes / link[1])
    fetch_s = latency_s + kept_bytes / rate
    exposed_s = max(0.0, fetch_s - early_s) + cluster.call_s
    # The pass takes as long as its work, or as K/V there and dK/dV back.
    back = record_bytes(problem, problem.wire_dtype or problem.accumulator_dtype, Kind.DKV)
    hops_s = sum(latency_s + size(content) * (record + back) / rate for at, _, content in arrived(part) if at == rank)
    share = exposed_s / (max(all_s, hops_s) + exposed_s)
    if cluster.name != REFERENCE.name and not cluster.recognised and share > kept_bytes / _saved_bytes(problem, rank):
        return "kept"
    return "split" if min(early_s, fetch_s) > cluster.call_s else "fetched"


def _saved_bytes(problem: Problem, rank: int) -> int:
    """What a forward pass saves for its backward in any case: q, k, v, out and lse."""
    dims = problem.head_dim + problem.value_dim
    queries = problem.q_layout.counts[rank] * problem.q_heads
    keys = problem.kv_layout.counts[rank] * problem.kv_heads
    values = (queries + keys) * dims * ITEM_BYTES[problem.dtype]
    return max(1, problem.batch * (values + queries * ITEM_BYTES[problem.accumulator_dtype]))
