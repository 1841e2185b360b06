"""Place the tokens of a mask on ranks: items (`core.areas`) stay whole on one rank, or are cut over several ranks.

An item is a document, a node of a tree, or a range of queries of slices. Every rank gets exactly its share of the
tokens, and nearly its share of the pairs. Two ways to cut an item that does not fit are tried, and the faster placement
is used:

    zigzag            |-1-|-2-|-3-|-4-|-4-|-3-|-2-|-1-|     each rank has equal work with the keys of every other rank
    from its end      |1|2|--------- 3 --------|-- 2 --|-1-|     fewer rows: fewer ranks read up to its end

This placement is for schedules whose ranks wait for each other in every step; `placed_at_once` is for other schedules.
A rank that takes the last tokens of an item fills its share with whole small items, or with first tokens of the same
item. The first tokens cost no rows, because the rank reads them anyway. `cut_from_both_ends` does this along an order
of all items, in which the nodes of a path are adjacent. On several machines, `placed_at_once` runs twice: over the
machines, then over the ranks of each. Trees are placed over groups of ranks in the same way, if that sends fewer rows.
Guarantees: equal masks and ranks give equal placements. Token counts are those of the contiguous layout; on several
machines they differ by at most one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, product

import numpy as np

from ringattn.core.areas import PAIRS_PER_ROW, Areas, AreasOfMask, AreasOfPart, Load, Piece, Pieces, Shards, areas_of
from ringattn.core.bounded_cache import bounded
from ringattn.core.cuts import by_density, cut_from_both_ends, orders
from ringattn.core.filling import Choice, place
from ringattn.core.mask import Mask
from ringattn.core.owners import Search

MOST_FILLED = 8192
"""Number of ranks times items, with `RANK_ITEMS` more items, up to which ranks are filled item by item and a search
improves placements."""
RANK_ITEMS = 64
DRAWN = 24
"""Number of orders that are drawn in addition to the plain ones, for a search."""
LEAST_EVEN = 1.05
"""Largest ratio of a rank's pairs to the mean in a placement for steps, if any placement has it."""
FEW_ROWS = 0.01
"""Share of all tokens. If fewer rows are sent, do not try another placement."""
CHOICES = (
    Choice(0.002, 0.03, 2.0), Choice(0.002, 1.0, 0.0), Choice(0.03, 0.05, 0.0), Choice(0.03, 1.0, 1.0),
    Choice(0.002, 0.03, 2.0, even=1.0), Choice(0.002, 1.0, 0.0, even=3.0),
)  # fmt: skip
"""The choices to try, in order. Selected on randomly drawn documents (see `bench/placement.py`); others save hardly any
rows."""
EACH_ZIGZAG = Choice(0.002, 0.03, 2.0, even=0.0)
"""Each item is cut zigzag over all ranks. It is tried where items read other items, as in trees: there, steps of other
placements are uneven."""


@bounded
def placed(mask: Mask, length: int, ranks: int) -> Shards:
    """Return a placement of `length` tokens with this mask.

    Of the placements whose cost is within 1 % of the lowest, it is the one that sends the fewest rows. The cost is the
    number of pairs of the whole pass, if messages travel during the computation.
    """
    areas = areas_of(mask, length)
    tried: list[tuple[int, int, float, Pieces]] = []  # cost, rows, unevenness
    for pieces, load in _loads(areas, ranks, _filled(areas, ranks)):
        pairs = areas.in_steps(pieces) or max(load.pairs)
        cost = max(pairs, *(PAIRS_PER_ROW * rows for rows in (*load.received, *load.sent)))
        tried.append((cost, sum(load.sent), unevenness(load), pieces))
        # For thousands of short documents, the first placement is good enough.
        if 100 * cost * ranks <= 101 * sum(load.pairs) and sum(load.sent) <= FEW_ROWS * length:
            break
    even = [entry for entry in tried if entry[2] <= LEAST_EVEN]
    if any(areas.reads):  # documents may be uneven where their steps are shorter
        tried = even or tried
    least = min(entry[0] for entry in tried)
    return min((entry for entry in tried if 100 * entry[0] <= 101 * least), key=lambda entry: entry[1])[3].shards()


def _filled(areas: Areas, ranks: int) -> Iterator[Pieces]:
    """Yield placements that suit schedules in steps, until the caller has one that is good enough."""
    if _is_small(areas, ranks):
        for choice in (*CHOICES, EACH_ZIGZAG) if any(areas.reads) else CHOICES:
            yield Pieces.of(place(areas, ranks, choice))
    for order in orders(areas):
        yield cut_from_both_ends(areas, order, ranks, EVEN)


