"""The speed of two ranks, compared with one process on the same whole problem and with torch's own internal ring.

Run `python -m ringattn.bench.speed length_tokens=16384 repeats=5`. All baselines run in the same processes, one thread
each, in turns whose order rotates. A time is measured between two barriers, so it is that of the slowest rank. Ratios
are those of medians over the rounds that other programs disturbed least. The spread of the ratios of all rounds is
shown next to them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from ringattn.bench.baselines import OurRing, TorchRing, independent, one_process
from ringattn.bench.clock import Lap, Sample, cpu, kept, lap, samples, wall
from ringattn.bench.gate import Baseline, open_gate, random_inputs
from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Table, finish, progress, spread
from ringattn.engine import aten
from ringattn.ring import Ring
from ringattn.runtime import executor
from ringattn.transport.base import Message, WorkHandle

PROGRAM = "ringattn.bench.speed:on_rank"
PASSES = ("forward", "backward")
GATE_TOKENS_PER_RANK = 96
BAR = 1.9
"""The smallest gain of two processes over one."""


@dataclass(frozen=True)
class SpeedOptions:
    """The options of the benchmark, which runs causal attention. `rotate` is alltoall or allgather in torch's ring."""

    length_tokens: int = 16_384
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    ranks: int = 2
    layout: str = "zigzag"
    schedule: str = "ring"
    rotate: str = "alltoall"
    repeats: int = 8
    results: str = RESULTS


def on_rank(ring: Ring, **spec: Any) -> dict[str, Any]:
    """Run this rank: the gate, the rounds, and a round of ours by stage.

    Return the laps of each baseline by pass and round, the errors of the gate, and the seconds of the stages.
    """
    options = SpeedOptions(**spec)
    say: Callable[[str], None] = (lambda line: print(line, flush=True)) if ring.rank == 0 else (lambda line: None)
    shape = options.heads, options.kv_heads, options.head_dim, torch.float32
    ours = OurRing(ring, options.layout, options.schedule)
    candidates = (
        one_process(ring.rank),
        ours,
        TorchRing(ring, options.rotate),
        independent(ring.rank, ring.world_size, options.heads, options.kv_heads),
    )
    baselines: list[Baseline] = [baseline for baseline in candidates if baseline is not None]

    say("gate: small problems against a dense float64 softmax")
    errors = open_gate(baselines, random_inputs(GATE_TOKENS_PER_RANK * ring.world_size, *shape))
    open_gate([ours], random_inputs(GATE_TOKENS_PER_RANK * ring.world_size + 5, *shape))
    ring.barrier()
    say("gate: green")

    inputs = random_inputs(options.length_tokens, *shape)
    for baseline in baselines:
        baseline.load(inputs)
    laps: dict[str, dict[str, list[Lap]]] = {baseline.name: {name: [] for name in PASSES} for baseline in baselines}
    for turn in range(options.repeats):
        first = turn % len(baselines)
        for baseline in baselines[first:] + baselines[:first]:
            say(f"round {turn + 1} of {options.repeats}: {baseline.name}")
            for name in PASSES:
                laps[baseline.name][name].append(lap(ring.barrier, getattr(baseline, name)))
    say("where our time goes")
    return {"laps": laps, "errors": errors, "stages": _staged(ring, ours)}


def _staged(ring: Ring, ours: OurRing) -> dict[str, dict[str, float]]:
    """Run another round and return the seconds of this rank by pass and stage.

    `all` is the time of the whole pass, without waiting at a barrier at its end.
    """
    by_pass = {}
    for name in PASSES:
        ring.barrier()
        with stages(ring) as by_stage:
            start = time.perf_counter()
            getattr(ours, name)()
            whole = time.perf_counter() - start
        by_pass[name] = {**by_stage, "other": whole - sum(by_stage.values()), "all": whole}
    return by_pass


Samples = dict[str, dict[str, list[Sample]]]
"""Samples by baseline and pass."""


