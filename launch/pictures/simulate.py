"""`ringattn simulate`: how long one attention call takes on 1 to 16,384 ranks of a cluster, and who waits for whom.

Nothing is run. Few ranks are simulated with the plans that would run, thousands by classes of ranks that behave alike.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, ClassVar

from ringattn.core.layout import LAYOUTS
from ringattn.errors import InputError
from ringattn.launch.calls import MOST_HEADS, TORCH_DTYPES, CallConfig, schedule_option, tokens_option
from ringattn.launch.options import DTYPES, MOST, help_text, option
from ringattn.launch.outputs import writing
from ringattn.launch.words import load_plain
from ringattn.observe.files import write_file
from ringattn.planner.cluster import CLUSTERS, cluster_named
from ringattn.planner.simulate import duration

PURPOSE = """\
Simulates one attention call on so many ranks of a cluster: how long it takes, how long ranks work and wait, what they
hold, and what stragglers, slow links and jitter cost. Nothing is run; 16,384 ranks take seconds.
Examples: ringattn simulate ranks=16384 tokens=1B cluster=h100
          ringattn simulate ranks=1,8,64,512,4096 tokens=1B scaling=both cluster=gb200 picture=scaling.png
          ringattn simulate ranks=64 tokens=1M slow_rank=3:1.5 slow_link=7-8:4 jitter=0.05 seed=1"""
SCALINGS = "strong", "weak", "both"
MOST_RANKS = 2**14


@dataclass
class SimulateConfig(CallConfig):
    """One attention call, simulated."""

    DEFAULT_TOKENS: ClassVar[int] = 131072

    tokens: int | None = tokens_option(131072, most=MOST)
    heads: int = option(32, "query heads", least=1, most=MOST_HEADS)
    kv_heads: int = option(8, "key and value heads; divides heads", least=1, most=MOST_HEADS)
    head_dim: int = option(128, "of queries, keys and values", least=1, most=MOST)
    dtype: str = option("bf16", "of queries, keys and values", choices=DTYPES)
    layout: str = option("auto", "which rank owns which tokens", choices=("auto", *LAYOUTS[:3]))
    schedule: str = schedule_option("ring")
    ranks: str = option("8", "ranks of the ring; several as 1,8,64")
    scaling: str = option("strong", "several ranks share the same tokens, or have as many each; tokens are those of "
                          "the largest ring where scaling is weak", choices=SCALINGS)  # fmt: skip
    cluster: str = option("h100", "machines: a file of `ringattn calibrate`, or one of " + ", ".join(CLUSTERS),
                          names=tuple(CLUSTERS))  # fmt: skip
    overlap: bool = option(True, "messages travel beside the work of their step; else they follow it")
    sm_margin: int = option(0, "multiprocessors of a GPU that attention leaves to exchanges, as NCCL takes 8", least=0)
    slow_rank: str = option("", "ranks whose work takes longer, as 3:1.5 or 3:1.5,9:2")
    slow_link: str = option("", "pairs whose messages take longer, either way, as 7-8:4")
    jitter: float = option(0.0, "work takes up to this share longer, drawn anew for each rank and step", least=0.0)
    seed: int = option(0, "what jitter is drawn from", least=0, most=2**32 - 1)
    json: str = option("", "file to write everything into (JSON)", writes="file")
    picture: str = option("", "file to draw curves or, of one number of ranks, a timeline into (PNG)", writes="picture")


def main(argv: Sequence[str]) -> int:
    """The command. Raises `InputError` for bad options and `UnsupportedError` for what cannot be simulated."""
    if "--help" in argv or "-h" in argv:
        print(help_text("simulate", PURPOSE, SimulateConfig))
        return 0
    began = time.perf_counter()
    config = load_plain(argv, SimulateConfig)
    config.check()
    ranks = counts(config.ranks)
    slow_ranks = [(rank, factor) for (rank,), factor in factors("slow_rank", config.slow_rank, 1)]
    slow_links = [(rank, peer, factor) for (rank, peer), factor in factors("slow_link", config.slow_link, 2)]
    cluster = cluster_named(config.cluster).leaving(config.sm_margin)
    print(f"on {cluster.name}", flush=True)
    from ringattn.launch.measure.simulation import Call, Machines, shared_out, simulate_call  # numpy
    from ringattn.planner.simulate import Disturbance

    left, right = config.bounds or (None, None)
    sizes = config.batch, config.heads, config.kv_heads, config.head_dim, TORCH_DTYPES[config.dtype]
    call = Call(config.schedule, config.layout, config.causal, left, right, *sizes)
    disturbance = Disturbance(tuple(slow_ranks), tuple(slow_links), config.jitter, config.seed)
    machines = Machines(cluster, disturbance, config.overlap)
    curves: dict[str, list[Any]] = {}
    known: dict[tuple[int, int], Any] = {}
    for scaling in SCALINGS[:2] if config.scaling == "both" else (config.scaling,):
        if len(ranks) > 1:
            print(f"\n{scaling} scaling", flush=True)
        head = HEADER
        for count, tokens in zip(ranks, shared_out(config.length, ranks, scaling == "weak"), strict=True):
            watched = told_ranks(count, [rank for rank, _ in slow_ranks]) if len(ranks) == 1 else []
            # Both curves have the greatest number of ranks with all tokens.
            if (count, tokens) not in known:
                known[count, tokens] = simulate_call(call, machines, tokens, count, config.backward, watched, _say)
            found = known[count, tokens]
            curves.setdefault(scaling, []).append(found)
            # What cannot be simulated is refused without a table.
            print(*filter(None, (head, line(found))), sep="\n", flush=True)
            head = ""
    points = [found for one in curves.values() for found in one]
    print("\n".join(notes(points)))
    if len(points) == 1:
        print("\n" + table(points[0]))
    print(f"simulated in {time.perf_counter() - began:.1f} s, at most {_peak_mib():,.0f} MiB of this process")
    print("\n".join(wrap(f"constants: {cluster.source or 'of no stated source'}", 120, subsequent_indent="  ")))
    if config.json:
        with writing("json", config.json):
            write_file(Path(config.json), json.dumps(record(config, cluster, curves), indent=1) + "\n")
        print(f"written into {config.json}")
    if config.picture:
        from ringattn.launch.pictures.simulated import draw_curves, draw_point

        words = f"{config.schedule} on {cluster.name}"
        with writing("picture", config.picture):
            if len(points) == 1:
                draw_point(config.picture, points[0], words)
            else:
                draw_curves(config.picture, curves, words)
        print(f"drawn into {config.picture}")
    return 0


HEADER = (f"{'ranks':>7}{'tokens':>16}{'time':>16}{'efficiency':>12}{'exposed':>14}{'waiting':>14}"
          f"{'MiB held':>11}{'took s':>9}  simulated")  # fmt: skip


def line(found: Any) -> str:
    """One number of ranks: all passes together, of the rank that waits longest and holds most."""
    exposed, waiting = (sum(getattr(one, name).max() for one in found.passes) for name in ("exposed_s", "waiting_s"))
    how = "by classes of ranks" if found.classes else "by the plan of each rank"
    return (
        f"{found.ranks:>7,}{found.tokens:>16,}{duration(found.total_s):>16}{found.efficiency:>12.1%}{duration(exposed):>14}"
        f"{duration(waiting):>14}{found.held_bytes[2] / 2**20:>11,.0f}{found.took_s:>9.2f}  {how}"
    )


def notes(points: Sequence[Any]) -> list[str]:
    """What the figures are, and what was rounded."""
    lines = ["efficiency: the allowed pairs alone, shared evenly, at the kernel's rate, over the simulated time; "
             "exposed, waiting, MiB held: of the rank that has most"]  # fmt: skip
    if rounded := [one for one in points if one.tokens != one.asked]:
        worst = max(rounded, key=lambda one: one.tokens / one.asked)
        more = worst.tokens / worst.asked - 1
        share = f"{worst.tokens / worst.asked:,.1f} times as many" if more >= 1 else f"{max(more, 1e-6):.4%} more"
        lines.append(
            f"shards are of one length: tokens are rounded up, on {worst.ranks:,} ranks {worst.asked:,} to "
            f"{worst.tokens:,}, {share}"
        )
    return lines


def table(found: Any) -> str:
    """Least, median and greatest of all ranks, by pass."""
    lines = [f"{'pass':<10}{'of all ranks':<14}{'least':>17}{'median':>17}{'greatest':>17}"]
    for name, one in zip(("forward", "backward"), found.passes, strict=False):
        for word, values in (("work", one.busy_s), ("waiting", one.waiting_s), ("exposed", one.exposed_s)):
            shown = "".join(f"{duration(value):>17}" for value in quantiles(values))
            lines.append(f"{name:<10}{word:<14}{shown}")
        shown = "".join(f"{value / 2**20:>17,.1f}" for value in quantiles(one.sent_bytes))
        lines.append(f"{name:<10}{'MiB sent':<14}{shown}")
    shown = "".join(f"{value / 2**20:>17,.1f}" for value in found.held_bytes)
    return "\n".join([*lines, f"{'greatest':<10}{'MiB held':<14}{shown}"])


def quantiles(values: Any) -> list[float]:
    """Least, median, greatest."""
    ordered = sorted(values.tolist())
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def record(config: SimulateConfig, cluster: Any, curves: dict[str, list[Any]]) -> dict[str, Any]:
    """Everything for JSON; seconds and bytes."""
    return {
        "config": {**asdict(config), "tokens": config.length},
        "cluster": {"name": cluster.name, "source": cluster.source},
        "curves": {
            scaling: [
                {
                    "ranks": one.ranks, "tokens": one.tokens, "asked_tokens": one.asked,
                    "by": "classes" if one.classes else "plans", "total_s": one.total_s, "ideal_s": one.ideal_s,
                    "efficiency": one.efficiency, "held_bytes": list(one.held_bytes), "took_s": one.took_s,
                    "passes": [
                        {name: quantiles(getattr(each, name))
                         for name in ("busy_s", "waiting_s", "exposed_s", "sent_bytes")} | {"total_s": each.total_s}
                        for each in one.passes
                    ],
                }
                for one in found
            ]
            for scaling, found in curves.items()
        },
    }  # fmt: skip


def counts(text: str) -> list[int]:
    """Numbers of ranks, in order. Raises `InputError` for what is none."""
    words = text.strip("[]").split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= MOST_RANKS for word in words):
        raise InputError(f"ranks={text}: give numbers from 1 to {MOST_RANKS:,}, as ranks=1,8,64")
    return sorted({int(word) for word in words})


def factors(key: str, text: str, ranks: int) -> list[tuple[tuple[int, ...], float]]:
    """Ranks, `ranks` of them together, and factors. Raises `InputError` for what is none."""
    found = []
    for word in filter(None, text.strip("[]").split(",")):
        match = re.fullmatch("-".join([r"(\d+)"] * ranks) + r":(\d+(?:\.\d+)?)", word.strip())
        if match is None:
            example = "3:1.5 for rank 3 and times half as long again" if ranks == 1 else "7-8:4 for four times as long"
            raise InputError(f"{key}={word}: write {example}")
        *named, factor = match.groups()
        found.append((tuple(map(int, named)), float(factor)))
    return found


def told_ranks(ranks: int, slow: Sequence[int]) -> list[int]:
    """The ranks whose timelines are drawn: the first, the last, some between, and the slow ones."""
    spread = {0, ranks // 4, ranks // 2, 3 * ranks // 4, ranks - 1}
    return sorted({*spread, *slow[:3]})


def _say(words: str) -> None:
    import sys

    if sys.stderr.isatty():
        print(f"\r{words:<60}\r", end="", file=sys.stderr, flush=True)


def _peak_mib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
