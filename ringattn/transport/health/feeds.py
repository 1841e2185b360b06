"""Heartbeats of other ranks as this rank reads them: from the control store, and in datagrams of its two neighbours.

A rank counts as silent only if this rank itself has read that its heartbeat stopped. Time during which a feed did not
answer, or this rank was itself stopped, does not count.

The store: one request is in progress at a time. The connection's thread runs it, so a store that does not answer blocks
no other thread. Guarantee: once all ranks have sent a heartbeat, a round makes at most three requests.

Datagrams: each has the nonce of the ring, the sender's heartbeat, and the ranks that the sender knows to be silent or
gone. Reports are passed around the ring: a rank sends the reports from one neighbour on to the other neighbour, until
they reach the rank that made them. Guarantees: the format is JSON, never pickle. A datagram that lacks the nonce or has
another form is dropped. The socket is bound to the address on the route to the store's host. Firewalls may drop
datagrams, so a neighbour whose datagrams never arrived is not silent, and while the store answers, a neighbour is not
called silent because of datagrams.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Generic, TypeVar

import torch.distributed as dist

from ringattn.errors import RingError
from ringattn.transport.control_store import CAUSE, ControlStore, missing_ranks, read_many
from ringattn.transport.deadline import Request
from ringattn.transport.health.verdict import Beat
from ringattn.transport.location import Address, address_of_interface, find_address, reachable

T = TypeVar("T")


@dataclass
class Heard(Generic[T]):
    """The newest heartbeat of a rank, and when it was read first and last, on this process's monotonic clock."""

    beat: T
    first_s: float
    last_s: float
    changed: bool = False
    """Whether an older heartbeat of this rank was read before, so that `first_s` is the time of a new one."""


class Feed(Generic[T]):
    """The heartbeats of one source. The health thread writes a feed; any thread may read it."""

    def __init__(self, gap_s: float) -> None:
        """Ignore a rank's earlier readings after a gap of more than `gap_s` between two readings."""
        self._gap_s = gap_s
        self.heard: dict[int, Heard[T]] = {}

    def note(self, rank: int, beat: T, now_s: float) -> None:
        """Record that the newest heartbeat of `rank` is `beat`."""
        before = self.heard.get(rank)
        if before is None or before.beat != beat or now_s - before.last_s > self._gap_s:
            self.heard[rank] = Heard(beat, now_s, now_s, before is not None and before.beat != beat)
        else:
            before.last_s = now_s

    def keep(self, ranks: Collection[int]) -> None:
        """Forget all ranks except `ranks`, which are still read: an old reading says nothing about the present."""
        for rank in self.heard.keys() - set(ranks):
            del self.heard[rank]

    def unchanged(self, at_least_s: float, since_s: float) -> set[int]:
        """Return the ranks whose heartbeat has not changed for `at_least_s`, of those read since `since_s`."""
        return {
            rank
            for rank, heard in list(self.heard.items())
            if heard.last_s - heard.first_s >= at_least_s and heard.last_s >= since_s
        }

    def new(self, since_s: float) -> set[int]:
        """Return the ranks from which a new heartbeat has been read since `since_s`."""
        return {rank for rank, heard in list(self.heard.items()) if heard.changed and heard.first_s >= since_s}


# --- the control store -----------------------------------------------------------------------------------------------


INTERVAL_S = 0.1
REQUESTS_PER_S = 4500.0
"""The request rate of a whole job's heartbeats. One store handles about ten thousand requests a second."""
SOON_S = 0.02
"""How long a round waits for its answer, which takes about a millisecond. A later answer is read in the next round."""
ANSWER_S = 0.8
"""A store that has not answered for this long is stopped or out of reach."""


def interval_s(job_size: int, requests: int = 2) -> float:
    """Return the seconds between two rounds of a rank that makes `requests` requests in each round.

    `job_size`: the number of ranks that share the store, which together must not exceed `REQUESTS_PER_S`.
    """
    return max(INTERVAL_S, requests * job_size / REQUESTS_PER_S)


def silence_s(interval: float) -> float:
    """Return for how many seconds a heartbeat may stay the same before its rank counts as silent.

    A heartbeat is sent every `interval` seconds, and two heartbeats may be late.
    """
    return max(10 * INTERVAL_S, 2.2 * interval + 0.2)


def heartbeat_key(rank: int) -> str:
    """Return the store's key of a rank's heartbeat."""
    return f"heartbeat/{rank}"


