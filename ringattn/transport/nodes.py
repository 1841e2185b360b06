"""A ring whose ranks are on several nodes: one transport inside each node, another between them.

Guarantees: a message takes the transport of the node where its peer is on the node, and the other one else, so all
messages of a pair of ranks take the same; an exchange may have both kinds, is checked before any of it is started, and
has one deadline; whichever transport fails, both end, and every rank tells the same first cause, in the numbers of the
whole ring; what concerns all ranks, as all-gathers and who is at fault, goes by the transport between nodes, which
joins all of them.
No order of starts is a deadlock that is none over one transport. Every rank starts exchange k between nodes before it
starts exchange k inside its node. Between nodes it waits for the same of exchange k and for whole earlier exchanges;
inside for either of exchange k. So every wait is for a smaller (exchange, transport), also where the streams of a
device share one hardware queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ringattn.errors import ClosedError, DisagreementError, TransportError, UnsupportedError
from ringattn.transport.base import Ending, Hop, Message, Opening, Transport, WorkHandle, closed_at_exit
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.location import node_of, sharing_obstacle
from ringattn.transport.nccl.transport import EXIT_LINGER_S, NcclTransport
from ringattn.transport.peer.transport import PeerTransport
from ringattn.transport.shared.transport import ShmTransport

BEFORE_PAINT_S = 0.2
"""What the aborts of NCCL have before waits inside the node are let loose, behind which it may have more to send."""


class NodesWorkHandle:
    """An exchange in flight, of which one part or the other may be missing."""

    arrived_s = None  # neither part says

    def __init__(self, ring: NodesTransport, between: WorkHandle | None, inside: WorkHandle | None) -> None:
        self.ring, self.between, self.inside = ring, between, inside
        self._waited = False

    def wait(self) -> None:
        """See `WorkHandle.wait`. A second wait does nothing."""
        if not self._waited:
            with self.ring.joint():
                self.ring.await_both(self)
            self._waited = True


class NodesHop:
    """The messages of one exchange, bound by the transports that carry them."""

    def __init__(self, ring: NodesTransport, between: Hop | None, inside: Hop | None) -> None:
        self.ring, self.between, self.inside = ring, between, inside

    def start(self) -> NodesWorkHandle:
        """See `Hop.start`."""
        ring = self.ring
        with ring.joint():
            ring.before_start()
            between = self.between.start() if self.between is not None else None
            return NodesWorkHandle(ring, between, self.inside.start() if self.inside is not None else None)


class NodesTransport(Ending):
    """One rank's end. `inside` and `between` have the rank and the world size of the whole ring."""

    def __init__(self, inside: Transport, between: Transport, node: Sequence[int]) -> None:
        """Takes over two open transports. `node`: the ranks of this rank's node."""
        self.inside, self.between, self.node = inside, between, frozenset(node)
        self.name = f"{inside.name}+{between.name}"
        self.rank, self.world_size, self.device = between.rank, between.world_size, between.device
        self.stream: Any = between.stream
        self.locations = between.locations

    @property
    def ways(self) -> str:
        """Which message goes which way, in words."""
        return f"{self.inside.name} inside a node and {self.between.name} between nodes"

    @property
    def sm_margin(self) -> int:
        """See `Transport`: what works on a device between nodes."""
        return self.between.sm_margin

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `Transport.allocate`: memory of the transport inside, from which the other can send, too."""
        with self.joint():
            return self.inside.allocate(nbytes)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> NodesWorkHandle:
        """See `Transport.exchange`."""
        return self.bind(sends, recvs).start()

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> NodesHop:
        """See `Transport.bind`."""
        with self.joint():

            def part(transport: Transport, here: bool) -> Hop | None:
                chosen = [[one for one in each if (one.peer in self.node) == here] for each in (sends, recvs)]
                return transport.bind(*chosen) if any(chosen) else None

            return NodesHop(self, part(self.between, here=False), part(self.inside, here=True))

    def announce(self, call: int, digest: bytes, words: str, gradients: str = "") -> bool:
        """See `Transport.announce`: all ranks hear of it between nodes."""
        return self.between.announce(call, digest, words, gradients)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Transport.all_gather_bytes`."""
        with self.joint():
            return self.between.all_gather_bytes(payload)

    def drain(self) -> None:
        """See `Transport.drain`. Inside at last: it finds what a failing rank of the node may have spoiled."""
        with self.joint():
            self.between.drain()
            self.inside.drain()

    def begin_pass(self) -> None:
        """See `Transport.begin_pass`."""
        self.between.begin_pass()
        self.inside.begin_pass()

    def end_pass(self) -> None:
        """See `Transport.end_pass`."""
        self.between.end_pass()
        self.inside.end_pass()

    def replay(self, run: Callable[[], None]) -> None:
        """See `Transport.replay`: refused, as inside a node."""
        self.inside.replay(run)

    def abort(self, cause: BaseException) -> None:
        """See `Transport.abort`. Inside first, where a store reaches all others at once."""
        if self._end is None:
            self._end = cause
        self.inside.abort(cause)
        self.between.abort(cause)

    def close(self, linger_s: float | None = None) -> None:
        """See `Transport.close`. `linger_s`: how long to wait for the other ranks where closing does, see NCCL's."""
        if self._end is None:
            with self.joint():
                self.between.drain()  # what it moves lies in memory that closing inside gives back
                self.inside.close()
                self.between.close() if linger_s is None else self.between.close(linger_s)  # type: ignore[call-arg]
            self._end = ClosedError(f"rank {self.rank} closed its ring")

    @contextmanager
    def joint(self) -> Iterator[None]:
        """Whatever ends one transport ends both. Raises `ClosedError` once they have ended."""
        self._check_open()
        try:
            yield
        except (TransportError, DisagreementError) as error:
            self.abort(error)
            raise

    def before_start(self) -> None:
        """Refuse what one of the transports refuses, before the other has started."""

    def await_both(self, handle: NodesWorkHandle) -> None:
        """Wait for both parts of an exchange."""
        for part in (handle.between, handle.inside):
            if part is not None:
                part.wait()


