"""Heartbeats in the control store, and the first cause that any rank has published.

One request is under way at a time. The thread of the connection runs it, so a store that does not answer holds up
nobody. Guarantee: at most three requests per round, whatever is read, once all ranks have sent a heartbeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch.distributed as dist

from ringattn.errors import RingError
from ringattn.transport.bounded_store import BoundedStore, Request, read_many
from ringattn.transport.control_store import CAUSE, ControlStore
from ringattn.transport.health.heard import Feed
from ringattn.transport.health.place import Beat

INTERVAL_S = 0.1
REQUESTS_PER_S = 4500.0
"""The request rate of a whole job's heartbeats. One store serves about ten thousand requests a second."""
SOON_S = 0.02
"""How long a round waits for its answer, which takes about a millisecond. A later one is taken in the next round."""
ANSWER_S = 0.8
"""A store that has not answered for this long is stopped or out of reach."""


def interval_s(job_size: int, requests: int = 2) -> float:
    """Seconds between two rounds of a rank, each of which makes `requests`, if `job_size` ranks share the store."""
    return max(INTERVAL_S, requests * job_size / REQUESTS_PER_S)


def silence_s(interval: float) -> float:
    """Seconds without a change after which a heartbeat sent every `interval` has stopped: two of them may be late."""
    return max(10 * INTERVAL_S, 2.2 * interval + 0.2)


def heartbeat_key(rank: int) -> str:
    """The key of a rank's heartbeat."""
    return f"heartbeat/{rank}"


class StoreFeed(Feed[Beat | None]):
    """The heartbeats that were read from the store; None for a rank that has not sent one."""

    def __init__(
        self, control: ControlStore, interval: float, also: Callable[[dist.Store], None] = lambda store: None
    ) -> None:
        """`control` is used by nothing else. `also` runs in each round, on the thread of the connection."""
        super().__init__(silence_s(interval) / 2)
        self.cause: str | None = None
        self.gone: str | None = None
        """Why the store cannot be read any more."""
        self.rounds = 0
        """Rounds that the store has answered."""
        self.interval_s = interval
        self._control, self._also, self._due_s = control, also, 0.0
        self._request: Request[tuple[bytes, dict[int, bytes | None]]] | None = None
        self._asked_s = 0.0
        self._begun: set[int] = set()

    @property
    def store(self) -> BoundedStore:
        """The connection of this feed."""
        return self._control.store

    @property
    def unanswered(self) -> str:
        """Why the store could not be read just now, with its host; empty if it answers."""
        host = self.store.host
        if self.gone is not None:
            return f"{host} is gone"
        late = self._request is not None and not self._request.done and time.monotonic() - self._asked_s >= ANSWER_S
        return f"{host} did not answer within {ANSWER_S:g} s (stopped, or out of reach)" if late else ""

    def advance(self, beat: Beat, ranks: Iterable[int], now_s: float, often: bool = False) -> None:
        """Take the last answer if it is there, and ask for the heartbeats of `ranks` when the next round is due.

        `often`: the next round is due in `INTERVAL_S`, also in a large job.
        """
        if self.gone is not None:
            return
        try:
            if self._request is not None and self._request.done:
                self._take(*self._request.result(), now_s)
            if self._request is None and now_s >= self._due_s:
                wanted, text = list(ranks), beat.text()
                self._asked_s, self._due_s = now_s, now_s + (INTERVAL_S if often else self.interval_s)
                self._request = self.store.begin(lambda store: self._round(store, text, wanted))
                if self._request.wait_shortly(SOON_S):
                    self._take(*self._request.result(), time.monotonic())
        except RuntimeError as error:
            self.gone, self._request = str(error), None

    def end(self, beat: Beat, patience_s: float) -> None:
        """Write the last heartbeat, which says that nothing is wrong with this rank. Never raises."""
        self.ask(lambda store: store.set(heartbeat_key(self._control.rank), beat.text()), patience_s)

    def ask(self, run: Callable[[dist.Store], object], patience_s: float) -> None:
        """Run a request behind the one that is under way. Never raises.

        Wait for it if the store answers. If it does not, the request is run when it answers again.
        """
        try:
            if self.gone is None:
                self.store.begin(run).wait_shortly(0.0 if self.unanswered else patience_s)
        except RingError:
            pass  # the connection was given up, or belongs to the parent of this process

    def _round(self, store: dist.Store, text: str, ranks: list[int]) -> tuple[bytes, dict[int, bytes | None]]:
        """On the thread of the connection: send this rank's heartbeat, then read the cause and those of `ranks`."""
        if not self.rounds:
            store.compare_set(CAUSE, "", "")  # the key exists from now on, empty as long as nothing has failed
        store.set(heartbeat_key(self._control.rank), text)
        with suppress(OSError, ValueError, TypeError):  # datagrams only add to what the store tells
            self._also(store)
        self._begun.update(_present(store, [rank for rank in ranks if rank not in self._begun]))
        begun = [rank for rank in ranks if rank in self._begun]
        cause, *texts = read_many(store, [CAUSE, *map(heartbeat_key, begun)])
        return cause, {**dict.fromkeys(ranks), **dict(zip(begun, texts, strict=True))}

    def _take(self, cause: bytes, texts: dict[int, bytes | None], now_s: float) -> None:
        self._request = None
        for rank, text in texts.items():
            self.note(rank, Beat.parse_or_none(text), now_s)
        self.cause = cause.decode() or None
        self.rounds += 1


def _present(store: dist.Store, ranks: list[int]) -> list[int]:
    """The ranks whose heartbeat is in the store: few requests if most are."""
    if not ranks or store.check([heartbeat_key(rank) for rank in ranks]):
        return ranks
    half = len(ranks) // 2
    return [*_present(store, ranks[:half]), *_present(store, ranks[half:])] if half else []
