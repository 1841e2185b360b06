"""One rank's health: its heartbeat, its observations of the other ranks, and which rank is at fault after a failure.

A thread runs a round every tenth of a second. It measures how late the round is, sends this rank's heartbeat, and reads
the feeds: the store (first cause, and heartbeats of the neighbours and of ranks that this rank waits for), shared
pages, and datagrams of the two neighbours.
Guarantees: the thread never waits long for the store. A rank that was itself stopped discards its earlier observations
and names no other rank. In an open ring every rank reads the first cause in each round. After a failure one rank reads
all heartbeats and the other ranks wait for the cause that it publishes, so the number of requests grows linearly with
the ranks. `explain` ends within `limit_s`, even if the store does not answer, or within `LOSS_S` more if a connection
to a living rank has broken.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, Protocol

from ringattn.transport.control_store import CAUSE, ControlStore, first_cause
from ringattn.transport.deadline import Deadline
from ringattn.transport.health.feeds import INTERVAL_S, Feed, Neighbours, StoreFeed, interval_s, silence_s
from ringattn.transport.health.verdict import ENDED, Beat, Evidence, Place, Waits, explain

END_S = 1.0
"""How long the end of the heartbeats may take. Writing the last one takes far less, unless the store's host hangs."""
PUBLISH_S = 0.5
"""How long a failing rank waits until its cause is in the store."""
SHARE_S = 0.6
"""How long an explanation may take in addition to `silence_s`, after which a silent rank counts as lost."""
SHORTEST_S = 1.6
LOSS_S = PUBLISH_S + 2 * INTERVAL_S
"""How much longer a rank waits for the cause of a living peer whose connection broke. A peer that reaches its deadline
closes its connections first, then explains the failure, which takes as long as it does here, and then publishes it."""
HELD_BACK_S = 5.0
"""The longest delay of heartbeats that is attributed to a link that loses packets."""
READ_AT_ONCE = 8
"""How many ranks' heartbeats one round reads in addition to the neighbours'. If more are needed, each round reads the
next group of them.
"""
LONG_ROUNDS = 10
"""A wait of more rounds than this reads the heartbeats of all ranks in turn, because any of them may be at fault."""
IN_TURN_UP_TO = 64
"""The largest ring in which every waiting rank reads all heartbeats, group by group. In a larger ring, the rounds that
this takes are too many to detect silence in time, so only the investigating rank reads all heartbeats.
"""


class Pages(Protocol):
    """The heartbeats of the ranks of this machine, in shared pages."""

    gone: set[int]
    """Ranks whose process has ended without closing the ring."""

    def exchange(self, beat: Beat) -> dict[int, Beat]:
        """Publish this rank's heartbeat, and return the newest heartbeat of each other rank.

        The heartbeat of a rank that has failed or closed has the count `ENDED`.
        """
        ...

    def first_cause(self) -> str | None:
        """Return the first cause of a failure that a rank of this machine has reported."""
        ...


