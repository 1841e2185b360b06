"""Signs of life in a store: each rank's pulse counts up for as long as its process runs.

A rank whose pulse stands still while others listen is stopped, stuck in a call that holds the interpreter, or gone;
one whose pulse goes on is alive, and its status says where it is. One that ended its pulse on purpose is neither.
Guarantees: clocks of different machines are never compared.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist

ENDED = 0
POLL_S = 0.05
END_S = 1.0
"""How long the thread may take to end: a beat takes far less, unless the store's host stands still."""


@dataclass(frozen=True)
class Beat:
    """What was last heard of a rank. `count` is `ENDED` once it ended its pulse on purpose."""

    count: int
    status: str


class Pulse:
    """One rank's pulse and ear. Uses `store` from one thread at a time; give each thread a clone of its own."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._count = ENDED

    def beat(self, status: str) -> None:
        """Say that this rank lives. Raises `RuntimeError` when the store's host is gone."""
        self._count += 1
        self._store.set(f"pulse/{self._rank}", f"{self._count} {status}")

    def end(self, status: str) -> None:
        """Say that this rank beats no more and that nothing is wrong with it. Raises as `beat` does."""
        self._store.set(f"pulse/{self._rank}", f"{ENDED} {status}")

    def heard(self, rank: int) -> Beat | None:
        """The last beat of `rank`, None before its first. Raises `RuntimeError` when the store's host is gone."""
        if not self._store.check([f"pulse/{rank}"]):
            return None
        count, _, status = self._store.get(f"pulse/{rank}").decode().partition(" ")
        return Beat(int(count), status)

    def silent(self, ranks: Iterable[int], listen_s: float) -> list[int]:
        """Those of `ranks` whose pulse stands still for `listen_s`, which must be a few intervals of theirs."""
        listening = Listening(self, ranks)
        until = time.monotonic() + listen_s
        while listening.quiet and time.monotonic() < until:
            time.sleep(min(POLL_S, listen_s))
            listening.update()
        return sorted(listening.quiet)


class Listening:
    """Which of some ranks have given no sign since it began: `quiet` holds them, and shrinks with every `update`."""

    def __init__(self, ear: Pulse, ranks: Iterable[int]) -> None:
        """Raises `RuntimeError` when the store's host is gone, and so does `update`."""
        self._ear = ear
        self._before = {rank: ear.heard(rank) for rank in ranks}
        self.quiet = {rank for rank, beat in self._before.items() if beat is None or beat.count != ENDED}

    def update(self) -> None:
        """Take out the ranks that have beaten, or ended their pulse, since."""
        self.quiet -= {rank for rank in self.quiet if self._ear.heard(rank) != self._before[rank]}


class Beating:
    """A daemon thread that beats every `interval_s` with whatever `status()` says, until `stop`.

    It calls `then()` after each beat, and `lost(error)` once when the store's host is gone.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        interval_s: float,
        status: Callable[[], str],
        then: Callable[[], None] = lambda: None,
        lost: Callable[[RuntimeError], None] = lambda error: None,
    ) -> None:
        self._pulse = Pulse(store, rank)
        self._interval_s = interval_s
        self._status, self._then, self._lost = status, then, lost
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"ringattn-pulse-{rank}", daemon=True)
        self._thread.start()
        # A thread inside a store call while the interpreter ends can take the whole process down.
        atexit.register(self._halt)

    def stop(self) -> None:
        """End the pulse on purpose; returns when the thread has ended or its store does not answer. Idempotent."""
        if self._stopped.is_set():
            return
        self._halt()
        if not self._thread.is_alive():
            try:
                self._pulse.end(self._status())
            except RuntimeError:
                pass  # the store's host is gone: nobody can hear
        atexit.unregister(self._halt)

    def _halt(self) -> None:
        """End the thread without a word: whoever only leaves the process is heard as silent."""
        self._stopped.set()
        self._thread.join(END_S)

    def _live(self) -> None:
        try:
            while not self._stopped.is_set():
                self._pulse.beat(self._status())
                self._then()
                self._stopped.wait(self._interval_s)
        except RuntimeError as error:
            self._lost(error)  # the store's host is gone: nobody can hear
