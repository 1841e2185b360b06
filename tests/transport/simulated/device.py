"""A simulated GPU of one rank: `CudaDevice` of the NCCL transport, on ordinary CPU tensors.

Guarantees: memory, streams and events behave as CUDA's for a program that obeys CUDA's rules. Test code that reads or
writes staging buffers must report this to the race detector with `touch`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ringattn.transport.device import CudaDevice
from tests.transport.simulated.streams import COMPUTE, Range, Record, Touch, Wait

if TYPE_CHECKING:
    from tests.transport.simulated.world import SimWorld


class SimStream:
    """A stream of one rank."""

    def __init__(self, world: SimWorld, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.cuda_stream = world.registry.new_handle()
        world.streams[self.cuda_stream] = (rank, name)
        self._world = world

    def wait_event(self, event: SimEvent) -> None:
        """See `Stream.wait_event`. Blocks on the compute stream. As in CUDA, it ignores an event without a record."""
        if event.last is not None:
            self._world.issue(Wait(self.rank, self.name, event.last))


class SimEvent:
    """A simulated CUDA event; `last` is its newest record."""

    def __init__(self, world: SimWorld, rank: int) -> None:
        self.last: Record | None = None
        self._world, self._rank = world, rank

    def record(self, stream: SimStream) -> None:
        """See `Event.record`."""
        self.last = Record(self._rank, stream.name, self._world.capturing(self._rank))
        self._world.issue(self.last)

    def query(self) -> bool:
        """See `Event.query`. True for an event that was never recorded."""
        world, record = self._world, self.last
        with world.changed:
            world.script.check_alive(self._rank)
            if record is None:
                return True
            if record.captured:
                world.violate(self._rank, "query of an event that was recorded in a capture")
                return False
            world.settle([record])
            return record.complete


class SimDevice(CudaDevice):
    """The GPU of `rank`."""

    def __init__(self, world: SimWorld, rank: int) -> None:
        self.torch_device = torch.device("cpu")
        self.uuid = f"GPU-{rank}"
        self._world, self._rank = world, rank
        self._compute = SimStream(world, rank, COMPUTE)
        self._current = threading.local()
        self._streams = self._user_streams = 0
        self.emptied = 0
        world.devices[rank] = self

    def activate(self) -> None:
        """See `CudaDevice.activate`."""
        self._world.script.check_alive(self._rank)

    def watch_captures(self) -> None:
        """See `CudaDevice.watch_captures`. Here every thread may query events during a capture."""

    def new_stream(self) -> SimStream:
        """See `CudaDevice.new_stream`. Streams are numbered in the order of their creation."""
        self._streams += 1
        return SimStream(self._world, self._rank, f"lane {self._streams}")

    def user_stream(self) -> SimStream:
        """Return a new stream of the caller. Its work runs asynchronously to the host; see `on` and `kernel`."""
        self._user_streams += 1
        return SimStream(self._world, self._rank, f"user {self._user_streams}")

    @contextmanager
    def on(self, stream: SimStream) -> Iterator[None]:
        """Make `stream` the current stream of this thread."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def current_stream(self) -> SimStream:
        """Return the stream set by `on`, or the compute stream."""
        return getattr(self._current, "stream", self._compute)

    def new_event(self) -> SimEvent:
        """See `CudaDevice.new_event`."""
        return SimEvent(self._world, self._rank)

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `CudaDevice.empty`. The memory ends with its last view; the library then refuses its address."""
        with self._world.changed:
            self._world.script.check_alive(self._rank)
            return torch.from_numpy(self._world.memory.plain(self._rank, nbytes))

    def wrap(self, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
        """See `CudaDevice.wrap`."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        array = (ctypes.c_uint8 * nbytes).from_address(pointer)
        array.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)

    def release_cached(self) -> None:
        """See `CudaDevice.release_cached`."""
        with self._world.changed:
            self._world.memory.cached[self._rank] = 0
            self.emptied += 1

    def is_capturing(self) -> bool:
        """See `CudaDevice.is_capturing`."""
        return self._world.capturing(self._rank)

    def touch(self, reads: Sequence[Range] = (), writes: Sequence[Range] = (), label: str = "") -> None:
        """Record in the trace that the current stream reads and writes these ranges."""
        self.kernel(reads, writes, label)

    def kernel(
        self, reads: Sequence[Range] = (), writes: Sequence[Range] = (), label: str = "", held: bool = False
    ) -> Touch:
        """Enqueue compute that accesses these ranges. If `held`, it does not run before `SimWorld.finish`."""
        stream = self.current_stream()
        assert not held or stream is not self._compute, "compute on the host thread's stream cannot be held"
        entry = Touch(self._rank, stream.name, tuple(reads), tuple(writes), label, held)
        self._world.issue(entry)
        return entry


def span(tensor: torch.Tensor) -> Range:
    """Return (address, bytes) of a contiguous tensor, for `SimDevice.touch`."""
    return tensor.data_ptr(), tensor.nbytes
