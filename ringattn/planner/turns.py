"""How the steps of a pass lie to the turns of its schedule, and how many ranks belong together in it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ringattn.core.problem import Problem
from ringattn.planner.cluster import Cluster
from ringattn.schedule.routes import route_named


class Steps(NamedTuple):
    """How the steps of a pass lie to the turns of its schedule: `turns` of them, of `inner` steps each, `extra` for
    what is before and after the ring.

    `transposed`: a backward pass that undoes the forward's steps from the last on: an opening step, then a main and a
    merge step for each.
    """

    turns: int
    transposed: bool
    inner: int = 1
    extra: int = 0

    @property
    def in_all(self) -> int:
        """Steps of the pass."""
        there = self.turns * self.inner
        return 1 + 2 * there if self.transposed else there

    def place(self, number: int) -> tuple[int, int, int]:
        """The phase of a step, the turn that it belongs to, and its place in the turn."""
        if not self.transposed:
            return 0, *divmod(number, self.inner)
        there = self.turns * self.inner
        return (1 + (number - 1) % 2, *divmod(there - 1 - (number - 1) // 2, self.inner)) if number else (
            0, self.turns, 0)  # fmt: skip


@lru_cache(maxsize=64)
def steps_of(schedule: str, ranks: int, backward: bool, group: int = 1) -> Steps:
    """The steps of a pass of a schedule, with groups as of `group_of`."""
    route = route_named(schedule if group == 1 else f"{schedule.partition(':')[0]}:{group}", ranks)
    inner = route.inner_steps(group)
    return Steps(route.steps(ranks) // inner, backward and route.undoes_steps, inner, route.extra_steps)


def group_of(problem: Problem, schedule: str, cluster: Cluster) -> int:
    """How many ranks belong together: those of a node where the schedule knows nodes, else one.

    Raises `InputError` as the route does.
    """
    ranks = problem.world_size
    nodes = tuple(map(cluster.node_of, range(ranks)))
    return route_named(schedule, ranks).on_nodes(nodes).group_size(problem)
