"""What one rank's process may ask of its communicators, and how a broken rule is told.

Guarantees: NCCL's status for what NCCL refuses; for what it leaves undefined also an entry in `SimWorld.violations`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ringattn.transport.nccl.binding import Capability, CommConfig, MissingError, NcclError, Status
from tests.transport.simulated.communicators import Communicator, Phase
from tests.transport.simulated.entries import Range
from tests.transport.simulated.world import SimWorld


class Checks:
    """The rules for the process of `rank`. All but `enter` and the capabilities need the world's lock.

    `words`: what was refused last.
    """

    def __init__(self, world: SimWorld, rank: int, capabilities: frozenset[Capability]) -> None:
        self.words = ""
        self._world, self._rank, self._capabilities = world, rank, capabilities

    def enter(self, function: str) -> None:
        """What every call that may raise begins with: the script of faults."""
        if (answer := self._world.script.enter(self._rank, function)) is not None:
            raise self.refusal(function, answer, "scripted")

    def refusal(self, function: str, status: int, words: str = "") -> NcclError:
        """The error of a call, with the last broken rule if it has no words of its own."""
        self.words = words or self.words
        return NcclError(function, status, self.words)

    def broken(self, function: str, words: str) -> int:
        """Keep a broken rule; the status of who broke it."""
        self.words = f"{function}: {words}"
        self._world.violate(self._rank, self.words)
        return Status.INVALID_ARGUMENT

    def capability(self, needed: Capability) -> None:
        """Raise `MissingError` for what the library lacks."""
        if needed not in self._capabilities:
            raise MissingError(f"the simulated library of rank {self._rank} lacks {needed.value}")

    def config(self, config: CommConfig) -> None:
        """Raise `MissingError` for what the library cannot configure."""
        for needed in config.needs():
            self.capability(needed)

    def no_graph(self, function: str, end: Communicator) -> None:
        """Raise while a graph lives: NCCL spins in destroy and abort until then (commDestroySync)."""
        if self._world.in_graph(end):
            self.broken(function, f"{end} is used by a living CUDA graph; reset the graph first")
            raise self.refusal(function, Status.INVALID_USAGE)

    def known(self, function: str, handle: int) -> Communicator | None:
        """The end behind a handle, None if it is none, another rank's or freed."""
        end = self._world.registry.by_handle.get(handle)
        if not handle:
            self.words = f"{function}: NULL communicator"
            return None
        if end is None or end.process != self._rank:
            self.broken(function, f"handle {handle:#x} is no communicator of this rank")
            return None
        if end.gone:
            self.broken(function, f"{end} is {end.phase.value}")
            return None
        return end

    def usable(self, function: str, handle: int, also: Phase = Phase.READY) -> Communicator | None:
        """The end behind a handle if it is ready (or in phase `also`), finalized, and used by no other thread."""
        end = self.known(function, handle)
        if end is None:
            return None
        if end.phase not in (Phase.READY, also):
            self.broken(function, f"{end} is {end.phase.value}")
        elif end.polls_left:
            self.broken(function, f"{end} is still in progress: state() has not said SUCCESS")
        elif end.user not in (None, threading.get_ident()):
            self.broken(function, f"two threads use {end} at once")
        else:
            return end
        return None

    @contextmanager
    def inside(self, function: str, handle: int, also: Phase = Phase.READY) -> Iterator[Communicator]:
        """The end behind a handle, used by this thread until the call returns."""
        end = self.usable(function, handle, also)
        if end is None:
            raise self.refusal(function, Status.INVALID_ARGUMENT)
        before, end.user = end.user, threading.get_ident()
        try:
            yield end
        finally:
            end.user = before

    def own_memory(self, function: str, pointer: int, nbytes: int) -> bool:
        """Whether these bytes live and are this rank's; a broken rule if not."""
        owned = self._world.memory.view(self._rank, pointer, nbytes) is not None
        if not owned:
            self.broken(function, f"illegal address {pointer:#x}: not {nbytes} living bytes of this rank")
        return owned

    def registered(self, held: Range) -> bool:
        """Whether any communicator has a piece of this memory registered."""
        ends = self._world.registry.of(self._rank)
        return any(_overlap(held, each) for end in ends for each in end.registered.values())

    def in_flight(self, held: Range) -> bool:
        """Whether any group that has not completed sends from or receives into this memory."""
        launches = (launch for end in self._world.registry.of(self._rank) for launch in end.in_flight())
        return any(_overlap(held, (op.address, op.nbytes)) for launch in launches for op in launch.ops)


def _overlap(one: Range, other: Range) -> bool:
    """Whether two ranges share a byte."""
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]
