"""One exchange by copy engines, bound once and started many times.

Guarantees: the buffers of a bound hop have fixed addresses, so a start makes no allocation; receives into memory that
other ranks cannot map arrive in staging memory and are copied on from there, on the same stream.
"""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

from ringattn.errors import UnsupportedError
from ringattn.observe.flight import LAUNCHING, POSTED, Flight
from ringattn.transport.base import Operation
from ringattn.transport.device import Event
from ringattn.transport.peer.arena import Arena, Place
from ringattn.transport.peer.lane import MOST_TO_ONE_PEER, Lane
from ringattn.transport.peer.program import push_exchange
from ringattn.transport.stream import Arrived, StreamHop, StreamTransport, StreamWatch, StreamWorkHandle

ALIGNMENT_BYTES = 256


class HopTransport(StreamTransport):
    """What hops ask of the transport that they belong to."""

    lane: Lane
    arena: Arena
    staging: Staging
    watch: StreamWatch[PeerWorkHandle]

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of `nbytes` that the other ranks can map, for long use: it takes whole pages of 2 MiB."""

    def refuse_capture(self) -> None:
        """Raise `UnsupportedError` while the current stream is being captured: numbers would stand in the graph."""
        if self.gpu.is_capturing():
            raise UnsupportedError(
                f"rank {self.rank}: transport='peer' cannot be captured into a CUDA graph; use transport='nccl'"
            )


class PeerWorkHandle(StreamWorkHandle):
    """A started hop, and which of its messages wait for their peer."""

    __slots__ = ("pending",)

    def __init__(self, hop: PeerHop, flight: Flight, ready: Event, done: Event) -> None:
        super().__init__(hop, flight, ready, done)
        lane = hop.transport.lane
        bases = lane.numbers.bases(hop.program)
        self.pending: Callable[[], list[Operation]] = lambda: lane.pending(hop, bases)

    def release(self) -> None:
        """See `StreamWorkHandle.release`."""
        self.pending = list
        super().release()


class PeerHop(StreamHop):
    """The messages of one hop with everything worked out beforehand."""

    transport: HopTransport

    def __init__(self, transport: HopTransport, operations: Sequence[Operation]) -> None:
        super().__init__(transport, operations)
        self.sends = [operation for operation in operations if operation.sends]
        self.recvs = [operation for operation in operations if not operation.sends]
        self.program = push_exchange(transport.rank, [o.peer for o in self.sends], [o.peer for o in self.recvs])
        for (src, dst), count in self.program.counts:
            if count > MOST_TO_ONE_PEER:
                raise UnsupportedError(
                    f"rank {transport.rank}: {count} messages from rank {src} to rank {dst} in one exchange, and "
                    f"transport='peer' carries {MOST_TO_ONE_PEER}; pack them, or use transport='nccl'"
                )
        self.unstaged: list[tuple[int, int, int]] = []
        self.places = self._placed()

    def start(self) -> PeerWorkHandle | Arrived:
        """Put the hop on the lane, behind what the current stream holds now."""
        transport = self.transport
        transport.check()
        if not self.parts:
            return Arrived()
        gpu, watch = transport.gpu, transport.watch
        transport.refuse_capture()
        ready, done = watch.free.popleft() if watch.free else (gpu.new_event(), gpu.new_event())
        flight = transport.record.begin(0, self.parts, transport.name)
        flight.state = LAUNCHING
        handle = PeerWorkHandle(self, flight, ready, done)
        try:
            transport.lane.start(self, ready, done, watch.raise_failure)
        except BaseException as error:
            # Some ranks may count this message already.
            watch.fail(error)
            transport.check()
            raise
        flight.state, flight.posted_s = POSTED, time.time()
        watch.handles.append(handle)
        return handle

    def _placed(self) -> list[Place]:
        """Where the other ranks write each receive."""
        transport = self.transport
        found = [transport.arena.place(o.buffer.data_ptr(), o.nbytes) for o in self.recvs]
        offsets, total = [], 0
        for operation, place in zip(self.recvs, found, strict=True):
            offsets.append(total)
            if place is None:
                total += -(-operation.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not total:
            return [place for place in found if place is not None]
        staging = transport.staging.take(total)
        weakref.finalize(self, transport.staging.give_back, staging).atexit = False
        places = []
        for operation, place, offset in zip(self.recvs, found, offsets, strict=True):
            if place is None:
                address = staging.data_ptr() + offset
                place = transport.arena.place(address, operation.nbytes)
                assert place is not None
                self.unstaged.append((operation.buffer.data_ptr(), address, operation.nbytes))
            places.append(place)
        return places


class Staging:
    """Memory that other ranks can map, for receives into memory that they cannot. Used again, by its size."""

    def __init__(self, transport: HopTransport) -> None:
        self._transport = transport
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes."""
        rounded = 1 << max(nbytes - 1, 4095).bit_length()
        free = self._free.setdefault(rounded, [])
        try:
            return free.pop()
        except IndexError:
            return self._transport.allocate(rounded)

    def give_back(self, staging: torch.Tensor) -> None:
        """For the next hop. Its copies stand behind those of this one, on the same stream."""
        self._free[staging.numel()].append(staging)

    def clear(self) -> None:
        """Let go of all that no hop has."""
        self._free = {size: [] for size in self._free}
