"""Messages and time of layers with a state: rows of history and scans of states.

Everything is counted from the exchanges that run (`core.fragments`). `state_pass` counts the messages of all ranks at
once. Its time is that of the messages: one exchange after the other, none of it hidden behind computation.
`layer_pass` returns the steps of one rank, with the computation between the exchanges, for `simulate_steps`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringattn.core.fragments import (
    Ints,
    Part,
    Scan,
    Update,
    fragments_of,
    halo_of,
    halo_rows_of,
    scan_of,
    transfers_of,
)
from ringattn.core.layout import Layout
from ringattn.core.problem import ITEM_BYTES
from ringattn.planner.cluster import COPIED, SUMMED, Cluster, exchange_s, moved_s
from ringattn.planner.simulate import RankStep


class StateSizes(NamedTuple):
    """The bytes that one layer exchanges. A layer without a scan, or without history, has zeros.

    Attributes:
        transition_bytes: The transition of a fragment, all heads and batch rows.
        state_bytes: The state of a fragment, all heads and batch rows.
        halo_rows: Rows of history of a fragment.
        row_bytes: A row of history, all batch rows.
    """

    transition_bytes: int = 0
    state_bytes: int = 0
    halo_rows: int = 0
    row_bytes: int = 0


@dataclass(frozen=True)
class StatePass:
    """The messages of one pass of a layer. Arrays are by rank.

    `exchanges`: how many exchanges with messages follow one another. `seconds`: their predicted time.
    """

    sent_bytes: Ints
    received_bytes: Ints
    messages: Ints
    exchanges: int
    seconds: float


def state_pass(
    layout: Layout, cuts: tuple[int, ...], nodes: tuple[int, ...], cluster: Cluster, sizes: StateSizes, backward: bool
) -> StatePass:
    """Return the messages of a layer in one pass, without the plans of ranks: 1,024 ranks take less than a second.

    `cuts`: the cumulative document lengths (0, ..., length). `nodes`: the node of each rank.
    """
    exchanges = []
    if sizes.halo_rows:
        sender, receiver, rows = halo_rows_of(layout, cuts, sizes.halo_rows)
        if backward:  # the gradients of the rows return to their owners
            sender, receiver = receiver, sender
        exchanges.append((sender, receiver, rows * sizes.row_bytes))
    if sizes.state_bytes:
        for each in transfers_of(layout, cuts, nodes, backward):
            nbytes = sizes.state_bytes + sizes.transition_bytes * each.transition
            exchanges.append((each.source, each.target, nbytes))
    ranks = layout.world_size
    seconds = 0.0
    sent, received, messages = (np.zeros(ranks, np.int64) for _ in range(3))
    for source, target, nbytes in exchanges:
        pairs, positions = np.unique(source * ranks + target, return_inverse=True)
        pair_bytes = np.bincount(positions, nbytes, len(pairs)).astype(np.int64)
        source, target = pairs // ranks, pairs % ranks
        np.add.at(sent, source, pair_bytes)
        np.add.at(received, target, pair_bytes)
        np.add.at(messages, source, 1)
        seconds += _exchange_s(cluster, ranks, source, target, pair_bytes)
    return StatePass(sent, received, messages, sum(len(source) > 0 for source, *_ in exchanges), seconds)


def _exchange_s(cluster: Cluster, ranks: int, source: Ints, target: Ints, nbytes: Ints) -> float:
    """Return the seconds of messages between pairs of ranks that start at the same time."""
    if not len(source):
        return 0.0
    kinds = [cluster.link_class(*pair) for pair in zip(source.tolist(), target.tolist(), strict=True)]
    slowest = 0.0
    for kind in set(kinds):
        chosen = np.array([each is kind for each in kinds])
        busiest = max(np.bincount(ends[chosen], nbytes[chosen], ranks).max() for ends in (source, target))
        slowest = max(slowest, cluster.travel_s(kind, float(busiest), float(nbytes[chosen].max())))
    return cluster.sync_s + slowest


# --- the steps of a rank ---------------------------------------------------------------------------------------------


CHUNK = 64
"""Tokens of a chunk of the recurrence, as in `layers.recurrent` and in fla's kernels."""
BACKWARD_OVER_FORWARD = 2
"""Backward computes two products, and moves two tensors, for each of forward."""
WORK_NAME = "compute"
"""The name of the work in a step of such a layer."""


