"""Schedules that compute each pair of ranks either on the owner of the queries or on the owner of the keys.

If the owner of the queries computes a pair, it receives keys and values, and in backward returns dK/dV. If the owner of
the keys computes it, that rank receives queries and returns partial outputs, which the owner of the queries merges. In
backward it receives queries and output gradients, and returns dQ.
       step s - 1        step s          step s + 1        step s + 2
       inputs are sent   work            results are sent  merge
`pass_q` computes every pair on the owner of the keys. Use it for few queries and many keys. `balanced` does so only if
the keys are more than half a ring behind. Under a causal mask over contiguous shards the first ranks would otherwise be
idle; here they work for the last ranks, and all ranks finish in half the number of steps.
Guarantees: the schedules of both passes are already pruned: every row is sent only if it is read.
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
"""From the owner of the queries, the owner of the keys and the number of ranks: whether the owner of the keys computes
the pair, and in which step."""


class PlacedRoute(Route):
    """A schedule that computes each pair of ranks on the owner of the queries or on the owner of the keys."""

    moves_queries: ClassVar[bool] = True
    by_classes: ClassVar[bool] = True
    halves: ClassVar[bool] = True
    transposed: ClassVar[bool] = False
    undoes_steps: ClassVar[bool] = False

    @abstractmethod
    def place(self, q_owner: int, owner: int, ranks: int) -> tuple[bool, int]:
        """Return whether the owner of the keys computes the pair, and in which step; see `Place`."""

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
    """A schedule that computes every pair on the owner of the keys."""

    name: str = "pass_q"

    def place(self, q_owner: int, owner: int, ranks: int) -> tuple[bool, int]:
        """See `Place`. In step t a rank computes for the queries of the rank t positions before it."""
        return True, (owner - q_owner) % ranks


@register(order=9)
@dataclass(frozen=True)
class Balanced(PlacedRoute):
    """A schedule that computes a pair on the owner of the keys only if the keys are more than half a ring behind."""

    name: str = "balanced"

    def place(self, q_owner: int, owner: int, ranks: int) -> tuple[bool, int]:
        """See `Place`. In step t a rank reads keys of the rank t positions before it and computes for its queries."""
        behind = (q_owner - owner) % ranks
        return (False, behind) if 2 * behind <= ranks else (True, ranks - behind)


def part_of(problem: Problem, name: str, place: Place, rank: int, backward: bool) -> Schedule:
    """Return a rank's part of a pass: the pairs with its queries and the pairs with its keys.

    `place` says where and in which step a pair is computed. Step 0 attends to the local keys.
    """
    ranks = problem.world_size
    pairs = [(rank, owner, parts) for owner, parts in work_of(problem, rank).items()]
    pairs += [(q_owner, rank, parts) for q_owner, parts in work_of(problem, rank, keys=True).items() if q_owner != rank]
    places = {(q_owner, owner): place(q_owner, owner, ranks) for q_owner, owner, _ in pairs}
    on_owner = {(q_owner, owner): [part.tiles for part in parts] for q_owner, owner, parts in pairs
                if q_owner != owner and places[q_owner, owner][0]}  # fmt: skip
    single = SingleHeads(problem, on_owner)
    tiles = single.of_heads(single.heads)
    work: dict[int, list[Attend]] = defaultdict(list)
    for q_owner, owner, parts in pairs:
        step, pair = places[q_owner, owner][1], (q_owner, owner)
        work[step].append(_received(*pair, tiles[pair], step) if pair in tiles else attend(*pair, parts))
    # Drop the part of the peer of each pair.
    return with_exchanges(problem, name, backward, work, steps_of(place, ranks)).restricted_to(rank)


def steps_of(place: Place, ranks: int) -> int:
    """Return the number of steps of a pass. After the last work, one step sends the results and another merges them."""
    return 1 + max(place(0, owner, ranks)[1] for owner in range(ranks)) + 2 * (ranks > 1)


def _received(q_owner: int, owner: int, tiles: tuple[HeadTiles, ...], step: int) -> Attend:
    """Return the work that the owner of the keys does on received queries in `step`."""
    # The number of the step names the sub-ring, because each step copies the local keys into a buffer for its received
    # queries.
    q, kv = Block(Kind.Q, q_owner, ring=step), Block(Kind.KV, owner, ring=step)
    return Attend(owner, q, kv, Block(Kind.OUT, q_owner, owner, step), tiles)
