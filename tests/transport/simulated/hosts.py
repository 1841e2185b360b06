"""The host threads of all ranks: how they run, how they wait, and when waiting is in vain.

Guarantees: a wait ends when it is satisfied, when its rank dies, when nothing can move any more, or at the limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from tests.transport.simulated.entries import Entry
from tests.transport.simulated.faults import Died

Result = TypeVar("Result")


class Deadlock(AssertionError):
    """Nothing can move, or a wait reached the world's limit."""


class Waiter(NamedTuple):
    """A blocked thread. `ready`: whether it may go on; `needs`: the entries that it waits for."""

    rank: int
    what: str
    ready: Callable[[], bool]
    needs: Callable[[], Iterable[Entry]]


class Hosts:
    """Threads of `world_size` ranks under the one lock `changed`.

    `settle` moves what a waiter needs, `report` says who waits for whom. `supervised`: somebody else may still abort
    when all ranks wait; without it that is a `Deadlock` at once.
    """

    def __init__(
        self,
        world_size: int,
        limit_s: float,
        supervised: bool,
        dead: set[int],
        settle: Callable[[Iterable[Entry]], None],
        report: Callable[[], str],
    ) -> None:
        self.changed = threading.Condition()
        self.waiters: list[Waiter] = []
        self._world_size, self._limit_s, self._supervised = world_size, limit_s, supervised
        self._dead, self._settle, self._report = dead, settle, report
        self._left: set[int] = set()
        self._verdict = ""

    def run(self, function: Callable[[int], Result]) -> list[Result | None]:
        """`function(rank)` on a thread per rank; the results by rank, None for a rank that died.

        Re-raises the first error. `Deadlock` when a thread never ends.
        """
        results: list[Result | None] = [None] * self._world_size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except Died:
                pass
            except BaseException as error:
                errors.append(error)
            finally:
                with self.changed:
                    self._left.add(rank)
                    self.changed.notify_all()

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self._world_size)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 2 * self._limit_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if errors:
            raise errors[0]
        if any(thread.is_alive() for thread in threads):
            raise Deadlock(self._report())
        return results

    def block(self, waiter: Waiter) -> None:
        """Hold the calling thread until it is ready. Raises `Deadlock`, and `Died` when the rank dies meanwhile."""
        until = time.monotonic() + self._limit_s
        with self.changed:
            self.waiters.append(waiter)
            try:
                while True:
                    self._settle(waiter.needs())
                    if waiter.ready():
                        return
                    if waiter.rank in self._dead:
                        raise Died(f"rank {waiter.rank} died")
                    if self._hopeless():
                        raise Deadlock(self._verdict)
                    if (left_s := until - time.monotonic()) <= 0:
                        raise Deadlock(
                            f"rank {waiter.rank}: {waiter.what}: not within {self._limit_s} s\n{self._report()}"
                        )
                    self.changed.wait(left_s)
            finally:
                self.waiters.remove(waiter)

    def _hopeless(self) -> bool:
        """Whether every rank waits in vain; once said, it is said to all."""
        if self._verdict or self._supervised:
            return bool(self._verdict)
        for waiter in list(self.waiters):
            self._settle(waiter.needs())
        stuck = {waiter.rank for waiter in self.waiters} | self._left | self._dead
        if len(stuck) < self._world_size or any(waiter.ready() for waiter in self.waiters):
            return False
        self._verdict = f"nothing can move\n{self._report()}"
        self.changed.notify_all()
        return True
