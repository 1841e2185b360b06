"""Predictions with the planner's constants for published context-parallel attention, next to the published figures.

Run `python -m ringattn.bench.published`. There is one set of constants per machine (`planner.cluster`), one per kernel
and one per implementation (`published_points`); none is fitted to a single point. The last table has predictions for
our ring, which have not been confirmed on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from ringattn.bench import published_points as points
from ringattn.bench.options import parse
from ringattn.bench.published_points import MACHINES, RANKS, Implementation, Kernel
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.core.layout import make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.launch.capacity.hardware import hardware
from ringattn.launch.capacity.step_time import estimate
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import BACKWARD_OVER_FORWARD, CLUSTERS, FORWARD_FLOPS_PER_DIM, Cluster, LinkClass, moved_s
from ringattn.planner.simulate import simulate

NEAR = 0.15
"""The largest relative distance of a prediction from the published figure."""


class Row(NamedTuple):
    """One published figure and its prediction.

    `lead` is the number of the point in `LEADS` to which the figure belongs. The ten points are sets of figures; those
    that separate hypotheses best come first.
    """

    lead: int
    family: str
    case: str
    predicted: float
    published: float
    unit: str

    @property
    def ratio(self) -> float:
        """Return the ratio of the predicted and the published figure."""
        return self.predicted / self.published

    @property
    def met(self) -> bool:
        """Return whether the prediction is close enough."""
        return abs(self.ratio - 1) <= NEAR


def magi_rows() -> Iterator[Row]:
    """Yield the figures of MagiAttention's charts, in TFLOP/s per GPU."""
    for (machine, mask, direction, way), published in points.MAGI_ROWS.items():
        cluster, backward, h100 = MACHINES[machine], direction == "backward", machine == "H100"
        kernel = points.FA3 if h100 else points.CUDNN_B200
        implementation = points.MAGI_RING if h100 else points.TE_RING
        for ranks, rate in zip(RANKS, published, strict=True):
            call = Call(ranks, ranks * (8192 if h100 else 16384), 64, 8, causal=mask == "causal")
            if way == "ring":
                seconds = ring_s(call, cluster, kernel, implementation, backward)
            elif way == "all_gather":
                seconds = gather_s(call, cluster, kernel, backward)
            else:
                degree = None if way == "ulysses" else 8
                seconds = heads_s(call, cluster, kernel, implementation, backward, degree)
            name = "LoongTrain" if way == "double_ring" else way
            case = f"{mask} {direction}, {ranks} ranks"
            yield Row(
                1 if h100 else 2, f"{machine} {name}", case, call.flops(backward) / seconds / 1e12, rate, "TFLOP/s"
            )


def document_rows() -> Iterator[Row]:
    """Yield the figures of packed documents, in milliseconds of a ring step."""
    for machine, published in points.DOCUMENT_STEPS.items():
        h100 = machine == "H100"
        kernel = points.FA3 if h100 else points.CUDNN_B200
        implementation = points.MAGI_RING if h100 else points.TE_RING
        for ranks, ms in zip(RANKS, published, strict=True):
            tokens = ranks * (8192 if h100 else 16384)
            call = Call(ranks, tokens, 64, 8, share=points.DOCUMENT_SHARE[tokens])
            seconds = ring_s(call, MACHINES[machine], kernel, implementation, False)
            yield Row(3, f"{machine} ring", f"documents, {ranks} ranks", seconds / ranks * 1e3, ms, "ms a step")


def ring_rows() -> Iterator[Row]:
    """Yield the figures of rings of torch operations on one node."""
    for (machine, layout), rates in points.ZHUZILIN_ROWS.items():
        kernel = points.FA2_H800 if machine == "H800" else points.FA2_A100
        call = Call(8, 65536, 32, 8, causal=True)
        taken = [ring_s(call, MACHINES[machine], kernel, points.TORCH_RING, back, layout) for back in (False, True)]
        yield Row(4, f"{machine} ring of torch", f"{layout} forward", 1 / taken[0], rates[0], "passes/s")
        yield Row(4, f"{machine} ring of torch", f"{layout}, with backward", 1 / sum(taken), rates[1], "passes/s")
    for tokens, published in points.BURST_ROWS.items():
        call = Call(8, tokens, 32, 32)
        taken = [ring_s(call, MACHINES["A100"], points.FA2_A100, points.BURST_RING, back) for back in (False, True)]
        case = f"{tokens // 1024}K"
        yield Row(5, "A100 BurstAttention", f"{case} forward", taken[0] * 1e3, published[0], "ms")
        yield Row(5, "A100 BurstAttention", f"{case}, with backward", sum(taken) * 1e3, published[1], "ms")


