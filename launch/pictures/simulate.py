"""`ringattn simulate`: the time of one attention call on 1 to 16,384 ranks of a cluster, and the waits of the ranks.

Or the time of one layer with a state, on 1 to 1,024 ranks. Nothing is run. Small numbers of ranks are simulated with
the plan of each rank. Attention on thousands of ranks is simulated by classes of ranks that behave alike.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from ringattn.errors import InputError
from ringattn.launch.folders import json_output, writing
from ringattn.launch.options import help_text, load_plain
from ringattn.launch.pictures.simulation import (
    ATTENTION,
    PASSES,
    SCALINGS,
    SimulateConfig,
    Simulated,
    Simulator,
)
from ringattn.planner.cluster import Cluster, cluster_named
from ringattn.planner.simulate import Disturbance, duration

PURPOSE = """\
Simulates one attention call, or one layer with a state, on any number of ranks of a cluster: its time, the computing,
waiting and memory of ranks, and what stragglers, slow links and jitter cost. Nothing is run; 16,384 ranks take seconds.
Examples: ringattn simulate ranks=16384 tokens=1B cluster=h100
          ringattn simulate ranks=1,8,64,512,4096 tokens=1B scaling=both cluster=gb200 picture=scaling.png
          ringattn simulate ranks=64 tokens=1M slow_rank=3:1.5 slow_link=7-8:4 jitter=0.05 seed=1
          ringattn simulate layer=gated_delta_rule kv_heads=16 ranks=16 tokens=1M picture=timeline.png"""
MOST_RANKS = 2**14


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises `InputError` for bad options and `UnsupportedError` if a call cannot be simulated."""
    if "--help" in argv or "-h" in argv:
        print(help_text("simulate", PURPOSE, SimulateConfig))
        return 0
    config = load_plain(argv, SimulateConfig)
    config.check()
    config.check_words(argv)
    with json_output(config.json) as write:
        write(simulated(config))
    return 0


def simulated(config: SimulateConfig) -> dict[str, Any]:
    """Simulate the call on each number of ranks, print the results, draw the picture, and return the record."""
    began = time.perf_counter()
    ranks = counts(config.ranks)
    if len(ranks) == 1 and config.scaling != "strong":
        raise InputError(f"scaling={config.scaling}: has no effect on one number of ranks; write ranks=1,8,64")
    if config.seed and not config.jitter:
        raise InputError(f"seed={config.seed}: has no effect without jitter, as jitter=0.05")
    slow_ranks = [(rank, factor) for (rank,), factor in factors("slow_rank", config.slow_rank, 1)]
    slow_links = [(rank, peer, factor) for (rank, peer), factor in factors("slow_link", config.slow_link, 2)]
    cluster = cluster_named(config.cluster).leaving(config.sm_margin)
    print(f"on {cluster.name}", flush=True)
    disturbance = Disturbance(tuple(slow_ranks), tuple(slow_links), config.jitter, config.seed)
    simulator = Simulator(config, cluster, disturbance)
    curves: dict[str, list[Simulated]] = {}
    points: dict[tuple[int, int], Simulated] = {}
    for scaling in SCALINGS[:2] if config.scaling == "both" else (config.scaling,):
        if len(ranks) > 1:
            print(f"\n{scaling} scaling", flush=True)
        curves[scaling] = []
        for count, tokens in zip(ranks, shared_out(config.length, ranks, scaling == "weak"), strict=True):
            traced = traced_ranks(count, disturbance) if len(ranks) == 1 else []
            # The strong and the weak curve share the point with the largest number of ranks and all tokens.
            if (count, tokens) not in points:
                points[count, tokens] = simulator.run(tokens, count, traced)
            # Print the heading only after the first simulation, because a call that cannot be simulated raises before.
            print(*([] if curves[scaling] else [HEADER]), line(points[count, tokens]), sep="\n", flush=True)
            curves[scaling].append(points[count, tokens])
    everything = [point for curve in curves.values() for point in curve]
    print("\n".join(notes(everything, config.layer)))
    if len(everything) == 1:
        print("\n" + table(everything[0]))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"simulated in {time.perf_counter() - began:.1f} s, at most {peak_mib:,.0f} MiB of this process")
    print("\n".join(wrap(f"constants: {cluster.source or 'their source is not stated'}", 120, subsequent_indent="  ")))
    if config.picture:
        from ringattn.launch.pictures.charts import draw_curves, draw_point

        title = picture_title(simulator, everything)
        with writing("picture", config.picture):
            if len(everything) == 1:
                draw_point(config.picture, everything[0], title, names_of(disturbance))
            else:
                draw_curves(config.picture, curves, title)
        print(f"picture written: {config.picture}")
    return record(config, cluster, curves)


# --- options ---------------------------------------------------------------------------------------------------------


