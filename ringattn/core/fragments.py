"""Fragments of documents: the pieces that a layer with a state, such as a convolution or a recurrence, reads in order.

A *fragment* is a contiguous range of tokens of one document in the shard of one rank. The fragments of a document, in
token order, are its *chain*; consecutive fragments usually belong to different ranks. This module decides what the
ranks exchange so that each fragment continues its predecessor: rows (`halo_of`) or states (`scan_of`). Everything is
computed from the layout, so each rank derives its own part and all ranks agree without communication.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringattn.core.bounded_cache import bounded
from ringattn.core.layout import Layout
from ringattn.errors import UnsupportedError

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

LONGEST_DIRECT_CHAIN = 16
"""Chains of up to this number of fragments, zigzag on 8 ranks, exchange all states at once; longer ones by doubling."""


class Fragment(NamedTuple):
    """A contiguous range of tokens of one document on one rank: rows `start` to `stop` of the rank's shard.

    `begins_document`, `ends_document`: whether it has the first, or the last, token of its document.
    """

    start: int
    stop: int
    begins_document: bool
    ends_document: bool

    @property
    def is_part(self) -> bool:
        """Whether it is not a whole document, so that `Ring.scan_states` takes its state."""
        return not (self.begins_document and self.ends_document)


@dataclass(frozen=True)
class Fragments:
    """All fragments of a sequence in token order, as arrays over fragments.

    `start`, `stop`: positions. `rank`: the owner. `row`: the first row in the owner's shard. `first`, `last`: the
    indices of the first and the last fragment of the same document.
    """

    start: Ints
    stop: Ints
    rank: Ints
    row: Ints
    document_start: Ints
    first: Ints
    last: Ints

    def of(self, rank: int) -> Ints:
        """Return the indices of the fragments of `rank`, in the order of its rows."""
        indices = np.flatnonzero(self.rank == rank)
        return indices[np.argsort(self.row[indices], kind="stable")]

    @cached_property
    def index(self) -> Ints:
        """The index of each fragment."""
        return np.arange(len(self.start))


@bounded
def fragments_of(layout: Layout, cuts: tuple[int, ...]) -> Fragments:
    """Return the fragments of documents with the boundaries `cuts` (0, ..., length).

    Raises `UnsupportedError` if a rank holds every n-th token: each token would be a fragment.
    """
    runs = [(run, rank) for rank, shard in enumerate(layout.shards) for run in shard]
    if any(run.stride > 1 and run.count > 1 for run, _ in runs):
        raise UnsupportedError(
            f"layout={layout.name!r} gives a rank every {layout.world_size}th token, but a layer with a state needs "
            "contiguous tokens; use layout='zigzag', 'contiguous', 'per_document' or 'documents'"
        )
    start = np.array([run.start for run, _ in runs], np.int64)
    count = np.array([run.count for run, _ in runs], np.int64)
    rank = np.array([owner for _, owner in runs], np.int64)
    # The row of a run is the number of tokens of the same rank before it. `runs` is ordered by rank.
    before = np.cumsum(count) - count
    row = before - np.repeat(before[np.searchsorted(rank, np.unique(rank))], np.bincount(rank)[np.unique(rank)])
    order = np.argsort(start)
    start, count, rank, row = start[order], count[order], rank[order], row[order]
    # Zigzag gives the last rank two chunks that are neighbours: one fragment.
    continues = (rank[1:] == rank[:-1]) & (row[1:] == row[:-1] + count[:-1])
    kept = np.concatenate([[True], ~continues]) if len(start) else np.empty(0, bool)
    start, rank, row = start[kept], rank[kept], row[kept]
    bounds = np.array(cuts, np.int64)
    points = np.union1d(start, bounds[bounds < layout.length])
    run = np.searchsorted(start, points, "right") - 1
    document = np.searchsorted(bounds, points, "right") - 1
    return Fragments(
        start=points,
        stop=np.append(points[1:], layout.length) if len(points) else points,
        rank=rank[run],
        row=row[run] + points - start[run],
        document_start=bounds[document],
        first=np.searchsorted(document, document, "left"),
        last=np.searchsorted(document, document, "right") - 1,
    )


@dataclass(frozen=True)
class Halo:
    """What one rank exchanges so that each of its fragments has `width` rows of history.

    A *padded* tensor holds, for each fragment of the rank, `width` rows of history and then the rows of the fragment.
    If this rank fills rows of history from its own shard, it is a key of both `sends` and `receives`.

    Attributes:
        rows: The number of rows of the padded tensor.
        local: For each row of the rank's shard, its row in the padded tensor.
        sends: For each rank, the rows of this rank's shard that it needs.
        receives: For each rank, the rows of the padded tensor that its message fills.
    """

    rows: int
    local: Ints
    sends: dict[int, Ints]
    receives: dict[int, Ints]


@bounded
def halo_of(layout: Layout, cuts: tuple[int, ...], width: int, rank: int) -> Halo:
    """Return what `rank` exchanges for `width` rows of history. History ends at the start of the document."""
    fragments = fragments_of(layout, cuts)
    local = fragments.of(rank)
    count = fragments.stop[local] - fragments.start[local]
    # A fragment has at least one token, so its history is in the `width` fragments before it.
    source, target = _joined(_at_distance(fragments, local, distance) for distance in range(1, width + 1))
    source, target, position = _history(fragments, source, target, width)
    sends = _by_rank(fragments.rank[target], fragments.row[source] + position - fragments.start[source])
    target, source = _joined(_at_distance(fragments, local, -distance) for distance in range(1, width + 1))
    source, target, position = _history(fragments, source, target, width)
    padded_start = np.zeros(len(fragments.start), np.int64)  # of each local fragment, behind its history
    padded_start[local] = np.cumsum(count) - count + width * np.arange(1, len(local) + 1)
    receives = _by_rank(fragments.rank[source], padded_start[target] + position - fragments.start[target])
    return Halo(
        rows=int(count.sum()) + width * len(local),
        local=np.repeat(padded_start[local], count) + _counted(count),
        sends=sends,
        receives=receives,
    )


def _at_distance(fragments: Fragments, local: Ints, distance: int) -> tuple[Ints, Ints]:
    """Return the fragments of `local` that have a fragment of their document at `distance`, and that fragment."""
    other = local + distance
    inside = (other >= fragments.first[local]) & (other <= fragments.last[local])
    return local[inside], other[inside]


def _joined(pairs: Iterable[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Join lists of pairs."""
    left, right = zip((np.empty(0, np.int64),) * 2, *pairs, strict=True)
    return np.concatenate(left), np.concatenate(right)


