"""The peer transport: a ring over copy engines, whose ranks are processes of one node. Exchanges use no multiprocessor.

Guarantees: an exchange consists of copies into the other ranks' memory, between waits for words in shared host memory,
on a separate stream. So the host of any rank can release every wait by a plain store. Every exchange has a deadline. A
failure is raised on all ranks with its first cause. After `drain` no result can contain data that a failing rank has
spoiled. A wait orders streams and returns at once: call `drain` before you keep results.
A sender finds the receive for its message in the other rank's log of started receives, so a copy is enqueued only for
a receive that has started. The host waits for nothing between the first and the last operation that it enqueues for an
exchange. An abort needs no stream and no space in a queue, only host stores: set the poison flag, paint (release every
wait by overwriting its word) until the lane has run empty, then unmap the peers' memory.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from ringattn import errors
from ringattn.errors import (
    ClosedError,
    DeadlineError,
    DisagreementError,
    PeerLostError,
    RingError,
    TransportError,
    UnsupportedError,
)
from ringattn.observe.flight import LAUNCHING, POSTED, Flight
from ringattn.transport.base import Message, Operation, closed_at_exit, listed, operations
from ringattn.transport.deadline import Deadline, wait_until
from ringattn.transport.device import (
    Arrived,
    CudaDevice,
    Event,
    PassOrder,
    StreamHop,
    StreamTransport,
    StreamWatch,
    StreamWorkHandle,
    bare,
)
from ringattn.transport.health.verdict import STUCK_S, Place, Waits
from ringattn.transport.peer import program as steps
from ringattn.transport.peer.arena import Arena, ArenaPlace, Imports
from ringattn.transport.peer.driver import OUT_OF_MEMORY, Attribute, CudaDriver, DriverError, WordOperation
from ringattn.transport.peer.program import PAINTED, PairNumbers, push_exchange
from ringattn.transport.shared import page as pages
from ringattn.transport.shared.group import SharedGroup
from ringattn.transport.shared.page import FREED

# --- the lane ------------------------------------------------------------------------------------------------------


ABORT_S = 60.0
"""An abort that takes longer counts as stuck. It waits for the computation that precedes the exchanges."""
PAINT_S = 1e-3
"""The time between two paints of an abort, and so the delay if a live peer overwrites a painted word."""
NEVER = float("inf")
"""The deadline of waits whose condition raises in time by itself."""
WORDS = {steps.WordKind.CREDIT: pages.CREDIT, steps.WordKind.ARRIVAL: pages.ARRIVAL}


class Lane:
    """The stream that a rank's exchanges run on, one after another."""

    def __init__(self, driver: CudaDriver, gpu: CudaDevice, group: SharedGroup) -> None:
        self.stream = gpu.new_stream()
        self.numbers = PairNumbers()
        self.imports = Imports(driver, self._pull, lambda rank: group.pages[rank].load(pages.FREED))
        # The event at the end of the lane: once it has completed, the lane is empty.
        self.newest: Event | None = None
        self.awaited: frozenset[int] = frozenset()
        """The rank whose start of a receive this rank's host is waiting for; empty if the host does not wait."""
        self._driver, self._gpu, self._group = driver, gpu, group
        # If True, nothing is enqueued or mapped any more. Set under `_enqueuing`, before the peers' memory is unmapped.
        self._ended = False
        # Held while operations are enqueued. The holder blocks only if the driver's queue is full.
        self._enqueuing = threading.Lock()
        # `_starting` refuses a second caller. `_mapping` keeps an abort from unmapping memory during its lookup.
        self._starting, self._mapping = threading.Lock(), threading.Lock()
        # Some devices need an explicit flush before bytes that another GPU wrote are visible (attribute 98).
        self._flushes = bool(driver.attribute(Attribute.FLUSHES_REMOTE_WRITES))
        # Addresses of the registered pages in this process, for `unregister`.
        self._registered: list[int] = []
        try:
            self._bases = {rank: self._register(page) for rank, page in group.pages.items()}
        except RingError:
            self.unregister()
            raise

    def start(self, hop: PeerHop, ready: Event, done: Event, watch: Callable[[], None]) -> None:
        """Enqueue an exchange on the lane, after the current work of the caller's stream.

        The host waits until the receivers of its messages have started their receives.
        Raises `DisagreementError` if sender and receiver of a message differ in its size or label, `DeadlineError` if
        a receive does not start in time, and any error that `watch` raises.
        """
        if not self._starting.acquire(blocking=False):
            raise RingError(f"rank {self._group.rank}: two threads use one ring at once; give each thread its own")
        try:
            # Drop stale mappings first: they hold memory that the peers have freed since.
            self.imports.review({o.peer for o in hop.sends}, self._is_empty)
            targets = [0] * len(hop.sends)
            enqueued: list[steps.Step] = []
            # The program logs all starts before it looks up the first buffer. So two ranks that send to each other
            # find each other's log, whichever of them starts first.
            for step in hop.program.start:
                if isinstance(step, steps.LogStart):
                    self._log(hop, step, watch)
                elif isinstance(step, steps.FindBuffer):
                    targets[step.message] = self._find(hop.sends[step.message], self.numbers.of(step), watch)
                else:
                    enqueued.append(step)
            # From here on the host waits for no other rank, so an abort gets the lock soon.
            with self._enqueuing:
                if self._ended:
                    # Raises the first cause, which says more than the error below.
                    watch()
                    raise RingError(f"rank {self._group.rank}: this ring has ended")
                try:
                    for step in enqueued:
                        self._enqueue(hop, step, targets, ready, done)
                except BaseException:
                    # The operations enqueued so far must complete as well before anything is unmapped.
                    with suppress(RuntimeError):
                        done.record(self.stream)
                    raise
                finally:
                    # Also after a failure: an abort waits for the newest event before it unmaps.
                    self.newest = done
            # Count the messages only now: a start that failed ends the ring, so its numbers are never used again.
            self.numbers.advance(hop.program)
        finally:
            self._starting.release()

    def pending(self, hop: PeerHop, bases: dict[steps.Pair, int]) -> list[Operation]:
        """Return the messages of an exchange that wait for their peer, according to their credit and arrival words.

        `bases`: what `PairNumbers.bases` returned for this exchange.
        """
        local_page, late = self._group.own_page, []
        for step in hop.program.start:
            if isinstance(step, steps.LogStart):
                operation = (hop.sends if step.sends else hop.recvs)[step.message]
                # A send waits for its receiver's credit, a receive for the arrival of its bytes.
                word = pages.CREDIT if step.sends else pages.ARRIVAL
                if local_page.load(word, operation.peer) < bases[step.pair] + step.nth:
                    late.append(operation)
        return late

    def abort(self) -> bool:
        """Release every wait and unmap the peers' memory. Return False if the stream is not empty after `ABORT_S`.

        The poison flag is already set in every page, so no result that `drain` accepts is spoiled by a released copy.
        """
        deadline = Deadline(ABORT_S)
        self._gpu.activate()
        # A full queue blocks the enqueuing thread while it holds the lock. Painting drains the queue and frees it.
        while not self._enqueuing.acquire(timeout=PAINT_S):
            self._paint()
            if deadline.passed:
                return False
        # No operation is enqueued after this flag is set, so the stream only gets emptier.
        self._ended = True
        self._enqueuing.release()
        self._paint()
        while not self._is_empty():
            if deadline.passed:
                return False
            time.sleep(PAINT_S)
            # Paint again: a live peer may have overwritten a painted word with a smaller number.
            self._paint()
        with self._mapping:
            self.imports.drop()
        return True

    def close(self) -> None:
        """Unmap the peers' memory and unregister the pages. Everything enqueued must have run."""
        with self._enqueuing:
            self._ended = True
        with self._mapping:
            self.imports.drop()
        self.unregister()

    def unregister(self) -> None:
        """Unregister the pages from the device. Idempotent."""
        while self._registered:
            self._driver.unregister(self._registered.pop())

    def _register(self, page: pages.Page) -> int:
        """Register a page; return the offset from its addresses in this process to device addresses."""
        base = self._driver.register(page.segment.address, page.segment.nbytes)
        self._registered.append(page.segment.address)
        return base - page.segment.address

    def _is_empty(self) -> bool:
        return self.newest is None or self.newest.query()

    def _paint(self) -> None:
        """Overwrite each word of this rank's page with a number that satisfies every wait on the word."""
        local_page = self._group.own_page
        for rank in self._group.ranks:
            local_page.store(pages.CREDIT, PAINTED, rank)
            local_page.store(pages.ARRIVAL, PAINTED, rank)

    def _pull(self, rank: int, arena: int) -> int:
        return self._group.pull(rank, arena, time.monotonic() + self._group.timeout_s)

    def _log(self, hop: PeerHop, step: steps.LogStart, watch: Callable[[], None]) -> None:
        """Publish a send or receive of this rank in its log, where the message's other rank finds it."""
        group, number = self._group, self.numbers.of(step)
        operation = (hop.sends if step.sends else hop.recvs)[step.message]
        # No rank reads from the memory of a sender, so only receives have a position in an arena. The entry's first
        # field holds the size of the arena, because the sender maps the whole arena. (The shm transport stores 0
        # there.)
        place = ArenaPlace(0, 0, 0) if step.sends else hop.places[step.message]
        entry = pages.Entry(
            place.arena_bytes, place.arena, place.offset, operation.nbytes, str(operation.buffer.dtype), operation.label
        )
        # The log is a ring buffer: this entry overwrites that of message `number - LOG_ENTRIES`.
        if not step.sends:
            overwritten = number - pages.LOG_ENTRIES

            def read() -> bool:
                watch()
                return group.own_page.load(pages.ARRIVAL, operation.peer) >= overwritten

            # The sender has read the entry of every message that has arrived. The watch enforces the deadline.
            if overwritten > 0 and not read():
                group.hold(read, lambda: [operation.peer], lambda: str(operation), NEVER)
        group.own_page.log(step.sends, operation.peer).write(number, entry.packed())
        # Wake the sender's host: it may be waiting for this entry.
        if not step.sends:
            group.ring(operation.peer)

    def _find(self, send: Operation, number: int, watch: Callable[[], None]) -> int:
        """Return the address to which this rank writes message `number` to the peer.

        Waits until the peer has started to receive the message. `watch` raises if the ring has failed.
        """
        group = self._group
        log = group.pages[send.peer].log(False, group.rank)
        entry = log.read(number)
        if entry is None:
            # An event on the caller's stream shows when this rank's device has reached the exchange.
            caller_ready, ready_since = self._gpu.new_event(), 0.0
            caller_ready.record(self._gpu.current_stream())

            def started() -> bool:
                nonlocal entry, ready_since
                watch()
                entry = log.read(number)
                # The deadline counts from the moment this rank is ready, as for exchanges in flight.
                if entry is None and not ready_since and caller_ready.query():
                    ready_since = time.monotonic()
                if entry is None and ready_since and time.monotonic() - ready_since >= group.timeout_s:
                    explanation = group.health.explain([send.peer], waited_s=group.timeout_s)
                    raise DeadlineError(
                        f"rank {group.rank}: no answer from ranks [{send.peer}] within {group.timeout_s:g} s, which "
                        f"has not started to receive; pending: {send}; {explanation}"
                    )
                return entry is not None

            # Heartbeats report which rank this host waits for, so that the cause of a chain of waits can be found.
            self.awaited = frozenset({send.peer})
            try:
                # A receiver may close or die after it has logged the start. The wait has then succeeded.
                group.hold(started, lambda: [send.peer] if log.read(number) is None else [], lambda: str(send), NEVER)
            finally:
                self.awaited = frozenset()
        # Compare both ends before any byte moves. Labels are compared as the log stores them, cut to its length.
        assert entry is not None
        subject = pages.subject(entry.label, group.rank)
        if (entry.nbytes, subject) != (send.nbytes, pages.subject(cut(send.label), send.peer)):
            raise DisagreementError(
                f"message {number} from rank {group.rank} to rank {send.peer} has different ends: {send}, but the peer "
                f"receives {entry}; the ranks do not make the same calls"
            )
        # An abort sets `_ended`, and afterwards unmaps the peers' memory while it holds this lock.
        with self._mapping:
            if self._ended:
                watch()
            # `bound` is the size of the arena, see `_log`.
            return self.imports.address(send.peer, ArenaPlace(entry.arena, entry.bound, entry.offset))

    def _enqueue(self, hop: PeerHop, step: steps.Step, targets: list[int], ready: Event, done: Event) -> None:
        stream = self.stream
        if isinstance(step, steps.Copy):
            buffer = hop.sends[step.message]
            # Push: this rank's copy engine writes into the receiver's memory.
            self._driver.copy(targets[step.message], buffer.buffer.data_ptr(), buffer.nbytes, stream.cuda_stream)
        elif isinstance(step, steps.Memops):
            self._driver.operate([self._operation(op) for op in step.ops], stream.cuda_stream)
        elif isinstance(step, steps.RecordEvent):
            # READY is recorded on the caller's stream: it marks when the caller's buffers may be used.
            if step.event is steps.Event.READY:
                ready.record(self._gpu.current_stream())
                return
            # Before DONE, copy receives out of staging: stream order places the copies after the waits for arrival.
            for dst, src, nbytes in hop.unstaged:
                self._driver.copy(dst, src, nbytes, stream.cuda_stream)
            done.record(stream)
        elif isinstance(step, steps.WaitEvent):
            stream.wait_event(ready)
        else:
            raise TypeError(f"a lane does not run {step}")

    def _operation(self, op: steps.Write | steps.Wait) -> WordOperation:
        word = op.word
        # The word is in the page of the rank that waits for it, at its writer's index.
        address = self._bases[word.page] + self._group.pages[word.page].word_address(WORDS[word.kind], word.writer)
        # A flush costs time, so only waits that precede a read of data have it.
        waits, reads = isinstance(op, steps.Wait), isinstance(op, steps.Wait) and op.data
        return WordOperation(waits, address, self.numbers.of(op), reads and self._flushes)


