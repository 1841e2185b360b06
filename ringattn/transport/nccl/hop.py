"""One hop, bound once and started many times: the group of its sends and receives, between two events.

The first event says that the compute stream is ready for the exchange, the second that the exchange has arrived; the
host waits for neither. Guarantees: starting and waiting costs a few microseconds of Python (`bench/hop.py`) and no
device allocation; inside a CUDA graph's capture events are fresh and never queried.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

from ringattn.observe.flight import CAPTURED, LAUNCHING, POSTED
from ringattn.transport.base import Operation
from ringattn.transport.nccl.communicator import PeerCall
from ringattn.transport.nccl.supervisor import Supervisor
from ringattn.transport.stream import Arrived, StreamHop, StreamTransport, StreamWorkHandle


class HopTransport(StreamTransport):
    """What hops ask of the transport that they belong to."""

    supervisor: Supervisor

    @abstractmethod
    def launch(self, calls: Sequence[PeerCall]) -> None:
        """Put one group on the communication stream; `NcclHop` does the rest."""


class NcclHop(StreamHop):
    """The messages of one hop with everything worked out beforehand."""

    transport: HopTransport

    def __init__(self, transport: HopTransport, operations: Sequence[Operation]) -> None:
        super().__init__(transport, operations)
        # Addresses are fixed from here on, so a start looks up nothing.
        self._calls = tuple(PeerCall(o.sends, o.buffer.data_ptr(), o.nbytes, o.peer) for o in operations)

    def start(self) -> StreamWorkHandle | Arrived:
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
        flight = transport.record.begin(0, self.parts, transport.name)
        flight.state = LAUNCHING
        supervisor.where = self.parts[0].label
        # The deadline of a launch counts from here: NCCL may block inside while it connects peers.
        supervisor.launching = self, time.monotonic()
        try:
            transport.launch(self._calls)
        finally:
            supervisor.launching = None
        flight.state = CAPTURED if capturing else POSTED
        # On the communication stream, behind the group: passed when the hop has arrived.
        done.record(stream)
        handle = StreamWorkHandle(self, flight, ready, done)
        # A captured hop runs when its graph is replayed, and is watched as part of the `Replay`.
        if not capturing:
            supervisor.handles.append(handle)
        return handle


class Replay(StreamHop):
    """A captured pass that runs again: many hops between two events, of which only the whole can be watched."""

    transport: HopTransport

    def __init__(self, transport: HopTransport, replay: Callable[[], None]) -> None:
        super().__init__(transport, ())  # its peers are all, or none: a graph does not say
        self._replay = replay

    def start(self) -> StreamWorkHandle:
        """Call `replay`, which puts the graph on the current stream, behind the last pass."""
        transport, gpu = self.transport, self.transport.gpu
        transport.order.begin()
        ready, done = gpu.new_event(), gpu.new_event()
        ready.record(gpu.current_stream())
        flight = transport.record.begin(0, self.parts)
        transport.supervisor.where = str(self)
        self._replay()
        del self._replay  # the caller may drop the graph before this has arrived
        done.record(gpu.current_stream())
        transport.order.end()
        handle = StreamWorkHandle(self, flight, ready, done)
        handle.waited = True  # it ran on the caller's own stream
        transport.supervisor.handles.append(handle)
        return handle

    def __str__(self) -> str:
        return "a replayed pass"
