"""The time that a full ring loses by leaving SMs free for exchanges, simulated from its plans without running them.

Run `python -m ringattn.bench.margin [key=value ...]`. One attention call, forward and backward, is simulated on a
cluster of GPUs. With margins of SMs, each time is compared with the same ring whose messages need no SM. Without a
margin, the worst case is simulated: an exchange finds no free SM before the kernels of its step have ended.
The gate: a margin makes no pass faster, and makes it slower by at most its share of the SMs. Without overlap, a pass
takes at most the time of all hops longer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from ringattn.bench.gate import GateError
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Table, finish
from ringattn.core.layout import make_layout
from ringattn.core.mask import make_mask
from ringattn.core.problem import Problem
from ringattn.planner.choose import plan_of
from ringattn.planner.cluster import Cluster, cluster_named
from ringattn.planner.plan import Plan
from ringattn.planner.simulate import simulate
from ringattn.schedule.routes import ROUTES


@dataclass(frozen=True)
class MarginOptions:
    """The options of the benchmark: one bfloat16 call on `ranks` GPUs of one machine.

    The mask is causal, in the zigzag layout, or full.
    """

    clusters: tuple[str, ...] = ("h100", "b200")
    ranks: int = 8
    tokens: tuple[int, ...] = (8192, 32768, 131072, 1048576)
    margins: tuple[int, ...] = (4, 8)
    masks: tuple[str, ...] = ("full", "causal")
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    results: str = RESULTS


class Row(NamedTuple):
    """The milliseconds of a call: `free_ms` without a margin, `margins_ms` by margin, `serial_ms` without overlap.

    `hidden` is the share of the messages' time that compute hides.
    """

    cluster: str
    mask: str
    tokens: int
    free_ms: float
    margins_ms: dict[int, float]
    serial_ms: float
    hidden: float

    def cells(self) -> list[str]:
        """Return the row as text."""
        slower = (ms / self.free_ms - 1 for ms in (*self.margins_ms.values(), self.serial_ms))
        facts = (self.cluster, self.mask, str(self.tokens), f"{self.free_ms:.3f}", f"{self.hidden:.0%}")
        return [*facts, *(f"+{share:.1%}" for share in slower)]


def main(arguments: Sequence[str] = ()) -> None:
    """Predict, print and save the table. Raises `GateError` for impossible times."""
    options = parse(MarginOptions(), arguments)
    cases = product(options.clusters, options.masks, options.tokens)
    rows = [row_of(options, name, mask, tokens) for name, mask, tokens in cases]
    table = Table(
        f"A full ring of {options.ranks}, {options.heads} query and {options.kv_heads} K/V heads of "
        f"{options.head_dim}, bfloat16, forward and backward",
        ("cluster", "mask", "tokens", "0 SMs, ms", "hops hidden", *(f"{n} SMs" for n in options.margins),
         "0 SMs, no overlap"),
        [row.cells() for row in rows],
        ["0 SMs: messages need no SM, because copy engines move them. N SMs, and no overlap: how much slower that is.",
         "Hops hidden: the share of the messages' time hidden by compute, with 0 SMs. Constants are published ones; "
         "not measured on a GPU."],
    )  # fmt: skip
    finish("margin", options, [table], {"rows": [row._asdict() for row in rows]}, options.results)


def row_of(options: MarginOptions, name: str, mask: str, tokens: int) -> Row:
    """Return the row of a call on the cluster `name`.

    Raises `GateError` for impossible times, and `InputError` for a cluster without SMs.
    """
    # The baseline of all margins is a cluster whose messages are moved by copy engines, without SMs.
    cluster, passes = cluster_named(name).by_copy_engines(), plans_of(options, mask, tokens)

    def total_ms(machine: Cluster, overlap: bool = True) -> float:
        return sum(simulate(plans, machine, overlap).total_us for plans in passes) / 1e3

    free_ms, serial_ms = total_ms(cluster), total_ms(cluster, overlap=False)
    margins_ms = {margin: total_ms(cluster.leaving(margin)) for margin in options.margins}
    for margin, ms in margins_ms.items():
        max_ms = free_ms * cluster.flops / cluster.leaving(margin).flops
        if not free_ms <= ms <= max_ms * (1 + 1e-9):
            raise GateError(f"{name}, {mask}, {tokens} tokens: {ms} ms with a margin of {margin}, {free_ms} ms without")
    hops_ms = serial_ms - total_ms(replace(cluster, bandwidth=1e30, latency_s=0.0))
    if not free_ms <= serial_ms <= free_ms + hops_ms:
        raise GateError(f"{name}, {mask}, {tokens} tokens: {serial_ms} ms without overlap, {free_ms} ms with it")
    return Row(name, mask, tokens, free_ms, margins_ms, serial_ms, (serial_ms - free_ms) / hops_ms)


def plans_of(options: MarginOptions, mask: str, tokens: int) -> list[tuple[Plan, ...]]:
    """Return the plans of all ranks, forward and backward."""
    causal = mask == "causal"
    layout = make_layout("zigzag" if causal else "contiguous", tokens, options.ranks)
    problem = Problem(
        layout, layout, make_mask(tokens, tokens, causal=causal), 1, options.heads, options.kv_heads, options.head_dim,
        options.head_dim, "bfloat16",
    )  # fmt: skip
    return [
        tuple(plan_of(problem, ROUTES["ring"], rank, back) for rank in range(options.ranks)) for back in (False, True)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
