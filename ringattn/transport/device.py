"""What transports on GPUs ask of CUDA: streams, events, memory, in torch's own words.

Guarantees: the NCCL transport touches no other CUDA call, so that a simulated device can stand in for a real one.
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
        """Whether everything before it has run. Never asked of an event that was recorded in a capture."""
        ...


class Stream(Protocol):
    """A queue of device work."""

    @property
    def cuda_stream(self) -> int:
        """The handle that NCCL is given."""
        ...

    def wait_event(self, event: Event) -> None:
        """Later work of this stream runs after `event`. Does not block the host."""
        ...


class _Memory:
    """Device memory with the interface that torch reads; every view of it keeps `owner` alive."""

    def __init__(self, pointer: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


class CudaDevice:
    """A GPU as this process sees it, through `torch.cuda`. A simulated or missing one overrides every method."""

    torch_device: torch.device
    uuid: str

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self.uuid = str(torch.cuda.get_device_properties(index).uuid)

    def activate(self) -> None:
        """Make it the current device of the calling thread."""
        torch.cuda.set_device(self.torch_device)

    def watch_captures(self) -> None:
        """Let the calling thread query events while other threads capture, whatever the mode of their capture.

        Torch has no name for it, so the runtime that torch has loaded is called.
        """
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        mode = ctypes.c_int(RELAXED)
        if status := runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
            raise UnsupportedError(f"cudaThreadExchangeStreamCaptureMode failed with CUDA error {status}")

    def new_stream(self) -> Stream:
        """A stream of the highest priority that torch has, which may be lower than the device's."""
        _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # static, which its stub does not say
        return cast(Stream, torch.cuda.Stream(self.torch_device, priority=highest))

    def current_stream(self) -> Stream:
        """The stream that the caller computes on."""
        return cast(Stream, torch.cuda.current_stream(self.torch_device))

    def new_event(self) -> Event:
        """Without timing, which would cost the device time."""
        return cast(Event, torch.cuda.Event())

    def empty(self, nbytes: int) -> torch.Tensor:
        """Plain device memory, a flat uint8 tensor."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def wrap(self, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
        """Memory that another library allocated, as a flat uint8 tensor whose views keep `owner` alive."""
        return torch.as_tensor(_Memory(pointer, nbytes, owner), device=self.torch_device)

    def release_cached(self) -> None:
        """Give memory that torch has cached and nobody uses back to the device, where NCCL can take it."""
        torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()


class PassOrder:
    """Orders passes that work in the same memory, on whichever of the caller's streams each of them runs.

    Not covered: passes on several streams within one capture of a graph.
    """

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        self._ended = gpu.new_event()
        # The handle of the stream that the last pass ran on; None before the first.
        self._stream: int | None = None

    def begin(self) -> None:
        """Later work of the current stream follows the last pass."""
        # A capture cannot wait for an event from outside of it; its replay is ordered instead.
        if self._stream is None or self._gpu.is_capturing():
            return
        current = self._gpu.current_stream()
        # A stream is in order with itself.
        if current.cuda_stream != self._stream:
            current.wait_event(self._ended)

    def end(self) -> None:
        """What the current stream holds now is the end of a pass."""
        if self._gpu.is_capturing():
            return
        current = self._gpu.current_stream()
        self._ended.record(current)
        self._stream = current.cuda_stream

    def passed(self) -> bool:
        """Whether the device has run the last pass, and with it all before."""
        return self._stream is None or self._ended.query()


AnyPiece = TypeVar("AnyPiece")


class _View:
    """What every view of a piece keeps alive."""


class ViewedMemory(ABC, Generic[AnyPiece]):
    """Device memory of one ring, in pieces by their address, each of which is given back after its last view.

    Used by the thread that uses the ring, and after its end by a thread of its own.
    Guarantee: nothing is given back from a destructor, which may run on any thread at any time and must not wait for
    the device: the end of the last view only notes the address.
    """

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        self._pieces: dict[int, AnyPiece] = {}
        # Addresses whose last view has gone. A queue that a destructor may write to, whatever its thread holds.
        self._unused: SimpleQueue[int] = SimpleQueue()

    @property
    def is_empty(self) -> bool:
        """Whether all has been given back."""
        return not self._pieces

    def free(self) -> None:
        """Give back what has no view any more. The device can touch none of it."""
        while True:
            try:
                pointer = self._unused.get_nowait()
            except Empty:
                return
            self._give_back(self._pieces.pop(pointer))

    def _viewed(self, pointer: int, nbytes: int, piece: AnyPiece) -> torch.Tensor:
        """A flat uint8 tensor over a new piece."""
        self._pieces[pointer] = piece
        view = _View()
        weakref.finalize(view, self._unused.put, pointer).atexit = False
        return self._gpu.wrap(pointer, nbytes, view)

    def _free_each(self, quiet: Callable[[], bool]) -> None:
        """Give back each piece after its last view, while `quiet` returns that the device can touch it no more."""
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
    """A transport whose exchanges run on a stream of their own, ordered with the caller's by events.

    Each exchange runs between two events: the caller's stream is ready for it, and it has arrived.
    Guarantees: a wait orders streams and never blocks the host; buffers live until their exchange has arrived.
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
        """See `Transport.exchange`. Raises `InputError`, `ClosedError`, and what has failed before."""
        return self.bind(sends, recvs).start()

    def begin_pass(self) -> None:
        """See `Transport.begin_pass`."""
        self.order.begin()

    def end_pass(self) -> None:
        """See `Transport.end_pass`."""
        self.order.end()

    def check(self) -> None:
        """Raise `ClosedError` if this ring has ended, and before that, once, what ended it."""
        self._check_open()
        # The first time the failure itself, later `ClosedError` with it as the cause.
        try:
            self.watch.raise_failure()
        except RingError as failure:
            self._end = bare(failure)
            self._failure_raised()
            raise

    def _failure_raised(self) -> None:
        """The caller gets what has ended this ring."""


