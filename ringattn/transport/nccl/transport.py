"""The NCCL transport: a ring whose ranks are processes with one GPU each.

Guarantees: each hop is one NCCL group on a separate stream, ordered with the caller's stream by events, so the host
never waits inside a pass. Every exchange has a deadline that the supervisor enforces. A failure is raised by the next
call of the ring or by its close, never swallowed. The NCCL communicators are shared with nothing else. A wait orders
streams and returns at once, so spoiled results of a failure raise only at a later call: call `drain` before you keep
results.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from ringattn.errors import ClosedError, DeadlineError, PeerLostError, RingError
from ringattn.observe.flight import CAPTURED, LAUNCHING, POSTED
from ringattn.observe.memory import is_shortage
from ringattn.transport.base import Message, Opening, Operation, closed_at_exit, operations
from ringattn.transport.deadline import Deadline, wait_until
from ringattn.transport.device import (
    Arrived,
    CudaDevice,
    PassOrder,
    StreamHop,
    StreamTransport,
    StreamWorkHandle,
    ViewedMemory,
    bare,
)
from ringattn.transport.nccl.binding import Binding, Capability, NcclError, Status
from ringattn.transport.nccl.bootstrap import Arrival, StoreAllGather, all_ready, meet, share_unique_id
from ringattn.transport.nccl.communicator import ABORT_S, Communicator, PeerCall, State
from ringattn.transport.nccl.options import NcclOptions, config_of
from ringattn.transport.nccl.supervisor import NOT_CLOSED, BrokenCommunicatorError, CallHistory, Supervisor

CLOSE_S = 10.0
"""How long freeing a communicator may take if all ranks do it."""
EXIT_LINGER_S = 1.0
GRACE_S = 5.0
"""How much longer a wait on the host waits than the supervisor, whose error says more about the cause."""
ANSWER_S = 0.5
"""How long a closing rank waits for an answer of the store after the end of its own patience."""


class NcclTransport(StreamTransport):
    """One rank of a ring over NCCL. Created by `open`."""

    name = "nccl"

    def __init__(
        self,
        opening: Opening,
        binding: Binding,
        gpu: CudaDevice,
        options: NcclOptions,
        leave: Callable[[str], None] | None,
        ras: str | None,
    ) -> None:
        """Create the transport without connecting it; see `open`."""
        super().__init__(opening, gpu)
        self.options, self.stream = options, gpu.new_stream()
        self._binding = binding
        self.communicator = Communicator(opening, binding, gpu, config_of(options, binding.capabilities))
        """The communicator that hops run on."""
        self._calls = CallHistory()
        self.watch = self.supervisor = Supervisor(opening, self.communicator, gpu, self._calls, leave, ras)
        self._memory = RingMemory(binding, gpu, self.communicator, self.can_register, self.rank)
        self.order = self._memory.order
        self._all_gather = StoreAllGather(opening, self.supervisor)
        self.check_groups: Callable[[], None] = lambda: None  # called at each call of the ring

    @classmethod
    def open(
        cls,
        opening: Opening,
        *,
        binding: Binding,
        gpu: CudaDevice,
        options: NcclOptions,
        nccl_id: str,
        leave: Callable[[str], None] | None = None,
        ras: str | None = None,
    ) -> NcclTransport:
        """Connect this rank with all others.

        `nccl_id`: NCCL's identifier of this host. `leave` ends the process if even an abort is stuck. `ras`: the
        address of NCCL's RAS service; None if it has none.
        Raises `DeadlineError` with the missing ranks, `InputError` if the ranks' versions or options do not fit
        together, and `NcclError`.
        """
        gpu.activate()
        opening.name = opening.name or cls.name
        ring = cls(opening, binding, gpu, options, leave, ras)
        try:
            # Start the watch before the ranks meet, so that a stuck open is noticed too.
            ring.supervisor.start()
            ring._meet(nccl_id)
        except DeadlineError as error:
            # The store knows which rank did not arrive, even if the communicator never opened.
            raise ring._end_with_attribution(error) from error
        except BaseException as error:
            ring.abort(error)
            raise
        closed_at_exit[id(ring)] = ring
        return ring

    @property
    def can_register(self) -> bool:
        """Whether staging buffers are NCCL's own registered memory."""
        return self.options.register and {Capability.MEMORY, Capability.REGISTER} <= self._binding.capabilities

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate a uint8 tensor on the GPU for long-lived buffers: NCCL's registered memory if it is available."""
        self.check()
        if self.gpu.is_capturing():
            raise RingError(
                f"rank {self.rank}: the first run of a pass allocates its staging buffers; run it, then capture it"
            )
        try:
            return self._memory.allocate(nbytes, self._wait_until_quiet)
        except NcclError:
            self.check()  # if the ring was aborted meanwhile, its failure is the cause, not the call that NCCL refused
            raise

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> NcclHop:
        """See `Transport.bind`."""
        return NcclHop(self, operations(Operation, self.rank, self.world_size, self.device, sends, recvs))

    def replay(self, run: Callable[[], None]) -> None:
        """See `Transport.replay`."""
        self.check()
        Replay(self, run).start()

    def launch(self, calls: Sequence[PeerCall]) -> None:
        """Enqueue the sends and receives of one hop as a group on the communication stream. For `NcclHop.start`."""
        try:
            self.communicator.launch(calls, self.stream.cuda_stream, self.check)
        except NcclError as error:
            if error.status in (Status.REMOTE_ERROR, Status.SYSTEM_ERROR):  # a connection broke, so a peer is at fault
                self.supervisor.fail(BrokenCommunicatorError(str(error)), attribute=True)
            self.check()  # also if the ring was aborted meanwhile
            raise
        except DeadlineError as error:
            raise self._end_with_attribution(error) from error

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Transport.all_gather_bytes`. The payloads are exchanged through the control store.

        Raises `DisagreementError` if another rank makes a different call.
        """
        self.check()
        try:
            return self._all_gather.all_gather_bytes(payload)
        except DeadlineError as error:
            raise self._end_with_attribution(error) from error
        except BaseException as error:
            self.abort(error)
            raise

    def announce(self, call: int, digest: bytes, description: str, gradients: str = "") -> bool:
        """See `Transport.announce`. The supervisors compare the calls in the background."""
        self._calls.announce(call, digest, description, gradients)
        self.check_groups()
        return True

    def drain(self) -> None:
        """Return when every exchange has arrived. Raises the failure, if any.

        As in the supervisor, the device may take any time to reach an exchange. The deadline counts from then.
        """
        self._arrive(math.inf)

    def abort(self, cause: BaseException) -> None:
        """See `Transport.abort`."""
        if self.forked:
            return
        if self._end is None:
            self._end = bare(cause)
        computed = self._memory.compute_event_query()
        self.supervisor.fail(cause)
        self.supervisor.stop()
        closed_at_exit.pop(id(self), None)
        self._end_memory(computed)

    def _end_with_attribution(self, error: DeadlineError) -> BaseException:
        """End the ring after this thread missed a deadline; return the error that names the rank at fault."""
        self.supervisor.fail(error, attribute=True)
        failure = self.supervisor.failure or error
        self.abort(failure)
        return bare(failure)

    def close_at_exit(self) -> None:
        """See `Ending.close_at_exit`: close with a short patience."""
        self.close(EXIT_LINGER_S)

    def close(self, linger_s: float | None = None) -> None:
        """See `Transport.close`. Waits for the other ranks for `linger_s` (None: the deadline), then closes alone.

        Only all ranks together can free a communicator gracefully, and over a network the last bytes may still be in
        flight when this rank's part is done. Raises a failure that no call has raised, and `PeerLostError` that names
        a dead rank that has not closed.
        """
        if self._end is not None:
            return
        self.gpu.activate()  # the thread that closes a dropped ring has not used it
        patience_s = self.opening.timeout_s if linger_s is None else linger_s
        try:
            self._arrive(math.inf if linger_s is None else linger_s)
        except RingError as error:
            self.abort(error)
            raise
        computed = self._memory.compute_event_query()
        # Announce the close only after everything has arrived: this rank waits for nothing more.
        linger = Deadline(patience_s)
        self.supervisor.leave(linger)
        self._end, self.record.over = ClosedError(f"rank {self.rank} closed its ring"), True
        together, lost = False, None
        try:
            all_ranks_closed = self.supervisor.all_closed(self.opening.control.until(linger.plus(ANSWER_S)))
            together = wait_until(all_ranks_closed, linger, self.supervisor.raise_failure, self.opening.control.naps_s)
        except RuntimeError as error:  # a rank failed or the store's host is gone, so this rank waits for no other
            lost = error if isinstance(error, PeerLostError) and NOT_CLOSED in str(error) else None
        self.supervisor.stop()
        self.supervisor.tick()  # releases the last buffers
        closed_at_exit.pop(id(self), None)
        # Stuck computation or a stuck communicator may still touch the ring's memory, so then the memory is kept.
        # Wait for the computation first: NCCL frees a communicator only when the device is idle, and until then every
        # CUDA call of this process waits in the driver.
        if self._memory.wait(computed, patience_s) and self._free(together):
            self._memory.free()
            # Memory that a caller still views is freed when its last view ends.
            self._end_memory(computed)
        else:
            self._memory.leave()
        if lost is not None:
            raise lost

    def _arrive(self, ready_s: float) -> None:
        """Return when every exchange has arrived. `ready_s`: the time the device may take to reach each of them."""
        self.check()
        for handle in list(self.supervisor.handles):  # in order, as they run
            self._await(handle, ready_s)
        self.check()

    def _await(self, handle: StreamWorkHandle, ready_s: float) -> None:
        if not wait_until(lambda: handle.ready.query() or handle.done.query(), Deadline(ready_s), self.check):
            raise DeadlineError(f"rank {self.rank}: the GPU was still computing after {ready_s} s, before {handle.hop}")
        # Wait longer than the supervisor does, so that its error, which names the rank at fault, is raised.
        if not wait_until(handle.done.query, Deadline(self.opening.timeout_s + GRACE_S), self.check):
            raise DeadlineError(f"rank {self.rank}: an exchange did not end within {self.opening.timeout_s} s")

    def _wait_until_quiet(self) -> bool:
        """Wait until neither exchanges nor the caller's streams can touch memory without a view.

        Return False if the caller's streams did not finish within the timeout.
        """
        # Wait for the exchanges first, then for the caller's later work on its stream.
        self.drain()
        self.supervisor.tick()
        return self._memory.wait(self._memory.compute_event_query(), self.opening.timeout_s)

    def _end_memory(self, computed: Callable[[], bool]) -> None:
        """Free all memory once nothing can touch it any more. Returns at once."""

        def quiet() -> bool:
            # Communicators must end before memory that they may still write to is freed.
            if not self._wait_for_aborts():
                warn(self.rank, "a communicator does not end, so memory of the ring is not freed")
                return False
            self.supervisor.release_buffers()
            return self._memory.wait(computed, self.opening.timeout_s)

        self._memory.end(f"ringattn-memory-{self.rank}", quiet)

    def _wait_for_aborts(self) -> bool:
        """Wait for the aborts if the ring has failed; return whether all of them have completed."""
        supervisor = self.supervisor
        return not supervisor.failed or (supervisor.ended.wait(2 * ABORT_S) and not supervisor.stuck)

    @property
    def sm_margin(self) -> int:
        """See `Transport.sm_margin`; 0 for a single rank, which exchanges nothing."""
        return 0 if self.world_size == 1 else self.options.margin

    def _meet(self, nccl_id: str) -> None:
        """Meet the other ranks through the store, and open and warm up the communicator."""
        opening, watch = self.opening, self.supervisor.raise_failure
        control, deadline = opening.control, Deadline(opening.timeout_s)
        arrival = Arrival(
            self.rank, nccl_id, self.gpu.uuid, self._binding.version, _version(), self.can_register, self.options
        )
        meet(control, arrival, self.locations, deadline, watch)
        unique_id = share_unique_id(control, self._binding.unique_id, deadline, watch)
        self.communicator.open(unique_id, watch)
        # Warm up before reporting ready: the first message connects peers, which may take long.
        self._warm_up()
        all_ready(control, deadline, watch)
        self.supervisor.where = "idle"

    def _warm_up(self) -> None:
        """Exchange one byte in both directions: NCCL connects peers at their first message, which may block."""
        if self.world_size == 1:
            return
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        # Every rank posts both directions in the same order, so sends and receives pair.
        for dst, src in ((after, before), (before, after)):
            outgoing, incoming = self.gpu.empty(1), self.gpu.empty(1)
            self.exchange([Message(dst, outgoing, "warm-up")], [Message(src, incoming, "warm-up")]).wait()
        self.drain()

    def _free(self, together: bool) -> bool:
        """End the communicator and return whether it ended.

        `together`: all ranks do so, by a collective close. Otherwise this rank aborts, because the close would hang.
        """
        aborted = self._wait_for_aborts()
        ended = self.communicator.close(Deadline(CLOSE_S)) if together else self.communicator.abort()
        if not aborted or not ended:
            warn(self.rank, "a communicator does not end; is a CUDA graph of it still alive?")
        return aborted and ended


def _version() -> str:
    """Return the installed version of ringattn, or "a checkout" if it is not installed."""
    try:
        return version("ringattn")
    except PackageNotFoundError:
        return "a checkout"


# --- hops ------------------------------------------------------------------------------------------------------------


class NcclHop(StreamHop):
    """One hop, bound once and started many times: the group of its sends and receives, between two events.

    The first event marks that the compute stream is ready for the exchange, the second that the exchange has arrived.
    The host waits for neither. Guarantees: a start and a wait cost a few microseconds of Python (`bench/hop.py`) and no
    device allocation. Inside a graph capture, events are new and never queried.
    """

    transport: NcclTransport

    def __init__(self, transport: NcclTransport, operations: Sequence[Operation]) -> None:
        super().__init__(transport, operations)
        # Addresses are fixed from here on, so a start looks up nothing.
        self._calls = tuple(PeerCall(o.sends, o.buffer.data_ptr(), o.nbytes, o.peer) for o in operations)

    def start(self) -> StreamWorkHandle | Arrived:
        """Enqueue the hop on the communication stream, after the current work of the current stream."""
        transport = self.transport
        transport.check()
        # A hop without messages launches nothing.
        if not self._calls:
            return Arrived()
        gpu, supervisor, stream = transport.gpu, transport.supervisor, transport.stream
        capturing = gpu.is_capturing()
        # Events recorded in a capture belong to the graph, so they are never queried or reused.
        if capturing or not supervisor.free:
            ready, done = gpu.new_event(), gpu.new_event()
        else:
            ready, done = supervisor.free.popleft()
        # The caller's work so far has produced the bytes to send, and has finished reading the receive buffers.
        ready.record(gpu.current_stream())
        stream.wait_event(ready)
        # Record the flight before the launch, so that a launch that hangs is in the record.
        flight = transport.record.begin(0, self.parts, transport.name)
        flight.state = LAUNCHING
        supervisor.where = self.parts[0].label
        # The deadline of a launch counts from here: NCCL may block in it while it connects peers.
        supervisor.launching = self, time.monotonic()
        try:
            transport.launch(self._calls)
        finally:
            supervisor.launching = None
        flight.state = CAPTURED if capturing else POSTED
        # Recorded after the group on the communication stream: completes when the hop has arrived.
        done.record(stream)
        handle = StreamWorkHandle(self, flight, ready, done)
        # A captured hop runs when its graph is replayed, and is watched as part of that `Replay`.
        if not capturing:
            supervisor.handles.append(handle)
        return handle


class Replay(StreamHop):
    """A replay of a captured pass: many hops between two events, which the supervisor can watch only as a whole."""

    transport: NcclTransport

    def __init__(self, transport: NcclTransport, replay: Callable[[], None]) -> None:
        super().__init__(transport, ())  # the graph does not list its peers; the supervisor assumes all ranks
        self._replay = replay

    def start(self) -> StreamWorkHandle:
        """Call `replay`, which launches the graph on the current stream, after the last pass."""
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


# --- memory ----------------------------------------------------------------------------------------------------------


def warn(rank: int, message: str) -> None:
    """Print a warning for the user where no later call could raise it."""
    print(f"ringattn rank {rank}: {message}", file=sys.stderr, flush=True)


_abandoned: list[RingMemory] = []
"""Memory kept until the process ends, because torch too would allocate it again."""


class _Piece:
    """One allocation. `plain`: the tensor that holds it if torch allocated it; None if NCCL did.

    `registration`: the handle of its registration with NCCL; None if it is not registered.
    """

    def __init__(self, pointer: int, plain: torch.Tensor | None) -> None:
        self.pointer, self.plain = pointer, plain
        self.registration: int | None = None


class RingMemory(ViewedMemory[_Piece]):
    """The device memory of one ring: NCCL's registered memory if all libraries support it, else torch's.

    Guarantees: memory is freed when nothing views it any more and the device has finished all work that may touch it.
    If the device is out of memory, torch's cache is released once before an error is raised.
    """

    def __init__(
        self, binding: Binding, device: CudaDevice, communicator: Communicator, registered: bool, rank: int = 0
    ) -> None:
        super().__init__(device)
        self.registered, self.order = registered, PassOrder(device)
        self._rank, self._binding, self._communicator = rank, binding, communicator
        self._ending: threading.Thread | None = None

    def compute_event_query(self) -> Callable[[], bool]:
        """Return a function that returns whether the caller's streams have finished their present work.

        That work may use this memory.
        """
        order = self.order
        # Events of a capture cannot be queried, and captured work does not run before a replay.
        if self._gpu.is_capturing():
            return order.passed
        event = self._gpu.new_event()
        try:
            event.record(self._gpu.current_stream())
        except RuntimeError:  # a lost device completes no event
            return lambda: False
        return lambda: event.query() and order.passed()

    def wait(self, computed: Callable[[], bool], limit_s: float) -> bool:
        """Wait for the computation. If it does not end in time, warn that memory is not freed, and return False."""
        if self.is_empty or wait_until(computed, Deadline(limit_s)):
            return True
        warn(self._rank, f"the GPU was still computing after {limit_s} s, so memory of the ring is not freed")
        return False

    def allocate(self, nbytes: int, quiet: Callable[[], bool]) -> torch.Tensor:
        """Return a flat uint8 tensor.

        Memory without a view is freed first if `quiet` returns True. `quiet` releases the buffers of exchanges that
        have arrived, waits for the device, and returns whether the device can no longer touch memory without a view.
        Raises `NcclError`, or torch's error, if the device is out of memory.
        """
        if not nbytes:
            return self._gpu.empty(0)
        if self._pieces and quiet():
            self.free()
        self._gpu.activate()
        plain = None if self.registered else self._gpu.empty(nbytes)
        piece = _Piece(self._take(nbytes) if plain is None else plain.data_ptr(), plain)
        memory = self._viewed(piece.pointer, nbytes, piece)
        if self.registered:
            piece.registration = self._binding.register(self._communicator.handle, piece.pointer, nbytes)
        return memory

    def end(self, name: str, quiet: Callable[[], bool]) -> None:
        """Start a thread that frees each allocation once it has no view and `quiet` returns True.

        `quiet` returns whether the device can no longer touch the memory. The caller does not wait for the thread: an
        error that a user keeps may hold views for any time, through the frames of its traceback.
        """
        if self._ending is None and not self.is_empty:
            self._ending = threading.Thread(target=self._run_out, args=(quiet,), name=name, daemon=True)
            self._ending.start()

    def leave(self) -> None:
        """Keep the memory until the process ends, because the device may touch it at any time."""
        _abandoned.append(self)

    def _run_out(self, quiet: Callable[[], bool]) -> None:
        try:
            self._gpu.activate()
            # Call `quiet` also before the first view ends, because it releases buffers that this package still views.
            if quiet():
                self._free_each(quiet)
        except RuntimeError as error:  # a lost device, whose memory is lost with it
            warn(self._rank, f"memory of the ring is not freed: {error}")
        if self._pieces:
            self.leave()

    def _take(self, nbytes: int) -> int:
        try:
            return self._binding.mem_alloc(nbytes)
        except NcclError as error:
            if not is_shortage(error):
                raise
            # Torch releases its cache only for its own allocations; NCCL does not know about it.
            self._gpu.release_cached()
            return self._binding.mem_alloc(nbytes)

    def _give_back(self, piece: _Piece) -> None:
        # The end of a communicator also ends its registrations.
        if piece.registration is not None and self._communicator.state is State.READY:
            self._binding.deregister(self._communicator.handle, piece.registration)
        # Free last: NCCL must not hold a registration of memory that is gone.
        if piece.plain is None:
            self._binding.mem_free(piece.pointer)