def node_rows() -> Iterator[Row]:
    """Yield the figures of four A800 nodes."""
    cluster, kernel, implementation = MACHINES["A800"], points.FA2_A100, points.TORCH_RING
    for (way, placement), published in points.ENGINE_ROWS.items():
        for tokens, ms in published.items():
            call = Call(32, tokens, 40, 40, causal=True)
            seconds = 0.0
            for back in (False, True):
                if way == "ulysses_ring":
                    outer = placement == "ring inside"
                    seconds += heads_s(call, cluster, kernel, implementation, back, 8, ring_inside=outer)
                elif way == "double_ring":
                    seconds += ring_s(call, cluster, kernel, implementation, back, inner=8)
                else:
                    seconds += ring_s(call, cluster, kernel, points.TE_RING, back)
            family = f"A800 {way}" + (f", {placement}" if placement else "")
            yield Row(6, family, f"{tokens // 1024}K, with backward", seconds * 1e3, ms, "ms")


def degree_rows() -> Iterator[Row]:
    """Yield the figures of different Ulysses degrees, on NVLink and on PCIe."""
    for (machine, tokens, heads, dim, kv_heads, batch), published in points.YUNCHANG_ROWS.items():
        kernel = points.FA2_A100 if machine == "A100" else points.FA2_L20
        call = Call(8, tokens, heads, kv_heads, dim, True, batch)
        for degree, rate in published.items():
            if degree == 1:
                seconds = ring_s(call, MACHINES[machine], kernel, points.TORCH_RING, False)
            else:
                seconds = heads_s(call, MACHINES[machine], kernel, points.TORCH_RING, False, degree)
                seconds = max(seconds, points.TORCH_RING.call_s)
            case = f"{tokens // 1024}K, {heads} heads of {dim}, Ulysses {degree}"
            yield Row(7, f"{machine} Ulysses × ring", case, 1 / seconds, rate, "passes/s")


def training_rows() -> Iterator[Row]:
    """Yield the figures of end-to-end training, predicted by `ringattn plan` with the constants of the same presets."""
    for name, setup, tokens_s in points.TITAN_ROWS:
        step = estimate(setup, hardware("h100"))
        yield Row(8, "H100 torchtitan", name, step.tokens_s / setup.ranks, tokens_s, "tokens/s")
    name, setup, tflops = points.NEMO_ROW
    machine = hardware("b200")
    yield Row(8, "B200 NeMo", name, estimate(setup, machine).mfu_full * machine.flops / 1e12, tflops, "TFLOP/s")


def kernel_rows() -> Iterator[Row]:
    """Yield the figures of kernels on one GPU, by length."""
    for (name, mask, direction), published in points.CHART.items():
        cluster, kernel, backward = MACHINES[name[-4:]], points.CHART_KERNELS[name], direction == "backward"
        for tokens, rate in zip(points.CHART_TOKENS, published, strict=True):
            call = Call(1, tokens, 64, 8, causal=mask == "causal")
            flops = call.flops(backward)
            seconds = kernel_s(cluster, kernel, flops, call.q_elements, backward, call.causal)
            yield Row(9, name, f"{mask} {direction}, {tokens // 1024}K", flops / seconds / 1e12, rate, "TFLOP/s")


def link_rows() -> Iterator[Row]:
    """Yield the presets' constants of links next to measured rates. Each row names the source of the measurement.

    These rows are no predictions.
    """
    for name, nodes, published, what in (
        ("h100", False, 371, "copy engine, one way; nccl issue 1264"),
        ("h100", False, 360, "all-gather of 8; nccl-tests issue 326"),
        ("h100", True, 180, "send and receive of a pair; nccl-tests issue 268"),
        ("a100", True, 195, "send and receive of a ring of 8; li-plus/playground"),
        ("b200", False, 770, "copy engine, GB200; Azure guide issue 7"),
    ):
        cluster = CLUSTERS[name]
        rate = cluster.peer_bandwidth if nodes else cluster.bandwidth
        yield Row(10, name.upper(), what, (rate or 0) / 1e9, published, "GB/s")
    for name in ("h100", "b200"):
        yield Row(
            10,
            name.upper(),
            "one 400G NIC; nccl-tests issue 290",
            (CLUSTERS[name].node_bandwidth or 0) / 1e9,
            47,
            "GB/s",
        )