class StreamHop(ABC):
    """Messages that travel together, bound to their buffers."""

    def __init__(self, transport: StreamTransport, operations: Sequence[Operation]) -> None:
        self.transport, self.operations = transport, operations
        self.peers = {operation.peer for operation in operations}
        self.parts = tuple(operation.record() for operation in operations)
        """As the flight record keeps them."""

    def __str__(self) -> str:
        return listed(self.operations)

    @abstractmethod
    def start(self) -> StreamWorkHandle | Arrived:
        """Put it on its stream, behind what the current stream holds now."""


class StreamWorkHandle:
    """A started hop. Keeps its buffers alive until it has arrived."""

    arrived_s = None
    __slots__ = ("done", "flight", "hop", "ready", "started_at", "transport", "waited")

    def __init__(self, hop: StreamHop, flight: Flight, ready: Event, done: Event) -> None:
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

    def look(self) -> None:
        """Note when this rank is ready for it: own computation before the exchange does not count."""
        if not self.started_at and self.ready.query():
            self.started_at = time.monotonic()
            self.flight.started_s, self.flight.state = time.time(), RUNNING

    def release(self) -> None:
        """It has arrived: let go of the buffers."""
        del self.hop


class Arrived:
    """The work handle of a hop without a byte."""

    arrived_s = None

    def wait(self) -> None:
        """Nothing to wait for."""


STUCK_ABORT_EXIT_CODE = 75
AnyHandle = TypeVar("AnyHandle", bound=StreamWorkHandle)