class Health:
    """The health of one rank, for all its transports.

    Only one thread at a time may call `explain`. Any thread may call the other methods.
    """

    def __init__(self, control: ControlStore, *, job_size: int | None = None, interface: str | None = None) -> None:
        """Prepare to observe the ring. `attach` starts the heartbeats.

        `job_size`: the number of ranks that share the store; None: the ranks of this ring. `interface`: the network
        interface for datagrams to the neighbours; empty: the one on the route to the store's host. None: no datagrams,
        because shared pages connect the ranks.
        """
        self.rank, self.world_size = control.rank, control.world_size
        self.call = 0
        """The number of this rank's current call."""
        self.calls: Callable[[], Any] = lambda: None
        """A function that returns fields about this rank's calls, which each heartbeat reports to the peers."""
        self.closed = False
        """Whether this rank has closed its ring."""
        self.pages: Pages | None = None
        interval = interval_s(job_size or self.world_size)
        self.silence_s = silence_s(interval)
        self._neighbours = Neighbours(self.rank, self.world_size, interface, self.silence_s)
        # A ring of one rank has no peer to observe.
        connection = control.clone() if self.world_size > 1 else control
        self.store = StoreFeed(connection, interval, self._neighbours.meet)
        self._page_feed = Feed[Beat](self.silence_s / 2)
        self._users: dict[object, tuple[Callable[[], Place], Callable[[str], object]]] = {}
        self._count = ENDED
        self._here, self._rounds_here, self._turn = Place(), 0, 0
        self._claims: dict[str, int] = {}
        self._last_s = time.monotonic()
        self._stops: deque[tuple[float, float]] = deque(maxlen=16)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def limit_s(self) -> float:
        """The longest time that `explain` takes, except for the extra time after a lost connection."""
        return max(self.silence_s + SHARE_S, SHORTEST_S)

    @property
    def cause(self) -> str | None:
        """The first cause that any rank has published, as far as this rank has read."""
        return self.store.cause

    def attach(
        self, user: object, place: Callable[[], Place], on_cause: Callable[[str], object] = lambda cause: None
    ) -> None:
        """Add `user`, a transport of this rank, and start the heartbeats if it is the first.

        `place`: a function that returns what the rank is doing in this transport. `on_cause`: a function that the
        health thread calls once when a rank has published a cause.
        """
        self._users[user] = place, on_cause
        if self.world_size > 1 and self._thread is None and not self._stopped.is_set():
            self._last_s = time.monotonic()
            self._thread = threading.Thread(target=self._live, name=f"ringattn-health-{self.rank}", daemon=True)
            self._thread.start()

    def detach(self, user: object, patience_s: float = END_S) -> None:
        """Remove `user`, a transport that has ended. After the last one, end the heartbeats on purpose. Idempotent."""
        last = Beat(ENDED, self.place(), self.closed)
        if self._users.pop(user, None) is None or self._users:
            return
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(patience_s)
            self.store.end(last, patience_s)
        self._neighbours.close(last)

    def publish(self, error: BaseException) -> None:
        """Publish why this rank fails unless another rank was first. Never raises, and never waits long."""
        text = first_cause(self.rank, error)
        self.store.call(lambda store: store.compare_set(CAUSE, "", text), PUBLISH_S)

    def place(self) -> Place:
        """Return what this rank is doing, in the first of its transports that waits for something.

        If no transport waits, describe the last transport. If all transports have ended, return the last known `Place`.
        """
        places = [place() for place, _ in list(self._users.values())] or [self._here]
        return next((place for place in places if place.waits is not Waits.HOST), places[-1])

    def beats(self) -> dict[int, Beat]:
        """Return the newest heartbeat of each rank, from all feeds. A rank's last heartbeat counts as its newest."""
        newest: dict[int, Beat] = {}
        feeds: list[Feed[Any]] = [self.store, self._page_feed, self._neighbours]
        for feed in feeds:
            for rank, heard in list(feed.heard.items()):
                beat, current = heard.beat, newest.get(rank)
                if beat is not None and (current is None or (beat.left, beat.count) > (current.left, current.count)):
                    newest[rank] = beat
        return newest

    def left(self) -> set[int]:
        """Return the ranks whose heartbeat says that they have closed the ring or ended their heartbeats on purpose."""
        return {rank for rank, beat in self.beats().items() if beat.left}

    def silent(self, at_least_s: float = 0.0) -> set[int]:
        """Return the ranks whose heartbeat has stopped for at least the longer of `silence_s` and `at_least_s`."""
        limit_s, now_s = max(self.silence_s, at_least_s), time.monotonic()
        silent = self._page_feed.unchanged(limit_s, now_s - self.silence_s)
        if not self.store.unanswered:
            silent |= self.store.unchanged(limit_s, now_s - self.silence_s)
        else:
            silent |= self._neighbours.unchanged(limit_s, now_s - self.silence_s)
            silent |= self._neighbours.reported("silent", now_s)
        return silent - self._alive(now_s - self.silence_s) - self.gone() - self.left() - {self.rank}

    def gone(self) -> set[int]:
        """Return the ranks whose process has ended, as this machine's pages show or neighbours report."""
        local = set(self.pages.gone) if self.pages is not None else set()
        return local | self._neighbours.reported("gone", time.monotonic())

    def stood_still_s(self, since_s: float, timeout_s: float) -> float:
        """Return for how long this rank itself was stopped after `since_s`, if for `silence_s` or longer; otherwise 0.

        A stop before `since_s` counts too if it lasted `timeout_s` or longer and ended less than `timeout_s` ago: it
        made the other ranks reach their deadline.
        """
        now_s, longest_s = time.monotonic(), 0.0
        for start_s, end_s in [*self._stops, *([(self._last_s, now_s)] if self._thread is not None else [])]:
            in_wait = end_s - max(start_s, since_s) >= self.silence_s
            if in_wait or (end_s - start_s >= timeout_s and now_s - end_s < timeout_s):
                longest_s = max(longest_s, end_s - start_s)
        return longest_s

    def explain(
        self,
        waited_for: Iterable[int] = (),
        *,
        waited_s: float = 0.0,
        timeout_s: float = math.inf,
        missing: Collection[int] = (),
        lost: tuple[int, str] | None = None,
        at_deadline: bool = True,
    ) -> str:
        """Return one line that names the ranks at fault after a failed wait, or says what the awaited ranks are doing.

        `waited_for`: the ranks that this rank waited for. `waited_s`: how long it waited. `timeout_s`: the longest time
        that any rank waits. `missing`, `lost`, `at_deadline`: see `Evidence`.
        """
        request = Evidence(
            self.rank,
            waited_for=frozenset(waited_for),
            missing=missing,
            lost=lost,
            at_deadline=at_deadline and lost is None,
        )
        began_s, deadline, rounds = time.monotonic(), Deadline(self.limit_s), self.store.rounds
        while True:
            seen = self._evidence(request, began_s, waited_s, timeout_s)
            # The investigating rank publishes its cause; a rank that waits for that cause reads it one round later.
            late_s = 0.0 if 1 in self._claims.values() else self.store.interval_s
            late_s += LOSS_S if lost is not None and not seen.store else 0.0
            if self._settled(seen, began_s, rounds) or deadline.plus(late_s).passed:
                return explain(seen)
            self._claim("loss" if lost else "deadline")
            time.sleep(INTERVAL_S / 2)

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _live(self) -> None:
        reported = False
        while True:
            self.round(time.monotonic())
            if self.cause is not None and not reported:
                reported = True
                for _, on_cause in list(self._users.values()):
                    on_cause(self.cause)
            if self._stopped.wait(INTERVAL_S):
                return

    def round(self, now_s: float) -> None:
        """Run one round of the health thread: send this rank's heartbeat and read the feeds."""
        if now_s - self._last_s >= self.silence_s / 2:
            self._stops.append((self._last_s, now_s))
        self._last_s = now_s
        place = self.place()
        self._rounds_here = self._rounds_here + 1 if place == self._here else 0
        self._here, self._count = place, self._count + 1
        beat = Beat(self._count, place, self.closed, self.calls())
        self.store.advance(beat, self._ranks_to_read(place), now_s, often=1 in self._claims.values())
        if self.pages is not None:
            for rank, page_beat in self.pages.exchange(beat).items():
                self._page_feed.note(rank, page_beat, now_s)
        # Report only this rank's own observations. The reports of other ranks are passed on unchanged.
        recent_s = now_s - self.silence_s
        silent = self._page_feed.unchanged(self.silence_s, recent_s)
        silent |= self._neighbours.unchanged(self.silence_s, recent_s)
        observed = dict.fromkeys(silent - self._alive(recent_s) - self.left(), "silent")
        if self.pages is not None:
            observed |= dict.fromkeys(self.pages.gone, "gone")
        self._neighbours.exchange(Beat(self._count, place, self.closed), observed, now_s)

    def _ranks_to_read(self, place: Place) -> list[int]:
        """Return the ranks whose heartbeats to read in this round: the neighbours, and ranks that this rank waits for.

        If this rank waits for many ranks, each round reads the next group of them. A rank that investigates a failure
        reads all ranks in each round.
        """
        peers = set(range(self.world_size)) - {self.rank}
        investigates = 1 in self._claims.values()
        waits = place.waits is not Waits.HOST
        long = self._rounds_here >= LONG_ROUNDS and self.world_size <= IN_TURN_UP_TO
        every = investigates or (waits and (place.peers is None or long))
        candidates = peers if every else self._neighbours.ranks | (place.peers or frozenset())
        self.store.keep(candidates)
        further = sorted(candidates - self._neighbours.ranks)
        first = self._turn * READ_AT_ONCE % max(len(further), 1)
        self._turn += 1
        chosen = further if investigates else [*further, *further][first : first + min(READ_AT_ONCE, len(further))]
        return [*sorted(self._neighbours.ranks), *chosen]

    # --- after a failure ---------------------------------------------------------------------------------------------

    def _claim(self, name: str) -> None:
        """Claim an investigation by its name. The first rank that claims it reads all heartbeats and publishes a cause.

        The other ranks wait for that cause. Ranks that lost a connection claim another name than ranks at a deadline,
        because they also wait for the cause that a rank at a deadline publishes.
        """
        if name not in self._claims:
            self._claims[name] = 0
            self.store.call(lambda store: self._claims.update({name: store.add(f"investigators/{name}", 1)}), 0.0)

    def _evidence(self, request: Evidence, began_s: float, waited_s: float, timeout_s: float) -> Evidence:
        """Return `request`, completed by what this rank knows now. `began_s`: when the explanation was requested."""
        # A slow link delays heartbeats. A rank whose heartbeat arrived shortly before the deadline is not at fault.
        quiet = self.silent()
        late = quiet - self.silent(min(waited_s / 2, HELD_BACK_S)) if request.at_deadline else set()
        late = {rank for rank in late if self._observed_since(rank) < began_s}
        beats = self.beats()
        return replace(
            request,
            stood_still_s=self.stood_still_s(began_s - waited_s, timeout_s),
            cause=self.cause or (self.pages.first_cause() if self.pages is not None else None),
            gone=self.gone(),
            silent=quiet - late,
            unheard=late,
            closed={rank for rank, beat in beats.items() if beat.closed},
            failed={rank for rank, beat in beats.items() if beat.left and not beat.closed},
            places={**{rank: beat.place for rank, beat in beats.items()}, self.rank: self.place()},
            store=self.store.unanswered,
        )

    def _settled(self, seen: Evidence, began_s: float, rounds: int) -> bool:
        """Return whether waiting longer would not change the explanation.

        `seen`: the evidence so far. `began_s`, `rounds`: the time, and the number of rounds that the store had
        answered, when the explanation was requested.
        """
        if seen.stood_still_s:
            return bool(seen.store) or self.store.rounds > rounds + 1  # a cause published meanwhile has been read
        if seen.cause:
            return True
        at_fault = {*seen.gone, *seen.silent}
        if seen.lost is not None:
            # A rank publishes its cause just before its connections close, unless it was killed. A round that begins
            # after that reads the cause. If such a round read none and the peer's heartbeat has stopped, it was killed.
            has_read = bool(seen.store) or self.store.rounds > rounds + 1
            return seen.lost[0] in seen.closed or (seen.lost[0] in at_fault and has_read)
        if at_fault:
            return True
        peers = set(range(self.world_size)) - {self.rank}
        heard = self._alive(began_s) | self.left()
        # Only one rank reads all heartbeats in the store. The pages show the heartbeats of a machine to all its ranks.
        return peers <= heard and (1 in self._claims.values() or peers <= self._page_feed.heard.keys())

    def _observed_since(self, rank: int) -> float:
        heard = self.store.heard.get(rank) or self._page_feed.heard.get(rank)
        return heard.first_s if heard is not None else time.monotonic()

    def _alive(self, since_s: float) -> set[int]:
        """Return the ranks from which any feed has received a new heartbeat since `since_s`."""
        return self.store.new(since_s) | self._page_feed.new(since_s) | self._neighbours.new(since_s)