def _history(fragments: Fragments, source: Ints, target: Ints, width: int) -> tuple[Ints, Ints, Ints]:
    """Return each row that a source holds of its target's history: source, target and position, in order of targets.

    Sender and receiver call this with the same pairs of their two ranks, so their messages have the same order.
    """
    order = np.lexsort((source, target))
    source, target = source[order], target[order]
    low = np.maximum(fragments.start[source], fragments.start[target] - width)
    count = np.maximum(fragments.stop[source] - low, 0)
    return np.repeat(source, count), np.repeat(target, count), np.repeat(low, count) + _counted(count)


def _counted(count: Ints) -> Ints:
    """Return 0 .. count[0] - 1, 0 .. count[1] - 1, ... in one array."""
    return np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)


def _by_rank(rank: Ints, values: Ints) -> dict[int, Ints]:
    """Group `values` by rank, each group in the given order."""
    order = np.argsort(rank, kind="stable")
    ranks, starts = np.unique(rank[order], return_index=True)
    return dict(zip(ranks.tolist(), np.split(values[order], starts[1:]), strict=True)) if len(ranks) else {}


class Part(NamedTuple):
    """A message of a scan: the table entries whose transitions, and whose states, one peer sends or receives."""

    peer: int
    transitions: Ints
    states: Ints


