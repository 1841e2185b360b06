"""What the control traffic of large rings asks of one store, and how soon a dead rank is named.

`python -m ringattn.bench.control_store` runs a real `TCPStore` in a process of its own and the real heartbeats, opening
and attribution of simulated ranks in a few more, on loopback. Counted is what the ranks call; torch makes two messages
of a read. The gate: every survivor names the dead rank, and no other.
"""

from __future__ import annotations

import json
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
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

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
BEFORE = "control_store_before"
INK = "#22303c"
SETTLE_S = 4.0
AHEAD_S = 3.0


@dataclass(frozen=True)
class ControlOptions:
    """`processes` share the ranks; `quiet_s` is counted; the dead rank has been silent for `deadline_s` at the
    deadline of all others."""

    ranks: tuple[int, ...] = (64, 256, 1024)
    processes: int = 3
    quiet_s: float = 8.0
    deadline_s: float = 4.0
    results: str = RESULTS


def main(words: Sequence[str] = ()) -> None:
    """Measure, print, keep table and picture. Raises `GateError` when a survivor names nobody, or an innocent."""
    options = parse(ControlOptions(), words)
    found = []
    with progress("control_store") as say:
        for ranks in options.ranks:
            say(f"{ranks} ranks")
            found.append(measure(ranks, options))
    before, missing = _before(options.results)
    finish("control_store", options, [table(found, before, missing)], {"records": found}, options.results)
    if options.results:
        draw(found, before, Path(options.results, "control_store.png"))
    if wrong := [one for one in found if one["blamed"]]:
        raise GateError(f"innocent ranks were named: {wrong}")


def measure(ranks: int, options: ControlOptions) -> dict[str, Any]:
    """One size: opening, quiet, a fault."""
    load = os.getloadavg()[0]
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    port = int(host.stdout.readline())
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    workers: list[BaseProcess] = []
    try:
        for n in range(options.processes):
            mine, theirs = context.Pipe()
            share = range(n, ranks, options.processes)
            workers.append(context.Process(target=clients.live, args=(port, share, ranks, theirs), daemon=True))
            workers[-1].start()
            pipes.append(mine)
        _answers(pipes)
        opened = [one for part in _ask(pipes, ("open", time.monotonic() + AHEAD_S)) for one in part]
        _ask(pipes, ("live", None))
        time.sleep(SETTLE_S)
        first = _ask(pipes, ("count",))
        time.sleep(options.quiet_s)
        last = _ask(pipes, ("count",))
        dead = ranks // 2 + 1
        _ask(pipes, ("live", dead))
        told = [one for part in _ask(pipes, ("deadline", time.monotonic() + options.deadline_s, dead)) for one in part]
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
    named = [(rank, s, set(map(int, re.findall(r"rank (\d+) is silent", str(words))))) for rank, s, words in told]
    right = sorted(s for _, s, who in named if dead in who)
    return {
        "ranks": ranks,
        "load": load,
        "opening_s": max(s for _, s, _ in opened),
        "opening_failed": sum(said is not None for _, _, said in opened),
        **{f"{key}_per_s": rate for key, rate in rates.items()},
        "survivors": ranks - 1,
        "named_by": len(right),
        "named_after_s": right[-1] if right else None,
        "named_median_s": right[len(right) // 2] if right else None,
        "blamed": sorted({other for _, _, who in named for other in who} - {dead}),
    }


def table(found: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]], missing: str) -> Table:
    """Before and after, a row each."""
    columns = (
        "ranks", "code", "requests/s", "messages/s", "MB/s", "opening, s", "named by", "named after, s", "innocents",
    )  # fmt: skip
    loads = ", ".join(f"{one['load']:.0f}" for one in found)
    rows: list[Sequence[str]] = []
    for one in sorted([*((old, "before") for old in before), *((new, "now") for new in found)],
                      key=lambda each: (each[0]["ranks"], each[1])):  # fmt: skip
        record, code = one
        late = record["named_after_s"]
        failed = f" ({record['opening_failed']} failed)" if record["opening_failed"] else ""
        rows.append((
            str(record["ranks"]), code, f"{record['requests_per_s']:.0f}", f"{record['messages_per_s']:.0f}",
            f"{record['bytes_per_s'] / 1e6:.2f}", f"{record['opening_s']:.2f}{failed}",
            f"{record['named_by']} of {record['survivors']}", "-" if late is None else f"{late:.2f}",
            str(len(record["blamed"])),
        ))  # fmt: skip
    return Table(
        "One store, in quiet and at a fault",
        columns,
        rows,
        [
            "requests: calls of the store by all ranks in quiet; messages: what torch sends for them. named: the time "
            "from the common deadline until the last survivor knows the dead rank. All clients and the store share "
            f"this machine's cores, whose load was {loads} when it began. innocents: others who were named too. "
            f"Clients without CPU ask later; by their interval they ask at most {REQUESTS_PER_S:.0f} times a second.",
            *([f"Before, {missing}."] if missing else []),
        ],
    )


def draw(found: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]], path: Path) -> None:
    """The curves over the number of ranks."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4))
    shown = (
        ("requests_per_s", "requests a second in quiet", 5000.0, "linear"),
        ("opening_s", "seconds to open", 10.0, "log"),
        ("named_after_s", "seconds from deadline to name, last rank", 2.0, "linear"),
    )
    for ax, (key, title, bar, scale) in zip(axes, shown, strict=True):
        for records, label, color, marker in ((before, "before", "C1", "s"), (found, "now", "C0", "o")):
            points = [(one["ranks"], one[key]) for one in records if one[key] is not None]
            ax.plot(*zip(*points, strict=True), color=color, marker=marker, label=label) if points else None
        ax.axhline(bar, color=INK, linewidth=0.8, linestyle="--")
        ax.set_xscale("log", base=2)
        ax.set_yscale(scale)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if scale == "linear":
            ax.set_ylim(0, 1.2 * bar)
        ax.set_xticks([one["ranks"] for one in found], [str(one["ranks"]) for one in found])
        ax.set_xlabel("ranks", color=INK)
        ax.set_title(title, loc="left", fontsize=10, color=INK)
        ax.grid(True, which="major", color="#dfe4e8", linewidth=0.7)
    axes[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _before(folder: str) -> tuple[list[dict[str, Any]], str]:
    """What the code before measured, where it is kept, and what it did not get to measure."""
    path = Path(folder, f"{BEFORE}.json")
    if not folder or not path.exists():
        return [], ""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return kept["records"], kept["missing"]


def _ask(pipes: Sequence[Connection], what: tuple[Any, ...]) -> list[Any]:
    for pipe in pipes:
        pipe.send(what)
    return _answers(pipes)


def _answers(pipes: Sequence[Connection]) -> list[Any]:
    return [pipe.recv() for pipe in pipes]


if __name__ == "__main__":
    main(sys.argv[1:])
