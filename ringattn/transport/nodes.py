"""A ring whose ranks are on several nodes: one transport inside each node, another between nodes.

Guarantees: a message to a peer on the same node uses the transport inside the node, and any other message uses the
transport between nodes. So all messages between two ranks use the same transport. An exchange may contain both kinds of
messages. All of them are checked before the first is started, and they share one deadline. If either transport fails,
both end, and every rank reports the same first cause, with rank numbers of the whole ring. Operations of all ranks,
such as all-gathers and failure attribution, use the transport between nodes, which connects all ranks.
Splitting an exchange over two transports introduces no new deadlock. Every exchange has two parts, and every rank
starts the part between nodes before the part inside its node. The part between nodes waits only for the peers' part
between nodes of the same exchange and for earlier exchanges. The part inside the node may wait for both parts of the
same exchange. So no wait is for a later part, even if the streams of a device share one hardware queue.
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
"""How long NCCL's aborts may take before waits inside the node are released: after a release, NCCL may send spoiled
bytes.
"""


class NodesWorkHandle:
    """An exchange in flight: its part between nodes and its part inside the node, either of which may be None."""

    arrived_s = None  # neither part measures the time

    def __init__(self, ring: NodesTransport, between: WorkHandle | None, inside: WorkHandle | None) -> None:
        self.ring, self.between, self.inside = ring, between, inside
        self._waited = False

    def wait(self) -> None:
        """See `WorkHandle.wait`. A second call does nothing."""
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
    """One rank's end of the ring. `inside` and `between` use the rank numbers and the size of the whole ring."""

    def __init__(self, inside: Transport, between: Transport, node: Sequence[int]) -> None:
        """Take over two open transports. `node`: the ranks of this rank's node."""
        self.inside, self.between, self.node = inside, between, frozenset(node)
        self.name = f"{inside.name}+{between.name}"
        self.rank, self.world_size, self.device = between.rank, between.world_size, between.device
        self.stream: Any = between.stream
        self.locations = between.locations

    @property
    def ways(self) -> str:
        """A description of which transport carries which messages."""
        return f"{self.inside.name} inside a node and {self.between.name} between nodes"

    @property
    def sm_margin(self) -> int:
        """See `Transport.sm_margin`; only the transport between nodes occupies multiprocessors."""
        return self.between.sm_margin

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `Transport.allocate`. `inside` allocates the memory; `between` can send from it too."""
        with self.joint():
            return self.inside.allocate(nbytes)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> NodesWorkHandle:
        """See `Transport.exchange`."""
        return self.bind(sends, recvs).start()

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> NodesHop:
        """See `Transport.bind`."""
        with self.joint():

            def part(transport: Transport, inside: bool) -> Hop | None:
                chosen = [[m for m in messages if (m.peer in self.node) == inside] for messages in (sends, recvs)]
                return transport.bind(*chosen) if any(chosen) else None

            return NodesHop(self, part(self.between, inside=False), part(self.inside, inside=True))

    def announce(self, call: int, digest: bytes, description: str, gradients: str = "") -> bool:
        """See `Transport.announce`. The transport between nodes reaches all ranks."""
        return self.between.announce(call, digest, description, gradients)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Transport.all_gather_bytes`."""
        with self.joint():
            return self.between.all_gather_bytes(payload)

    def drain(self) -> None:
        """See `Transport.drain`.

        `inside` comes last: the peer transport detects data that a failing rank of the node has spoiled.
        """
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
        """See `Transport.replay`. The transport inside the node refuses it."""
        self.inside.replay(run)

    def abort(self, cause: BaseException) -> None:
        """See `Transport.abort`. `inside` ends first. Then `between` reports the cause through the store."""
        if self._end is None:
            self._end = cause
        self.inside.abort(cause)
        self.between.abort(cause)

    def close(self, linger_s: float | None = None) -> None:
        """See `Transport.close`. `linger_s`: how long to wait for the other ranks; see `NcclTransport.close`."""
        if self._end is None:
            with self.joint():
                self.between.drain()  # its messages are in memory that the inner transport's close frees
                self.inside.close()
                self.between.close() if linger_s is None else self.between.close(linger_s)  # type: ignore[call-arg]
            self._end = ClosedError(f"rank {self.rank} closed its ring")

    @contextmanager
    def joint(self) -> Iterator[None]:
        """End both transports if either fails. Raises `ClosedError` once they have ended."""
        self._check_open()
        try:
            yield
        except (TransportError, DisagreementError) as error:
            self.abort(error)
            raise

    def before_start(self) -> None:
        """Check that both parts of an exchange can be started, before either is, and raise the error otherwise.

        By default nothing is checked. Subclasses override this.
        """

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
        """See `NodesTransport`. Both transports have the same `Health`."""
        super().__init__(inside, between, inside.group.ranks)

    def await_both(self, handle: NodesWorkHandle) -> None:
        """See `NodesTransport.await_both`. Wait inside first: this thread copies those messages, but gloo sends by
        itself.
        """
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
        """Copy messages from ranks of this node on another thread while this thread waits for gloo.

        Those ranks may be waiting until their messages have been copied.
        """
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
        """See `NodesTransport`. Both transports have the same `Health`, and NCCL's supervisor ends both."""
        super().__init__(inside, between, inside.group.ranks)
        supervisor, watch = between.supervisor, inside.watch
        watch.report = supervisor.fail
        # The supervisor reports the first cause with the pending exchange, so the pages need not report it.
        inside.group.health.attach(inside.group, watch.place)
        watch.before_paint = lambda: supervisor.ended.wait(BEFORE_PAINT_S)
        supervisor.node_transport = watch
        closed_at_exit[id(self)] = self

    def close_at_exit(self) -> None:
        """See `Ending.close_at_exit`; waits briefly for the other ranks."""
        self.close(EXIT_LINGER_S)

    def before_start(self) -> None:
        """See `NodesTransport.before_start`."""
        self.inside.refuse_capture()


def open_shm_and_gloo(opening: Opening) -> HostNodesTransport:
    """Open this rank's end of a ring on CPUs of several machines.

    Raises the same `UnsupportedError` on all ranks, and what `ShmTransport.open` and `GlooTransport.open` raise.
    """
    if reason := sharing_obstacle(opening.locations):
        raise UnsupportedError(f"rank {opening.rank}: transport='shm' cannot connect these ranks: {reason}; use gloo")
    opening.name = f"{ShmTransport.name}+{GlooTransport.name}"
    inside = ShmTransport.open(opening, node_of(opening.rank, opening.locations))
    try:
        return HostNodesTransport(inside, GlooTransport.open(opening))
    except BaseException as error:
        inside.abort(error)
        raise