class Update(NamedTuple):
    """A step of a scan: each `right` entry continues its `left` entry. All entries are read before any is written.

    Where `whole` is false, a later step also needs the transition of both together.
    """

    left: Ints
    right: Ints
    whole: Flags


class Round(NamedTuple):
    """One exchange of a scan, and the updates that follow it in this order."""

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    updates: tuple[Update, ...]


@dataclass(frozen=True)
class Scan:
    """The exclusive scan of states over chains, as one rank computes it.

    The rank has a table of (transition, state) entries. The first `local` entries are its own fragments in row order,
    without those that are whole documents.

    Attributes:
        local: The number of fragments of this rank that are parts of documents.
        rounds: The exchanges and updates.
        initial: For each local fragment, the entry whose state is its initial state; -1 for the first of a document.
    """

    local: int
    rounds: tuple[Round, ...]
    initial: Ints

    @property
    def entries(self) -> int:
        """The size of the table. Each round receives into the entries behind the local ones."""
        return self.local + max((sum(len(part.states) for part in each.receives) for each in self.rounds), default=0)

    def sent(self) -> tuple[int, int]:
        """Return the numbers of transitions and of states that this rank sends."""
        parts = [part for each in self.rounds for part in each.sends]
        return sum(len(part.transitions) for part in parts), sum(len(part.states) for part in parts)


@bounded
def scan_of(layout: Layout, cuts: tuple[int, ...], nodes: tuple[int, ...], rank: int, reverse: bool) -> Scan:
    """Return what `rank` computes and exchanges in a scan over the fragments of each document.

    `nodes`: the node of each rank. `reverse`: scan from the last fragment to the first, as the backward pass does.

    Short chains send each state directly to the owners of all later fragments, which continue them in token order.
    Long chains use recursive doubling: first within the fragments of a node, then over the nodes.
    """
    fragments = fragments_of(layout, cuts)
    local = fragments.of(rank)
    parts = fragments.first < fragments.last
    local = (np.cumsum(parts) - 1)[local[parts[local]]]
    chains = _chains_of(fragments, reverse)
    if reverse:
        local = len(chains.rank) - 1 - local
    place = np.full(len(chains.rank), -1)
    place[local] = np.arange(len(local))
    if _are_short(chains):
        return _direct(chains, rank, local, place)
    return _doubling(chains, rank, local, place, _blocks_of(chains, nodes))


class Transfers(NamedTuple):
    """The states that one exchange of a scan sends, an element for each: sender, receiver, whether with transition."""

    source: Ints
    target: Ints
    transition: Flags


@bounded
def transfers_of(layout: Layout, cuts: tuple[int, ...], nodes: tuple[int, ...], reverse: bool) -> tuple[Transfers, ...]:
    """Return the exchanges of a scan between all ranks, without the plan of any rank. See `scan_of`."""
    chains = _chains_of(fragments_of(layout, cuts), reverse)
    exchanges = [_direct_exchange(chains)] if _are_short(chains) else _exchanges(chains, _blocks_of(chains, nodes))
    return tuple(Transfers(*_sent_once(chains, each)[1:]) for each in exchanges)


@bounded
def halo_rows_of(layout: Layout, cuts: tuple[int, ...], width: int) -> tuple[Ints, Ints, Ints]:
    """Return the messages that give all fragments `width` rows of history: senders, receivers, and numbers of rows."""
    fragments = fragments_of(layout, cuts)
    pairs = (_at_distance(fragments, fragments.index, -distance) for distance in range(1, width + 1))
    target, source = _joined(pairs)
    rows = fragments.stop[source] - np.maximum(fragments.start[source], fragments.start[target] - width)
    sender, receiver = fragments.rank[source], fragments.rank[target]
    crossing = (rows > 0) & (sender != receiver)
    return sender[crossing], receiver[crossing], rows[crossing]