class StoreFeed(Feed[Beat | None]):
    """Heartbeats read from the store; None for a rank that has not sent one."""

    def __init__(
        self, control: ControlStore, interval: float, also: Callable[[dist.Store], None] = lambda store: None
    ) -> None:
        """Read through `control`, which nothing else may use, every `interval` seconds.

        `also` runs in each round, on the connection's thread.
        """
        super().__init__(silence_s(interval) / 2)
        self.cause: str | None = None
        self.gone: str | None = None
        """Why the store cannot be read any more."""
        self.rounds = 0
        """The number of rounds that the store has answered."""
        self.interval_s = interval
        self._control, self._also, self._due_s = control, also, 0.0
        self._request: Request[tuple[bytes, dict[int, bytes | None]]] | None = None
        self._asked_s = 0.0
        self._begun: set[int] = set()

    @property
    def unanswered(self) -> str:
        """A text that names the store's host and says why the store cannot be read now; empty if it answers."""
        host = self._control.host
        if self.gone is not None:
            return f"{host} is gone"
        late = self._request is not None and not self._request.done and time.monotonic() - self._asked_s >= ANSWER_S
        return f"{host} did not answer within {ANSWER_S:g} s (stopped, or out of reach)" if late else ""

    def advance(self, beat: Beat, ranks: Iterable[int], now_s: float, often: bool = False) -> None:
        """Read the last answer if it is available, and request the heartbeats of `ranks` when the next round is due.

        `often`: the next round is due in `INTERVAL_S`, even in a large job.
        """
        if self.gone is not None:
            return
        try:
            if self._request is not None and self._request.done:
                self._take(*self._request.result(), now_s)
            if self._request is None and now_s >= self._due_s:
                requested, text = list(ranks), beat.text()
                self._asked_s, self._due_s = now_s, now_s + (INTERVAL_S if often else self.interval_s)
                self._request = self._control.begin(lambda store: self._round(store, text, requested))
                if self._request.wait_shortly(SOON_S):
                    self._take(*self._request.result(), time.monotonic())
        except RuntimeError as error:
            self.gone, self._request = str(error), None

    def end(self, beat: Beat, patience_s: float) -> None:
        """Write this rank's last heartbeat, which says that the rank ends on purpose. Never raises."""
        self.call(lambda store: store.set(heartbeat_key(self._control.rank), beat.text()), patience_s)

    def call(self, run: Callable[[dist.Store], object], patience_s: float) -> None:
        """Run `run(store)` on the connection's thread, after the request in progress. Never raises.

        If the store answers, wait up to `patience_s` for the result. If not, do not wait; `run` is called once the
        store answers again.
        """
        try:
            if self.gone is None:
                self._control.begin(run).wait_shortly(0.0 if self.unanswered else patience_s)
        except RingError:
            pass  # the connection was abandoned, or belongs to the parent of this process

    def _round(self, store: dist.Store, text: str, ranks: list[int]) -> tuple[bytes, dict[int, bytes | None]]:
        """Send this rank's heartbeat, then return the cause and the heartbeats of `ranks`.

        Runs on the connection's thread.
        """
        if not self.rounds:
            store.compare_set(CAUSE, "", "")  # from now on the key exists; it is empty while nothing has failed
        store.set(heartbeat_key(self._control.rank), text)
        with suppress(OSError, ValueError, TypeError):  # datagrams are optional: the store has the same heartbeats
            self._also(store)
        unread = [rank for rank in ranks if rank not in self._begun]
        self._begun.update(set(unread) - set(missing_ranks(store.check, unread, heartbeat_key)))
        begun = [rank for rank in ranks if rank in self._begun]
        cause, *texts = read_many(store, [CAUSE, *map(heartbeat_key, begun)])
        return cause, {**dict.fromkeys(ranks), **dict(zip(begun, texts, strict=True))}

    def _take(self, cause: bytes, texts: dict[int, bytes | None], now_s: float) -> None:
        self._request = None
        for rank, text in texts.items():
            self.note(rank, Beat.parse_or_none(text), now_s)
        self.cause = cause.decode() or None
        self.rounds += 1


# --- datagrams of the neighbours -------------------------------------------------------------------------------------


LARGEST_BYTES = 32768
MOST_OBSERVERS = 64
"""The most observers whose reports one datagram passes on."""
Claims = dict[int, dict[int, str]]
"""For each observer, the ranks that it knows to be `gone` or `silent`, each with that word."""