def speed_table(options: SpeedOptions, by_baseline: Samples) -> Table:
    """Return a table of times and ratios; above 1 means that ours is faster."""
    ours = next(name for name in by_baseline if name.startswith("ringattn"))
    table = Table(
        f"{options.length_tokens} tokens, heads {options.heads}:{options.kv_heads} of {options.head_dim}, float32, "
        f"causal, {options.ranks} ranks of one thread, {options.repeats} rounds",
        ("pass", "attention", "seconds, all rounds", "kept", "foreign", "seconds, kept", f"over {ours}",
         "by round", "by processor time"),
        notes=[
            "- a / b / c is minimum / median / maximum; ratios above 1 mean that ours is faster.",
            "- foreign: processors that other programs used in the kept rounds, median; others are set aside.",
            "- by processor time: of the busiest rank, without waiting, so that other programs barely affect it.",
        ],
    )  # fmt: skip
    for name in PASSES:
        our_samples = by_baseline[ours][name]
        for baseline, by_pass in by_baseline.items():
            other_samples = by_pass[name]
            kept_samples = kept(other_samples)
            ratios = [a.wall_s / b.wall_s for a, b in zip(other_samples, our_samples, strict=True)]
            table.rows.append((
                name, baseline, spread([s.wall_s for s in other_samples]), str(len(kept_samples)),
                f"{median(s.foreign for s in kept_samples):.2f}", spread([s.wall_s for s in kept_samples]),
                f"{wall(other_samples) / wall(our_samples):.3f}", spread(ratios),
                f"{cpu(other_samples) / cpu(our_samples):.3f}",
            ))  # fmt: skip
        gain = wall(by_baseline["one process"][name]) / wall(our_samples)
        verdict = "met" if gain >= BAR else "MISSED"
        others = max(median(s.foreign for s in kept(by_baseline[baseline][name])) for baseline in ("one process", ours))
        table.notes.append(
            f"- {name}: {gain:.3f} times one process; the bar is {BAR}: {verdict}, "
            f"while other programs took {others:.2f} processors."
        )
    return table


def stage_table(by_rank: Sequence[dict[str, dict[str, float]]]) -> Table:
    """Return a table of our stages: milliseconds of each rank, and the largest share of a pass."""
    ranks = range(len(by_rank))
    table = Table("Where our pass goes", ("pass", "stage", *(f"rank {r}, ms" for r in ranks), "share, at most"))
    for name in PASSES:
        for stage in by_rank[0][name]:
            spent = [rank_times[name][stage] for rank_times in by_rank]
            share = max(rank_times[name][stage] / rank_times[name]["all"] for rank_times in by_rank)
            table.rows.append((name, stage, *(f"{1e3 * s:.1f}" for s in spent), f"{share:.1%}"))
    return table


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run, print, save and return the record."""
    options = parse(SpeedOptions(), arguments)
    with progress("speed") as say:
        by_rank = run_in_processes(options.ranks, PROGRAM, asdict(options), say)
    by_baseline: Samples = {
        baseline: {name: samples([rank["laps"][baseline][name] for rank in by_rank]) for name in PASSES}
        for baseline in by_rank[0]["laps"]
    }
    data: dict[str, Any] = {
        "samples": by_baseline,
        "sample_fields": Sample._fields,
        "largest_error": {name: max(rank["errors"][name] for rank in by_rank) for name in by_baseline},
        "stages_by_rank": [rank["stages"] for rank in by_rank],
    }
    tables = [speed_table(options, by_baseline), stage_table(data["stages_by_rank"])]
    finish("speed", options, tables, data, options.results)
    return data


# --- where a pass goes ------------------------------------------------------------------------------------------------


STAGES = ("block kernel", "merge", "pack", "add dK/dV", "post messages", "wait for messages", "agree")


class _TimedTicket:
    """A work handle that counts the time of its wait as the stage "wait for messages"."""

    def __init__(self, ticket: WorkHandle, timed: Callable[..., Any]) -> None:
        self._wait = timed("wait for messages", ticket.wait)

    def wait(self) -> None:
        self._wait()


@contextmanager
def stages(ring: Ring) -> Iterator[dict[str, float]]:
    """Yield this rank's seconds by stage, which are collected within the block. The engine must be torch's CPU flash.

    Only one block per process can be active, because it replaces functions of the whole process. Ranks that are threads
    can therefore not use it at the same time.
    """
    seconds = dict.fromkeys(STAGES, 0.0)

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                seconds[stage] += time.perf_counter() - start

        return run

    exchange = timed("post messages", ring.transport.exchange)

    def timed_exchange(sends: list[Message], recvs: list[Message]) -> _TimedTicket:
        return _TimedTicket(exchange(sends, recvs), timed)

    block = aten.CPU._replace(
        forward=timed("block kernel", aten.CPU.forward), backward=timed("block kernel", aten.CPU.backward)
    )
    with ExitStack() as wrapped:
        wrapped.enter_context(patch.object(aten, "CPU", block))
        wrapped.enter_context(patch.object(aten, "merge_", timed("merge", aten.merge_)))
        wrapped.enter_context(patch.object(executor, "pack", timed("pack", executor.pack)))
        wrapped.enter_context(patch.object(executor, "add", timed("add dK/dV", executor.add)))
        wrapped.enter_context(patch.object(ring.transport, "exchange", timed_exchange))
        wrapped.enter_context(
            patch.object(ring.transport, "all_gather_bytes", timed("agree", ring.transport.all_gather_bytes))
        )
        yield seconds


if __name__ == "__main__":
    main(sys.argv[1:])
