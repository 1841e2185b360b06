"""A ring whose ranks are processes with a GPU each, over raw NCCL.

Guarantees: one group per hop on a stream of its own, ordered with the caller's stream by events, so the host never
waits inside a pass; every exchange has a deadline that the supervisor keeps; a failure is raised by the next call of
the ring or by its close, never swallowed; NCCL's communicators are shared with nobody. A wait orders streams and
returns at once. Results that a failure has spoiled are therefore raised one call later: call `drain` before they are
kept.
"""

from __future__ import annotations

import atexit
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from ringattn.errors import ClosedError, DeadlineError, PeerLostError, RingError
from ringattn.observe.flight import FlightRecord
from ringattn.transport.base import Message, Operation, operations
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline, wait_until
from ringattn.transport.device import Device
from ringattn.transport.health.health import Health
from ringattn.transport.location import Location
from ringattn.transport.nccl.binding import Binding, Capability, NcclError, Status
from ringattn.transport.nccl.bootstrap import Arrival, StoreAllGather, all_ready, meet, share_unique_id
from ringattn.transport.nccl.calls import CallHistory
from ringattn.transport.nccl.communicator import ABORT_S, Communicator, PeerCall
from ringattn.transport.nccl.hop import HopTransport, NcclHop, Replay
from ringattn.transport.nccl.memory import RingMemory, say
from ringattn.transport.nccl.options import NcclOptions, config_of
from ringattn.transport.nccl.supervisor import NOT_CLOSED, BrokenCommunicatorError, Supervisor
from ringattn.transport.stream import StreamWorkHandle, bare, end_process

CLOSE_S = 10.0
"""How long freeing a communicator may take when all ranks do it."""
EXIT_LINGER_S = 1.0
GRACE_S = 5.0
"""What a wait on the host grants the supervisor, which knows better what went wrong."""
ANSWER_S = 0.5
"""How long after the end of its patience a rank that closes waits for an answer of the store."""

_open: weakref.WeakSet[NcclTransport] = weakref.WeakSet()


