"""The load of large rings' control traffic on one store, and the time until the other ranks name a dead rank.

`python -m ringattn.bench.control_store` runs a real `TCPStore` in a separate process, and the real heartbeats,
rendezvous and failure attribution of simulated ranks in a few more processes, on loopback. It counts the calls of the
ranks; torch sends two messages per read. The gate: every survivor names the dead rank and no other.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from ringattn.bench import control_clients as clients
from ringattn.bench.gate import GateError
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.transport.health.feeds import REQUESTS_PER_S

HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
SETTLE_S = 4.0
AHEAD_S = 3.0


@dataclass(frozen=True)
class ControlOptions:
    """The options of the benchmark.

    The ranks are divided among `processes`. Requests are counted for `quiet_s`. The deadline of the other ranks expires
    after the dead rank has been silent for `deadline_s`.
    """

    ranks: tuple[int, ...] = (64, 256, 1024)
    processes: int = 3
    quiet_s: float = 8.0
    deadline_s: float = 4.0
    results: str = RESULTS


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, print and save. Raises `GateError` if a survivor names an innocent rank."""
    options = parse(ControlOptions(), arguments)
    records = []
    with progress("control_store") as say:
        for ranks in options.ranks:
            say(f"{ranks} ranks")
            records.append(measure(ranks, options))
    finish("control_store", options, [table(records)], {"records": records}, options.results)
    if wrong := [record for record in records if record["blamed"]]:
        raise GateError(f"innocent ranks were named: {wrong}")


def measure(ranks: int, options: ControlOptions) -> dict[str, Any]:
    """Measure the rendezvous, quiet operation and a fault for one number of ranks."""
    load = os.getloadavg()[0]
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    port = int(host.stdout.readline())
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    workers: list[BaseProcess] = []
    try:
        for n in range(options.processes):
            parent_end, child_end = context.Pipe()
            share = range(n, ranks, options.processes)
            workers.append(context.Process(target=clients.live, args=(port, share, ranks, child_end), daemon=True))
            workers[-1].start()
            pipes.append(parent_end)
        _answers(pipes)
        opened = [result for part in _ask(pipes, ("open", time.monotonic() + AHEAD_S)) for result in part]
        _ask(pipes, ("live", None))
        time.sleep(SETTLE_S)
        first = _ask(pipes, ("count",))
        time.sleep(options.quiet_s)
        last = _ask(pipes, ("count",))
        dead = ranks // 2 + 1
        _ask(pipes, ("live", dead))
        attributions = [
            result for part in _ask(pipes, ("deadline", time.monotonic() + options.deadline_s, dead)) for result in part
        ]
    finally:
        for pipe in pipes:
            pipe.send(None)
        for worker in workers:
            worker.join(10.0)
        host.kill()
        host.communicate()
    seconds = max(b["at_s"] - a["at_s"] for a, b in zip(first, last, strict=True))
    rates = {
        key: sum(b[key] - a[key] for a, b in zip(first, last, strict=True)) / seconds
        for key in ("requests", "messages", "bytes", "rounds")
    }
    named = [
        (rank, s, set(map(int, re.findall(r"rank (\d+) is silent", str(attribution)))))
        for rank, s, attribution in attributions
    ]
    right = sorted(s for _, s, blamed in named if dead in blamed)
    return {
        "ranks": ranks,
        "load": load,
        "opening_s": max(s for _, s, _ in opened),
        "opening_failed": sum(error is not None for _, _, error in opened),
        **{f"{key}_per_s": rate for key, rate in rates.items()},
        "survivors": ranks - 1,
        "named_by": len(right),
        "named_after_s": right[-1] if right else None,
        "named_median_s": right[len(right) // 2] if right else None,
        "blamed": sorted({innocent for _, _, blamed in named for innocent in blamed} - {dead}),
    }


def table(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one row per number of ranks."""
    columns = (
        "ranks", "requests/s", "messages/s", "MB/s", "opening, s", "named by", "named after, s", "innocents",
    )  # fmt: skip
    rows: list[Sequence[str]] = []
    for record in records:
        late = record["named_after_s"]
        failed = f" ({record['opening_failed']} failed)" if record["opening_failed"] else ""
        rows.append((
            str(record["ranks"]), f"{record['requests_per_s']:.0f}", f"{record['messages_per_s']:.0f}",
            f"{record['bytes_per_s'] / 1e6:.2f}", f"{record['opening_s']:.2f}{failed}",
            f"{record['named_by']} of {record['survivors']}", "-" if late is None else f"{late:.2f}",
            str(len(record["blamed"])),
        ))  # fmt: skip
    loads = ", ".join(f"{record['load']:.0f}" for record in records)
    note = (
        "requests: calls of the store by all ranks in quiet operation; messages: what torch sends for them. named: the "
        "time from the common deadline until the last survivor knows the dead rank. All clients and the store share "
        f"this machine's cores, whose load was {loads} at the start. innocents: other ranks that were named too. "
        f"Clients without CPU time send later; by their interval they send at most {REQUESTS_PER_S:.0f} a second."
    )
    return Table("One store, in quiet and at a fault", columns, rows, [note])


def _ask(pipes: Sequence[Connection], request: tuple[Any, ...]) -> list[Any]:
    for pipe in pipes:
        pipe.send(request)
    return _answers(pipes)


def _answers(pipes: Sequence[Connection]) -> list[Any]:
    return [pipe.recv() for pipe in pipes]


if __name__ == "__main__":
    main(sys.argv[1:])