class StreamWatch(ABC, Generic[AnyHandle]):
    """The thread that watches one rank's exchanges: what is under way, and the first failure.

    What it looks for is its transport's. Guarantees: the first failure is the one that every call raises; whatever is
    raised on the thread ends the ring.
    """

    interval_s: float
    """Between two looks."""
    stop_s: float
    """How long the thread may take to end."""
    patience_s: float
    """How long a caller waits until the first failure has its words."""

    def __init__(self, opening: Opening, gpu: CudaDevice, leave: Callable[[str], None] | None) -> None:
        """`leave` is called with the reason when even an abort is stuck, and ends the process."""
        self.failure: BaseException | None = None
        self.handles: deque[AnyHandle] = deque()
        self.free: deque[tuple[Event, Event]] = deque()
        self.ended = threading.Event()
        """Set when the aborts after a failure have ended or are stuck."""
        self._opening, self._rank, self._record = opening, opening.rank, opening.record
        self._gpu, self._leave = gpu, leave or end_process
        self._unwaited: list[AnyHandle] = []
        self._ticking = threading.Lock()
        # Taken by the first failure and never given back: locked means failed.
        self._first = threading.Lock()
        self._told, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"ringattn-watch-{self._rank}", daemon=True)

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
        """Raise the failure, if there is one. What every wait on the host does between its naps."""
        # The failure may still be on its way to the other ranks, so this waits until they are told, but not for ever.
        if self._first.locked():
            self._told.wait(self.patience_s)
            if self.failure is None:
                raise RingError(f"rank {self._rank}: this ring is failing")
            # A copy: what is raised collects the frames that it passes, and those view the ring's memory.
            raise bare(self.failure)

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End the ring, for `error` unless it has failed already. Never raises."""

    def tick(self) -> None:
        """Tick off what has arrived, in order; let go of its buffers, and of its events once the caller has waited."""
        with self._ticking:
            # Hops run in order on one stream, so the first that has not arrived ends the search.
            while self.handles and self.handles[0].done.query():
                handle = self.handles.popleft()
                if handle.flight.state != FAILED:
                    handle.flight.state, handle.flight.done_s = DONE, time.time()
                handle.release()
                self._unwaited.append(handle)
            # Events are used again only when the caller has waited: its wait may still be to come.
            waited = [handle for handle in self._unwaited if handle.waited]
            self._unwaited = [handle for handle in self._unwaited if not handle.waited]
            self.free.extend((handle.ready, handle.done) for handle in waited if self._may_reuse(handle.done))

    def _may_reuse(self, done: Event) -> bool:
        """Whether an event may be recorded anew."""
        return True

    def _is_first(self) -> bool:
        """Whether the caller has the first failure, which ends the ring. Others wait: theirs follow from it."""
        if not self._first.acquire(blocking=False):
            self._told.wait(self.patience_s)
            return False
        for handle in list(self.handles):
            handle.flight.state = FAILED
        return True

    def _write_record(self, failure: BaseException, *others: BaseException) -> None:
        """Where the record is, is a note of `failure`, which later calls raise, and of the others."""
        folder = self._opening.flight_dir
        if folder is None:
            return
        try:
            note = f"flight record: {self._record.dump(folder, str(failure))}"
            for error in (failure, *others):
                error.add_note(note)
        except OSError as trouble:
            print(f"ringattn rank {self._rank}: no flight record: {trouble}", file=sys.stderr, flush=True)

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._gpu.activate()
            self._gpu.watch_captures()
            while not self._stopped.wait(self.interval_s):
                self._look()
        except BaseException as error:  # a device that is lost raises whatever it likes
            if not self._stopped.is_set():
                self._found(error)

    @abstractmethod
    def _look(self) -> None:
        """One round. Raises what ends the ring."""

    def _found(self, error: BaseException) -> None:
        """A round has raised it."""
        self.fail(error)


def bare(error: BaseException) -> BaseException:
    """The error without its traceback, whose frames would keep alive all that they name."""
    try:
        return copy.copy(error)
    except Exception:  # a class of the user's that cannot be copied
        return RingError(f"{type(error).__name__}: {error}")


def end_process(why: str) -> None:
    """No way is left to stop what runs on the GPU but to end the process, which torchrun may then start again."""
    print(f"ringattn: {why}", file=sys.stderr, flush=True)
    os._exit(STUCK_ABORT_EXIT_CODE)
