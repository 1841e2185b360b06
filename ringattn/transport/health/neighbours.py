"""Datagrams between a rank and its two neighbours in rank order: a heartbeat that needs no store.

Each datagram has the nonce of the ring, the sender's heartbeat and the ranks that it knows to be silent or gone. What a
neighbour observes is passed on around the ring: what came from one side goes to the other side, and ends at the
rank that observed it.
Guarantees: JSON, never pickle; a datagram without the nonce, or of another form, is dropped; the socket is bound to the
address on the route to the store's host. Firewalls drop datagrams, so a neighbour that was never heard here is not
silent, and none of this counts while the store answers.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Mapping
from ipaddress import ip_address

import torch.distributed as dist

from ringattn.transport.addresses import Address, address_of_interface, find_address, reachable
from ringattn.transport.health.heard import Feed
from ringattn.transport.health.place import Beat

LARGEST_BYTES = 32768
MOST_OBSERVERS = 64
"""Observers whose reports one datagram passes on."""
Claims = dict[int, dict[int, str]]
"""By observer: the ranks that it knows to be gone or silent, and which of the two."""


class Neighbours(Feed[Beat]):
    """The heartbeats of the next and the previous rank, and what they report of others."""

    def __init__(self, rank: int, world_size: int, interface: str | None, silence_s: float) -> None:
        """`interface`: a network interface; empty: the one that routes to the store's host; None: no datagrams."""
        super().__init__(silence_s / 2)
        self._silence_s = silence_s
        self.before, self.after = (rank - 1) % world_size, (rank + 1) % world_size
        self.ranks = {self.before, self.after} - {rank}
        self._rank, self._interface = rank, interface
        self._claims: dict[int, Claims] = {}
        self._observed: Mapping[int, str] = {}
        self._nonce = ""
        self._socket: socket.socket | None = None
        self._mine: Address | None = None
        self._targets: dict[int, tuple[str, int]] = {}

    def meet(self, store: dist.Store) -> None:
        """One step towards knowing the neighbours' addresses. Called from the thread that owns `store`, until met."""
        if self._interface is None or self._targets or (self._mine is not None and not self._mine.own):
            return  # no datagrams, all known, or an address that this rank does not know
        if self._mine is None:
            self._nonce = store.compare_set("neighbours/nonce", "", secrets.token_hex(16)).decode()
            self._mine = find_address(store, self._interface)
            if self._interface:
                self._mine = self._mine._replace(own=address_of_interface(self._interface))
            store.set(f"neighbours/address/{self._rank}", self._mine.text().decode())
            if not self._mine.own:
                return
        ranks = sorted(self.ranks)
        if self._socket is None and store.check([f"neighbours/address/{rank}" for rank in ranks]):
            others = [Address.parse(store.get(f"neighbours/address/{rank}")) for rank in ranks]
            # Neighbours whose user named an interface do not know the address of the store's host.
            known = [self._mine, *(other for other in others if other.meeting)]
            self._bind(self._mine.own if self._interface else reachable(0, known).own)
            if self._socket is not None:
                store.set(f"neighbours/socket/{self._rank}", json.dumps(self._socket.getsockname()[:2]))
        if self._socket is not None and store.check([f"neighbours/socket/{rank}" for rank in ranks]):
            self._targets = {rank: tuple(json.loads(store.get(f"neighbours/socket/{rank}"))) for rank in ranks}

    def exchange(self, beat: Beat, observed: Mapping[int, str], now_s: float) -> None:
        """Send this rank's heartbeat with what it has `observed`, and read what has arrived. Never blocks."""
        self._observed = observed
        if not self._targets:
            return
        for rank, target in self._targets.items():
            # From the other side: with two ranks both sides are the same, and its own reports end there.
            passed_on = self._claims_of(self.before if rank == self.after else self.after, now_s)
            claims = {**dict(list(passed_on.items())[:MOST_OBSERVERS]), self._rank: dict(observed)}
            message = [self._nonce, self._rank, beat.text(), [[o, list(c.items())] for o, c in claims.items() if c]]
            try:
                self._socket.sendto(json.dumps(message).encode(), target)  # type: ignore[union-attr]
            except OSError:
                pass  # no route at the moment, or no room: the next one may arrive
        self._receive(now_s)

    def reported(self, how: str, now_s: float) -> set[int]:
        """The ranks that neighbours report to be `gone` or `silent`."""
        return {
            rank
            for sender in list(self._claims)
            for claim in self._claims_of(sender, now_s).values()
            for rank, state in claim.items()
            if state == how
        }

    def _claims_of(self, sender: int, now_s: float) -> Claims:
        """What a neighbour reports, as long as it is heard. What it reported before it failed is kept: it is why."""
        heard = self.heard.get(sender)
        if heard is None:
            return {}
        failed = heard.beat.left and not heard.beat.closed
        return self._claims.get(sender, {}) if failed or now_s - heard.first_s < self._silence_s else {}

    def close(self, last: Beat) -> None:
        """Send the last heartbeat, with what this rank observed last, and close the socket. Idempotent."""
        self.exchange(last, self._observed, 0.0)
        self._targets = {}
        if self._socket is not None:
            self._socket.close()

    def _bind(self, address: str) -> None:
        host = ip_address(address.partition("%")[0])
        made = socket.socket(socket.AF_INET6 if host.version == 6 else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            made.bind((address, 0))
            made.setblocking(False)
            self._socket = made
        except OSError:
            made.close()  # an address that is reachable but not this machine's own, for example behind a NAT

    def _receive(self, now_s: float) -> None:
        for rank, heard in list(self.heard.items()):
            self.note(rank, heard.beat, now_s)  # read again, and unchanged unless a datagram has arrived
        while True:
            try:
                data = self._socket.recv(LARGEST_BYTES)  # type: ignore[union-attr]
            except OSError:
                return  # nothing more, or an answer of ICMP that a port is closed
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
