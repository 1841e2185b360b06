"""Runs a function on all ranks of a ring. Ranks are threads of this process, or processes that later cases reuse.

Guarantees: callers get each rank's return value or error; every wait ends at the deadline.
"""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch.distributed as dist

import ringattn
from ringattn.planner.cluster import CLUSTERS, Cluster, LinkClass, Links
from ringattn.transport.base import Opening
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.local import LocalWorld
from ringattn.transport.location import DEVICES, Location, Nic
from ringattn.transport.shared.transport import ShmTransport
from tests.contract.processes import Processes
from tests.fuzz.draw import Case
from tests.fuzz.draw_idle import PROCESSES
from tests.poison import unset_is_nan
from tests.transport.nccl_rings import open_on
from tests.transport.simulated.world import SimWorld

TIMEOUT_S = 20.0
START_S = 120.0
"""Time for processes to start on a busy machine."""
OPTIONS = ("poison", "keep_received", "dkv_wire_dtype", "kv_wire_dtype", "out_wire_dtype")

Body = Callable[[ringattn.Ring, Case], Any]
Outcomes = list[Any]
"""By rank: the return value, or the exception that was raised."""


def _cluster(case: Case) -> Cluster | str | None:
    """Return the argument `cluster` of the ring, for which schedule="auto" chooses: a cluster, "auto", or None."""
    if not (nodes := case.get("nodes")):
        return None
    if nodes.get("gpu"):
        return "auto"
    links = Links(tuple(rank // nodes["ranks"] for rank in range(case["ranks"])))
    constants = {key: nodes[key] for key in ("bandwidth", "latency_s", "node_bandwidth")}
    return Cluster("drawn", 1e9, links=links, sync_s=1e-5, **constants)


def _locations(case: Case) -> tuple[Location, ...]:
    """Return the locations of the ranks with the GPUs of the case, as a ring would detect them."""
    nodes = [rank // case["nodes"]["ranks"] for rank in range(case["ranks"])]
    name = case["nodes"]["gpu"]
    return tuple(
        Location(
            f"host-{node}", f"boot/{node}", rank, 0, f"gpu-{rank}", None, (Nic("mlx5_0:1", 400.0),),
            tuple((f"gpu-{peer}", LinkClass.NVLINK) for peer in range(rank) if nodes[peer] == node),
            name, CLUSTERS[DEVICES[name]].sms,
        )
        for rank, node in enumerate(nodes)
    )  # fmt: skip


def _run_rank(open_transport: Callable[[], Any], body: Body, case: Case) -> Any:
    """Run one rank; return the result of `body`, or the error that it raises."""
    try:
        transport = open_transport()
        if _cluster(case) == "auto":
            transport.locations = _locations(case)
        options = {"engine": case["engine"], "cluster": _cluster(case), **case["ring"]}
        with ringattn.Ring(transport=transport, timeout_s=TIMEOUT_S, **options) as ring:
            assert ring.cluster.recognised == (_cluster(case) == "auto"), ring.cluster_from
            return body(ring, case)
    except Exception as error:
        return error


def on_threads(body: Body, case: Case) -> Outcomes:
    """Run `body` on every rank, each a thread, and return the outcomes. The transport "nccl" is simulated."""
    world, nccl, store = LocalWorld(case["ranks"], TIMEOUT_S), SimWorld(case["ranks"]), dist.HashStore()
    outcomes: Outcomes = [TimeoutError("this rank hangs")] * case["ranks"]

    def work(rank: int) -> None:
        simulated = case.get("transport") == "nccl"
        open_transport = partial(open_on, nccl, rank, store.clone()) if simulated else partial(world.transport, rank)
        outcomes[rank] = _run_rank(open_transport, body, case)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(case["ranks"])]
    with unset_is_nan():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * TIMEOUT_S)
    return outcomes


class SharedProcesses:
    """Ranks that are processes, which communicate over gloo or shared memory.

    The processes start at the first case, and later cases reuse them. Each case opens a new ring.
    """

    def __init__(self) -> None:
        self._processes: Processes | None = None
        self._cases = 0

    def run(self, body: Body, case: Case) -> Outcomes:
        """Run `body`, a top-level function of a module, on every rank. Return the outcomes.

        Raises AssertionError if a process hangs or dies.
        """
        if self._processes is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._processes = Processes(PROCESSES)
        self._cases += 1
        try:
            outcomes = self._processes.run(
                _in_process, self._store.port, self._cases, body, case, hard_s=START_S + 4 * TIMEOUT_S
            )
        except BaseException:
            self._processes.__exit__(None, None, None)
            self._processes = None
            raise
        return [outcomes[rank] for rank in range(case["ranks"])]


@cache
def _store_at(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))


def _in_process(rank: int, processes: int, port: int, number: int, body: Body, case: Case) -> Any:
    """Run one rank and return its outcome. Return None in a process that is no rank of the case.

    `number`: the number of the case, which separates its keys in the store from those of other cases.
    """
    if rank >= case["ranks"]:
        return None
    warnings.simplefilter("ignore")
    kind = ShmTransport if case.get("transport") == "shm" else GlooTransport
    store = dist.PrefixStore(f"case {number}", _store_at(port))
    with unset_is_nan():
        outcome = _run_rank(partial(kind.open, Opening(store, rank, case["ranks"], TIMEOUT_S)), body, case)
    try:
        pickle.dumps(outcome)
    except Exception as error:
        return RuntimeError(f"{type(outcome).__name__}: {outcome} ({error})")
    return outcome