def cut(label: str) -> str:
    """Return a label, cut to the length that a log entry stores."""
    return label.encode()[: pages.LABEL_BYTES].decode(errors="replace")


MOST_TO_ONE_PEER = pages.LOG_ENTRIES - 1
"""The most messages of one exchange to or from one rank: an exchange must fit into the log.

Otherwise its last entries would overwrite its first, whose messages cannot arrive before the whole exchange is
enqueued, and `_log` would wait for them until the deadline.
"""


# --- the transport --------------------------------------------------------------------------------------------------


class PeerTransport(StreamTransport):
    """One rank of a ring over copy engines. Created by `peer.opening.open_peer`."""

    name = "peer"
    sm_margin = 0
    watch: Watch

    def __init__(
        self, group: SharedGroup, driver: CudaDriver, gpu: CudaDevice, leave: Callable[[str], None] | None = None
    ) -> None:
        """Take over an open group, and close it at the end. `leave` ends the process if an abort is stuck."""
        super().__init__(group.opening, gpu)
        self.group, self.driver = group, driver
        # Numbers the all-gathers in error messages.
        self._all_gathers = 0
        # Acquired by the first close or abort and never released, because two threads may close and abort at once.
        self._closing = threading.Lock()
        gpu.activate()
        self.lane = Lane(driver, gpu, group)
        self.stream = self.lane.stream
        # The order of passes on the caller's streams: memory may be freed only after the last pass has run as well.
        self.order = PassOrder(gpu)
        self.arena = Arena(driver, gpu, group.share, self._publish_frees, self._release_caches)
        self.staging = Staging(self)
        self.watch = Watch(group, self.lane, gpu, leave)
        # Heartbeats carry this rank's position from now on.
        group.place = self.watch.place
        self.watch.start()
        closed_at_exit[id(self)] = self

    def close_at_exit(self) -> None:
        """See `Ending.close_at_exit`."""
        self.close()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate a uint8 tensor that the other ranks can map, for long-lived buffers: it occupies 2 MiB pages."""
        self.check()
        self.refuse_capture()
        self.watch.tick()  # releases the buffers of exchanges that have arrived
        try:
            return self.arena.allocate(nbytes, self._wait_until_quiet)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise torch.OutOfMemoryError(f"rank {self.rank}: no {nbytes} bytes for exchanges: {error}") from error

    def refuse_capture(self) -> None:
        """Raise `UnsupportedError` while the current stream is captured: a graph would repeat old message numbers."""
        if self.gpu.is_capturing():
            raise UnsupportedError(
                f"rank {self.rank}: transport='peer' cannot be captured into a CUDA graph; use transport='nccl'"
            )

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> PeerHop:
        """See `Transport.bind`."""
        self.check()
        self.refuse_capture()
        return PeerHop(self, operations(Operation, self.rank, self.world_size, self.device, sends, recvs))

    def replay(self, run: Callable[[], None]) -> None:
        """See `Transport.replay`."""
        raise UnsupportedError("passes over transport='peer' cannot be captured as CUDA graphs; use transport='nccl'")

    def announce(self, call: int, digest: bytes, description: str, gradients: str = "") -> bool:
        """See `Transport.announce`. Returns False: comparing every call in the shared pages takes only microseconds."""
        self.group.health.call = call
        return False

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Transport.all_gather_bytes`. The payloads are exchanged in the shared pages."""
        self.check()
        label = f"rank {self.rank} in all-gather {self._all_gathers}"
        self._all_gathers += 1
        try:
            until = time.monotonic() + self.opening.timeout_s
            return self.group.all_gather(payload, self.watch.raise_failure, lambda: label, until)
        except (TransportError, DisagreementError) as error:
            # The watch may have seen the failure first. Its message does not mention the all-gather, so add it.
            message = str(error) if label in str(error) else f"{label}: {error}"
            failure = type(error)(message)
            self.abort(failure)
            raise failure from error
        except BaseException as error:
            self.abort(error)
            raise

    def drain(self) -> None:
        """Return when every exchange has arrived and all results computed from it are sound, or raise the failure.

        A failing rank sets the poison flag in every page before it releases its copies. So a result is sound if no
        poison is found after its last reader has run.
        """
        self.check()
        # No deadline here: the watch enforces it, counting from the moment this rank is ready.
        # The list is copied, because the watch removes finished handles meanwhile.
        for handle in list(self.watch.handles):
            wait_until(handle.done.query, Deadline(NEVER), self.check)
        computed = self.gpu.new_event()
        computed.record(self.gpu.current_stream())
        wait_until(lambda: computed.query() and self.order.passed(), Deadline(NEVER), self.check)
        # Look for poison only after the last reader has run: a stray copy may land until then.
        if (trouble := self.group.trouble()) is not None:
            kind = DisagreementError if f"failed first: {DisagreementError.__name__}:" in trouble else PeerLostError
            self.watch.fail(kind(f"rank {self.rank}: {trouble}"))
        self.check()

    def _failure_raised(self) -> None:
        self._finish(failed=True)

    def abort(self, cause: BaseException) -> None:
        """See `Transport.abort`."""
        # A forked child shares the pages: poison from it would end the ring of its parent.
        if self.forked:
            return
        if self._end is None:
            self._end = cause
        self.watch.fail(cause)
        self._finish(failed=True)

    def close(self) -> None:
        """See `Transport.close`. It waits for no other rank: memory lives for as long as another rank maps it."""
        if self._end is not None:
            return
        self.gpu.activate()  # the thread that closes a dropped ring has not used it
        try:
            self.drain()
        except RingError as error:
            self.abort(error)
            raise
        self._end, self.record.over = ClosedError(f"rank {self.rank} closed its ring"), True
        self._finish(failed=False)

    def _finish(self, failed: bool) -> None:
        """Release the ring's resources; later calls do nothing. If the ring has failed, a separate thread does it."""
        if not self._closing.acquire(blocking=False):
            return
        closed_at_exit.pop(id(self), None)
        # A failed ring may need up to `ABORT_S` until nothing touches its memory; its caller should not wait for that.
        if failed:
            threading.Thread(target=self._clear, args=(True,), name=f"ringattn-end-{self.rank}", daemon=True).start()
        else:
            self._clear(False)

    def _clear(self, failed: bool) -> None:
        """Release the ring's resources, except memory that a stuck operation of this rank may still access."""
        if failed:
            self.watch.ended.wait()
        self.watch.stop()
        # The last tick: hops that have arrived drop their buffers, so that the arena can free them below.
        self.watch.tick()
        # `leave` reports the close to the other ranks. After a failure the poison flag has already reported it.
        self.group.drop() if failed else self.group.leave()
        # A stuck operation may still access the arena and the pages, so keep both until the process ends.
        if failed and not self.watch.drained:
            return
        with suppress(DriverError):  # raised by a lost device
            self.gpu.activate()
            self.lane.close()
            # These hold views, and only memory without a view is freed.
            self.staging.clear()
            self.watch.handles.clear()
            # Kernels of the caller may still read memory whose last tensor is gone.
            self._wait_for_compute()
            self.arena.free()
            # Memory that the caller still views is freed when its last view ends.
            if not self.arena.is_empty:
                name, arguments = f"ringattn-free-{self.rank}", (self._wait_for_compute,)
                threading.Thread(target=self.arena.free_later, args=arguments, name=name, daemon=True).start()

    def _wait_for_compute(self) -> None:
        """Return when the device has finished the current stream's present work and the last pass."""
        self.gpu.activate()
        computed = self.gpu.new_event()
        computed.record(self.gpu.current_stream())
        wait_until(lambda: computed.query() and self.order.passed(), Deadline(NEVER))

    def _wait_until_quiet(self) -> None:
        """Return when neither an exchange nor the caller's stream can touch memory that no longer has a view."""
        self.drain()
        # The drained exchanges still view their buffers until a tick.
        self.watch.tick()

    def _publish_frees(self, count: int) -> None:
        self.group.own_page.store(FREED, count)

    def _release_caches(self) -> None:
        # Blocks that a kernel still uses must not be released, so wait first.
        self._wait_until_quiet()
        self.gpu.release_cached()


