"""File descriptors between processes of one user on one machine, and the notice that a process is gone.

Every rank listens on an abstract socket of a random name and keeps one connection to each other rank. Over it a rank
pulls the other's page and, later, its arenas. A connection that hangs up says that the process has ended.
Guarantees: a caller of another user, or one that does not know the ring, is turned away; no call waits without a
deadline; a process that was forked off closes its copies, so that it never stands in for its parent.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from ringattn.errors import DeadlineError, PeerLostError, TransportError

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
    """One rank's listener and connections. `round` runs in one thread, `connect` and `pull` in another."""

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
