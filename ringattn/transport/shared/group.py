"""The ranks of a ring on one machine, connected by shared pages: waits, failures, heartbeats and all-gathers.

Ranks are numbered within the whole ring. Some ranks of the ring may be on other machines, in other groups.

Guarantees: opening succeeds on all ranks, or all ranks raise the same message, which names the step that failed. Every
wait has a deadline. Every rank reports the first cause of a failure, and every rank can read that cause before the
failed rank releases its buffers. Only stopped or dead ranks are named at fault. After opening, the store is only read
for a first cause from another machine or job, so a ring keeps running without the store.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ringattn.errors import DeadlineError, DisagreementError, PeerLostError, RingError, TransportError, UnsupportedError
from ringattn.transport.base import Opening
from ringattn.transport.control_store import first_cause
from ringattn.transport.health.verdict import ENDED, Beat, Place
from ringattn.transport.shared import page as pages
from ringattn.transport.shared.page import (
    ALARM,
    BEAT,
    BELL,
    CLOSED,
    GATHER_BYTES,
    GATHERED,
    POISON,
    Header,
    Page,
    Segment,
    pause,
    wake,
)

# --- file descriptors, and detection of dead processes ---------------------------------------------------------------


NAME = "\0ringattn-"
GREETING = struct.Struct("<8s16sI")  # magic, the listener's nonce, the caller's rank
GREETING_WORDS = b"ringatt1"
CREDENTIALS = struct.Struct("<iII")  # pid, uid, gid of SO_PEERCRED
ARENA = struct.Struct("<Q")
NUMBER = struct.Struct("i")
PAGE_ARENA = 0
FOUND, GONE = b"found", b"gone"
POLL_MS = 20
BACKLOG = 4096


class Descriptor(Protocol):
    """An object that owns an open file descriptor, which other ranks can fetch as long as the object lives."""

    fd: int | None


class Service:
    """One rank's listener and connections, over which processes of one user pass file descriptors to each other.

    Every rank listens on an abstract socket with a random name, and keeps one connection to each other rank. Over this
    connection it fetches the other rank's page and, later, that rank's arenas. A connection that hangs up shows that
    the other process has ended. `round` runs in one thread, `connect` and `pull` in another.
    Guarantees: a process of another user, or one without the ring's nonce, is refused. No call waits without a
    deadline. A forked process closes its copies of the sockets, so it cannot be taken for its parent.
    """

    def __init__(self, rank: int) -> None:
        """Start to listen for connections. Raises `OSError`."""
        self.rank = rank
        self.name, self.nonce = secrets.token_hex(8), secrets.token_bytes(16)
        self._shared: weakref.WeakValueDictionary[int, Descriptor] = weakref.WeakValueDictionary()
        self._next_arena = PAGE_ARENA
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._served: dict[int, socket.socket] = {}
        self._greeted: set[int] = set()
        self._peers: dict[int, socket.socket] = {}
        self._hung_up: set[int] = set()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False
        _open.add(self)
        try:
            self._listener.bind(NAME + self.name)
            self._listener.listen(BACKLOG)
            self._listener.setblocking(False)
        except OSError:
            self.close()
            raise

    def share(self, owner: Descriptor) -> int:
        """Let other ranks fetch the owner's descriptor while the owner lives; return its arena number.

        A rank shares its page first, so the page is arena 0.
        """
        arena = self._next_arena
        self._next_arena += 1
        self._shared[arena] = owner
        return arena

    def connect(self, rank: int, name: str, nonce: bytes, until: float) -> None:
        """Connect to another rank's listener. Raises `OSError`, `TransportError`."""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            peer.settimeout(max(until - time.monotonic(), 1e-3))
            peer.connect(NAME + name)
            if _user_of(peer) != os.getuid():
                raise TransportError(f"rank {rank}'s socket belongs to user {_user_of(peer)}, not to {os.getuid()}")
            peer.send(GREETING.pack(GREETING_WORDS, nonce, self.rank))
            peer.setblocking(False)
        except BaseException:
            peer.close()
            raise
        self._peers[rank] = peer

    def pull(self, rank: int, arena: int, until: float, check: Callable[[], None] = lambda: None) -> int:
        """Fetch the descriptor of another rank's arena. The caller then owns the descriptor.

        `check` is called during the wait and may raise. Raises `OSError` if the rank has hung up, `PeerLostError` if it
        no longer shares that arena, and `DeadlineError` at `until`.
        """
        peer = self._peers[rank]
        peer.send(ARENA.pack(arena))
        while not _readable(peer):
            check()
            if time.monotonic() >= until:
                raise DeadlineError(f"rank {rank} did not send its arena {arena} in time")
        # `recv_fds` ignores its flags (Python 3.11), so the descriptor would survive an exec. Call `recvmsg` instead.
        reply, extras, _, _ = peer.recvmsg(len(FOUND), socket.CMSG_SPACE(NUMBER.size), socket.MSG_CMSG_CLOEXEC)
        if reply == GONE:
            raise PeerLostError(f"rank {rank} no longer shares its arena {arena}")
        if reply != FOUND or not extras:
            raise ConnectionResetError(f"rank {rank} hung up")
        return int(NUMBER.unpack(extras[0][2])[0])

    def round(self, wait_s: float) -> set[int]:
        """Wait up to `wait_s` for events, and handle them. Return the ranks that have hung up since the last call."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        for number in self._served:
            poll.register(number, select.POLLIN)
        watched = {peer.fileno(): rank for rank, peer in self._peers.copy().items() if rank not in self._hung_up}
        for number in watched:
            poll.register(number, 0)  # replies are for the other thread; a hang-up is reported in any case
        lost = set()
        for number, _ in poll.poll(wait_s * 1e3):
            if number == self._listener.fileno():
                self._accept()
            elif number in self._served:
                self._serve(number)
            elif number in watched:
                lost.add(watched[number])
        self._hung_up |= lost
        return lost

    def wake(self) -> None:
        """End the wait of a `round` that another thread is running."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close all connections. Idempotent; no `round` may be running."""
        if not self._closed:
            self._closed = True
            for end in (self._listener, *self._served.values(), *self._peers.values()):
                end.close()
            os.close(self._wake)
            _open.discard(self)

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except OSError:
            return  # the caller has already hung up
        caller.setblocking(False)
        if _user_of(caller) == os.getuid():
            self._served[caller.fileno()] = caller
        else:
            caller.close()

    def _serve(self, number: int) -> None:
        """Answer one request. Close the connection if the caller hung up or does not know this ring's nonce.

        `number`: the number of the connection's file descriptor.
        """
        caller = self._served[number]
        try:
            request = caller.recv(GREETING.size)
            if number in self._greeted and len(request) == ARENA.size:
                # Keep the owner alive while sending: its descriptor must not be closed and its number reused meanwhile.
                owner = self._shared.get(ARENA.unpack(request)[0])
                if owner is None or owner.fd is None:
                    caller.send(GONE)
                else:
                    socket.send_fds(caller, [FOUND], [owner.fd])
                return
            if len(request) == GREETING.size:
                magic, nonce, _ = GREETING.unpack(request)
                if magic == GREETING_WORDS and secrets.compare_digest(nonce, self.nonce):
                    self._greeted.add(number)
                    return
        except OSError:
            pass
        del self._served[number]
        self._greeted.discard(number)
        caller.close()