# --- hops -----------------------------------------------------------------------------------------------------------


ALIGNMENT_BYTES = 256


class PeerWorkHandle(StreamWorkHandle):
    """The handle of a started hop, with the messages that still wait for their peer."""

    __slots__ = ("pending",)

    def __init__(self, hop: PeerHop, flight: Flight, ready: Event, done: Event) -> None:
        super().__init__(hop, flight, ready, done)
        lane = hop.transport.lane
        # Later starts advance the counts, so keep the message numbers of this start.
        bases = lane.numbers.bases(hop.program)
        self.pending: Callable[[], list[Operation]] = lambda: lane.pending(hop, bases)

    def release(self) -> None:
        """See `StreamWorkHandle.release`."""
        # `list()` is "nothing pending". The replaced lambda refers to the hop, and so to its buffers.
        self.pending = list
        super().release()


class PeerHop(StreamHop):
    """One exchange by copy engines, bound once and started many times.

    Guarantees: the buffers of a bound hop have fixed addresses, so a start allocates nothing. Receives into memory that
    other ranks cannot map arrive in staging memory and are copied from there, on the same stream.
    """

    transport: PeerTransport

    def __init__(self, transport: PeerTransport, operations: Sequence[Operation]) -> None:
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
        """(to, from, bytes) of receives into memory that cannot be mapped: copied out of staging after they arrive."""
        self.places = self._receive_places()
        """Where the other ranks write each receive."""

    def start(self) -> PeerWorkHandle | Arrived:
        """Enqueue the hop on the lane, after the current work of the current stream."""
        transport = self.transport
        transport.check()
        if not self.parts:
            return Arrived()
        gpu, watch = transport.gpu, transport.watch
        transport.refuse_capture()
        # Events of finished hops are reused: creating one takes longer than recording it.
        ready, done = watch.free.popleft() if watch.free else (gpu.new_event(), gpu.new_event())
        flight = transport.record.begin(0, self.parts, transport.name)
        # The record exists before the start, so that a start which hangs appears in it.
        flight.state = LAUNCHING
        handle = PeerWorkHandle(self, flight, ready, done)
        try:
            transport.lane.start(self, ready, done, watch.raise_failure)
        except BaseException as error:
            # The start may be partly done: other ranks may already have counted this message. So the ring ends.
            watch.fail(error)
            transport.check()
            raise
        flight.state, flight.posted_s = POSTED, time.time()
        watch.handles.append(handle)
        return handle

    def _receive_places(self) -> list[ArenaPlace]:
        """Return the arena position that the sender of each receive writes to.

        A receive into memory that other ranks cannot map gets a position in staging memory.
        """
        transport = self.transport
        places_of_buffers = [transport.arena.place(o.buffer.data_ptr(), o.nbytes) for o in self.recvs]
        # All receives into memory that cannot be mapped share one staging buffer, each at an aligned offset.
        offsets, total = [], 0
        for operation, place in zip(self.recvs, places_of_buffers, strict=True):
            offsets.append(total)
            if place is None:
                total += -(-operation.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not total:
            return [place for place in places_of_buffers if place is not None]
        staging = transport.staging.take(total)
        # The hop owns its staging. When the hop is collected, the next one of that size reuses the memory.
        weakref.finalize(self, transport.staging.give_back, staging).atexit = False
        places = []
        for operation, place, offset in zip(self.recvs, places_of_buffers, offsets, strict=True):
            if place is None:
                address = staging.data_ptr() + offset
                place = transport.arena.place(address, operation.nbytes)
                assert place is not None
                self.unstaged.append((operation.buffer.data_ptr(), address, operation.nbytes))
            places.append(place)
        return places


class Staging:
    """Buffers that other ranks can map, for receives into memory that they cannot map. Reused by size."""

    def __init__(self, transport: PeerTransport) -> None:
        self._transport = transport
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least `nbytes` bytes."""
        # Powers of two from 4 KiB, so that hops of similar sizes share buffers.
        rounded = 1 << max(nbytes - 1, 4095).bit_length()
        free = self._free.setdefault(rounded, [])
        try:
            return free.pop()
        except IndexError:
            return self._transport.allocate(rounded)

    def give_back(self, staging: torch.Tensor) -> None:
        """Keep a buffer for the next hop, whose copies follow those of the hop before on the same stream."""
        self._free[staging.numel()].append(staging)

    def clear(self) -> None:
        """Drop the buffers that no hop uses."""
        self._free = {size: [] for size in self._free}


# --- the watch ------------------------------------------------------------------------------------------------------


class Watch(StreamWatch[PeerWorkHandle]):
    """The thread that watches one rank's exchanges, and ends the ring if one of them cannot complete.

    Guarantees: every exchange has a deadline, which counts from the moment this rank is ready for it. The caller gets
    an error at its next call if any rank fails, dies or closes. The poison flag is set in every page before a wait is
    released.
    """

    interval_s = 0.02
    stop_s = 1.0
    # Once the caller has the error, it may overwrite a buffer being sent. So the poison flag must be set before that.
    patience_s = ABORT_S

    def __init__(self, group: SharedGroup, lane: Lane, gpu: CudaDevice, leave: Callable[[str], None] | None) -> None:
        """See `StreamWatch`."""
        super().__init__(group.opening, gpu, leave)
        self.drained = False
        """The abort has completed, so no operation of this rank is in flight."""
        self.report: Callable[[BaseException], None] = self.end
        """Receives a failure: another transport of this rank, if there is one, which then calls `end`."""
        self.before_paint: Callable[[], object] = lambda: None
        """Returns when no device work other than exchanges can carry spoiled bytes to other ranks."""
        self._group, self._lane = group, lane

    def fail(self, error: BaseException) -> None:
        """End the ring with `error` unless it has failed before.

        Return when the failure is visible to all ranks. `ended` is set later, when the abort is complete or stuck.
        """
        self.report(error)

    def end(self, error: BaseException) -> None:
        """End the ring as `fail` does, without calling `report`."""
        if not self._is_first():
            return
        self.failure = _our_error(error)
        # Set the poison flag first: copies released by painted words must find it in every page.
        self._group.fail(error)
        # Abort on a separate thread: it waits for the computation before the exchanges, and no caller should.
        threading.Thread(target=self._abort, name=f"ringattn-abort-{self._rank}", daemon=True).start()
        self._write_record(self.failure)
        # From here on callers get the error: all pages are poisoned, and its note names the flight record.
        self._reported.set()

    def place(self) -> Place:
        """Return the state that this rank's heartbeats report: its current work, and the ranks that it waits for."""
        oldest, call = self.oldest, self._group.health.call
        if oldest is None:
            waits = Waits.PEERS if self._lane.awaited else Waits.HOST
            return Place.make(self._record.where(), call, waits, self._lane.awaited)
        if oldest.started_at:
            return Place.make(oldest.flight.label, call, Waits.PEERS, _peers(oldest.pending()))
        # Not started: the device is still computing what precedes the exchange. After `STUCK_S`, report that.
        waits = Waits.COMPUTE if time.time() - oldest.flight.posted_s >= STUCK_S else Waits.PEERS
        return Place.make(f"computing before {oldest.flight.label}", call, waits)

    def _may_reuse(self, done: Event) -> bool:
        """Return False for the newest event: it shows whether the lane is empty, until a newer event replaces it."""
        return done is not self._lane.newest

    def _abort(self) -> None:
        try:
            self.before_paint()
            self.drained = self._lane.abort()
        except Exception as error:  # a lost device raises any kind of error, and then nothing waits on it
            print(f"ringattn rank {self._rank}: the device is lost: {error}", file=sys.stderr, flush=True)
            self.drained = True
        self.ended.set()
        if not self.drained:
            self._leave(f"rank {self._rank}: the abort is stuck, so the process ends after: {self.failure}")

    def _check_exchanges(self) -> None:
        """Check the exchanges in flight and the ranks that they wait for. Raises the error that ends the ring."""
        self.tick()
        handle = self.oldest
        pending = handle.pending if handle is not None else list
        if self._group.trouble(_peers(pending())) is not None:
            # Look again: messages that their sender finished just before it closed or died have arrived by now.
            late = pending()
            self._group.check(_peers(late), lambda: self._describe(handle, late))
        if handle is None or handle.done.query():
            return
        # The deadline counts from READY, so an exchange behind a long computation is not late.
        if not handle.started_at:
            handle.note_start()
            return
        if time.monotonic() - handle.started_at >= self._timeout_s:
            late = pending()
            peers = sorted(_peers(late))
            raise DeadlineError(
                f"{self._describe(handle, late)}: no answer from ranks {peers} within {self._timeout_s:g} s; "
                f"{self._group.health.explain(peers, waited_s=self._timeout_s)}"
            )

    def _describe(self, handle: PeerWorkHandle | None, late: list[Operation]) -> str:
        """Return the subject of an error message: the rank, and the exchange with its pending messages."""
        rank = self._rank
        return f"rank {rank}: exchange {handle.flight.sequence}, pending {listed(late)}" if handle else f"rank {rank}"


def _peers(pending: list[Operation]) -> set[int]:
    return {operation.peer for operation in pending}


def _our_error(error: BaseException) -> BaseException:
    """Return the error without its traceback, whose frames might keep memory alive.

    Errors of other packages are wrapped in `RingError`.
    """
    if isinstance(error, RingError) and type(error).__module__ == errors.__name__:
        return bare(error)
    return RingError(f"{type(error).__name__}: {error}")
