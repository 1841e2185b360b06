"""Double ring: a ring of nodes, and within each node a ring of its ranks; a block crosses to each node once.

`grid[node][place]` is a rank; n nodes of m ranks. In round r the ranks of a node attend to the blocks of the node r
before it: each rank begins with the block of its own place, and the ring inside the node takes it round.
       grid 2 x 2 (ranks 0 1 | 2 3), the keys that rank 3 attends to and who sends them
       step          0       1       2       3
       round         0               1
       owner         3       2       1       0
       from          -       2>3     1>3     2>3
While a node works on its round, each rank passes the block that it began with to its place in the next node, a piece of
it beside each of the m steps (`spread`). A ring over all ranks waits for the slowest link in each of its n m - 1 steps;
here that link has m times as long for every block.
Guarantees: a schedule that needs no pass, forward or backward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import chain
from math import isqrt

from ringattn.core.problem import Problem
from ringattn.errors import InputError
from ringattn.schedule.content import Content, size, whole
from ringattn.schedule.ops import Block, Copy, Kind, Schedule, Work, attend, ordered_step, work_of
from ringattn.schedule.passes import Delivery, delivered, main_step, prune, readers_of, spread, transpose

Grid = tuple[tuple[int, ...], ...]
"""Ranks by node, as many in each."""


def grid_of(nodes: tuple[int, ...], name: str = "double_ring") -> Grid:
    """The ranks of each node, given the node of each rank. Raises `InputError` where nodes have unlike numbers."""
    grid = tuple(tuple(rank for rank, at in enumerate(nodes) if at == node) for node in dict.fromkeys(nodes))
    if len({len(ranks) for ranks in grid}) > 1:
        counts = ", ".join(str(len(ranks)) for ranks in grid)
        raise InputError(
            f"schedule='{name}' needs as many ranks on each node, and the nodes have {counts}; "
            f"choose schedule='ring', or say how many ranks belong together: schedule='{name}:2'"
        )
    return grid


def blocks_of(ranks: int, inner: int, name: str = "double_ring") -> Grid:
    """`inner` neighboring ranks each. Raises `InputError` where they do not divide the ranks."""
    if inner < 1 or ranks % inner:
        raise InputError(f"schedule='{name}:{inner}': {inner} ranks that belong together do not divide {ranks} ranks")
    return tuple(tuple(range(first, first + inner)) for first in range(0, ranks, inner))


def square(ranks: int) -> Grid:
    """Inner rings as long as the outer one, or as near as the number of ranks allows."""
    return blocks_of(ranks, next(inner for inner in range(isqrt(ranks), 0, -1) if not ranks % inner))


def forward(problem: Problem, name: str, grid: Grid) -> Schedule:
    """The pruned forward schedule."""
    nodes, places = len(grid), len(grid[0])
    copies: list[list[Copy]] = [[] for _ in range(nodes * places)]
    work: list[list[Work]] = [[] for _ in copies]
    for node, ranks in enumerate(grid):
        for place, rank in enumerate(ranks):
            tiles = work_of(problem, rank)
            for step in range(nodes * places):
                # Round and step within it are also how far the owner's node and place lie before this rank's.
                turn, inner = divmod(step, places)
                owner = grid[node - turn][place - inner]
                work[step].append(attend(rank, owner, tiles.get(owner, ())))
                source = ranks[place - 1] if inner else grid[node - 1][place]
                if step:
                    copies[step - 1].append(Copy(Block(Kind.KV, owner), source, rank, _shard(problem, owner)))
    pruned = prune(Schedule(problem, name, tuple(map(ordered_step, copies, work))))
    # A block for the next round may travel in every step of this one.
    return spread(pruned, _crosses(grid), lambda step: range(step - places + 1, step + 1))


def backward(forward_schedule: Schedule, grid: Grid) -> Schedule:
    """The transposed schedule: rounds and steps in reverse, dK/dV back along the edges, K/V delivered along them too.

    In each round the farthest place is first. The last node's gets the block from its owner, those of other nodes from
    their place in the node that was before; the ring inside the node runs the other way.
    """
    nodes, places = len(grid), len(grid[0])
    at = {rank: (node, place) for node, ranks in enumerate(grid) for place, rank in enumerate(ranks)}
    relayed: dict[Block, list[Delivery]] = defaultdict(list)
    direct: dict[Block, list[Delivery]] = defaultdict(list)
    for block, readers in readers_of(forward_schedule).items():
        node, place = at[block.owner]
        for step in range(1, nodes * places):
            turn, inner = divmod(step, places)
            there = grid[(node + turn) % nodes]
            if inner < places - 1:
                source = there[(place + inner + 1) % places]
            elif 0 < turn < nodes - 1:
                source = grid[(node + turn + 1) % nodes][(place + inner) % places]
            else:
                source = block.owner
            copy = Copy(block, source, there[(place + inner) % places], _shard(forward_schedule.problem, block.owner))
            relayed[block].append((step + 1, copy))
        direct[block] = [(step + 1, Copy(block, block.owner, reader, rows)) for step, reader, rows in readers]
    # How much relays carry is known once what nobody reads is cut. Each block goes the way that sends less.
    carried: dict[Block, int] = Counter()
    for each in prune(transpose(forward_schedule, chain.from_iterable(relayed.values()))).steps:
        for copy in each.copies:
            carried[copy.block] += size(copy.content)
    best = [relayed[block] if carried[block] <= delivered(straight) else straight for block, straight in direct.items()]
    last = nodes * places - 1

    def window(step: int) -> range:
        # Backward main steps are every second one. The deadline of a round's first block is the last of the round
        # before it; the opening step, which has no round, is a window of its own.
        done = last - (step - 1) // 2
        begins = step - 2 * (places - 1)
        is_border = step and done and done % places == 0 and begins >= main_step(last, last)
        return range(begins, step + 1, 2) if is_border else range(step, step + 1)

    return spread(prune(transpose(forward_schedule, chain.from_iterable(best))), _crosses(grid), window)


def _crosses(grid: Grid) -> Callable[[Copy], bool]:
    """Whether a copy goes from node to node."""
    node_of = {rank: node for node, ranks in enumerate(grid) for rank in ranks}
    return lambda copy: node_of[copy.src] != node_of[copy.dst]


def _shard(problem: Problem, owner: int) -> Content:
    return whole(problem.kv_layout.counts[owner], [part.kv_heads for part in problem.parts])