def _user_of(connection: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel recorded it when the connection was made."""
    return int(CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1])


def _readable(connection: socket.socket) -> bool:
    """Wait for at most `POLL_MS`. Return whether data has arrived or the other end has hung up."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(POLL_MS))


_open: weakref.WeakSet[Service] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the child's copies of all sockets: while these are open, no rank notices the parent's death."""
    for service in list(_open):
        service.close()


os.register_at_fork(after_in_child=_after_fork)


# --- the group -------------------------------------------------------------------------------------------------------


END_S = 2.0
ROUND_S = 0.1
"""How often the thread that sends descriptors checks whether the group has ended."""
LENGTH_BYTES = 8


class SharedGroup:
    """One rank's end of the group. Only one thread at a time may use it, but any may call `trouble` and `fail`."""

    def __init__(self, opening: Opening, pages: dict[int, Page], service: Service) -> None:
        """Create the group. `pages`: a page for each rank of the group, in rank order; pages may be replaced later."""
        self.opening, self.rank, self.world_size = opening, opening.rank, opening.world_size
        self.ranks, self.own_page, self.pages = tuple(pages), pages[self.rank], pages
        self.health = opening.health
        self.place: Callable[[], Place] = lambda: Place("opening")
        """Returns this rank's position, for its heartbeats."""
        self.gone: set[int] = set()
        """Ranks whose process ended without closing the ring."""
        self._service = service
        self._word_indices = [self.own_page.index(word, self.rank) for word in range(CLOSED + 1)]
        self._alarm, self._bell = self.own_page.index(ALARM), self.own_page.index(BELL)
        self._rings = itertools.count(1)
        self._turn = 0
        self._lock = threading.Lock()
        self._failed = self._left = False
        self.pid = os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def timeout_s(self) -> float:
        """The time limit of a wait."""
        return self.opening.timeout_s

    @classmethod
    def open(cls, opening: Opening, members: Sequence[int] | None = None) -> SharedGroup:
        """Connect all ranks. Every rank of the ring opens the group of its machine at the same time.

        `members`: the ranks of this machine, which form the group. None: all ranks.
        Raises `UnsupportedError` on all ranks of the ring if any rank fails, and `DeadlineError` that names the missing
        ranks.
        """
        rank, ranks = opening.rank, tuple(range(opening.world_size)) if members is None else tuple(members)
        service, own_page, problem, nonce = None, None, "", b""
        try:
            segment = Segment.create(f"page-{rank}", Page.size(len(ranks)))
            own_page = Page(segment, ranks)
            service = Service(rank)
            nonce = service.nonce
            service.share(segment)
            own_page.write_header(_header(rank, len(ranks), nonce))
        except (OSError, AttributeError, RingError) as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            name = service.name if service else ""
            offers = _gather(opening, "shared/offer", {"problem": problem, "name": name, "nonce": nonce.hex()})
            assert own_page is not None and service is not None
            return cls._connected(opening, ranks, own_page, service, offers)
        except BaseException:
            if service is not None:
                service.close()
            raise

    @classmethod
    def _connected(
        cls, opening: Opening, ranks: tuple[int, ...], own_page: Page, service: Service, offers: list[dict[str, str]]
    ) -> SharedGroup:
        """Map the pages of all ranks, and wait until every rank has done so.

        Until then, a word that a rank stores for a peer whose page it has not mapped does not reach that peer.
        """
        until = time.monotonic() + opening.until.left_s
        group = cls(opening, dict.fromkeys(ranks, own_page), service)
        group._start()
        try:
            problem = ""
            try:
                for peer in ranks:
                    if peer != opening.rank:
                        nonce = bytes.fromhex(offers[peer]["nonce"])
                        service.connect(peer, offers[peer]["name"], nonce, until)
                        group.pages[peer] = group._page_of(peer, nonce, until)
            except (OSError, RingError) as error:
                problem = f"the page of rank {peer}: {type(error).__name__}: {error}"
            _gather(opening, "shared/mapped", {"problem": problem})
        except BaseException:
            group.drop()
            raise
        return group

    # --- words -------------------------------------------------------------------------------------------------------

    def tell(self, rank: int, word: int, value: int) -> None:
        """Store this rank's word in the page of `rank`, after all earlier writes, and wake that rank."""
        self.pages[rank].words.store(self._word_indices[word], value)
        self.ring(rank)

    def ring(self, rank: int) -> None:
        """Ring the bell of `rank` after a change of its page, so that its wait checks its condition again."""
        page = self.pages[rank]
        # No two values of any ranks are equal, so a bell that has the same value has not been rung.
        page.words.store(self._bell, next(self._rings) * self.world_size + self.rank)
        wake(page.bell_address)

    # --- waits -------------------------------------------------------------------------------------------------------

    def hold(
        self, ready: Callable[[], bool], awaited: Callable[[], Iterable[int]], what: Callable[[], str], until: float
    ) -> None:
        """Wait until `ready()` is true. `ready` is called again whenever a word of this rank's page has changed.

        `awaited()`: the ranks that the wait depends on. `what()`: a description of the wait, for errors. Raises what
        `check` raises for the awaited ranks, and `DeadlineError` at `until`, a time on the monotonic clock.
        """
        words, began_s = self.own_page.words, time.monotonic()
        while True:
            # Read the bell before evaluating `ready`, so that a ring of the bell after this line ends the pause.
            seen = words.load(self._bell)
            if ready():
                return
            if words.load(self._alarm):
                try:
                    self.check(awaited(), what)
                except (PeerLostError, DisagreementError):
                    # Evaluate `ready` again: a word that arrived just before its sender closed is there now.
                    if ready():
                        return
                    raise
            if time.monotonic() >= until:
                raise self._late(what(), sorted(set(awaited())), began_s)
            pause(words, self._bell, self.own_page.bell_address, seen, until)

    def _late(self, where: str, ranks: list[int], began_s: float) -> DeadlineError:
        explanation = self.health.explain(ranks, waited_s=time.monotonic() - began_s)
        return DeadlineError(f"{where}: no answer from ranks {ranks} within {self.timeout_s:g} s; {explanation}")

    def check(self, awaited: Iterable[int] = (), what: Callable[[], str] | None = None) -> None:
        """Raise if any rank has failed, or if a rank in `awaited` is dead or has closed the ring.

        The error is `DisagreementError` if the first cause was one, otherwise `PeerLostError`. Its message begins with
        `what()`.
        """
        if not self.own_page.words.load(self._alarm):
            return
        if trouble := self.trouble(awaited):
            kind = DisagreementError if f"failed first: {DisagreementError.__name__}:" in trouble else PeerLostError
            raise kind(f"{what() if what else f'rank {self.rank} stopped because of another rank'}: {trouble}")

    def trouble(self, awaited: Iterable[int] = ()) -> str | None:
        """Return why a wait for `awaited` cannot succeed, or None. Any thread may call this."""
        if cause := self.first_cause():
            return cause
        awaited = set(awaited)
        if lost := sorted(awaited & self.gone):
            return "; ".join(f"rank {rank} is gone (its process has ended)" for rank in lost)
        closed = [rank for rank in sorted(awaited) if self.own_page.load(CLOSED, rank)]
        return "; ".join(f"rank {rank} closed its ring" for rank in closed) or None

    def first_cause(self) -> str | None:
        """See `Pages.first_cause`."""
        origins = self._origins()
        return min(self.pages[origin].cause for origin in origins)[1] if origins else None

    def _origins(self) -> set[int]:
        """Return the ranks whose own error is the cause of a failure that was reported to this rank."""
        return {origin - 1 for rank in self.ranks if (origin := self.own_page.load(POISON, rank))}

    # --- all-gather --------------------------------------------------------------------------------------------------

    def all_gather(
        self, payload: bytes, progress: Callable[[], object], what: Callable[[], str], until: float
    ) -> list[bytes]:
        """Return every rank's payload, of any length, in the order of `ranks`.

        `progress` is called whenever a word of this rank's page changes, until all payloads have arrived. `what`,
        `until`: as for `hold`.
        """
        self.check((), what)  # the other ranks may have reached this all-gather before they failed
        framed = len(payload).to_bytes(LENGTH_BYTES, "little") + payload
        parts = self._turn_of(framed[:GATHER_BYTES], [GATHER_BYTES] * len(self.ranks), progress, what, until)
        left = [int.from_bytes(part[:LENGTH_BYTES], "little") for part in parts]
        whole = [
            bytearray(part[LENGTH_BYTES : LENGTH_BYTES + length]) for part, length in zip(parts, left, strict=True)
        ]
        left = [length - len(part) for length, part in zip(left, whole, strict=True)]
        sent = GATHER_BYTES
        while any(left):
            parts = self._turn_of(framed[sent : sent + GATHER_BYTES], left, progress, what, until)
            for index, part in enumerate(parts):
                whole[index] += part
                left[index] -= len(part)
            sent += GATHER_BYTES
        return [bytes(part) for part in whole]

    def _turn_of(
        self,
        part: bytes,
        most_bytes: list[int],
        progress: Callable[[], object],
        what: Callable[[], str],
        until: float,
    ) -> list[bytes]:
        """Run one round of the all-gather: publish `part` of this rank's payload, and return every rank's part.

        The parts are in the order of `ranks`. `most_bytes`: for each rank, the most bytes that its part can have. When
        a rank starts round n, every rank has read the parts of round n - 2, so two buffers per rank are enough.
        """
        self._turn += 1
        turn, peers = self._turn, [rank for rank in self.ranks if rank != self.rank]
        self.own_page.write_part(turn, part)
        # All ranks read this one word: whoever sees the failure of a rank also sees every part that this rank has seen.
        self.own_page.store(GATHERED, turn)
        for rank in peers:
            self.ring(rank)

        def missing() -> list[int]:
            return [rank for rank in peers if self.pages[rank].load(GATHERED) < turn]

        def ready() -> bool:
            try:
                if missing():
                    progress()
            except (TransportError, DisagreementError):
                # A rank that fails after all parts have been published changes nothing.
                if missing():
                    raise
            return not missing()

        self.hold(ready, missing, what, until)
        return [
            self.pages[rank].read_part(turn, min(most, GATHER_BYTES))
            for rank, most in zip(self.ranks, most_bytes, strict=True)
        ]

    # --- descriptors -------------------------------------------------------------------------------------------------

    def share(self, owner: Descriptor) -> int:
        """Let other ranks fetch the owner's descriptor while the owner lives; return its arena number for `pull`."""
        return self._service.share(owner)

    def pull(self, rank: int, arena: int, until: float, what: Callable[[], str] | None = None) -> int:
        """Fetch the descriptor of another rank's arena. The caller then owns it. Raises what `hold` raises."""
        where, began_s = what() if what else f"rank {self.rank}", time.monotonic()
        try:
            return self._service.pull(rank, arena, until, lambda: self.check([rank], what))
        except DeadlineError:  # before OSError, because it is a TimeoutError and so an OSError
            raise self._late(where, [rank], began_s) from None
        except OSError as error:
            # This thread has noticed the hang-up before the group's own thread did.
            self._lose({rank})
            self.check([rank], what)
            raise PeerLostError(f"{where}: rank {rank} hung up ({error})") from error

    # --- ends --------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Report to all ranks of the group that this rank fails. Never raises.

        The reported cause is `error`, unless another rank has failed first.
        """
        self.poison(first_cause(self.rank, error))

    def poison(self, cause: str) -> None:
        """Report to all ranks of the group that this rank fails. Only this rank's first call has an effect.

        The reported cause is `cause`, unless another rank has reported a cause before: then that cause is reported
        again.
        """
        with self._lock:
            if self._failed or self._left or os.getpid() != self.pid:
                return
            self._failed = True
            origins = self._origins()
            if not origins:
                self.own_page.write_cause(time.time_ns(), cause)
            origin = min(origins, key=lambda rank: self.pages[rank].cause) if origins else self.rank
            self._tell_all(POISON, 1 + origin)

    def leave(self) -> None:
        """Report to all ranks of the group that this rank closes the ring, and release everything. Idempotent."""
        with self._lock:
            already_announced, self._left = self._failed or self._left or os.getpid() != self.pid, True
        if not already_announced:
            self.health.closed = True
            self._tell_all(CLOSED, 1)
        self.drop()

    def drop(self) -> None:
        """Close all connections. The pages stay mapped while anything refers to them. Idempotent."""
        if os.getpid() != self.pid:
            return  # in a forked child the descriptors are already closed, and the thread exists only in the parent
        self._left = True
        self.health.detach(self)
        if self._thread is not None:
            self._service.wake()
            self._thread.join(END_S)
            self._thread = None
        self._service.close()

    def _tell_all(self, word: int, value: int) -> None:
        for rank, page in self.pages.items():
            page.words.store(self._word_indices[word], value)
            page.words.store(self._alarm, 1)
            self.ring(rank)

    def exchange(self, beat: Beat) -> dict[int, Beat]:
        """See `Pages.exchange`."""
        self.own_page.write_beat(beat.count, beat.text())
        beats = {}
        for rank, page in self.pages.items():
            if rank != self.rank and page.load(BEAT):
                if self._ended(rank):
                    beats[rank] = Beat(ENDED, closed=bool(self.own_page.load(CLOSED, rank)))
                elif (newest := Beat.parse_or_none(page.beat)) is not None:  # None if overwritten during the read
                    beats[rank] = newest
        return beats

    def _start(self) -> None:
        name = f"ringattn-shared-{self.rank}"
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()
        self.health.pages = self
        self.health.attach(self, lambda: self.place(), self.poison)

    def _live(self) -> None:
        """Send descriptors and watch for hang-ups until the group ends."""
        while not self._left:
            self._lose(self._service.round(ROUND_S))

    def _lose(self, ranks: set[int]) -> None:
        """Handle ranks that have hung up. A rank that had neither closed nor failed is dead."""
        if gone := {rank for rank in ranks if not self._ended(rank)}:
            self.gone |= gone
            self.own_page.words.store(self._alarm, 1)
            self.ring(self.rank)

    def _ended(self, rank: int) -> bool:
        return bool(self.own_page.load(CLOSED, rank) or self.own_page.load(POISON, rank))

    def _page_of(self, peer: int, nonce: bytes, until: float) -> Page:
        """Fetch and map another rank's page. Raises `OSError`, `RingError`."""
        segment = Segment.attach(self._service.pull(peer, PAGE_ARENA, until), writable=True)
        if segment.nbytes < Page.size(len(self.ranks)):
            raise UnsupportedError(f"it has {segment.nbytes} bytes; is it of another version of this package?")
        page = Page(segment, self.ranks)
        header = page.header
        expected = _header(peer, len(self.ranks), nonce)
        if header._replace(pid=expected.pid, pid_namespace=expected.pid_namespace) != expected:
            raise UnsupportedError(f"it belongs to another ring or version: {header}")
        return page


def _header(rank: int, world_size: int, nonce: bytes) -> Header:
    return Header(pages.MAGIC, pages.VERSION, rank, world_size, os.getuid(), os.getpid(), _pid_namespace(), nonce)


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _gather(opening: Opening, name: str, offer: dict[str, str]) -> list[dict[str, str]]:
    """Gather every rank's `offer`. Raises the same `UnsupportedError` on all ranks if any rank reports a problem."""
    gathered = opening.control.gather(name, json.dumps(offer).encode(), opening.until)
    answers: list[dict[str, str]] = [json.loads(answer) for answer in gathered]
    if problems := {rank: answer["problem"] for rank, answer in enumerate(answers) if answer["problem"]}:
        reasons = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
        raise UnsupportedError(f"the ranks cannot share memory: {reasons}; use transport='gloo' instead")
    return answers