class NcclTransport(HopTransport):
    """One rank of a ring over NCCL. Made by `open`."""

    name = "nccl"

    def __init__(
        self,
        control: ControlStore,
        binding: Binding,
        gpu: Device,
        options: NcclOptions,
        timeout_s: float,
        flight_dir: Path | None,
        leave: Callable[[str], None],
        health: Health,
        ras: str | None = None,
        record: FlightRecord | None = None,
    ) -> None:
        """Not connected yet; see `open`."""
        record = record or FlightRecord(control.rank, control.world_size, self.name)
        super().__init__(control.rank, control.world_size, gpu, record, timeout_s)
        self.options = options
        self.stream = gpu.new_stream()
        self._control, self._binding = control, binding
        # Shared with the supervisor and the memory; filled when ranks have met.
        self._communicators: list[Communicator] = []
        self._calls = CallHistory()
        self.supervisor = Supervisor(
            control, self._communicators, gpu, record, self._calls, timeout_s, flight_dir, leave, health, ras
        )
        self._memory = RingMemory(binding, gpu, self._communicators, self.can_register, self.rank)
        self.order = self._memory.order
        self._all_gather = StoreAllGather(control, self.supervisor, timeout_s)
        self.look_around: Callable[[], None] = lambda: None  # at each call of the ring

    @classmethod
    def open(
        cls,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        *,
        binding: Binding,
        gpu: Device,
        options: NcclOptions,
        locations: Sequence[Location],
        nccl_id: str,
        flight_dir: Path | None = None,
        leave: Callable[[str], None] | None = None,
        job_size: int | None = None,
        interface: str | None = None,
        ras: str | None = None,
        record: FlightRecord | None = None,
        health: Health | None = None,
    ) -> NcclTransport:
        """Connect `rank` with all others through a fresh `store`; every later wait ends within `timeout_s` too.

        `locations`: of all ranks; `nccl_id`: what NCCL takes for this host. `leave` ends the process when even an
        abort is stuck. `job_size`, `interface`: see `Health`; `ras`: the address of NCCL's RAS, None where it has none.
        `record` and `health`: those that another transport of this rank uses, too.
        Raises `DeadlineError` that names the ranks which did not arrive,
        `InputError` when the ranks do not fit together, `NcclError`.
        """
        gpu.activate()
        control, leave = ControlStore(store, rank, world_size, timeout_s), leave or end_process
        health = health or Health(control, job_size=job_size, interface=interface)
        ring = cls(control, binding, gpu, options, timeout_s, flight_dir, leave, health, ras, record)
        ring.locations = tuple(locations)
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
        _open.add(ring)
        return ring

    @property
    def can_register(self) -> bool:
        """Whether staging buffers are NCCL's own registered memory."""
        return self.options.register and {Capability.MEMORY, Capability.REGISTER} <= self._binding.capabilities

    @property
    def communicator(self) -> Communicator:
        """The communicator that hops run on."""
        return self._communicators[-1]

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
        """See `HopTransport.launch`."""
        try:
            self.communicator.launch(calls, self.stream.cuda_stream, self.supervisor.raise_failure)
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

    def check(self) -> None:
        """See `StreamTransport.check`."""
        self._check_open()
        # The first time the failure itself, later `ClosedError` with it as the cause.
        try:
            self.supervisor.raise_failure()
        except RingError as failure:
            self._end = bare(failure)
            raise

    def abort(self, cause: BaseException) -> None:
        """See `Transport.abort`."""
        if self.forked:
            return
        if self._end is None:
            self._end = bare(cause)
        computed = self._memory.computed()
        self.supervisor.fail(cause)
        self.supervisor.stop()
        _open.discard(self)
        self._end_memory(computed)

    def _attributed(self, error: DeadlineError) -> BaseException:
        """End the ring for a deadline that this thread has met; returns the error that names the rank at fault."""
        self.supervisor.fail(error, attribute=True)
        failure = self.supervisor.failure or error
        self.abort(failure)
        return bare(failure)

    def close(self, linger_s: float | None = None) -> None:
        """See `Transport.close`. Waits for the others up to `linger_s`, None for the deadline, then leaves alone.

        Only together can ranks free a communicator in good order, and over a network the last bytes may still be on
        their way when this rank's part is done. Raises a failure that no call has raised, and `PeerLostError` that
        names a rank which is gone and has not closed.
        """
        if self._end is not None:
            return
        self.gpu.activate()  # the thread that closes a dropped ring has not used it
        patience_s = self._timeout_s if linger_s is None else linger_s
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
            asked = self.supervisor.all_closed(self._control.until(linger.plus(ANSWER_S)))
            together = wait_until(asked, linger, self.supervisor.raise_failure, self._control.naps_s)
        except RuntimeError as error:  # a rank has failed, or the store's host is gone: then this rank waits for none
            lost = error if isinstance(error, PeerLostError) and NOT_CLOSED in str(error) else None
        self.supervisor.stop()
        self.supervisor.tick()  # lets go of the last buffers
        _open.discard(self)
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
        if not wait_until(handle.done.query, Deadline(self._timeout_s + GRACE_S), self.check):
            raise DeadlineError(f"rank {self.rank}: an exchange did not end within {self._timeout_s} s")

    def _quiet(self) -> bool:
        """Whether neither an exchange nor the caller's streams touch memory without a view any more; waits for it."""
        # Exchanges first, then what the caller has put on its stream behind them.
        self.drain()
        self.supervisor.tick()
        return self._memory.wait(self._memory.computed(), self._timeout_s)

    def _end_memory(self, computed: Callable[[], bool]) -> None:
        """Give all memory back when nothing can touch it any more. Returns at once."""

        def quiet() -> bool:
            # Communicators end before the memory that they may still write to is freed.
            if not self._aborted():
                say(self.rank, "a communicator does not end, so memory of the ring is not given back")
                return False
            self.supervisor.let_go()
            return self._memory.wait(computed, self._timeout_s)

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
        control, watch, deadline = self._control, self.supervisor.raise_failure, Deadline(self._timeout_s)
        mine = Arrival(
            self.rank, nccl_id, self.gpu.uuid, self._binding.version, _version(), self.can_register, self.options
        )
        meet(control, mine, self.locations, deadline, watch)
        unique_id = share_unique_id(control, self._binding.unique_id, deadline, watch)
        config = config_of(self.options, self._binding.capabilities)
        communicator = Communicator(self._binding, self.gpu, self.rank, self.world_size, config, self._timeout_s)
        self._communicators.append(communicator)
        communicator.open(unique_id, watch)
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
        """End the communicators; alone only by abort, for a collective would wait for ever. Whether all have ended."""
        aborted = self._aborted()
        ended = [
            communicator.close(Deadline(CLOSE_S)) if together else communicator.abort()
            for communicator in self._communicators
        ]
        if not aborted or not all(ended):
            say(self.rank, "a communicator does not end; is a CUDA graph of it still alive?")
        return aborted and all(ended)


def _version() -> str:
    """Ours, where it is installed."""
    try:
        return version("ringattn")
    except PackageNotFoundError:
        return "a checkout"


@atexit.register
def _close_all() -> None:
    """Close the rings that are still open, briefly and without a hang. In a fork they have ended."""
    for ring in list(_open):
        with suppress(RuntimeError, OSError):
            ring.close(EXIT_LINGER_S)
