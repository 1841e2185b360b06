"""Runs one function on all ranks of a ring: threads of this process, or processes that stay for the next case.

Guarantees: what every rank returned or raised, by rank; a wait ends by the deadline.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import ringattn
from ringattn.planner.cluster import CLUSTERS, Cluster, LinkClass, Links
from ringattn.transport.base import Opening
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.local import LocalWorld
from ringattn.transport.location import DEVICES, Location, Nic
from ringattn.transport.shared.transport import ShmTransport
from tests.contract.forking import forked
from tests.fuzz.draw import Case
from tests.fuzz.session import START_S
from tests.poison import unset_is_nan
from tests.transport.nccl_rings import open_on
from tests.transport.simulated.world import SimWorld

TIMEOUT_S = 20.0
OPTIONS = ("poison", "dkv_wire_dtype", "kv_wire_dtype", "out_wire_dtype")

Body = Callable[[ringattn.Ring, Case], Any]
Outcomes = list[Any]
"""By rank: what it returned, or the exception that it raised."""


def _cluster(case: Case) -> Cluster | str | None:
    """The machines that schedule="auto" chooses for; None: not known."""
    if not (drawn := case.get("nodes")):
        return None
    if drawn.get("gpu"):
        return "auto"
    links = Links(tuple(rank // drawn["ranks"] for rank in range(case["ranks"])))
    constants = {key: drawn[key] for key in ("bandwidth", "latency_s", "node_bandwidth")}
    return Cluster("drawn", 1e9, links=links, sync_s=1e-5, **constants)


def _locations(case: Case) -> tuple[Location, ...]:
    """Ranks with the GPUs that were drawn, as far as a ring can tell."""
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


def _life(transport: Any, body: Body, case: Case) -> Any:
    """One rank's life. `transport`: an open one, or a function that opens it."""
    try:
        transport = transport() if callable(transport) else transport
        if _cluster(case) == "auto":
            transport.locations = _locations(case)
        options = {"engine": case["engine"], "cluster": _cluster(case), **case["ring"]}
        with ringattn.Ring(transport=transport, timeout_s=TIMEOUT_S, **options) as ring:
            assert ring.cluster.recognised == (_cluster(case) == "auto"), ring.cluster_from
            return body(ring, case)
    except Exception as error:
        return error


def on_threads(body: Body, case: Case) -> Outcomes:
    """Every rank is a thread; "nccl" is simulated."""
    world, nccl, store = LocalWorld(case["ranks"], TIMEOUT_S), SimWorld(case["ranks"]), dist.HashStore()
    outcomes: Outcomes = [TimeoutError("this rank hangs")] * case["ranks"]

    def work(rank: int) -> None:
        simulated = case.get("transport") == "nccl"
        transport = partial(open_on, nccl, rank, store.clone(), TIMEOUT_S) if simulated else world.transport(rank)
        outcomes[rank] = _life(transport, body, case)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(case["ranks"])]
    with unset_is_nan():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * TIMEOUT_S)
    return outcomes


class Processes:
    """Ranks that are processes over gloo or shared memory. They start at the first case and stay.

    Each case has a ring of its own.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._cases = 0

    def run(self, body: Body, case: Case) -> Outcomes:
        """As `on_threads`. A rank that dies or hangs ends them all; the next case starts new ones."""
        if not self._pipes:
            self._start()
        self._cases += 1
        used = self._pipes[: case["ranks"]]
        for pipe in used:
            pipe.send((self._cases, body, case))
        outcomes: Outcomes = []
        for rank, pipe in enumerate(used):
            try:
                outcomes.append(pipe.recv() if pipe.poll(4 * TIMEOUT_S) else TimeoutError("this rank hangs"))
            except EOFError:
                self._processes[rank].join(5)
                outcomes.append(ChildProcessError(f"this rank died with {self._processes[rank].exitcode}"))
        if any(isinstance(one, (TimeoutError, ChildProcessError)) for one in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._store = store
        for rank in range(self._most):
            mine, theirs = Pipe()
            self._processes.append(forked(_serve, rank, store.port, theirs))
            theirs.close()
            self._pipes.append(mine)
        for pipe in self._pipes:
            if not pipe.poll(START_S) or pipe.recv() != "ready":
                self.close()
                raise TimeoutError(f"the processes did not start in {START_S:.0f} s")


def _serve(rank: int, port: int, pipe: Connection) -> None:
    """The life of a process: cases until the pipe ends."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    pipe.send("ready")
    while True:
        try:
            number, body, case = pipe.recv()
        except EOFError:
            return
        try:
            kind = ShmTransport if case.get("transport") == "shm" else GlooTransport
            case_store = dist.PrefixStore(f"case {number}", store)
            transport = kind.open(Opening(case_store, rank, case["ranks"], TIMEOUT_S))
            with unset_is_nan():
                outcome = _life(transport, body, case)
        except Exception as error:
            outcome = error
        try:
            pipe.send(outcome)
        except Exception as error:  # an exception that cannot be pickled
            pipe.send(RuntimeError(f"{type(outcome).__name__}: {outcome} ({error})"))