# --- placement for schedules that receive all rows at once: the fewest rows sent --------------------------------------


SPREADS = tuple(Choice(0.002, 1.0, 0.0, even=even) for even in (1.0, 0.5, 0.25))
"""The ranks of a node have equal parts of each long item, which is cut zigzag over them. No single owner sends all the
rows that other nodes read through its own link. The choices are tried in order until one is even."""
MUCH_SHARED = 0.05
"""If keys of other nodes have a larger share of a node's pairs, or if the node sends a larger share of its tokens to
other nodes, its ranks get equal parts of long items. They then end each step together, so that none waits for rows of
another node that a rank passes on late."""
EVEN = 1.005
"""Largest ratio of a rank's pairs to the mean that counts as even. Of all even placements, the one with the fewest rows
is used."""
FILLS = 40000
"""The limit of a search: the number of tries times the number of ranks, from 8 ranks on. Such a search takes 0.1 to
0.6 s for a hundred documents or nodes."""
STARTING_CHOICES = tuple(Choice(*values) for values in product((0.002, 0.03), (0.03, 0.1, 1.0), (0.0, 1.0, 2.0)))
"""The choices whose placements the search starts from. Each gives three placements: with equal pairs on all ranks, with
the most pairs per rank that `EVEN` allows, and with half of this excess.
"""
GROUPS_SHARE = 4
"""How many times fewer tries a search over groups of ranks gets than the search over all ranks. The searches inside the
groups share the same number."""
LAST = 8
"""Number of the best placements whose load is computed exactly."""


