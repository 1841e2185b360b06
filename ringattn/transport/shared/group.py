"""The ranks of a ring that are on one machine, met through shared pages: waits, failures, heartbeats and agreement.

Ranks have the numbers of the whole ring, some of whose ranks may be on other machines and in other groups.

Guarantees: opening succeeds on all ranks or is refused on all with the same words, which name the step that failed;
every wait has a deadline; the first cause of a failure is what every rank tells, and it is in every page before the
rank that failed gives its buffers back; a rank that is stopped or gone is named and no other. After opening the store
is only read for a first cause from elsewhere, so a ring goes on without it.
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

# --- descriptors, and the notice that a process is gone --------------------------------------------------------------


NAME = "\0ringattn-"
GREETING = struct.Struct("<8s16sI")  # what it is, the listener's nonce, the caller's rank
GREETING_WORDS = b"ringatt1"
CREDENTIALS = struct.Struct("<iII")  # pid, uid, gid of SO_PEERCRED
ARENA = struct.Struct("<Q")
NUMBER = struct.Struct("i")
PAGE_ARENA = 0
FOUND, GONE = b"found", b"gone"
POLL_MS = 20
BACKLOG = 4096


class Descriptor(Protocol):
    """What keeps a descriptor open: it is handed out for as long as its owner lives."""

    fd: int | None


class Service:
    """One rank's listener and connections, over which processes of one user pass file descriptors to each other.

    Every rank listens on an abstract socket of a random name and keeps one connection to each other rank. Over it a
    rank pulls the other's page and, later, its arenas. A connection that hangs up shows that the process has ended.
    `round` runs in one thread, `connect` and `pull` in another.
    Guarantees: a caller of another user, or one that does not know the ring, is turned away; no call waits without a
    deadline; a forked process closes its copies, so that it never stands in for its parent.
    """

    def __init__(self, rank: int) -> None:
        """Listens at once. Raises `OSError`."""
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
        """Hand out the owner's descriptor for as long as it lives; returns the arena's number, the page's first."""
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
        """Another rank's descriptor, the caller's from here on; `check` may raise meanwhile.

        Raises `OSError` when the rank has hung up, `PeerLostError` when it shares that arena no more, `DeadlineError`
        at `until`.
        """
        peer = self._peers[rank]
        peer.send(ARENA.pack(arena))
        while not _readable(peer):
            check()
            if time.monotonic() >= until:
                raise DeadlineError(f"rank {rank} did not hand out its arena {arena} in time")
        # Not by `recv_fds`, which forgets its flags (Python 3.11): the descriptor would outlive an exec.
        words, extras, _, _ = peer.recvmsg(len(FOUND), socket.CMSG_SPACE(NUMBER.size), socket.MSG_CMSG_CLOEXEC)
        if words == GONE:
            raise PeerLostError(f"rank {rank} shares its arena {arena} no more")
        if words != FOUND or not extras:
            raise ConnectionResetError(f"rank {rank} hung up")
        return int(NUMBER.unpack(extras[0][2])[0])

    def round(self, wait_s: float) -> set[int]:
        """Answer for at most `wait_s`, until something happens; the ranks that have hung up since the last round."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        for number in self._served:
            poll.register(number, select.POLLIN)
        watched = {peer.fileno(): rank for rank, peer in self._peers.copy().items() if rank not in self._hung_up}
        for number in watched:
            poll.register(number, 0)  # what arrives there is the other thread's; a hang-up is always told
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
        """End a round of another thread now."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Hang up. Idempotent; no round may be running."""
        if not self._closed:
            self._closed = True
            for each in (self._listener, *self._served.values(), *self._peers.values()):
                each.close()
            os.close(self._wake)
            _open.discard(self)

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except OSError:
            return  # the caller has gone again
        caller.setblocking(False)
        if _user_of(caller) == os.getuid():
            self._served[caller.fileno()] = caller
        else:
            caller.close()

    def _serve(self, number: int) -> None:
        """Answer one question, or let the caller go: it hung up, or it does not know this ring."""
        caller = self._served[number]
        try:
            question = caller.recv(GREETING.size)
            if number in self._greeted and len(question) == ARENA.size:
                # Held while it is sent: the descriptor must not be closed, and its number used again, meanwhile.
                owner = self._shared.get(ARENA.unpack(question)[0])
                if owner is None or owner.fd is None:
                    caller.send(GONE)
                else:
                    socket.send_fds(caller, [FOUND], [owner.fd])
                return
            if len(question) == GREETING.size:
                words, nonce, _ = GREETING.unpack(question)
                if words == GREETING_WORDS and secrets.compare_digest(nonce, self.nonce):
                    self._greeted.add(number)
                    return
        except OSError:
            pass
        del self._served[number]
        self._greeted.discard(number)
        caller.close()