class _Chains(NamedTuple):
    """All parts of documents in the order of a scan: the owner, and the first and the last part of the document."""

    rank: Ints
    first: Ints
    last: Ints


def _chains_of(fragments: Fragments, reverse: bool) -> _Chains:
    """Return the fragments that are parts of documents. Whole documents exchange nothing."""
    parts = fragments.first < fragments.last
    number = np.cumsum(parts) - 1
    rank, first, last = fragments.rank[parts], number[fragments.first[parts]], number[fragments.last[parts]]
    if not reverse:
        return _Chains(rank, first, last)
    end = len(rank) - 1
    return _Chains(rank[::-1], end - last[::-1], end - first[::-1])


def _are_short(chains: _Chains) -> bool:
    """Return whether states are sent directly to all that need them."""
    return bool((chains.last - chains.first).max(initial=0) < LONGEST_DIRECT_CHAIN)


class _Blocks(NamedTuple):
    """Ranges of consecutive fragments of a chain on one node.

    For each fragment: the index of its block, the first and the last fragment of the block, and `depth`, the number of
    blocks before it in its chain. `ends`: the last fragment of each block.
    """

    block: Ints
    first: Ints
    last: Ints
    depth: Ints
    ends: Ints


def _blocks_of(chains: _Chains, nodes: tuple[int, ...]) -> _Blocks:
    index, node = np.arange(len(chains.rank)), np.array(nodes, np.int64)[chains.rank]
    starts = (index == chains.first) | np.append(True, node[1:] != node[:-1])
    block = np.cumsum(starts) - 1
    ends = np.append(np.flatnonzero(starts)[1:], len(index)) - 1
    return _Blocks(block, np.flatnonzero(starts)[block], ends[block], block - block[chains.first], ends)


class _Exchange(NamedTuple):
    """One exchange: the owner of each `right` fragment gets the entry of its `left` one, with its transition if needed.

    `whole`: whether a later exchange needs the transition of `right` after the update.
    """

    left: Ints
    right: Ints
    transition: Flags
    whole: Flags


def _direct_exchange(chains: _Chains) -> _Exchange:
    """Return the exchange that sends each fragment to the owners of all later fragments of its document."""
    index = np.arange(len(chains.rank))
    longest = int((chains.last - chains.first).max(initial=0))
    pairs = [(index[index + step <= chains.last], step) for step in range(1, longest + 1)]
    left = np.concatenate([index[:0], *(each for each, _ in pairs)])
    right = np.concatenate([index[:0], *(each + step for each, step in pairs)])
    return _Exchange(left, right, left > chains.first[left], np.zeros(len(left), bool))


def _exchanges(chains: _Chains, blocks: _Blocks) -> list[_Exchange]:
    """Return the exchanges of recursive doubling within blocks, and then over them.

    The last one gives each fragment the entry before it in its block, and the one at the end of the block before.
    """
    index, first, depth, ends = np.arange(len(chains.rank)), blocks.first, blocks.depth, blocks.ends
    exchanges = []
    # Before the exchange of a stride, an entry stands for the last `stride` fragments of its block. Once it stands for
    # all fragments since the start of the chain, its transition is not needed.
    stride = 1
    while stride <= int((blocks.last - first).max()):
        right = index[(index - stride >= first) & (index < chains.last)]
        left = right - stride
        transition = (depth[left] > 0) | (left - stride >= first[left])
        exchanges.append(_Exchange(left, right, transition, (depth[right] > 0) | (right - 2 * stride >= first[right])))
        stride *= 2
    stride = 1
    while stride <= int(depth.max()):
        right = ends[(depth[ends] >= stride) & (ends < chains.last[ends])]
        left = ends[blocks.block[right] - stride]
        exchanges.append(_Exchange(left, right, depth[left] >= stride, depth[right] >= 2 * stride))
        stride *= 2
    inner, later = index[index > first], index[depth > 0]
    left = np.concatenate([inner - 1, ends[blocks.block[later] - 1]])
    transition = np.concatenate([depth[inner] > 0, np.zeros(len(later), bool)])
    exchanges.append(_Exchange(left, np.concatenate([inner, later]), transition, np.zeros(len(left), bool)))
    return exchanges