def counts(text: str) -> list[int]:
    """Return the numbers of ranks in `text`, sorted. Raises `InputError` for other text."""
    numbers = text.strip("[]").split(",")
    if not all(number.strip().isdecimal() and 1 <= int(number) <= MOST_RANKS for number in numbers):
        raise InputError(f"ranks={text}: give numbers from 1 to {MOST_RANKS:,}, as ranks=1,8,64")
    return sorted({int(number) for number in numbers})


def factors(key: str, text: str, ranks: int) -> list[tuple[tuple[int, ...], float]]:
    """Parse a list such as `3:1.5` (if `ranks` is 1) or `7-8:4` (if it is 2); return the ranks and factor of each item.

    Raises `InputError`, with the key first, for other text.
    """
    pairs = []
    for word in filter(None, text.strip("[]").split(",")):
        match = re.fullmatch("-".join([r"(\d+)"] * ranks) + r":(\d+(?:\.\d+)?)", word.strip())
        if match is None:
            example = (
                "3:1.5 if rank 3 takes 1.5 times as long"
                if ranks == 1
                else "7-8:4 if messages between ranks 7 and 8 take 4 times as long"
            )
            raise InputError(f"{key}={word}: write {example}")
        *named, factor = match.groups()
        pairs.append((tuple(map(int, named)), float(factor)))
    return pairs