@bounded
def placed_at_once(
    mask: Mask, length: int, ranks: int, ranks_per_node: int = 0, even: float = EVEN, fills: int = FILLS
) -> Shards:
    """Return a placement of `length` tokens with this mask: over the nodes first, then over the ranks of each node.

    Of all even placements that the search tries, it is the one that sends the fewest rows. Inside one of several nodes,
    the rows of the busiest rank count as much as all rows, and rows that it sends to other nodes count `ACROSS` times.
    A node that shares much with others gives its ranks equal parts of long items instead (decision 0060).
    `ranks_per_node`: each node has this number of neighbouring ranks; 0 if there is one node. `even`: the largest ratio
    of pairs to the mean that counts as even, of nodes and of the ranks of a node. `fills`: the number of tries of the
    search, times ranks.
    """
    areas = areas_of(mask, length)
    if ranks_per_node in (0, ranks):
        return _at_once(areas, ranks, even, fills if _is_small(areas, ranks) else 0).shards()
    nodes = ranks // ranks_per_node
    items = len(areas.slopes)
    # Each of the nodes has about its share of the items.
    cost = nodes * (items + RANK_ITEMS) + ranks * (items // nodes + RANK_ITEMS)
    fills = fills // (nodes + 1) if cost <= 2 * MOST_FILLED else 0
    of_nodes = _at_once(areas, nodes, even, fills).shards()
    # For more nodes and items, counting the rows that each node sends to the others takes most of the time.
    counts_others = nodes * (items + nodes) <= MOST_FILLED
    shares_much = _nodes_that_share_much(areas, of_nodes)
    shards: list[tuple[Piece, ...]] = []
    for node, tokens in enumerate(of_nodes):
        part = AreasOfPart(areas, tokens, of_nodes[:node] + of_nodes[node + 1 :] if counts_others else ())
        pieces = _spread(part, ranks_per_node, even) if shares_much[node] else None
        pieces = pieces or _at_once(part, ranks_per_node, even, fills, ranks_per_node)
        shards += part.placed(pieces).shards()
    return tuple(shards)


def _nodes_that_share_much(areas: AreasOfMask, nodes: Shards) -> list[bool]:
    """Return for each node whether it exchanges more than `MUCH_SHARED` with other nodes; False for too many pieces."""
    between, load = areas.pairs_between(nodes), areas.load(nodes)
    if between is None:
        return [False] * len(nodes)
    tokens = [sum(stop - start for start, stop in shard) for shard in nodes]
    return [
        int(between[node].sum()) - int(between[node, node]) > MUCH_SHARED * load.pairs[node]
        or load.sent[node] > MUCH_SHARED * tokens[node]
        for node in range(len(nodes))
    ]


def _spread(part: AreasOfPart, ranks: int, even: float) -> Pieces | None:
    """Return a placement in which the ranks of a node have equal parts of long items, or None if none is even.

    Return None too if most pairs belong to items whose queries all have equally many keys, as in a window. Adjacent
    tokens of such items are equal parts already, and need fewer rows.
    """
    pairs = int(part.before[-1])
    if 2 * int(np.diff(part.before)[part.slopes != 0].sum()) < pairs:
        return None
    most = even * pairs / ranks
    spread = (Pieces.of(place(part, ranks, choice, limit)) for choice, limit in product(SPREADS, (None, int(most))))
    return next((pieces for pieces in spread if part.pairs_by_rank(pieces).max() <= most), None)


def _at_once(areas: Areas, ranks: int, even: float, fills: int, busiest: int = 0, by_groups: bool = True) -> Pieces:
    """Return the placement of `placed_at_once` without nodes.

    `fills`: 0 for no search. `busiest`: how many times the rows of the rank that sends or receives most count, in
    addition to all rows. `by_groups`: whether to try `_by_groups` and `STARTING_CHOICES` too.
    """
    tried: list[tuple[tuple[float, int], int, Pieces]] = []

    def order(load: Load) -> tuple[float, int]:
        """Return a sort key: even placements by rows, then all others by unevenness."""
        return max(even, unevenness(load)), sum(load.received) + busiest * max(*load.received, *load.sent)

    placements = _starts(areas, ranks, even, fills > 0, by_groups)
    groups = sorted(n for n in {2, ranks // 2} if 1 < n < ranks and not ranks % n)
    if fills and by_groups and groups and any(areas.reads):  # documents gain little
        fills //= 2
        placements = chain(placements, _by_groups(areas, ranks, groups, even, fills // GROUPS_SHARE))
    for pieces, load in _loads(areas, ranks, placements):
        tried.append((order(load), len(tried), pieces))
        # For thousands of short documents, the first placement is good enough.
        if tried[-1][0] <= (even, FEW_ROWS * areas.length):
            return pieces
    if fills:
        search = Search(areas, ranks, even)
        starts = [search.owners_of(pieces.shards()) for _, _, pieces in tried]
        for owners in search.improved(starts, fills // max(8, ranks))[-LAST:]:
            pieces = Pieces.of(search.shards(owners))
            tried.append((order(areas.load(pieces)), len(tried), pieces))
    return min(tried)[2]


def _by_groups(areas: Areas, ranks: int, counts: list[int], even: float, fills: int) -> Iterator[Pieces]:
    """Yield for each number of groups a placement over these groups of ranks, and then over the ranks of each.

    So a branch of a tree that fills several ranks stays together, which moves of single items do not find.
    """
    for groups in counts:
        shards: list[tuple[Piece, ...]] = []
        for tokens in _at_once(areas, groups, even**0.5, fills, by_groups=False).shards():
            part = AreasOfPart(areas, tokens, ())
            inside = _at_once(part, ranks // groups, even**0.5, fills // groups, by_groups=False)
            shards += part.placed(inside).shards()
        yield Pieces.of(tuple(shards))


def _is_small(areas: Areas, ranks: int) -> bool:
    """Return whether a search takes a fraction of a second."""
    return ranks * (len(areas.slopes) + RANK_ITEMS) <= MOST_FILLED


def _loads(areas: Areas, ranks: int, placements: Iterator[Pieces]) -> Iterator[tuple[Pieces, Load]]:
    """Yield the placements with their loads, and a last one that is even for any mask if none of them is."""
    ratio = math.inf
    for pieces in placements:
        load = areas.load(pieces)
        ratio = min(ratio, unevenness(load))
        yield pieces, load
    if ratio > LEAST_EVEN and areas.length:
        pieces = cut_from_both_ends(areas, by_density(areas, -(-areas.length // ranks)), ranks, EVEN)
        yield pieces, areas.load(pieces)


def unevenness(load: Load) -> float:
    """Return the ratio of the largest number of pairs of a rank to the mean."""
    return max(load.pairs) * len(load.pairs) / max(1, sum(load.pairs))


def _starts(areas: Areas, ranks: int, even: float, searches: bool, by_choices: bool) -> Iterator[Pieces]:
    """Yield the placements that a search starts from, or a few if there is no search."""
    if isinstance(areas, AreasOfPart) and areas.others.ranks:
        yield Pieces.of(place(areas, ranks, SPREADS[0]))
    for order in orders(areas, DRAWN if searches else 0):
        yield cut_from_both_ends(areas, order, ranks, even)
    if searches and by_choices:
        most = int(even * int(areas.before[-1]) / ranks)
        middle = int(most * (1 + even) / (2 * even))
        for choice, limit in product(STARTING_CHOICES, (None, most, middle)):
            yield Pieces.of(place(areas, ranks, choice, limit))
