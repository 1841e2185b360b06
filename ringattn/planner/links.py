"""Which link joins each pair of ranks: as a value that the planner, the simulator and `explain` read.

Guarantees: a link that nobody could find out is `UNKNOWN`, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ringattn.errors import InputError


class LinkClass(Enum):
    """What the bytes between two ranks cross."""

    SAME_GPU = "same GPU"
    NVLINK = "NVLink"
    PCIE = "PCIe"
    MEMORY = "host memory"
    NETWORK = "network"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Links:
    """The links of a ring. `nodes`: the node of each rank, counted from 0 in the order in which they appear.

    `inside`: the class of pairs on one node. `exceptions`: pairs (lower rank, higher rank) that have another class;
    few, for a node has few ranks. `outside`: the class of pairs on two nodes, unless they are exceptions too. Raises
    `InputError` for nodes that are not counted so.
    """

    nodes: tuple[int, ...]
    inside: LinkClass = LinkClass.UNKNOWN
    exceptions: tuple[tuple[int, int, LinkClass], ...] = ()
    outside: LinkClass = LinkClass.NETWORK

    def __post_init__(self) -> None:
        """Nodes appear in the order of their numbers."""
        if list(dict.fromkeys(self.nodes)) != list(range(len(set(self.nodes)))):
            raise InputError(f"nodes={self.nodes}: count the nodes from 0 in the order in which ranks name them")
        object.__setattr__(self, "_by_pair", {(first, second): kind for first, second, kind in self.exceptions})
        # A ring's choices are kept by its links, and each call asks for one.
        object.__setattr__(self, "_hash", hash((self.nodes, self.inside, self.exceptions, self.outside)))

    def __hash__(self) -> int:
        """Counted once."""
        return self._hash  # type: ignore[attr-defined]

    def of(self, rank: int, peer: int) -> LinkClass:
        """The class of a pair."""
        plain = self.inside if self.nodes[rank] == self.nodes[peer] else self.outside
        by_pair: dict[tuple[int, int], LinkClass] = self._by_pair  # type: ignore[attr-defined]
        return by_pair.get((min(rank, peer), max(rank, peer)), plain)

    def hops(self) -> tuple[LinkClass, ...]:
        """The class of each hop of the ring, from rank to the next rank; none where a rank is alone."""
        ranks = len(self.nodes)
        return tuple(self.of(rank, (rank + 1) % ranks) for rank in range(ranks)) if ranks > 1 else ()

    def classes_inside(self) -> set[LinkClass]:
        """What joins ranks of a node; empty where every rank has a node of its own."""
        pairs = [kind for first, second, kind in self.exceptions if self.nodes[first] == self.nodes[second]]
        sizes = Counter(self.nodes).values()
        plain = sum(size * (size - 1) // 2 for size in sizes) > len(pairs)
        return {*pairs, self.inside} if plain else set(pairs)

    @property
    def crossings(self) -> int:
        """Hops of the ring, from rank to the next rank, that lead to another node."""
        return sum(node != after for node, after in zip(self.nodes, self.nodes[1:] + self.nodes[:1], strict=True))

    @property
    def least_crossings(self) -> int:
        """As many as a ring has that enters each node once."""
        nodes = len(set(self.nodes))
        return nodes if nodes > 1 else 0


def numbered(names: Iterable[str]) -> tuple[int, ...]:
    """Nodes by name as numbers, in the order in which they appear."""
    found: dict[str, int] = {}
    return tuple(found.setdefault(name, len(found)) for name in names)


def placement(links: Links) -> str:
    """How the ranks lie on nodes, and how often the ring crosses from one to another."""
    told = []
    for node in range(max(links.nodes) + 1):
        ranks = [rank for rank, where in enumerate(links.nodes) if where == node]
        told.append(f"{ranges(ranks)} on node {node}")
    often = f"the ring crosses from node to node {links.crossings} times"
    least = "" if links.crossings == links.least_crossings else f", and {links.least_crossings} would do"
    return f"ranks {'; '.join(told)}: {often}{least}"


def ranges(ranks: list[int]) -> str:
    """Ascending numbers in few words: 0-3, 6, 8-9."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in found)
