"""Heartbeats in the control store, the monitor that reads them, and failure attribution for gloo.

Each rank writes a counter and a status at an interval for as long as its process runs. A rank whose counter does not
change is stopped, stuck in a call that holds the interpreter, or gone; one whose counter changes is alive, and its
status says where it is. One that ended its heartbeat on purpose is neither. When a wait fails, every rank is checked:
the peer that a rank waits for may itself wait for another.
Guarantees: clocks of different machines are never compared.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ringattn.transport.control_store import Board

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


INTERVAL_S = 0.1
PER_RANK_S = 0.5e-3
"""Added to a round for each rank of the ring: one store serves them all."""


class Ear:
    """The other ranks as this one last heard of them."""

    def __init__(self, board: Board, status: Callable[[], str]) -> None:
        """`status` is what this rank's pulse says of it. Starts at once."""
        self.cause: str | None = None
        self.lost: str | None = None
        """Why the store cannot be read any more."""
        self.beats: dict[int, Beat] = {}
        self.closed: set[int] = set()
        self.wanted: set[int] = set()
        """Ranks to listen to besides the next one; replaced, never changed."""
        self._board = board
        self._pulse = Pulse(board.store, board.rank)
        self._next = {(board.rank + 1) % board.world_size} - {board.rank}
        self._beating = Beating(
            board.store, board.rank, INTERVAL_S + PER_RANK_S * board.world_size, status, self._round, self._lose
        )

    def stop(self) -> None:
        """End the pulse. Idempotent."""
        self._beating.stop()

    def _round(self) -> None:
        self.cause = self._board.cause()
        for rank in self.wanted | self._next:
            beat = self._pulse.heard(rank)
            if beat is not None:
                self.beats[rank] = beat
            if self._board.holds(f"closed/{rank}"):
                self.closed.add(rank)

    def _lose(self, error: RuntimeError) -> None:
        self.lost = str(error)


BEAT_S = 0.25
"""Seconds between two beats of a rank."""
LISTEN_S = 0.8
"""How long a pulse must stand still: three beats."""
# A rank publishes its cause just before its connections fall, except that gloo drops the pair of a timed-out wait by
# itself, before that rank has listened. So its neighbor looks for the cause this long.
CAUSE_S = LISTEN_S + 0.5
CAUSE_POLL_S = 0.02
HOST_LOST = "the store's host (rank 0) is gone"


class Diagnosis:
    """One rank's view of the others. Used by the thread that uses the transport."""

    def __init__(self, board: Board) -> None:
        """`board` is read, never written."""
        self._board = board
        self._ear = Pulse(board.store, board.rank)
        self._others = [rank for rank in board.everyone() if rank != board.rank]

    def of_deadline(self, waited_for: Sequence[int]) -> str:
        """After a missed deadline: the silent among all ranks, where the others of `waited_for` are, the first cause.

        Returns one line; listens for `LISTEN_S` unless every rank is heard before.
        """
        try:
            silent = self._ear.silent(self._others, LISTEN_S)
            found = self._silences(silent)
            found += [self._whereabouts(rank) for rank in waited_for if rank not in silent]
            cause = self._board.cause()
        except RuntimeError:
            return HOST_LOST
        return "; ".join([*found, *([cause] if cause else [])])

    def of_loss(self, peer: int, error: BaseException) -> str:
        """After the connection to `peer` was lost with `error`: the first cause, else who closed, else who is silent.

        Returns one line. A peer that lives and says nothing fell because of another, which then is the silent one.
        """
        until = time.monotonic() + CAUSE_S
        try:
            listening = Listening(self._ear, self._others)
            while time.monotonic() < until:
                # Asked in this order: a rank that fails publishes its cause before it ends.
                closed = self._board.holds(f"closed/{peer}")
                if cause := self._board.cause():
                    return cause
                if closed:
                    return f"rank {peer} closed its ring"
                time.sleep(CAUSE_POLL_S)
                listening.update()
            lost = f"rank {peer} {'is gone' if peer in listening.quiet else 'dropped its connection'} ({error})"
            return "; ".join([lost, *self._silences(sorted(listening.quiet))])
        except RuntimeError:
            return f"rank {peer} is gone, and {HOST_LOST}, so no first cause can be read"

    def _silences(self, silent: Iterable[int]) -> list[str]:
        heard = {rank: self._ear.heard(rank) for rank in silent}
        last = {rank: f"last heard in '{beat.status}'" if beat else "never heard" for rank, beat in heard.items()}
        return [f"rank {rank} is silent (stopped, stuck or gone), {words}" for rank, words in last.items()]

    def _whereabouts(self, rank: int) -> str:
        beat = self._ear.heard(rank)
        if beat is None or beat.count == ENDED:
            return f"rank {rank} has left its ring"
        return f"rank {rank} is alive in '{beat.status}'"