class HostNodesTransport(NodesTransport):
    """Shared memory inside each machine, gloo between machines."""

    inside: ShmTransport
    between: GlooTransport

    def __init__(self, inside: ShmTransport, between: GlooTransport) -> None:
        """See `NodesTransport`. Both have the same `Health`."""
        super().__init__(inside, between, inside.group.ranks)

    def await_both(self, handle: NodesWorkHandle) -> None:
        """See `NodesTransport.await_both`. What gloo has started moves meanwhile; inside, a wait moves the bytes."""
        until = time.monotonic() + self.inside.group.timeout_s
        if handle.inside is not None:
            handle.inside.wait(until)  # type: ignore[call-arg]
        if handle.between is not None:
            with self._copying():
                handle.between.wait(until)  # type: ignore[call-arg]

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `NodesTransport.all_gather_bytes`."""
        with self.joint(), self._copying():
            return self.between.all_gather_bytes(payload)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Copy what comes inside, on a thread, while this one waits for gloo: another rank may wait for that."""
        if not self.inside.under_way:
            yield
            return
        over = threading.Event()
        name = f"ringattn-copy-{self.rank}"
        thread = threading.Thread(target=self.inside.copy_until, args=(over.is_set,), name=name, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            self.inside.group.ring(self.rank)
            thread.join()


class DeviceNodesTransport(NodesTransport):
    """Copy engines inside each node, NCCL between nodes."""

    inside: PeerTransport
    between: NcclTransport

    def __init__(self, inside: PeerTransport, between: NcclTransport) -> None:
        """See `NodesTransport`. Both have the same `Health`; the supervisor of NCCL ends both."""
        super().__init__(inside, between, inside.group.ranks)
        supervisor, watch = between.supervisor, inside.watch
        watch.report = supervisor.fail
        # The supervisor reads the first cause, with the exchange that is pending; shared pages need not tell it.
        inside.group.health.attach(inside.group, watch.place)
        watch.before_paint = lambda: supervisor.ended.wait(BEFORE_PAINT_S)
        supervisor.beside = watch
        closed_at_exit[id(self)] = self

    def close_at_exit(self) -> None:
        """See `Ending.close_at_exit`: closing waits briefly for the other ranks."""
        self.close(EXIT_LINGER_S)

    def before_start(self) -> None:
        """See `NodesTransport.before_start`."""
        self.inside.refuse_capture()


def open_shm_and_gloo(opening: Opening) -> HostNodesTransport:
    """This rank's end of a ring on CPUs of several machines.

    Raises `UnsupportedError` on all ranks alike, and what `ShmTransport.open` and `GlooTransport.open` raise.
    """
    if why := sharing_obstacle(opening.locations):
        raise UnsupportedError(f"rank {opening.rank}: transport='shm' cannot join these ranks: {why}; use gloo")
    opening.name = f"{ShmTransport.name}+{GlooTransport.name}"
    inside = ShmTransport.open(opening, node_of(opening.rank, opening.locations))
    try:
        return HostNodesTransport(inside, GlooTransport.open(opening))
    except BaseException as error:
        inside.abort(error)
        raise