def _user_of(end: socket.socket) -> int:
    """The user of the process at the other end, as the kernel saw it when they connected."""
    return int(CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1])


def _readable(end: socket.socket) -> bool:
    """Whether something has come, or the other end has hung up, within `POLL_MS`."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(POLL_MS))


_open: weakref.WeakSet[Service] = weakref.WeakSet()


def _after_fork() -> None:
    """The child holds copies of all descriptors: while they are open nobody notices the parent's death."""
    for service in list(_open):
        service.close()


os.register_at_fork(after_in_child=_after_fork)


# --- the group -------------------------------------------------------------------------------------------------------


END_S = 2.0
ROUND_S = 0.1
"""How often the thread that hands out descriptors looks whether the group has ended."""
LENGTH_BYTES = 8


class SharedGroup:
    """One rank's view. Used by one thread at a time, besides `trouble`, `fail` and the group's own thread."""

    def __init__(self, opening: Opening, pages: dict[int, Page], service: Service) -> None:
        """`pages`: by the ranks of the group, in their order; may still be filled in."""
        self.opening, self.rank, self.world_size = opening, opening.rank, opening.world_size
        self.ranks, self.own, self.pages = tuple(pages), pages[self.rank], pages
        self.health = opening.health
        self.place: Callable[[], Place] = lambda: Place("opening")
        """Where this rank is, for its heartbeats."""
        self.gone: set[int] = set()
        """Ranks whose process has ended without closing the ring."""
        self._service = service
        self._mine = [self.own.index(word, self.rank) for word in range(GATHERED + 1)]
        self._alarm, self._bell = self.own.index(ALARM), self.own.index(BELL)
        self._rings = itertools.count(1)
        self._turn = 0
        self._lock = threading.Lock()
        self._failed = self._left = False
        self.pid = os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def timeout_s(self) -> float:
        """The deadline of a wait."""
        return self.opening.timeout_s

    @classmethod
    def open(cls, opening: Opening, members: Sequence[int] | None = None) -> SharedGroup:
        """Meet all ranks. Every rank of the ring opens a group at once, that of its machine.

        `members`: the ranks of this machine, which form the group, None: all.
        Raises `UnsupportedError` on all ranks of the ring where one cannot, `DeadlineError` that names the ranks which
        are missing.
        """
        rank, ranks = opening.rank, tuple(range(opening.world_size)) if members is None else tuple(members)
        service, own, problem, nonce = None, None, "", b""
        try:
            segment = Segment.create(f"page-{rank}", Page.size(len(ranks)))
            own = Page(segment, ranks)
            service = Service(rank)
            nonce = service.nonce
            service.share(segment)
            own.write_header(_header(rank, len(ranks), nonce))
        except (OSError, AttributeError, RingError) as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            name = service.name if service else ""
            offers = _gather(opening, "shared/offer", {"problem": problem, "name": name, "nonce": nonce.hex()})
            assert own is not None and service is not None
            return cls._connected(opening, ranks, own, service, offers)
        except BaseException:
            if service is not None:
                service.close()
            raise

    @classmethod
    def _connected(
        cls, opening: Opening, ranks: tuple[int, ...], own: Page, service: Service, offers: list[dict[str, str]]
    ) -> SharedGroup:
        """Map every page, and agree that everybody has: a word that is stored before is lost for its reader."""
        until = time.monotonic() + opening.until.left_s
        group = cls(opening, dict.fromkeys(ranks, own), service)
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
        """Store this rank's word in the page of `rank`, after all that was written before, and wake it."""
        self.pages[rank].words.store(self._mine[word], value)
        self.ring(rank)

    def ring(self, rank: int) -> None:
        """Make a rank that holds look again, after something in this rank's page has changed."""
        page = self.pages[rank]
        # No two values of any rank are alike, so a bell that has not changed has not been rung.
        page.words.store(self._bell, next(self._rings) * self.world_size + self.rank)
        wake(page.bell_address)

    # --- waits -------------------------------------------------------------------------------------------------------

    def hold(
        self, ready: Callable[[], bool], awaited: Callable[[], Iterable[int]], what: Callable[[], str], until: float
    ) -> None:
        """Return when `ready()`, which is asked whenever a word of this page has changed.

        Raises what `check` raises for the ranks `awaited()`, and `DeadlineError` at `until`, on the monotonic clock.
        """
        words, began_s = self.own.words, time.monotonic()
        while True:
            # Before asking: what is rung after this ends the pause.
            seen = words.load(self._bell)
            if ready():
                return
            if words.load(self._alarm):
                try:
                    self.check(awaited(), what)
                except (PeerLostError, DisagreementError):
                    # Again: what came just before its sender closed is there now.
                    if ready():
                        return
                    raise
            if time.monotonic() >= until:
                raise self._late(what(), sorted(set(awaited())), began_s)
            pause(words, self._bell, self.own.bell_address, seen, until)

    def _late(self, where: str, ranks: list[int], began_s: float) -> DeadlineError:
        said = self.health.explain(ranks, waited_s=time.monotonic() - began_s)
        return DeadlineError(f"{where}: no answer from ranks {ranks} within {self.timeout_s:g} s; {said}")

    def check(self, awaited: Iterable[int] = (), what: Callable[[], str] | None = None) -> None:
        """Raise if a rank has failed, or if one of `awaited` has gone or closed.

        Raises `PeerLostError`, or `DisagreementError` where that is the first cause.
        """
        if not self.own.words.load(self._alarm):
            return
        if words := self.trouble(awaited):
            kind = DisagreementError if f"failed first: {DisagreementError.__name__}:" in words else PeerLostError
            raise kind(f"{what() if what else f'rank {self.rank} must stop'}: {words}")

    def trouble(self, awaited: Iterable[int] = ()) -> str | None:
        """Why a wait for `awaited` is in vain, None where it is not. Any thread may ask."""
        if cause := self.first_cause():
            return cause
        awaited = set(awaited)
        if lost := sorted(awaited & self.gone):
            return "; ".join(f"rank {rank} is gone (its process has ended)" for rank in lost)
        closed = [rank for rank in sorted(awaited) if self.own.load(CLOSED, rank)]
        return "; ".join(f"rank {rank} closed its ring" for rank in closed) or None

    def first_cause(self) -> str | None:
        """See `Pages.first_cause`."""
        origins = self._origins()
        return min(self.pages[origin].cause for origin in origins)[1] if origins else None

    def _origins(self) -> set[int]:
        """The ranks whose own error is the cause of a failure that this rank has been shown."""
        return {origin - 1 for rank in self.ranks if (origin := self.own.load(POISON, rank))}

    # --- agreement ---------------------------------------------------------------------------------------------------

    def all_gather(
        self, payload: bytes, progress: Callable[[], object], what: Callable[[], str], until: float
    ) -> list[bytes]:
        """Every payload, of any length, in the order of `ranks`. `progress()` is called when a word has changed."""
        self.check((), what)  # the others may have come here before they failed
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
            for place, part in enumerate(parts):
                whole[place] += part
                left[place] -= len(part)
            sent += GATHER_BYTES
        return [bytes(part) for part in whole]

    def _turn_of(
        self,
        part: bytes,
        wanted: list[int],
        progress: Callable[[], object],
        what: Callable[[], str],
        until: float,
    ) -> list[bytes]:
        """One part of every rank, in their order.

        Who has got here has read all parts before the last, so two places are enough.
        """
        self._turn += 1
        turn, others = self._turn, [rank for rank in self.ranks if rank != self.rank]
        self.own.write_part(turn, part)
        for rank in others:
            self.tell(rank, GATHERED, turn)

        def missing() -> list[int]:
            return [rank for rank in others if self.own.load(GATHERED, rank) < turn]

        def ready() -> bool:
            # Asked first: a rank that fails after the last part has come does not undo the gather.
            if missing():
                progress()
            return not missing()

        self.hold(ready, missing, what, until)
        return [
            self.pages[rank].read_part(turn, min(most, GATHER_BYTES))
            for rank, most in zip(self.ranks, wanted, strict=True)
        ]

    # --- descriptors -------------------------------------------------------------------------------------------------

    def share(self, owner: Descriptor) -> int:
        """Hand out the owner's descriptor to the other ranks for as long as it lives; the number to `pull` it by."""
        return self._service.share(owner)

    def pull(self, rank: int, arena: int, until: float, what: Callable[[], str] | None = None) -> int:
        """Another rank's descriptor, the caller's from here on. Raises what `hold` raises."""
        where, began_s = what() if what else f"rank {self.rank}", time.monotonic()
        try:
            return self._service.pull(rank, arena, until, lambda: self.check([rank], what))
        except DeadlineError:  # an OSError too, for it is a TimeoutError
            raise self._late(where, [rank], began_s) from None
        except OSError as error:
            # Noticed before the group's thread has.
            self._lose({rank})
            self.check([rank], what)
            raise PeerLostError(f"{where}: rank {rank} hung up ({error})") from error

    # --- ends --------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell every rank why this one fails, unless another has told first. Idempotent, never raises."""
        self.poison(first_cause(self.rank, error))

    def poison(self, cause: str) -> None:
        """Tell every rank of the group the first cause of a failure, unless another rank has. Idempotent."""
        with self._lock:
            if self._failed or self._left or os.getpid() != self.pid:
                return
            self._failed = True
            origins = self._origins()
            if not origins:
                self.own.write_cause(time.time_ns(), cause)
            origin = min(origins, key=lambda one: self.pages[one].cause) if origins else self.rank
            self._tell_all(POISON, 1 + origin)

    def leave(self) -> None:
        """Tell every rank that this one closes the ring, and let go of everything. Idempotent."""
        with self._lock:
            told, self._left = self._failed or self._left or os.getpid() != self.pid, True
        if not told:
            self.health.closed = True
            self._tell_all(CLOSED, 1)
        self.drop()

    def drop(self) -> None:
        """Hang up. The pages stay mapped while anything refers to them. Idempotent."""
        if os.getpid() != self.pid:
            return  # the descriptors of a forked process are closed already, and the thread is the parent's
        self._left = True
        self.health.detach(self)
        if self._thread is not None:
            self._service.wake()
            self._thread.join(END_S)
            self._thread = None
        self._service.close()

    def _tell_all(self, word: int, value: int) -> None:
        for rank, page in self.pages.items():
            page.words.store(self._mine[word], value)
            page.words.store(self._alarm, 1)
            self.ring(rank)

    def exchange(self, beat: Beat) -> dict[int, Beat]:
        """See `Pages.exchange`."""
        self.own.write_beat(beat.count, beat.text())
        beats = {}
        for rank, page in self.pages.items():
            if rank != self.rank and page.load(BEAT):
                if self._ended(rank):
                    beats[rank] = Beat(ENDED, closed=bool(self.own.load(CLOSED, rank)))
                elif (newest := Beat.parse_or_none(page.beat)) is not None:  # not overwritten while it was read
                    beats[rank] = newest
        return beats

    def _start(self) -> None:
        name = f"ringattn-shared-{self.rank}"
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()
        self.health.pages = self
        self.health.attach(self, lambda: self.place(), self.poison)

    def _live(self) -> None:
        """Hand out descriptors, and notice who hangs up, until the group ends."""
        while not self._left:
            self._lose(self._service.round(ROUND_S))

    def _lose(self, ranks: set[int]) -> None:
        """These ranks have hung up. One that has neither closed nor failed is gone."""
        if gone := {rank for rank in ranks if not self._ended(rank)}:
            self.gone |= gone
            self.own.words.store(self._alarm, 1)
            self.ring(self.rank)

    def _ended(self, rank: int) -> bool:
        return bool(self.own.load(CLOSED, rank) or self.own.load(POISON, rank))

    def _page_of(self, peer: int, nonce: bytes, until: float) -> Page:
        """Another rank's page, mapped. Raises `OSError`, `RingError`."""
        segment = Segment.attach(self._service.pull(peer, PAGE_ARENA, until), writable=True)
        if segment.nbytes < Page.size(len(self.ranks)):
            raise UnsupportedError(f"it has {segment.nbytes} bytes: another version of this package?")
        page = Page(segment, self.ranks)
        header = page.header
        mine = _header(peer, len(self.ranks), nonce)
        if header._replace(pid=mine.pid, pid_namespace=mine.pid_namespace) != mine:
            raise UnsupportedError(f"it is of another ring or version: {header}")
        return page


def _header(rank: int, world_size: int, nonce: bytes) -> Header:
    return Header(pages.MAGIC, pages.VERSION, rank, world_size, os.getuid(), os.getpid(), _pid_namespace(), nonce)


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _gather(opening: Opening, name: str, mine: dict[str, str]) -> list[dict[str, str]]:
    """Every rank's answer. Raises `UnsupportedError` on all ranks alike where one reports a problem."""
    gathered = opening.control.gather(name, json.dumps(mine).encode(), opening.until)
    answers: list[dict[str, str]] = [json.loads(each) for each in gathered]
    if problems := {rank: answer["problem"] for rank, answer in enumerate(answers) if answer["problem"]}:
        reasons = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
        raise UnsupportedError(f"the ranks cannot share memory: {reasons}; use transport='gloo' instead")
    return answers