def traced_ranks(ranks: int, disturbance: Disturbance) -> list[int]:
    """Return the ranks whose timelines are drawn: the first, the last, three in between, and disturbed ranks.

    Of the disturbed ranks, the first three slow ones and both ends of the first slow link are drawn.
    """
    spread = {0, ranks // 4, ranks // 2, 3 * ranks // 4, ranks - 1}
    slow = [rank for rank, _ in disturbance.slow_ranks[:3]]
    ends = [rank for link in disturbance.slow_links[:1] for rank in link[:2]]
    return sorted({*spread, *slow, *ends})


def shared_out(tokens: int, ranks: Sequence[int], weak: bool) -> list[int]:
    """Return the number of tokens to simulate for each number of ranks.

    It is `tokens` for strong scaling. For weak scaling, each rank always has the tokens that it has with the largest
    number of ranks. Raises `InputError` if a rank would have no token.
    """
    if tokens < max(ranks):
        raise InputError(f"ranks={max(ranks)}: {max(ranks)} ranks are more than tokens={tokens}; use fewer ranks")
    return [max(1, tokens * count // max(ranks)) if weak else tokens for count in ranks]


# --- the picture -----------------------------------------------------------------------------------------------------


TITLE_WIDTH = 130
"""The number of characters that fit into a line of a picture's title."""


def picture_title(simulator: Simulator, points: Sequence[Simulated]) -> str:
    """Return the title of the picture: the schedule and cluster, the call, and its disturbances."""
    config, most = simulator.config, max(points, key=lambda point: (point.ranks, point.tokens))
    layout = simulator.layout(most.tokens, most.ranks).name
    options = "" if config.overlap else ", messages after the computation of their step"
    options += f", {config.sm_margin} multiprocessors reserved for messages" if config.sm_margin else ""
    ranks = f"{'up to ' if len(points) > 1 else ''}{most.ranks:,} rank{'s'[: most.ranks > 1]}"
    batch = f"{config.batch} sequences of " if config.batch > 1 else ""
    passes = "forward and backward" if config.backward else "forward"
    if config.layer == ATTENTION:
        what = f"{config.schedule} schedule"
        mask = ("causal" if config.causal else "full") + (f", window {list(config.bounds)}" if config.bounds else "")
        heads = f"{config.heads} query and {config.kv_heads} K/V heads of {config.head_dim}, {mask}"
    else:
        what, layer = f"{config.layer} layer", config.state_layer
        heads = f"{layer.heads} states of {layer.d_k} x {layer.d_v}, {layer.key_heads} key heads, {layer.taps} taps"
    lines = (
        f"{what}, {layout} layout, on {simulator.cluster.name}{options}",
        f"{batch}{most.tokens:,} tokens on {ranks}, {heads}, {config.dtype}, {passes}",
        disturbances(simulator.disturbance),
    )
    return "\n".join(part for line in lines for part in wrap(line, TITLE_WIDTH))


def disturbances(disturbance: Disturbance) -> str:
    """Return a text about the slow ranks, slow links and jitter. Long lists are shortened."""
    parts = []
    if slow := disturbance.slow_ranks:
        ranks = [f"rank {rank:,} computes {factor:g} times as long" for rank, factor in slow]
        parts.append(_shortened(ranks))
    if links := disturbance.slow_links:
        pairs = [f"messages between ranks {rank:,} and {peer:,} take {factor:g} times as long"
                 for rank, peer, factor in links]  # fmt: skip
        parts.append(_shortened(pairs))
    if disturbance.jitter:
        parts.append(f"jitter: computing takes up to {100 * disturbance.jitter:.3g} % longer, seed {disturbance.seed}")
    return "; ".join(parts) or "no stragglers, slow links or jitter"


NAMED = 2
"""A picture names this many slow ranks and this many slow links, and counts the rest."""


def _shortened(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    return ", ".join(parts[:NAMED]) + more


def names_of(disturbance: Disturbance) -> dict[int, str]:
    """Return the labels, by rank, of slow ranks and of the ends of slow links."""
    names = {rank: f"rank {rank:,}, slow link" for link in disturbance.slow_links for rank in link[:2]}
    return names | {rank: f"rank {rank:,}, slow ×{factor:g}" for rank, factor in disturbance.slow_ranks}


# --- what is printed and written -------------------------------------------------------------------------------------


HEADER = (f"{'ranks':>7}{'tokens':>16}{'time':>16}{'efficiency':>12}{'exposed':>14}{'waiting':>14}"
          f"{'MiB held':>11}{'took s':>9}  simulated")  # fmt: skip


def line(point: Simulated) -> str:
    """Return a line of the table for one number of ranks, with the sums of all passes.

    Exposed time, waiting time and memory are those of the rank with the most.
    """
    exposed, waiting = (sum(getattr(each, name).max() for each in point.passes) for name in ("exposed_s", "waiting_s"))
    how = "by classes of ranks" if point.classes else "by the plan of each rank"
    return (
        f"{point.ranks:>7,}{point.tokens:>16,}{duration(point.total_s):>16}{point.efficiency:>12.1%}"
        f"{duration(exposed):>14}{duration(waiting):>14}{point.held_bytes[2] / 2**20:>11,.0f}"
        f"{point.took_s:>9.2f}  {how}"
    )


def notes(points: Sequence[Simulated], layer: str) -> list[str]:
    """Return notes that define the figures of the table, and state how many tokens were rounded up."""
    ideal = ("the allowed pairs alone, divided evenly over the ranks, at the kernel's rate" if layer == ATTENTION else
             "the layer in one process, divided evenly over the ranks")  # fmt: skip
    lines = [
        f"efficiency: the time of {ideal}, as a share of the simulated time; exposed, waiting, MiB held: the largest "
        "value of any rank"
    ]
    if layer != ATTENTION:
        lines.append(
            "arithmetic of the layer: the products of its chunked form at the rate of the attention kernel, and its "
            "tensors at the rate of copies; not measured"
        )
    worst = max(points, key=lambda point: point.tokens / point.requested_tokens)
    ratio = worst.tokens / worst.requested_tokens
    if ratio > 1:
        share = f"{ratio:,.1f} times as many" if ratio >= 2 else f"{max(ratio - 1, 1e-6):.4%} more"
        lines.append(
            f"all shards have the same length, so tokens are rounded up: on {worst.ranks:,} ranks "
            f"{worst.requested_tokens:,} to {worst.tokens:,}, {share}"
        )
    return lines


def table(point: Simulated) -> str:
    """Return a table of the least, median and largest values over all ranks, by pass."""
    rows: list[tuple[str, str, Sequence[str]]] = [("pass", "of all ranks", ("least", "median", "greatest"))]
    for name, each in zip(PASSES, point.passes, strict=False):
        times = ("work", each.busy_s), ("waiting", each.waiting_s), ("exposed", each.exposed_s)
        rows += [(name, what, [duration(value) for value in quantiles(values)]) for what, values in times]
        rows.append((name, "MiB sent", _mib(quantiles(each.sent_bytes))))
    rows.append(("greatest", "MiB held", _mib(point.held_bytes)))
    return "\n".join(f"{name:<10}{what:<14}" + "".join(f"{cell:>17}" for cell in cells) for name, what, cells in rows)


def _mib(sizes_bytes: Sequence[float]) -> list[str]:
    return [f"{size / 2**20:,.1f}" for size in sizes_bytes]


def quantiles(values: Any) -> list[float]:
    """Return the least, median and largest value."""
    ordered = sorted(values.tolist())
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def record(config: SimulateConfig, cluster: Cluster, curves: Mapping[str, Sequence[Simulated]]) -> dict[str, Any]:
    """Return all figures as plain data for JSON, in seconds and bytes."""
    times = ("busy_s", "waiting_s", "exposed_s", "sent_bytes")
    return {
        "config": {**asdict(config), "tokens": config.length},
        "cluster": {"name": cluster.name, "source": cluster.source},
        "curves": {
            scaling: [
                {
                    "ranks": point.ranks, "tokens": point.tokens, "asked_tokens": point.requested_tokens,
                    "by": "classes" if point.classes else "plans", "total_s": point.total_s, "ideal_s": point.ideal_s,
                    "efficiency": point.efficiency, "held_bytes": list(point.held_bytes), "took_s": point.took_s,
                    "passes": [
                        {name: quantiles(getattr(each, name)) for name in times} | {"total_s": each.total_s}
                        for each in point.passes
                    ],
                }
                for point in points
            ]
            for scaling, points in curves.items()
        },
    }  # fmt: skip
