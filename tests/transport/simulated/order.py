"""Whether all ranks issue the groups of several communicators in one order.

Two ranks that issue them in different orders can wait for each other for ever, since a device may run one launch after
the other. Where the orders of two matched pairs differ, the first pair's groups are in flight at once on some rank.
"""

from __future__ import annotations

from collections import defaultdict

from tests.transport.simulated.communicators import Clique
from tests.transport.simulated.entries import Launch


class LaunchOrder:
    """Compares each new launch with the last matched ones of other communicators."""

    def __init__(self) -> None:
        # By (rank, peer) and communicator: the newest pair of launches that met or will meet.
        self._newest: defaultdict[tuple[int, int], dict[Clique, tuple[Launch, Launch]]] = defaultdict(dict)

    def inverted(self, launch: Launch) -> str | None:
        """What is wrong with issuing `launch` now, None if nothing."""
        comm, fault = launch.comm, None
        for op in launch.ops:
            other = comm.clique.opposite(comm.rank, op)
            if other is None or other.launch.rank == launch.rank:
                continue  # seen from the end that is issued later
            theirs = other.launch
            for clique, (before, after) in self._newest[launch.rank, theirs.rank].items():
                if clique is not comm.clique and before.group < launch.group and after.group > theirs.group:
                    fault = (
                        f"{before.comm} before {comm}, but rank {theirs.rank} issued them the other way round: "
                        "all ranks need one order"
                    )
            self._newest[launch.rank, theirs.rank][comm.clique] = (launch, theirs)
            self._newest[theirs.rank, launch.rank][comm.clique] = (theirs, launch)
        return fault
