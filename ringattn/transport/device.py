"""The CUDA interface of GPU transports: streams, events and memory, through torch.

Guarantees: the NCCL transport makes no other CUDA call, so a simulated device can replace the real one.
"""

from __future__ import annotations

import copy
import ctypes
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from ringattn.errors import RingError, UnsupportedError
from ringattn.observe.flight import DONE, FAILED, RUNNING, Flight
from ringattn.transport.base import Ending, Message, Opening, Operation, listed

RELAXED = 2
"""`cudaStreamCaptureModeRelaxed`."""


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: Stream) -> None: ...

    def query(self) -> bool:
        """Return whether all work before the event has run. Never called on an event recorded during a capture."""
        ...


class Stream(Protocol):
    """A queue of device work."""

    @property
    def cuda_stream(self) -> int:
        """The stream handle that NCCL receives."""
        ...

    def wait_event(self, event: Event) -> None:
        """Order later work of this stream after `event`. Does not block the host."""
        ...


class _Memory:
    """Device memory with the interface that torch reads. Every view of it keeps `owner` alive."""

    def __init__(self, pointer: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


class CudaDevice:
    """A GPU of this process, through `torch.cuda`.

    The tests' simulated devices, and a stub without a GPU in `bench/hop.py`, override every method.
    """

    torch_device: torch.device
    uuid: str

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self.uuid = str(torch.cuda.get_device_properties(index).uuid)

    def activate(self) -> None:
        """Make this GPU the current device of the calling thread."""
        torch.cuda.set_device(self.torch_device)

    def watch_captures(self) -> None:
        """Allow the calling thread to query events while other threads capture, in any capture mode.

        Torch does not wrap this call, so it is made on the runtime library that torch has loaded.
        """
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        mode = ctypes.c_int(RELAXED)
        if status := runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
            raise UnsupportedError(f"cudaThreadExchangeStreamCaptureMode failed with CUDA error {status}")

    def new_stream(self) -> Stream:
        """Return a stream of torch's highest priority, which may be lower than the device's highest."""
        _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # static, which its stub does not say
        return cast(Stream, torch.cuda.Stream(self.torch_device, priority=highest))

    def current_stream(self) -> Stream:
        """Return the stream that the caller computes on."""
        return cast(Stream, torch.cuda.current_stream(self.torch_device))

    def new_event(self) -> Event:
        """Return an event without timing, which would cost device time."""
        return cast(Event, torch.cuda.Event())

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return plain device memory as a flat uint8 tensor."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def wrap(self, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
        """Wrap another library's memory as a flat uint8 tensor whose views keep `owner` alive."""
        return torch.as_tensor(_Memory(pointer, nbytes, owner), device=self.torch_device)

    def release_cached(self) -> None:
        """Return torch's unused cached memory to the device, so that NCCL can allocate it."""
        torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()


class PassOrder:
    """The order of passes that use the same memory, whichever of the caller's streams each pass runs on.

    Passes on several streams within one graph capture are not covered.
    """

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        self._ended = gpu.new_event()
        # The handle of the last pass's stream; None before the first pass.
        self._stream: int | None = None

    def begin(self) -> None:
        """Order later work of the current stream after the last pass."""
        # A capture cannot wait for an event from outside. The replay of the graph is ordered instead.
        if self._stream is None or self._gpu.is_capturing():
            return
        current = self._gpu.current_stream()
        # The work of one stream is in order anyway, so only another stream needs the wait.
        if current.cuda_stream != self._stream:
            current.wait_event(self._ended)

    def end(self) -> None:
        """Mark the current point of the current stream as the end of a pass."""
        if self._gpu.is_capturing():
            return
        current = self._gpu.current_stream()
        self._ended.record(current)
        self._stream = current.cuda_stream

    def passed(self) -> bool:
        """Return whether the device has completed the last pass, and so all earlier passes."""
        return self._stream is None or self._ended.query()


AnyPiece = TypeVar("AnyPiece")


class _View:
    """An object that all views of one piece of memory keep alive. It is collected when the last view is."""


class ViewedMemory(ABC, Generic[AnyPiece]):
    """Device memory of one ring: pieces, stored by address, each of which is freed after its last view has ended.

    Only the thread that uses the ring may use this object, and after the ring's end one separate thread.
    Guarantee: no destructor frees memory. A destructor may run on any thread at any time and must not wait for the
    device, so the end of a piece's last view only queues the piece's address.
    """

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        self._pieces: dict[int, AnyPiece] = {}
        # Addresses without a view. A destructor may put into a SimpleQueue whatever locks its thread holds.
        self._unused: SimpleQueue[int] = SimpleQueue()

    @property
    def is_empty(self) -> bool:
        """Whether every piece has been freed."""
        return not self._pieces

    def free(self) -> None:
        """Free the pieces that have no view. Call this only when the device can no longer access them."""
        while True:
            try:
                pointer = self._unused.get_nowait()
            except Empty:
                return
            self._give_back(self._pieces.pop(pointer))

    def _viewed(self, pointer: int, nbytes: int, piece: AnyPiece) -> torch.Tensor:
        """Register a new piece of memory, and return it as a flat uint8 tensor."""
        self._pieces[pointer] = piece
        view = _View()
        weakref.finalize(view, self._unused.put, pointer).atexit = False
        return self._gpu.wrap(pointer, nbytes, view)

    def _free_each(self, quiet: Callable[[], bool]) -> None:
        """Wait for the end of each piece's last view, then free the piece.

        Stop without freeing it if `quiet()` returns False: the device may still access the memory.
        """
        while self._pieces:
            pointer = self._unused.get()
            if not quiet():
                return
            self._give_back(self._pieces.pop(pointer))

    @abstractmethod
    def _give_back(self, piece: AnyPiece) -> None:
        """Free one piece."""


# --- transports that exchange on a stream ----------------------------------------------------------------------------


class StreamTransport(Ending, ABC):
    """A transport whose exchanges run on a separate stream, ordered with the caller's by events.

    Each exchange runs between two events: `ready`, when the caller's stream has reached the exchange, and `done`, when
    its messages have arrived. Guarantees: a wait orders streams and never blocks the host; the buffers of an exchange
    live until its messages have arrived.
    """

    name: str
    watch: StreamWatch[Any]
    stream: Stream
    order: PassOrder

    def __init__(self, opening: Opening, gpu: CudaDevice) -> None:
        self.opening, self.gpu, self.device = opening, gpu, gpu.torch_device
        self.rank, self.world_size, self.locations = opening.rank, opening.world_size, tuple(opening.locations)
        self.record = opening.record

    @abstractmethod
    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> StreamHop:
        """See `Transport.bind`."""

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> StreamWorkHandle | Arrived:
        """See `Transport.exchange`. Raises `InputError`, `ClosedError`, and an earlier failure."""
        return self.bind(sends, recvs).start()

    def begin_pass(self) -> None:
        """See `Transport.begin_pass`."""
        self.order.begin()

    def end_pass(self) -> None:
        """See `Transport.end_pass`."""
        self.order.end()

    def check(self) -> None:
        """Raise the failure that ended this ring, once, and `ClosedError` in later calls."""
        self._check_open()
        # The first call raises the failure itself. Later ones raise `ClosedError` with it as the cause.
        try:
            self.watch.raise_failure()
        except RingError as failure:
            self._end = bare(failure)
            self._failure_raised()
            raise

    def _failure_raised(self) -> None:
        """React to the failure that `check` is about to raise. A transport overrides this if it has more to end."""


class StreamHop(ABC):
    """The messages of one exchange, bound to their buffers."""

    def __init__(self, transport: StreamTransport, operations: Sequence[Operation]) -> None:
        self.transport, self.operations = transport, operations
        self.peers = {operation.peer for operation in operations}
        self.parts = tuple(operation.record() for operation in operations)
        """The messages as the flight record stores them."""

    def __str__(self) -> str:
        return listed(self.operations)

    @abstractmethod
    def start(self) -> StreamWorkHandle | Arrived:
        """Enqueue the hop on its stream, after the current work of the current stream."""


class StreamWorkHandle:
    """A started hop. It keeps its buffers alive until the exchange is complete."""

    arrived_s = None
    __slots__ = ("done", "flight", "hop", "ready", "started_at", "transport", "waited")

    def __init__(self, hop: StreamHop, flight: Flight, ready: Event, done: Event) -> None:
        self.transport, self.flight, self.ready, self.done = hop.transport, flight, ready, done
        self.hop: StreamHop | None = hop
        """None after the exchange has arrived. Other threads read it, so it is never deleted."""
        self.started_at = 0.0
        self.waited = False

    def wait(self) -> None:
        """See `WorkHandle.wait`: order later work of the current stream after the exchange. Idempotent."""
        transport = self.transport
        # Raise an earlier failure first: the events of a failed ring prove nothing.
        transport.check()
        if not self.waited:
            # This orders streams and returns at once: the host never waits here.
            transport.gpu.current_stream().wait_event(self.done)
            self.waited = True
            # Check again, so that a failure in between is raised before the results are used.
            transport.check()

    def note_start(self) -> None:
        """Note when this rank is ready for the exchange: the computation before it does not count as waiting."""
        if not self.started_at and self.ready.query():
            self.started_at = time.monotonic()
            self.flight.started_s, self.flight.state = time.time(), RUNNING

    def release(self) -> None:
        """Release the buffers, because the exchange has arrived."""
        self.hop = None


class Arrived:
    """The work handle of a hop without bytes."""

    arrived_s = None

    def wait(self) -> None:
        """Return at once: there is nothing to wait for."""


STUCK_ABORT_EXIT_CODE = 75
AnyHandle = TypeVar("AnyHandle", bound=StreamWorkHandle)


class StreamWatch(ABC, Generic[AnyHandle]):
    """The thread that watches one rank's exchanges in flight and stores the ring's first failure.

    Each transport defines what the thread checks. Guarantees: every call raises the first failure, and any error on the
    thread ends the ring.
    """

    interval_s: float
    """The time between two checks."""
    stop_s: float
    """How long the thread may take to end."""
    patience_s: float
    """How long a caller waits for the first failure to be reported to the other ranks."""

    def __init__(self, opening: Opening, gpu: CudaDevice, leave: Callable[[str], None] | None) -> None:
        """Create the thread; `start` starts it.

        `leave`: a function that ends the process. It is called with the reason if even an abort is stuck.
        """
        self.failure: BaseException | None = None
        self.handles: deque[AnyHandle] = deque()
        self.free: deque[tuple[Event, Event]] = deque()
        self.ended = threading.Event()
        """Set when the aborts after a failure are complete or stuck."""
        self._opening, self._rank, self._record = opening, opening.rank, opening.record
        self._gpu, self._leave = gpu, leave or end_process
        self._unwaited: list[AnyHandle] = []
        self._ticking = threading.Lock()
        # Acquired by the first failure and never released, so locked means failed.
        self._first = threading.Lock()
        self._reported, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ringattn-watch-{self._rank}", daemon=True)

    @property
    def _timeout_s(self) -> float:
        return self._opening.timeout_s

    @property
    def oldest(self) -> AnyHandle | None:
        """The oldest exchange that has not arrived."""
        return next(iter(list(self.handles)[:1]), None)

    def start(self) -> None:
        """Start the watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self.stop_s)

    def raise_failure(self) -> None:
        """Raise the ring's failure, if it has failed. Every wait on the host calls this between its sleeps."""
        # The failure may still be on its way to the other ranks. Wait until it is reported, but not indefinitely.
        if self._first.locked():
            self._reported.wait(self.patience_s)
            if self.failure is None:
                raise RingError(f"rank {self._rank}: this ring is failing")
            # Raise a copy: a raised error collects the frames it passes, and those view the ring's memory.
            raise bare(self.failure)

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End the ring with `error`, unless it has failed before. Never raises."""

    def tick(self) -> None:
        """Complete the exchanges that have arrived, in order: release their buffers, and reuse their events."""
        with self._ticking:
            # Hops run in order on one stream, so the first hop that has not arrived ends the loop.
            while self.handles and self.handles[0].done.query():
                handle = self.handles.popleft()
                if handle.flight.state != FAILED:
                    handle.flight.state, handle.flight.done_s = DONE, time.time()
                handle.release()
                self._unwaited.append(handle)
            # Reuse the events of an exchange only after the caller's wait, which needs them.
            waited = [handle for handle in self._unwaited if handle.waited]
            self._unwaited = [handle for handle in self._unwaited if not handle.waited]
            self.free.extend((handle.ready, handle.done) for handle in waited if self._may_reuse(handle.done))

    def _may_reuse(self, done: Event) -> bool:
        """Return whether an event may be recorded again."""
        return True

    def _is_first(self) -> bool:
        """Return whether the caller's failure is the ring's first. If not, wait until the first has been reported."""
        if not self._first.acquire(blocking=False):
            self._reported.wait(self.patience_s)
            return False
        for handle in list(self.handles):
            handle.flight.state = FAILED
        return True

    def _write_record(self, failure: BaseException, *later_errors: BaseException) -> None:
        """Write the flight record, and add its path as a note to every given error. Later calls raise `failure`."""
        folder = self._opening.flight_dir
        if folder is None:
            return
        try:
            note = f"flight record: {self._record.dump(folder, str(failure))}"
            for error in (failure, *later_errors):
                error.add_note(note)
        except OSError as io_error:
            print(f"ringattn rank {self._rank}: no flight record: {io_error}", file=sys.stderr, flush=True)

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._gpu.activate()
            self._gpu.watch_captures()
            while not self._stopped.wait(self.interval_s):
                self._check_exchanges()
        except BaseException as error:  # a lost device may raise any kind of error
            if not self._stopped.is_set():
                self._end_ring(error)

    @abstractmethod
    def _check_exchanges(self) -> None:
        """Check the exchanges once. Raises the error that ends the ring."""

    def _end_ring(self, error: BaseException) -> None:
        """End the ring with an error that a check raised."""
        self.fail(error)


def bare(error: BaseException) -> BaseException:
    """Return a copy of the error without its traceback, whose frames would keep their local variables alive."""
    try:
        return copy.copy(error)
    except Exception:  # a user's class that cannot be copied
        return RingError(f"{type(error).__name__}: {error}")


def end_process(reason: str) -> None:
    """End the process: this is the only way left to stop the work on the GPU. torchrun may restart the process."""
    print(f"ringattn: {reason}", file=sys.stderr, flush=True)
    os._exit(STUCK_ABORT_EXIT_CODE)