class StateLayer(NamedTuple):
    """The sizes of a layer with a state, and of the short convolution in front of it.

    Attributes:
        heads: Heads of values, each with a state of `d_k` times `d_v` numbers.
        key_heads: Heads of queries and of keys (of C and B).
        gates: Numbers per token and head for gates and steps.
        matrix: Whether transitions are matrices; else they are a number per head.
        taps: Taps of the convolution over queries, keys and values; 1: no convolution.
        batch: Sequences.
        dtype: The dtype of activations. States are float32, or float64 if activations are.
    """

    heads: int
    d_k: int
    d_v: int
    key_heads: int
    gates: int
    matrix: bool
    taps: int = 4
    batch: int = 1
    dtype: str = "bfloat16"

    @property
    def channels(self) -> int:
        """Channels of the convolution: a token's queries, keys and values."""
        return 2 * self.key_heads * self.d_k + self.heads * self.d_v

    @property
    def item_bytes(self) -> int:
        """Bytes of a number of an activation."""
        return ITEM_BYTES[self.dtype]

    @property
    def state_item_bytes(self) -> int:
        """Bytes of a number of a state."""
        return max(self.item_bytes, ITEM_BYTES["float32"])

    @property
    def sizes(self) -> StateSizes:
        """The bytes that the layer exchanges."""
        heads_bytes = self.batch * self.heads * self.state_item_bytes
        transition = self.d_k * self.d_k if self.matrix else 1
        row_bytes = self.batch * self.channels * self.item_bytes
        return StateSizes(transition * heads_bytes, self.d_k * self.d_v * heads_bytes, self.taps - 1, row_bytes)


class Cost(NamedTuple):
    """FLOPs, and bytes read and written."""

    flops: float = 0.0
    moved_bytes: float = 0.0

    def times(self, factor: float) -> Cost:
        """Return the cost of this computation `factor` times."""
        return Cost(self.flops * factor, self.moved_bytes * factor)

    def plus(self, other: Cost) -> Cost:
        """Return the cost of both computations."""
        return Cost(self.flops + other.flops, self.moved_bytes + other.moved_bytes)

    def seconds(self, cluster: Cluster, backward: bool) -> float:
        """Return the time at the rate of the attention kernel in this pass, and at the rate of copies."""
        rate = cluster.backward_flops if backward and cluster.backward_flops else cluster.flops
        return self.flops / rate + moved_s(self.moved_bytes, cluster)


# The costs of a token in forward, from the products and tensors of `layers.recurrent` with chunks of `CHUNK` tokens.
# They leave out elementwise arithmetic.


def convolution_cost(layer: StateLayer) -> Cost:
    """Return the cost of the convolution: it reads and writes all channels."""
    if layer.taps == 1:
        return Cost()
    numbers = layer.batch * layer.channels
    return Cost(2 * layer.taps * numbers, COPIED * numbers * layer.item_bytes)


def states_cost(layer: StateLayer, continued: bool) -> Cost:
    """Return the cost of the states at the ends of chunks, from an empty state.

    It reads keys, values and gates, and writes the states of chunks; the delta rule also writes two tensors for the
    outputs. `continued`: also the transition, which is `d_k` more columns of the state.
    """
    d_k, d_v = layer.d_k, layer.d_v
    columns = d_v + (d_k if continued and layer.matrix else 0)
    flops: float = 2 * d_k * d_v
    numbers: float = d_v + layer.gates + layer.key_heads * d_k / layer.heads
    if layer.matrix:
        flops += 2 * CHUNK * d_k + CHUNK * (d_k + d_v) + 4 * d_k * columns
        numbers += d_k + d_v
    return _of_heads(layer, flops, numbers, d_k * columns / CHUNK)


