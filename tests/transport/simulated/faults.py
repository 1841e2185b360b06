"""Scripted faults: what goes wrong on which rank, and when.

Guarantees: a fault strikes at a counted call or hop, never by the clock; a rank that has died raises `Died` from all
its later calls, on every thread, and its device and its store are silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringattn.transport.nccl.binding import Status

if TYPE_CHECKING:
    from tests.transport.simulated.world import SimWorld


class Died(BaseException):
    """The rank's process is gone. No code of a rank may catch it."""


@dataclass(frozen=True)
class Die:
    """The process of `rank` ends just before or after its hop `hop` is launched. Hops count launched groups from 0."""

    rank: int
    hop: int
    after: bool = False


@dataclass(frozen=True)
class Stall:
    """Call `call` (from 0) of a binding's `function` does not return before `SimWorld.release`."""

    rank: int
    function: str
    call: int = 0


@dataclass(frozen=True)
class Answer:
    """Call `call` of `function` does nothing and returns, or raises, `status`."""

    rank: int
    function: str
    status: Status
    call: int = 0


Fault = Die | Stall | Answer


class Script:
    """Counts calls and hops, and lets the faults happen."""

    def __init__(self, world: SimWorld, faults: Sequence[Fault]) -> None:
        self._world, self._faults = world, faults
        self._calls: Counter[tuple[int, str]] = Counter()
        self._hops: Counter[int] = Counter()
        self._released: set[int] = set()

    def check_alive(self, rank: int) -> None:
        """Raise `Died` if the process of `rank` is gone."""
        if rank in self._world.dead:
            raise Died(f"rank {rank} died")

    def enter(self, rank: int, function: str) -> Status | None:
        """At each call, without the lock: what it must answer instead of working, None for nothing."""
        with self._world.changed:
            self.check_alive(rank)
            call = self._calls[rank, function]
            self._calls[rank, function] += 1
        for fault in self._faults:
            if isinstance(fault, Die) or (fault.rank, fault.function, fault.call) != (rank, function, call):
                continue
            if isinstance(fault, Answer):
                return fault.status
            self._stall(rank)
        return None

    def ending_group(self, rank: int) -> None:
        """Die before the hop that is about to be launched."""
        self._die_if(rank, Die(rank, self._hops[rank]))

    def launched(self, rank: int) -> None:
        """Count a hop that goes on its stream now."""
        self._hops[rank] += 1

    def leave(self, rank: int) -> None:
        """Die after the hop that was launched last."""
        self._die_if(rank, Die(rank, self._hops[rank] - 1, after=True))

    def release(self, rank: int) -> None:
        """End the stalls of `rank`, now and later."""
        with self._world.changed:
            self._released.add(rank)
            self._world.changed.notify_all()

    def _die_if(self, rank: int, death: Die) -> None:
        if death in self._faults:
            with self._world.changed:
                self._world.dead.add(rank)
                self._world.changed.notify_all()
            raise Died(f"rank {rank} died at hop {death.hop}")

    def _stall(self, rank: int) -> None:
        with self._world.changed:
            ended = self._world.changed.wait_for(
                lambda: rank in self._released or rank in self._world.dead, self._world.limit_s
            )
            self.check_alive(rank)
        if not ended:
            raise TimeoutError(f"rank {rank} was stalled and never released within {self._world.limit_s} s")


class MortalStore:
    """A rank's connection to a store, which ends with the rank: then every call raises `RuntimeError`, as torch's."""

    def __init__(self, world: SimWorld, rank: int, store: Any) -> None:
        self._world, self._rank, self._store = world, rank, store

    def clone(self) -> MortalStore:
        """Another connection of the same rank."""
        return MortalStore(self._world, self._rank, self._store.clone())

    def __getattr__(self, name: str) -> Any:
        if self._rank in self._world.dead:
            raise RuntimeError(f"rank {self._rank} died, and its connection to the store with it")
        return getattr(self._store, name)