def all_rows() -> list[Row]:
    """Return the rows of all figures."""
    makers = (magi_rows, document_rows, ring_rows, node_rows, degree_rows, training_rows, kernel_rows, link_rows)
    return [row for make in makers for row in make()]


LEADS = {
    1: ("H100: ring, all-gather, Ulysses and both, 8 to 64 ranks", ""),
    2: ("the same on B200", "Ulysses, causal, 32 and 64 ranks"),
    3: ("packed documents, a ring's step", "cost of short pieces (8 ranks); documents not known exactly (64)"),
    4: ("contiguous, zigzag, striped; H800 and A100", ""),
    5: ("BurstAttention by length", ""),
    6: ("four nodes: heads or ring inside of the node", "factor of two of the inner ring; differences between runs"),
    7: ("Ulysses degrees on NVLink and on PCIe", "shared host bridges of PCIe; cost of a step over NVLink"),
    8: ("training end to end", "other kernels; loss from 2 to 4 ranks"),
    9: ("kernels by length", ""),
    10: ("links: constants, not predictions", "no measurement of a B200, only of a GB200"),
}
"""The points, and the reasons for figures that are not met, which docs/internals/published.md explains."""


def leads_table(rows: list[Row]) -> Table:
    """Return a table with one row for each of the ten points."""
    table = Table(
        "Ten points, in the order in which they separate hypotheses",
        ("point", "figures", f"within {NEAR:.0%}", "median", "least", "greatest", "not met, and why"),
    )
    for lead, (what, why) in LEADS.items():
        point_rows = [row for row in rows if row.lead == lead]
        ratios = [row.ratio for row in point_rows]
        met = sum(row.met for row in point_rows)
        table.rows.append((
            f"{lead} {what}", str(len(point_rows)), str(met), f"{median(ratios):.2f}", f"{min(ratios):.2f}",
            f"{max(ratios):.2f}", why if met < len(point_rows) else "",
        ))  # fmt: skip
    table.notes.append("- median, least, greatest: predicted over published.")
    return table


def family_tables(rows: list[Row]) -> list[Table]:
    """Return a table of figures for each point and family."""
    tables = []
    for lead, (what, _) in LEADS.items():
        columns = ("implementation", "case", "predicted", "published", "unit", "ratio", "")
        table = Table(f"{lead} {what}", columns)
        table.rows = [
            (row.family, row.case, f"{row.predicted:.4g}", f"{row.published:.4g}", row.unit, f"{row.ratio:.2f}",
             "" if row.met else "not met")
            for row in rows if row.lead == lead
        ]  # fmt: skip
        tables.append(table)
    implementations = (
        points.MAGI_RING,
        points.TE_RING,
        points.GATHER,
        points.HEADS,
        points.TORCH_RING,
        points.BURST_RING,
    )
    tables[0].notes += [f"- {entry.name}: {entry.why}." for entry in implementations]
    sources = (points.MAGI, points.ZHUZILIN, points.BURST, points.ENGINE, points.YUNCHANG, points.TITAN, points.NEMO)
    tables[0].notes.append(f"- Sources: {'; '.join(sources)}.")
    tables[0].notes += [
        f"- {name}: {entry.source}." for name, entry in CLUSTERS.items() if name in ("h100", "b200", "a100")
    ]
    return tables


# --- our own ring ----------------------------------------------------------------------------------------------------


def our_ring_s(
    machine: str, kernel: Kernel, ranks: int, causal: bool, backward: bool, schedule: str, copies: bool
) -> float:
    """Return the predicted seconds of our ring's plans at the kernel's rates.

    Our kernel carries the softmax state from step to step, so no launch merges outputs.
    """
    tokens = ranks * (8192 if machine == "h100" else 16384)
    layout = make_layout("zigzag" if causal else "contiguous", tokens, ranks)
    mask = Banded(causal).mask(tokens, tokens, None, None, 64, 8)
    problem = Problem(layout, layout, mask, 1, 64, 8, 128, 128, "bfloat16")
    cluster = replace(CLUSTERS[machine], flops=kernel.forward, backward_flops=kernel.backward)
    cluster = cluster.by_copy_engines() if copies else cluster.leaving(8)
    route = choose_route(problem, schedule, cluster)
    return simulate(tuple(plan_of(problem, route, rank, backward) for rank in range(ranks)), cluster).total_us / 1e6