def _direct(chains: _Chains, rank: int, local: Ints, place: Ints) -> Scan:
    """Return the scan with one exchange: a rank receives all fragments before its own ones of the same document."""
    exchange = _direct_exchange(chains)
    sends, receives, place = _transfer(chains, rank, exchange, place, len(local))
    # A rank continues every fragment that is before an own one, except the first of each chain.
    continued = np.unique(exchange.left[chains.rank[exchange.right] == rank])
    depth = continued - chains.first[continued]
    steps = [continued[depth == step] for step in range(1, int(depth.max(initial=0)) + 1)]
    updates = tuple(Update(place[each - 1], place[each], np.zeros(len(each), bool)) for each in steps if len(each))
    initial = np.where(local > chains.first[local], place[local - 1], -1)
    return Scan(len(local), (Round(sends, receives, updates),), initial)


def _doubling(chains: _Chains, rank: int, local: Ints, place: Ints, blocks: _Blocks) -> Scan:
    """Return the scan by recursive doubling."""
    *doubling, last = _exchanges(chains, blocks)
    rounds = []
    for each in doubling:
        sends, receives, placed = _transfer(chains, rank, each, place, len(local))
        own = chains.rank[each.right] == rank
        update = Update(placed[each.left[own]], place[each.right[own]], each.whole[own])
        rounds.append(Round(sends, receives, (update,)))
    # The entry before a fragment in its block continues the one at the end of the block before.
    sends, receives, placed = _transfer(chains, rank, last, place, len(local))
    in_block, in_chain = placed[local - 1], placed[blocks.ends[blocks.block[local] - 1]]
    inner, later = local > blocks.first[local], blocks.depth[local] > 0
    both = inner & later
    rounds.append(Round(sends, receives, (Update(in_chain[both], in_block[both], np.zeros(both.sum(), bool)),)))
    initial = np.where(inner, in_block, np.where(later, in_chain, -1))
    return Scan(len(local), tuple(rounds), initial)


def _sent_once(chains: _Chains, exchange: _Exchange, rank: int | None = None) -> tuple[Ints, Ints, Ints, Flags]:
    """Return each fragment that is sent, with sender, receiver, and whether with its transition. `rank`: of one rank.

    A fragment is sent to a rank once, with its transition if any of its readers there needs it.
    """
    left, transition = exchange.left, exchange.transition
    source, target = chains.rank[left], chains.rank[exchange.right]
    crossing = source != target
    if rank is not None:
        crossing &= (source == rank) | (target == rank)
    chosen = np.flatnonzero(crossing)
    order = chosen[np.lexsort((~transition[chosen], target[chosen], left[chosen]))]
    changes = (np.diff(left[order]) != 0) | (np.diff(target[order]) != 0)
    once = order[np.append(True, changes)] if len(order) else order
    return left[once], source[once], target[once], transition[once]


def _transfer(
    chains: _Chains, rank: int, exchange: _Exchange, place: Ints, entries: int
) -> tuple[tuple[Part, ...], tuple[Part, ...], Ints]:
    """Return the messages of `rank` in an exchange, and the table entries of fragments after it.

    `place`: the entry of each fragment in the table of `rank`, -1 if it is not there. Received fragments get the
    entries from `entries` on.
    """
    left, source, target, transition = _sent_once(chains, exchange, rank)
    received = target == rank
    place = place.copy()
    place[left[received]] = entries + np.arange(received.sum())
    parts = []
    for chosen, peers in ((~received, target), (received, source)):
        parts.append(
            tuple(
                Part(peer, place[left[each & transition]], place[left[each]])
                for peer in np.unique(peers[chosen]).tolist()
                for each in (chosen & (peers == peer),)
            )
        )
    return parts[0], parts[1], place
