"""A ring whose ranks are processes with a GPU each, over raw NCCL.

Guarantees: one group per hop on a stream of its own, ordered with the caller's stream by events, so the host never
waits inside a pass; every exchange has a deadline that the supervisor keeps; a failure is raised by the next call of
the ring or by its close, never swallowed; NCCL's communicators are shared with nobody. A wait orders streams and
returns at once. Results that a failure has spoiled are therefore raised one call later: call `drain` before they are
kept.
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
"""How long freeing a communicator may take when all ranks do it."""
EXIT_LINGER_S = 1.0
GRACE_S = 5.0
"""What a wait on the host grants the supervisor, which knows better what went wrong."""
ANSWER_S = 0.5
"""How long after the end of its patience a rank that closes waits for an answer of the store."""


class NcclTransport(StreamTransport):
    """One rank of a ring over NCCL. Made by `open`."""

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
        """Not connected yet; see `open`."""
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
        self.look_around: Callable[[], None] = lambda: None  # at each call of the ring

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

        `nccl_id`: what NCCL takes for this host. `leave` ends the process when even an abort is stuck. `ras`: the
        address of NCCL's RAS, None where it has none.
        Raises `DeadlineError` that names the ranks which did not arrive, `InputError` when the ranks do not fit
        together, `NcclError`.
        """
        gpu.activate()
        opening.name = opening.name or cls.name
        ring = cls(opening, binding, gpu, options, leave, ras)
        try:
            # Before the ranks meet: a stuck open must be seen, too.
            ring.supervisor.start()
            ring._meet(nccl_id)
        except DeadlineError as error:
            # Which rank did not arrive is in the store, even where the communicator never opened.
            raise ring._attributed(error) from error
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
        """A flat uint8 tensor of `nbytes` on the GPU, for long use: NCCL's own registered memory where it can be."""
        self.check()
        if self.gpu.is_capturing():
            raise RingError(
                f"rank {self.rank}: the first run of a pass allocates its staging buffers; run it, then capture it"
            )
        return self._memory.allocate(nbytes, self._quiet)

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> NcclHop:
        """See `Transport.bind`."""
        return NcclHop(self, operations(Operation, self.rank, self.world_size, self.device, sends, recvs))

    def replay(self, run: Callable[[], None]) -> None:
        """See `Transport.replay`."""
        self.check()
        Replay(self, run).start()

    def launch(self, calls: Sequence[PeerCall]) -> None:
        """Put one group on the communication stream; `NcclHop` does the rest."""
        try:
            self.communicator.launch(calls, self.stream.cuda_stream, self.check)
        except NcclError as error:
            if error.status in (Status.REMOTE_ERROR, Status.SYSTEM_ERROR):  # a connection broke: some peer is at fault
                self.supervisor.fail(BrokenCommunicatorError(str(error)), attribute=True)
                self.check()
            raise
        except DeadlineError as error:
            raise self._attributed(error) from error

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Transport`; through the store. Raises `DisagreementError` when a rank makes another call."""
        self.check()
        try:
            return self._all_gather.all_gather_bytes(payload)
        except DeadlineError as error:
            raise self._attributed(error) from error
        except BaseException as error:
            self.abort(error)
            raise

    def announce(self, call: int, digest: bytes, words: str, gradients: str = "") -> bool:
        """See `Transport.announce`: the supervisors compare calls while they wait."""
        self._calls.announce(call, digest, words, gradients)
        self.look_around()
        return True

    def drain(self) -> None:
        """Return when every exchange has arrived. Raises what has failed.

        Like the supervisor, it grants the device any time to come to an exchange; the deadline begins there.
        """
        self._arrive(math.inf)

    def abort(self, cause: BaseException) -> None:
        """See `Transport.abort`."""
        if self.forked:
            return
        if self._end is None:
            self._end = bare(cause)
        computed = self._memory.computed()
        self.supervisor.fail(cause)
        self.supervisor.stop()
        closed_at_exit.pop(id(self), None)
        self._end_memory(computed)

    def _attributed(self, error: DeadlineError) -> BaseException:
        """End the ring for a deadline that this thread has met; returns the error that names the rank at fault."""
        self.supervisor.fail(error, attribute=True)
        failure = self.supervisor.failure or error
        self.abort(failure)
        return bare(failure)

    def close_at_exit(self) -> None:
        """See `Ending.close_at_exit`: briefly and without a hang."""
        self.close(EXIT_LINGER_S)

    def close(self, linger_s: float | None = None) -> None:
        """See `Transport.close`. Waits for the others up to `linger_s`, None for the deadline, then leaves alone.

        Only together can ranks free a communicator in good order, and over a network the last bytes may still be on
        their way when this rank's part is done. Raises a failure that no call has raised, and `PeerLostError` that
        names a rank which is gone and has not closed.
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
        computed = self._memory.computed()
        # Told only when all has arrived: this rank waits for nothing more.
        linger = Deadline(patience_s)
        self.supervisor.leave(linger)
        self._end, self.record.over = ClosedError(f"rank {self.rank} closed its ring"), True
        together, lost = False, None
        try:
            asked = self.supervisor.all_closed(self.opening.control.until(linger.plus(ANSWER_S)))
            together = wait_until(asked, linger, self.supervisor.raise_failure, self.opening.control.naps_s)
        except RuntimeError as error:  # a rank has failed, or the store's host is gone: then this rank waits for none
            lost = error if isinstance(error, PeerLostError) and NOT_CLOSED in str(error) else None
        self.supervisor.stop()
        self.supervisor.tick()  # lets go of the last buffers
        closed_at_exit.pop(id(self), None)
        # A communicator that does not end, or compute that does not, may still touch its memory: it is left alone.
        if self._free(together) and self._memory.wait(computed, patience_s):
            self._memory.free()
            # What a caller still views is given back later.
            self._end_memory(computed)
        else:
            self._memory.leave()
        if lost is not None:
            raise lost

    def _arrive(self, ready_s: float) -> None:
        """Return when every exchange has arrived; `ready_s`: how long the device may take to come to each of them."""
        self.check()
        for handle in list(self.supervisor.handles):  # one after another, as they run
            self._await(handle, ready_s)
        self.check()

    def _await(self, handle: StreamWorkHandle, ready_s: float) -> None:
        if not wait_until(lambda: handle.ready.query() or handle.done.query(), Deadline(ready_s), self.check):
            raise DeadlineError(f"rank {self.rank}: the GPU was still computing after {ready_s} s, before {handle.hop}")
        # Longer than the supervisor waits, so that its failure, with the rank at fault, is raised.
        if not wait_until(handle.done.query, Deadline(self.opening.timeout_s + GRACE_S), self.check):
            raise DeadlineError(f"rank {self.rank}: an exchange did not end within {self.opening.timeout_s} s")

    def _quiet(self) -> bool:
        """Whether neither an exchange nor the caller's streams touch memory without a view any more; waits for it."""
        # Exchanges first, then what the caller has put on its stream behind them.
        self.drain()
        self.supervisor.tick()
        return self._memory.wait(self._memory.computed(), self.opening.timeout_s)

    def _end_memory(self, computed: Callable[[], bool]) -> None:
        """Give all memory back when nothing can touch it any more. Returns at once."""

        def quiet() -> bool:
            # Communicators end before the memory that they may still write to is freed.
            if not self._aborted():
                say(self.rank, "a communicator does not end, so memory of the ring is not given back")
                return False
            self.supervisor.let_go()
            return self._memory.wait(computed, self.opening.timeout_s)

        self._memory.end(f"ringattn-memory-{self.rank}", quiet)

    def _aborted(self) -> bool:
        """Where the ring has failed, whether all aborts have ended; waits for them."""
        supervisor = self.supervisor
        return not supervisor.failed or (supervisor.ended.wait(2 * ABORT_S) and not supervisor.stuck)

    @property
    def sm_margin(self) -> int:
        """See `Transport`; none alone."""
        return 0 if self.world_size == 1 else self.options.margin

    def _meet(self, nccl_id: str) -> None:
        """From the store to a warm communicator."""
        opening, watch = self.opening, self.supervisor.raise_failure
        control, deadline = opening.control, Deadline(opening.timeout_s)
        mine = Arrival(
            self.rank, nccl_id, self.gpu.uuid, self._binding.version, _version(), self.can_register, self.options
        )
        meet(control, mine, self.locations, deadline, watch)
        unique_id = share_unique_id(control, self._binding.unique_id, deadline, watch)
        self.communicator.open(unique_id, watch)
        # Before ranks are ready: the first message connects peers, and may take long.
        self._warm_up()
        all_ready(control, deadline, watch)
        self.supervisor.where = "idle"

    def _warm_up(self) -> None:
        """One byte in both directions: NCCL connects peers at their first message, which may block."""
        if self.world_size == 1:
            return
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        # Both directions of the ring; each rank posts them in the same order, so they pair.
        for dst, src in ((after, before), (before, after)):
            there, here = self.gpu.empty(1), self.gpu.empty(1)
            self.exchange([Message(dst, there, "warm-up")], [Message(src, here, "warm-up")]).wait()
        self.drain()

    def _free(self, together: bool) -> bool:
        """End the communicator; alone only by abort, for a collective would wait for ever. Whether it has ended."""
        aborted = self._aborted()
        ended = self.communicator.close(Deadline(CLOSE_S)) if together else self.communicator.abort()
        if not aborted or not ended:
            say(self.rank, "a communicator does not end; is a CUDA graph of it still alive?")
        return aborted and ended


def _version() -> str:
    """Ours, where it is installed."""
    try:
        return version("ringattn")
    except PackageNotFoundError:
        return "a checkout"


# --- hops ------------------------------------------------------------------------------------------------------------


class NcclHop(StreamHop):
    """One hop, bound once and started many times: the group of its sends and receives, between two events.

    The first event says that the compute stream is ready for the exchange, the second that the exchange has arrived;
    the host waits for neither. Guarantees: a start and a wait cost a few microseconds of Python (`bench/hop.py`) and no
    device allocation; inside a CUDA graph's capture events are fresh and never queried.
    """

    transport: NcclTransport

    def __init__(self, transport: NcclTransport, operations: Sequence[Operation]) -> None:
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

    transport: NcclTransport

    def __init__(self, transport: NcclTransport, replay: Callable[[], None]) -> None:
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


# --- memory ----------------------------------------------------------------------------------------------------------


def say(rank: int, words: str) -> None:
    """For the user, where no call is left that could raise."""
    print(f"ringattn rank {rank}: {words}", file=sys.stderr, flush=True)


_left: list[RingMemory] = []
"""Kept until the process ends: torch too would hand the memory out again."""


class _Piece:
    """One allocation. `plain`: torch's memory, None for NCCL's; `registration`: its handle, where it is registered."""

    def __init__(self, pointer: int, plain: torch.Tensor | None) -> None:
        self.pointer, self.plain = pointer, plain
        self.registration: int | None = None


class RingMemory(ViewedMemory[_Piece]):
    """The device memory of one ring: NCCL's own, registered, if all libraries have it, else torch's.

    Guarantees: a piece is given back when nothing views it any more and the device has done what may still touch it; if
    the device has no room, torch's cache is emptied once before an error is raised.
    """

    def __init__(
        self, binding: Binding, device: CudaDevice, communicator: Communicator, registered: bool, rank: int = 0
    ) -> None:
        super().__init__(device)
        self.registered, self.order = registered, PassOrder(device)
        self._rank, self._binding, self._communicator = rank, binding, communicator
        self._ending: threading.Thread | None = None

    def computed(self) -> Callable[[], bool]:
        """Whether the caller's streams have run what is on them now and may touch this memory."""
        order = self.order
        # Nothing asks for an event of a capture, nor does the capture's work run before a replay.
        if self._gpu.is_capturing():
            return order.passed
        now = self._gpu.new_event()
        try:
            now.record(self._gpu.current_stream())
        except RuntimeError:  # a device that is lost comes to no event
            return lambda: False
        return lambda: now.query() and order.passed()

    def wait(self, computed: Callable[[], bool], limit_s: float) -> bool:
        """Wait for compute; when that does not end, say so and that memory is left."""
        if self.is_empty or wait_until(computed, Deadline(limit_s)):
            return True
        say(self._rank, f"the GPU was still computing after {limit_s} s, so memory of the ring is not given back")
        return False

    def allocate(self, nbytes: int, quiet: Callable[[], bool]) -> torch.Tensor:
        """A flat uint8 tensor.

        Memory without a view is given back first, if `quiet`: it lets go of what has arrived, and returns whether the
        device can touch none of that any more; it may wait. Raises `NcclError`, or torch's error, when the device has
        no room.
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
        """Give back each piece when its last view goes, and `quiet` says that the device can touch it no more.

        Returns at once: an error that a caller keeps has views, by the frames of its traceback.
        """
        if self._ending is None and not self.is_empty:
            self._ending = threading.Thread(target=self._run_out, args=(quiet,), name=name, daemon=True)
            self._ending.start()

    def leave(self) -> None:
        """Give nothing back any more: the device may touch it for ever."""
        _left.append(self)

    def _run_out(self, quiet: Callable[[], bool]) -> None:
        try:
            self._gpu.activate()
            # Also before the first view has gone, for it lets go of what this package itself still views.
            if quiet():
                self._free_each(quiet)
        except RuntimeError as error:  # a device that is lost: its memory went with it
            say(self._rank, f"memory of the ring is not given back: {error}")
        if self._pieces:
            self.leave()

    def _take(self, nbytes: int) -> int:
        try:
            return self._binding.mem_alloc(nbytes)
        except NcclError as error:
            if not is_shortage(error):
                raise
            # Torch empties its cache by itself where its own allocations find no room; NCCL knows nothing of it.
            self._gpu.release_cached()
            return self._binding.mem_alloc(nbytes)

    def _give_back(self, piece: _Piece) -> None:
        # A communicator that has ended took its registrations with it.
        if piece.registration is not None and self._communicator.state is State.READY:
            self._binding.deregister(self._communicator.handle, piece.registration)
        # Last: NCCL may not hold a registration of memory that is gone.
        if piece.plain is None:
            self._binding.mem_free(piece.pointer)