def our_ring_table(counts: Sequence[int] = (8, 16, 32)) -> Table:
    """Return a table of our ring's predicted TFLOP/s per GPU, and their ratio to those of the published ring."""
    table = Table(
        "Our ring, predicted, TFLOP/s a GPU; nothing of this has run on a GPU",
        ("machine", "mask, pass", "ranks", "published ring", "ring, NCCL", "ring, copy engines", "double ring", "gain"),
        notes=[
            "- The published ring's kernel and shapes. NCCL: 8 multiprocessors left to it. Copy engines: inside nodes.",
            "- Gain: copy engines, the better of ring and double ring, over the published ring.",
            "- Wrong if, on 8 H100 without a mask, a step costs over 0.25 ms more than its kernel alone.",
        ],
    )
    for machine in ("h100", "b200"):
        kernel = points.FA3 if machine == "h100" else points.CUDNN_B200
        for causal in (False, True):
            for backward in (False, True):
                mask, direction = "causal" if causal else "full", "backward" if backward else "forward"
                for ranks in counts:
                    published = points.MAGI_ROWS[machine.upper(), mask, direction, "ring"][RANKS.index(ranks)]
                    call = Call(ranks, ranks * (8192 if machine == "h100" else 16384), 64, 8, causal=causal)
                    ways = [("ring", False), ("ring", True)] + [("double_ring", True)] * (ranks > 8)
                    rates = [
                        call.flops(backward) / our_ring_s(machine, kernel, ranks, causal, backward, way, copies) / 1e12
                        for way, copies in ways
                    ]
                    table.rows.append((
                        machine, f"{mask} {direction}", str(ranks), str(published), *(f"{rate:.0f}" for rate in rates),
                        *[""] * (3 - len(rates)), f"{max(rates[1:]) / published:.2f}",
                    ))  # fmt: skip
    return table


@dataclass(frozen=True)
class PublishedOptions:
    """The options of the benchmark. `results` is the folder of the results."""

    results: str = RESULTS


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Compute, print, save and return the record."""
    options = parse(PublishedOptions(), arguments)
    with progress("published") as say:
        say("published points")
        rows = all_rows()
        say("our own ring")
        tables = [leads_table(rows), our_ring_table(), *family_tables(rows)]
    data = {
        "tables": {table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows] for table in tables}
    }
    finish("published", options, tables, data, options.results)
    return data


# --- times in closed form ---------------------------------------------------------------------------------------------


ITEM = 2
"""Bytes of a bf16 number."""


class Call(NamedTuple):
    """One attention call.

    `tokens` is the number of all `ranks` together. `share` is the number of pairs relative to the same mask without
    documents.
    """

    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int = 128
    causal: bool = False
    batch: int = 1
    share: float = 1.0

    @property
    def pairs(self) -> float:
        """Return the number of (q, k) pairs of all ranks, times heads and batch."""
        return self.share * self.tokens**2 * self.heads * self.batch / (2 if self.causal else 1)

    @property
    def q_elements(self) -> float:
        """Return the number of elements of one rank's queries."""
        return self.tokens / self.ranks * self.heads * self.dim * self.batch

    @property
    def kv_elements(self) -> float:
        """Return the number of elements of one rank's keys; its values have the same number."""
        return self.tokens / self.ranks * self.kv_heads * self.dim * self.batch

    def flops(self, backward: bool) -> float:
        """Return the mean FLOPs per rank."""
        return self.pairs * self.dim * FORWARD_FLOPS_PER_DIM * (BACKWARD_OVER_FORWARD if backward else 1) / self.ranks


def kernel_s(
    cluster: Cluster, kernel: Kernel, flops: float, elements: float, backward: bool,
    causal: bool = False, dim: int = 128,
) -> float:  # fmt: skip
    """Return the seconds of one kernel call. `causal` means that its tiles are on the diagonal of the mask."""
    flops *= (1 + kernel.softmax_dims / dim) / (1 + kernel.softmax_dims / 128)
    if backward:
        rate = kernel.backward * (kernel.causal_backward if causal else 1)
        return flops / rate + kernel.launches_s + moved_s(kernel.back_row_bytes * elements, cluster)
    rate = kernel.forward * (kernel.causal if causal else 1)
    return max(kernel.call_s, flops / rate + moved_s(kernel.row_bytes * elements, cluster))