class Neighbours(Feed[Beat]):
    """The heartbeats of the next and the previous rank, and their reports about other ranks."""

    def __init__(self, rank: int, world_size: int, interface: str | None, silence_s: float) -> None:
        """Create the feed.

        `interface`: the network interface for datagrams; empty for that on the route to the store's host, None for no
        datagrams. `silence_s`: the time without a new heartbeat after which a rank counts as silent.
        """
        super().__init__(silence_s / 2)
        self._silence_s = silence_s
        self.before, self.after = (rank - 1) % world_size, (rank + 1) % world_size
        self.ranks = {self.before, self.after} - {rank}
        self._rank, self._interface = rank, interface
        self._claims: dict[int, Claims] = {}
        self._observed: Mapping[int, str] = {}
        self._nonce = ""
        self._socket: socket.socket | None = None
        self._address: Address | None = None
        self._targets: dict[int, tuple[str, int]] = {}

    def meet(self, store: dist.Store) -> None:
        """Find out the neighbours' addresses, one step per call. The thread that owns `store` calls it every round."""
        if self._interface is None or self._targets or (self._address is not None and not self._address.own):
            return  # no datagrams are wanted, all addresses are known, or this rank's own address is unknown
        if self._address is None:
            self._nonce = store.compare_set("neighbours/nonce", "", secrets.token_hex(16)).decode()
            self._address = find_address(store, self._interface)
            if self._interface:
                self._address = self._address._replace(own=address_of_interface(self._interface))
            store.set(f"neighbours/address/{self._rank}", self._address.text().decode())
            if not self._address.own:
                return
        ranks = sorted(self.ranks)
        if self._socket is None and store.check([f"neighbours/address/{rank}" for rank in ranks]):
            addresses = [Address.parse(store.get(f"neighbours/address/{rank}")) for rank in ranks]
            # A neighbour whose user named an interface does not report the address of the store's host.
            candidates = [self._address, *(address for address in addresses if address.meeting)]
            self._bind(self._address.own if self._interface else reachable(0, candidates).own)
            if self._socket is not None:
                store.set(f"neighbours/socket/{self._rank}", json.dumps(self._socket.getsockname()[:2]))
        if self._socket is not None and store.check([f"neighbours/socket/{rank}" for rank in ranks]):
            self._targets = {rank: tuple(json.loads(store.get(f"neighbours/socket/{rank}"))) for rank in ranks}

    def exchange(self, beat: Beat, observed: Mapping[int, str], now_s: float) -> None:
        """Send this rank's heartbeat with its observations, and read what has arrived. Never blocks."""
        self._observed = observed
        if not self._targets:
            return
        for rank, target in self._targets.items():
            # Pass on the other neighbour's reports. With two ranks there is only one, which gets its own reports back.
            passed_on = self._claims_of(self.before if rank == self.after else self.after, now_s)
            claims = {**dict(list(passed_on.items())[:MOST_OBSERVERS]), self._rank: dict(observed)}
            message = [self._nonce, self._rank, beat.text(), [[o, list(c.items())] for o, c in claims.items() if c]]
            try:
                self._socket.sendto(json.dumps(message).encode(), target)  # type: ignore[union-attr]
            except OSError:
                pass  # there is no route at the moment, or no buffer space; a later datagram may arrive
        self._receive(now_s)

    def reported(self, state: str, now_s: float) -> set[int]:
        """Return the ranks that neighbours report as `gone` or `silent`."""
        return {
            rank
            for sender in list(self._claims)
            for claim in self._claims_of(sender, now_s).values()
            for rank, reported_state in claim.items()
            if reported_state == state
        }

    def _claims_of(self, sender: int, now_s: float) -> Claims:
        """Return a neighbour's reports if it is alive, or if it has failed: its reports may then explain why."""
        heard = self.heard.get(sender)
        if heard is None:
            return {}
        failed = heard.beat.left and not heard.beat.closed
        return self._claims.get(sender, {}) if failed or now_s - heard.first_s < self._silence_s else {}

    def close(self, last: Beat) -> None:
        """Send the last heartbeat with this rank's last observations, and close the socket. Idempotent."""
        self.exchange(last, self._observed, 0.0)
        self._targets = {}
        if self._socket is not None:
            self._socket.close()

    def _bind(self, address: str) -> None:
        host = ip_address(address.partition("%")[0])
        bound = socket.socket(socket.AF_INET6 if host.version == 6 else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            bound.bind((address, 0))
            bound.setblocking(False)
            self._socket = bound
        except OSError:
            bound.close()  # the address is reachable but not this machine's own, for example behind a NAT

    def _receive(self, now_s: float) -> None:
        for rank, heard in list(self.heard.items()):
            self.note(rank, heard.beat, now_s)  # note it again as unchanged, unless a datagram has arrived
        while True:
            try:
                data = self._socket.recv(LARGEST_BYTES)  # type: ignore[union-attr]
            except OSError:
                return  # nothing more has arrived, or ICMP reports a closed port
            try:
                nonce, sender, beat, claims = json.loads(data)
                if nonce != self._nonce or sender not in self.ranks:
                    continue
                parsed = Beat.parse(beat)
                received = {int(o): {int(rank): str(how)[:16] for rank, how in claim} for o, claim in claims}
            except (ValueError, TypeError, RecursionError):
                continue
            newest = self.heard.get(sender)
            if newest is None or parsed.count > newest.beat.count or parsed.left:
                self.note(sender, parsed, now_s)
                self._claims[sender] = received
