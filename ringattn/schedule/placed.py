"""Schedules that say for each pair of ranks where their queries and keys meet: on the asker, or on the keys' owner.

On the asker, keys and values travel to it and in the backward dK/dV return. On the owner, queries travel to it, and
partial outputs return (backward: queries and output gradients travel, and dQ returns), to be merged where they belong.
       step s - 1        step s          step s + 1        step s + 2
       inputs travel     work            results travel    merge
`pass_q` computes every pair on the owner of the keys: worth it where there are few queries and many keys. `balanced`
does so only where the keys are more than half a ring behind: under a causal mask over contiguous shards the first ranks
would else be idle; here they work for the last ones, and all are done in half as many steps.
Guarantees: a schedule that needs no pass, forward or backward; every row travels only if it is read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ringattn.core.problem import Problem
from ringattn.schedule.all_to_all import SingleHeads, with_exchanges
from ringattn.schedule.ops import (
    Attend,
    Block,
    HeadTiles,
    Kind,
    Schedule,
    attend,
    work_of,
)
from ringattn.schedule.route import Route, register

Place = Callable[[int, int, int], tuple[bool, int]]
"""Of asker, owner and the number of ranks: whether they meet on the owner of the keys, and in which step."""


class PlacedRoute(Route):
    """A schedule that places each pair of ranks on the asker or on the owner of the keys."""

    moves_queries: ClassVar[bool] = True
    by_classes: ClassVar[bool] = True
    halves: ClassVar[bool] = True
    transposed: ClassVar[bool] = False
    undoes_steps: ClassVar[bool] = False

    @abstractmethod
    def place(self, asker: int, owner: int, ranks: int) -> tuple[bool, int]:
        """See `Place`."""

    def forward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.forward_part`."""
        return part_of(problem, self.name, self.place, rank, backward=False)

    def backward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.backward_part`."""
        return part_of(problem, self.name, self.place, rank, backward=True)

    def steps(self, ranks: int) -> int:
        """See `Route.steps`."""
        return steps_of(self.place, ranks)


@register(order=8)
@dataclass(frozen=True)
class PassQ(PlacedRoute):
    """Every pair on the owner of the keys."""

    name: str = "pass_q"

    def place(self, asker: int, owner: int, ranks: int) -> tuple[bool, int]:
        """In step t a rank works for the rank t before it."""
        return True, (owner - asker) % ranks


@register(order=9)
@dataclass(frozen=True)
class Balanced(PlacedRoute):
    """On the owner of the keys only if they are more than half a ring behind."""

    name: str = "balanced"

    def place(self, asker: int, owner: int, ranks: int) -> tuple[bool, int]:
        """In step t a rank reads the keys of the rank t before it, and works for that rank."""
        behind = (asker - owner) % ranks
        return (False, behind) if 2 * behind <= ranks else (True, ranks - behind)


def part_of(problem: Problem, name: str, place: Place, rank: int, backward: bool) -> Schedule:
    """What a rank does in a pass: the pairs that it asks for, and those that ask for its keys.

    A rank's own keys are attended in step 0.
    """
    ranks = problem.world_size
    asked = [(rank, owner, parts) for owner, parts in work_of(problem, rank).items()]
    asked += [(asker, rank, parts) for asker, parts in work_of(problem, rank, keys=True).items() if asker != rank]
    spots = {(asker, owner): place(asker, owner, ranks) for asker, owner, _ in asked}
    on_owner = {(asker, owner): [part.tiles for part in parts] for asker, owner, parts in asked
                if asker != owner and spots[asker, owner][0]}  # fmt: skip
    single = SingleHeads(problem, on_owner)
    tiles = single.of_heads(single.heads)
    work: dict[int, list[Attend]] = defaultdict(list)
    for asker, owner, parts in asked:
        step, pair = spots[asker, owner][1], (asker, owner)
        work[step].append(_received(*pair, tiles[pair], step) if pair in tiles else attend(*pair, parts))
    # What the other rank of a pair does with it is not this rank's.
    return with_exchanges(problem, name, backward, work, steps_of(place, ranks)).restricted_to(rank)


def steps_of(place: Place, ranks: int) -> int:
    """Steps of a pass: results of the last work travel in one step and are merged in another."""
    return 1 + max(place(0, owner, ranks)[1] for owner in range(ranks)) + 2 * (ranks > 1)


def _received(asker: int, owner: int, tiles: tuple[HeadTiles, ...], step: int) -> Attend:
    # Named by the step, for a rank's own keys lie anew beside the queries of each.
    q, kv = Block(Kind.Q, asker, ring=step), Block(Kind.KV, owner, ring=step)
    return Attend(owner, q, kv, Block(Kind.OUT, asker, owner, step), tiles)