def ring_s(
    call: Call, cluster: Cluster, kernel: Kernel, impl: Implementation, backward: bool, layout: str = "zigzag",
    inside: bool | None = None, inner: int = 1, rails: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of a ring of shards.

    `inside` says whether the hops stay within a node; None means that they do if all ranks are on one node. `inner` is
    the number of ranks of a node's ring in a double ring, whose hops between nodes have `inner` steps to complete. With
    `rails`, every rank of a node sends to another node in a step.
    """
    steps, causal = call.ranks, call.causal
    flops = call.flops(backward) / steps
    # In a step off the diagonal, half of the queries or half of the keys of a zigzag shard take part.
    part = 0.75 if causal and layout == "zigzag" else 1.0
    elements = call.q_elements * part
    merged = impl.dq_bytes * (elements + 2 * call.kv_elements) if backward else impl.out_bytes * elements

    def step_s(flops: float, diagonal: bool) -> float:
        work_s = kernel_s(cluster, kernel, flops, elements, backward, diagonal, call.dim) + moved_s(merged, cluster)
        return max(impl.host_s, work_s + impl.sync_s)

    if inside is None:
        inside = call.ranks <= (cluster.ranks_per_node or call.ranks)
    nbytes = 2 * call.kv_elements * ITEM * (impl.backward_messages if backward else 1)
    # In a flat ring one rank per node sends to another node, so no other rank shares its network cards.
    shared = nbytes if rails or inner > 1 else 0.0
    near = cluster.travel_s(LinkClass.UNKNOWN, nbytes, nbytes)
    hop = near if inside else max(near, cluster.travel_s(LinkClass.NETWORK, shared, nbytes) / inner)
    if causal and layout == "contiguous":
        # The last rank attends to all keys, so all its steps are full except that of the local block.
        whole = 2 * flops
        return max(step_s(flops, True), hop) + (steps - 2) * max(step_s(whole, False), hop) + step_s(whole, False)
    each, first = step_s(flops, layout == "striped"), step_s(flops, causal)
    return max(first, hop) + (steps - 2) * max(each, hop) + each if steps > 1 else first


def collective_s(cluster: Cluster, ranks: int, nbytes: float, gathered: bool = False, spread: bool = False) -> float:
    """Return the seconds of a collective in which each rank receives `nbytes` from `ranks` - 1 others, evenly.

    With `gathered`, data from other nodes arrives once per node, over the links of all its ranks. With `spread`, every
    rank is on a separate node.
    """
    node = 1 if spread else cluster.ranks_per_node or ranks
    across = nbytes * max(0, ranks - node) / max(1, ranks - 1)
    far = cluster.travel_s(LinkClass.NETWORK, across / (node if gathered else 1), 0) if across else 0.0
    near = cluster.travel_s(LinkClass.UNKNOWN, nbytes if gathered else nbytes - across, 0) if not spread else 0.0
    return max(near, far)


def gather_s(call: Call, cluster: Cluster, kernel: Kernel, backward: bool) -> float:
    """Return the seconds of the all-gather schedule.

    It gathers K and V, calls one kernel per half of a zigzag shard, and in backward scatters the gradients.
    """
    received = 2 * call.kv_elements * ITEM * (call.ranks - 1)
    half = kernel_s(cluster, kernel, call.flops(backward) / 2, call.q_elements / 2, backward, call.causal, call.dim)
    exchanges = collective_s(cluster, call.ranks, received, gathered=True)
    if backward:  # float32 gradients go back, from each rank for all keys
        exchanges += 2 * collective_s(cluster, call.ranks, received, gathered=True)
        exchanges += moved_s(6 * received, cluster)
    return exchanges + 2 * half


def heads_s(
    call: Call, cluster: Cluster, kernel: Kernel, impl: Implementation, backward: bool, degree: int | None = None,
    ring_inside: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of Ulysses over groups of `degree` ranks (None: all), with a ring across the groups.

    No all-to-all is hidden.
    """
    degree = degree or call.ranks
    rings = call.ranks // degree
    copies = max(1.0, degree / call.kv_heads)  # K/V heads are replicated if there are fewer than ranks
    sent = 2 * (call.q_elements + call.kv_elements * copies) * ITEM * (degree - 1) / degree
    exchange = collective_s(cluster, degree, sent, spread=ring_inside)
    # Sent data is packed once and unpacked once.
    exchange += moved_s(4 * sent, cluster)
    if rings == 1:
        return exchange + kernel_s(
            cluster, kernel, call.flops(backward), call.q_elements, backward, call.causal, call.dim
        )
    # Each ring computes a share of the heads over correspondingly more tokens per rank.
    part = call._replace(ranks=rings, kv_heads=max(1, call.kv_heads // degree), heads=call.heads // degree)
    near = ring_inside or call.ranks <= (cluster.ranks_per_node or call.ranks)
    return exchange + ring_s(part, cluster, kernel, impl, backward, inside=near, rails=True)


if __name__ == "__main__":
    main(sys.argv[1:])