def outputs_cost(layer: StateLayer) -> Cost:
    """Return the cost of the outputs for an empty initial state: it reads all inputs and the states of chunks."""
    d_k, d_v = layer.d_k, layer.d_v
    flops: float = 2 * CHUNK * (d_k + d_v) + 2 * d_k * d_v
    numbers: float = 2 * d_v + 2 * layer.key_heads * d_k / layer.heads
    if layer.matrix:
        flops += 2 * CHUNK * d_k
        numbers += d_k
    return _of_heads(layer, flops, numbers, d_k * d_v / CHUNK)


def initial_states_cost(layer: StateLayer) -> Cost:
    """Return the cost of adding the part of the initial state to the outputs of a fragment that continues another."""
    d_k, d_v = layer.d_k, layer.d_v
    transition = d_k * d_k / CHUNK if layer.matrix else 0
    return _of_heads(layer, 2 * d_k * d_v + 2 * transition * d_v, d_k + 2 * d_v, transition)


def _of_heads(layer: StateLayer, flops: float, numbers: float, state_numbers: float) -> Cost:
    """Return the cost of all heads and sequences, from the FLOPs and the numbers read or written by a head."""
    moved_bytes = numbers * layer.item_bytes + state_numbers * layer.state_item_bytes
    return Cost(flops, moved_bytes).times(layer.heads * layer.batch)


def alone_s(layer: StateLayer, tokens: float, cluster: Cluster, backward: bool) -> float:
    """Return the seconds of a pass over `tokens` tokens in one process, without exchanges and transitions."""
    cost = convolution_cost(layer).plus(states_cost(layer, continued=False)).plus(outputs_cost(layer))
    return cost.times(tokens * (BACKWARD_OVER_FORWARD if backward else 1)).seconds(cluster, backward)


class LayerPass(NamedTuple):
    """The steps and buffers of one rank in one pass of a layer.

    `steps`: for `simulate_steps`. `buffer_bytes`: the bytes of the table of states and of the messages of its largest
    exchange.
    """

    steps: list[RankStep]
    buffer_bytes: int


def layer_pass(
    layout: Layout,
    cuts: tuple[int, ...],
    nodes: tuple[int, ...],
    cluster: Cluster,
    layer: StateLayer,
    rank: int,
    backward: bool,
) -> LayerPass:
    """Return the steps and buffers of `rank` in one pass of a layer.

    Forward: the rows of history; the convolution and the local states; the exchanges of the scan, of which the first
    one hides behind the local outputs; the initial states. Backward is the same from the end: the gradients of the
    initial states; the scan in the other direction, behind the gradients of the local outputs; the gradients of states
    and convolution; the gradients of the rows of history.
    """
    fragments = fragments_of(layout, cuts)
    local = fragments.of(rank)
    count = fragments.stop[local] - fragments.start[local]
    later = fragments.start[local] > fragments.document_start[local]
    tokens, continued = int(count.sum()), int(count[later].sum())
    scan = scan_of(layout, cuts, nodes, rank, backward)

    def work(cost: Cost, times: float) -> Cost:
        return cost.times(times * (BACKWARD_OVER_FORWARD if backward else 1))

    states = work(convolution_cost(layer).plus(states_cost(layer, bool(continued))), tokens)
    outputs = work(outputs_cost(layer), tokens)
    initial = work(initial_states_cost(layer), continued)
    history = [_history_step(layout, cuts, cluster, layer, rank, tokens, backward)] if layer.taps > 1 else []
    exchanges, updates = _exchange_steps(scan, cluster, layer, rank, outputs, backward)
    if backward:
        # The gradient of a transition is the product of two states, as large as an update.
        states = states.plus(_update_cost(layer, scan.local, 0))
        first, last = ("initial states", initial), ("local states", updates.plus(states))
    else:
        first, last = ("local states", states), ("initial states", updates.plus(initial))
    middle = [
        RankStep(0, first[0], 0.0, first[1].seconds(cluster, backward), work=WORK_NAME),
        *exchanges,
        RankStep(0, last[0], 0.0, last[1].seconds(cluster, backward), work=WORK_NAME),
    ]
    steps = [*middle, *history] if backward else [*history, *middle]
    entries = scan.entries * (layer.sizes.transition_bytes + layer.sizes.state_bytes)
    messages = (sum(part_bytes(part, layer.sizes) for part in (*each.sends, *each.receives)) for each in scan.rounds)
    numbered = [step._replace(number=number) for number, step in enumerate(steps)]
    return LayerPass(numbered, entries + max(messages, default=0))


