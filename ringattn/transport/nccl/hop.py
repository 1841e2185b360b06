"""One hop, bound once and started many times: the group of its sends and receives, between two events.

The first event says that the compute stream is ready for the exchange, the second that the exchange has arrived; the
host waits for neither. Guarantees: starting and waiting costs a few microseconds of Python (`bench/hop.py`) and no
device allocation; inside a CUDA graph's capture events are fresh and never queried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ringattn.observe.flight import CAPTURED, LAUNCHING, POSTED, Flight
from ringattn.transport.base import Operation, listed
from ringattn.transport.device import Event
from ringattn.transport.nccl.communicator import PeerCall

if TYPE_CHECKING:
    from ringattn.transport.nccl.transport import NcclTransport


class NcclWorkHandle:
    """A started hop. Keeps its buffers alive until it has arrived."""

    arrived_s = None
    __slots__ = ("done", "flight", "hop", "ready", "started_at", "transport", "waited")

    def __init__(self, hop: NcclHop | Replay, flight: Flight, ready: Event, done: Event) -> None:
        self.transport, self.hop, self.flight, self.ready, self.done = hop.transport, hop, flight, ready, done
        self.started_at = 0.0
        self.waited = False

    def wait(self) -> None:
        """See `WorkHandle.wait`: later work of the current stream follows the exchange. A second wait does nothing."""
        transport = self.transport
        # Raises what has failed; a wait on an event of a dead ring would mean nothing.
        transport.check()
        if not self.waited:
            # Orders streams and returns at once: the host never waits here.
            transport.gpu.current_stream().wait_event(self.done)
            self.waited = True
            # Again: a failure meanwhile is raised before its results are used.
            transport.check()

    def release(self) -> None:
        """It has arrived: let go of the buffers."""
        del self.hop


class Arrived:
    """The work handle of a hop without a byte."""

    arrived_s = None

    def wait(self) -> None:
        """Nothing to wait for."""


Started = NcclWorkHandle | Arrived


class NcclHop:
    """The messages of one hop with everything worked out beforehand."""

    def __init__(self, transport: NcclTransport, operations: Sequence[Operation]) -> None:
        self.transport, self.operations = transport, operations
        self.peers = {o.peer for o in operations}
        # Addresses are fixed from here on, so a start looks up nothing.
        self._calls = tuple(PeerCall(o.sends, o.buffer.data_ptr(), o.nbytes, o.peer) for o in operations)
        self._parts = tuple(operation.record() for operation in operations)

    def __str__(self) -> str:
        return listed(self.operations)

    def start(self) -> Started:
        """Put the hop on the communication stream, behind what the current stream holds now."""
        transport = self.transport
        transport.check()
        # Without a message nothing is launched.
        if not self._calls:
            return Arrived()
        gpu, supervisor, stream = transport.gpu, transport.supervisor, transport.stream
        capturing = gpu.is_capturing()
        # Events recorded in a capture belong to the graph: they are never queried nor used again.
        if capturing or not supervisor.free:
            ready, done = gpu.new_event(), gpu.new_event()
        else:
            ready, done = supervisor.free.popleft()
        # What the caller has computed so far is what may be sent, and buffers it has read may be overwritten.
        ready.record(gpu.current_stream())
        stream.wait_event(ready)
        # Recorded before the launch, so that a launch that hangs is in the record.
        flight = transport.record.begin(0, self._parts, transport.name)
        flight.state = LAUNCHING
        supervisor.where = self._parts[0].label
        # The deadline of a launch counts from here: NCCL may block inside while it connects peers.
        supervisor.launching = self, time.monotonic()
        try:
            transport.launch(self._calls)
        finally:
            supervisor.launching = None
        flight.state = CAPTURED if capturing else POSTED
        # On the communication stream, behind the group: passed when the hop has arrived.
        done.record(stream)
        handle = NcclWorkHandle(self, flight, ready, done)
        # A captured hop runs when its graph is replayed, and is watched as part of the `Replay`.
        if not capturing:
            supervisor.handles.append(handle)
        return handle


class Replay:
    """A captured pass that runs again: many hops between two events, of which only the whole can be watched."""

    def __init__(self, transport: NcclTransport) -> None:
        self.transport = transport
        self.peers: set[int] = set()  # all, or none: a graph does not say

    def run(self, replay: Callable[[], None]) -> None:
        """Call `replay`, which puts the graph on the current stream, behind the last pass."""
        transport, gpu = self.transport, self.transport.gpu
        transport.order.begin()
        ready, done = gpu.new_event(), gpu.new_event()
        ready.record(gpu.current_stream())
        flight = transport.record.begin(0, ())
        transport.supervisor.where = str(self)
        replay()
        done.record(gpu.current_stream())
        transport.order.end()
        handle = NcclWorkHandle(self, flight, ready, done)
        handle.waited = True  # it ran on the caller's own stream
        transport.supervisor.handles.append(handle)

    def __str__(self) -> str:
        return "a replayed pass"