def _history_step(
    layout: Layout, cuts: tuple[int, ...], cluster: Cluster, layer: StateLayer, rank: int, tokens: int, backward: bool
) -> RankStep:
    """Return the exchange of rows of history, which nothing hides. Packing includes the padded copy of the shard."""
    sizes = layer.sizes
    halo = halo_of(layout, cuts, sizes.halo_rows, rank)
    sends, receives = (halo.receives, halo.sends) if backward else (halo.sends, halo.receives)
    sent, received = (
        [(peer, len(rows) * sizes.row_bytes) for peer, rows in sorted(messages.items()) if peer != rank]
        for messages in (sends, receives)
    )
    packed = COPIED * sum(map(len, sends.values())) * sizes.row_bytes
    # Forward copies the shard into a tensor of zeros. Backward sums the gradients in the dtype of states.
    wide_bytes = layer.batch * layer.channels * layer.state_item_bytes
    shard = tokens * 2 * (sizes.row_bytes + wide_bytes) if backward else (COPIED * tokens + halo.rows) * sizes.row_bytes
    packing_s = moved_s(packed + shard, cluster)
    return _step("history", packing_s, 0.0, rank, sent, received, cluster)


def _exchange_steps(
    scan: Scan, cluster: Cluster, layer: StateLayer, rank: int, hidden: Cost, backward: bool
) -> tuple[list[RankStep], Cost]:
    """Return the exchanges of a scan, and the updates that follow the last one. The first hides behind `hidden`."""
    steps = []
    sizes = layer.sizes
    work = hidden
    # The table of all entries is created from the local ones.
    before = Cost(moved_bytes=COPIED * scan.local * (sizes.state_bytes + sizes.transition_bytes))
    for number, each in enumerate(scan.rounds, start=1):
        sent, received = (
            [(part.peer, part_bytes(part, sizes)) for part in parts] for parts in (each.sends, each.receives)
        )
        packing = before.plus(Cost(moved_bytes=COPIED * sum(nbytes for _, nbytes in sent)))
        seconds = packing.seconds(cluster, backward), work.seconds(cluster, backward)
        steps.append(_step(f"exchange {number}", *seconds, rank, sent, received, cluster))
        unpacked = Cost(moved_bytes=COPIED * sum(nbytes for _, nbytes in received))
        before, work = unpacked.plus(_updates_cost(layer, each.updates)), Cost()
    return steps, before


def _step(
    name: str,
    packing_s: float,
    work_s: float,
    rank: int,
    sends: list[tuple[int, int]],
    receives: list[tuple[int, int]],
    cluster: Cluster,
) -> RankStep:
    """Return a step with messages, which add to its work."""
    work_s += exchange_s(rank, sends, receives, cluster)
    return RankStep(0, name, packing_s, work_s, tuple(sends), tuple(peer for peer, _ in receives), WORK_NAME)


def part_bytes(part: Part, sizes: StateSizes) -> int:
    """Return the bytes of a message of a scan."""
    return len(part.transitions) * sizes.transition_bytes + len(part.states) * sizes.state_bytes


def _updates_cost(layer: StateLayer, updates: Iterable[Update]) -> Cost:
    """Return the cost of the updates of an exchange."""
    counts = [(len(update.right), int(update.whole.sum())) for update in updates]
    return _update_cost(layer, *(sum(numbers) for numbers in zip((0, 0), *counts, strict=True)))


def _update_cost(layer: StateLayer, updates: int, whole: int) -> Cost:
    """Return the cost of updates of states, of which `whole` update transitions too."""
    sizes, per_head = layer.sizes, 2 * layer.d_k if layer.matrix else 2
    moved_bytes = updates * (sizes.transition_bytes + SUMMED * sizes.state_bytes)
    moved_bytes += whole * SUMMED * sizes.transition_bytes
    numbers = (updates * sizes.state_bytes + whole * sizes.transition_bytes) / layer.state_item_bytes
    return Cost(per_head * numbers, moved_bytes)
