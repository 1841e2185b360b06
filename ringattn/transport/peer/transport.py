"""A ring whose ranks are processes of one node, over copy engines: no multiprocessor works on an exchange.

Guarantees: an exchange is copies into the other ranks' memory between waits for words in shared host memory, on a
stream of its own, so the host of any rank can release every wait by a plain store; every exchange has a deadline; a
failure is raised on all ranks with its first cause; after `drain` no result is one that a failing rank could have
spoiled. A wait orders streams and returns at once: call `drain` before results are kept.
A message is paired by the other rank's log of its starts and never by a guess, so a copy is enqueued only for a receive
that was started; between the first operation that is enqueued and the last the host waits for nothing. An abort needs
no stream and no room in a queue, only stores of the host: poison, then paint until the lane has run empty, then unmap.
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
"""How long an abort may take before it counts as stuck. It waits for what the device computes before the exchanges."""
PAINT_S = 1e-3
NEVER = float("inf")
WORDS = {steps.WordKind.CREDIT: pages.CREDIT, steps.WordKind.ARRIVAL: pages.ARRIVAL}


class Lane:
    """Runs the exchanges of one rank one after another."""

    def __init__(self, driver: CudaDriver, gpu: CudaDevice, group: SharedGroup) -> None:
        self.stream = gpu.new_stream()
        self.numbers = PairNumbers()
        self.imports = Imports(driver, self._pull, lambda rank: group.pages[rank].load(pages.FREED))
        self.newest: Event | None = None
        self.awaited: frozenset[int] = frozenset()
        """The rank whose start this one's host waits for."""
        self._driver, self._gpu, self._group = driver, gpu, group
        self._ended = False
        # Held while operations are enqueued, which nothing blocks but a queue of the driver's that is full.
        self._enqueuing = threading.Lock()
        self._starting, self._mapping = threading.Lock(), threading.Lock()
        self._flushes = bool(driver.attribute(Attribute.FLUSHES_REMOTE_WRITES))
        self._registered: list[int] = []
        try:
            self._bases = {rank: self._register(page) for rank, page in group.pages.items()}
        except RingError:
            self.unregister()
            raise

    def start(self, hop: PeerHop, ready: Event, done: Event, watch: Callable[[], None]) -> None:
        """Put an exchange on the stream, behind what the caller's stream holds now.

        The host waits until the receivers have started theirs. Raises `DisagreementError` where the ends of a message
        differ, `DeadlineError`, and what `watch` raises.
        """
        if not self._starting.acquire(blocking=False):
            raise RingError(f"rank {self._group.rank}: two threads use one ring at once; give each thread its own")
        try:
            self.imports.review({o.peer for o in hop.sends}, self._is_empty)
            targets = [0] * len(hop.sends)
            enqueued: list[steps.Step] = []
            # The program logs all starts before it looks for the first buffer. So two ranks that send to each other
            # find each other's log, whichever of them starts first.
            for step in hop.program.start:
                if isinstance(step, steps.LogStart):
                    self._log(hop, step, watch)
                elif isinstance(step, steps.FindBuffer):
                    targets[step.message] = self._find(hop.sends[step.message], self.numbers.of(step), watch)
                else:
                    enqueued.append(step)
            with self._enqueuing:
                if self._ended:
                    watch()
                    raise RingError(f"rank {self._group.rank}: this ring has ended")
                try:
                    for step in enqueued:
                        self._enqueue(hop, step, targets, ready, done)
                except BaseException:
                    # What is queued already must run empty, too, before anything is unmapped.
                    with suppress(RuntimeError):
                        done.record(self.stream)
                    raise
                finally:
                    self.newest = done
            self.numbers.advance(hop.program)
        finally:
            self._starting.release()

    def pending(self, hop: PeerHop, bases: dict[steps.Pair, int]) -> list[Operation]:
        """The messages of an exchange whose peer has not done its part: the words say which."""
        own, late = self._group.own, []
        for step in hop.program.start:
            if isinstance(step, steps.LogStart):
                operation = (hop.sends if step.sends else hop.recvs)[step.message]
                # A send waits for its receiver's credit, a receive for the arrival of its bytes.
                word = pages.CREDIT if step.sends else pages.ARRIVAL
                if own.load(word, operation.peer) < bases[step.pair] + step.nth:
                    late.append(operation)
        return late

    def abort(self) -> bool:
        """Release every wait and unmap the others' memory; False when the stream does not run empty in `ABORT_S`.

        The poison stands in every page already: a copy that this lets loose spoils no result that is called good.
        """
        deadline = Deadline(ABORT_S)
        self._gpu.activate()
        # A queue that is full holds the thread that enqueues: paint lets it go on.
        while not self._enqueuing.acquire(timeout=PAINT_S):
            self._paint()
            if deadline.passed:
                return False
        self._ended = True
        self._enqueuing.release()
        self._paint()
        while not self._is_empty():
            if deadline.passed:
                return False
            time.sleep(PAINT_S)
            # Again: a peer that lives may have written a smaller number over it.
            self._paint()
        with self._mapping:
            self.imports.drop()
        return True

    def close(self) -> None:
        """Let go of the others' memory and of the pages. Everything has run."""
        with self._enqueuing:
            self._ended = True
        with self._mapping:
            self.imports.drop()
        self.unregister()

    def unregister(self) -> None:
        """Take the pages from the device. Idempotent."""
        while self._registered:
            self._driver.unregister(self._registered.pop())

    def _register(self, page: pages.Page) -> int:
        """Return what to add to an address of the page in this process to get its device address."""
        base = self._driver.register(page.segment.address, page.segment.nbytes)
        self._registered.append(page.segment.address)
        return base - page.segment.address

    def _is_empty(self) -> bool:
        return self.newest is None or self.newest.query()

    def _paint(self) -> None:
        """Store a number into each word of this rank's page that satisfies every wait for it."""
        own = self._group.own
        for rank in self._group.ranks:
            own.store(pages.CREDIT, PAINTED, rank)
            own.store(pages.ARRIVAL, PAINTED, rank)

    def _pull(self, rank: int, arena: int) -> int:
        return self._group.pull(rank, arena, time.monotonic() + self._group.timeout_s)

    def _log(self, hop: PeerHop, step: steps.LogStart, watch: Callable[[], None]) -> None:
        """Put up one end of a message, so that the other end finds it."""
        group, number = self._group, self.numbers.of(step)
        operation = (hop.sends if step.sends else hop.recvs)[step.message]
        place = ArenaPlace(0, 0, 0) if step.sends else hop.places[step.message]
        entry = pages.Entry(
            place.arena_bytes, place.arena, place.offset, operation.nbytes, str(operation.buffer.dtype), operation.label
        )
        if not step.sends:
            overwritten = number - pages.LOG_ENTRIES

            def read() -> bool:
                watch()
                return group.own.load(pages.ARRIVAL, operation.peer) >= overwritten

            # What has arrived was looked up; until then its entry stays. The watch keeps the deadline.
            if overwritten > 0 and not read():
                group.hold(read, lambda: [operation.peer], lambda: str(operation), NEVER)
        group.own.log(step.sends, operation.peer).write(number, entry.packed())
        if not step.sends:
            group.ring(operation.peer)

    def _find(self, send: Operation, number: int, watch: Callable[[], None]) -> int:
        """Where this rank writes to reach the receive that the peer has started as `number`."""
        group = self._group
        log = group.pages[send.peer].log(False, group.rank)
        entry = log.read(number)
        if entry is None:
            here, began = self._gpu.new_event(), 0.0
            here.record(self._gpu.current_stream())

            def started() -> bool:
                nonlocal entry, began
                watch()
                entry = log.read(number)
                # The deadline counts from the moment that this rank is ready, as for what is under way.
                if entry is None and not began and here.query():
                    began = time.monotonic()
                if entry is None and began and time.monotonic() - began >= group.timeout_s:
                    said = group.health.explain([send.peer], waited_s=group.timeout_s)
                    raise DeadlineError(
                        f"rank {group.rank}: no answer from ranks [{send.peer}] within {group.timeout_s:g} s, which "
                        f"has not started to receive; pending: {send}; {said}"
                    )
                return entry is not None

            self.awaited = frozenset({send.peer})
            try:
                group.hold(started, lambda: [send.peer] if log.read(number) is None else [], lambda: str(send), NEVER)
            finally:
                self.awaited = frozenset()
        assert entry is not None
        theirs = pages.subject(entry.label, group.rank)
        if (entry.nbytes, theirs) != (send.nbytes, pages.subject(cut(send.label), send.peer)):
            raise DisagreementError(
                f"message {number} of ranks {group.rank} and {send.peer} has unlike ends: {send}, and there a receive "
                f"of {entry}; the ranks do not make the same calls"
            )
        # An abort sets `_ended` and then unmaps the peers' memory, under the same lock.
        with self._mapping:
            if self._ended:
                watch()
            return self.imports.address(send.peer, ArenaPlace(entry.arena, entry.bound, entry.offset))

    def _enqueue(self, hop: PeerHop, step: steps.Step, targets: list[int], ready: Event, done: Event) -> None:
        stream = self.stream
        if isinstance(step, steps.Copy):
            buffer = hop.sends[step.message]
            # A push: this rank's copy engine writes into the memory of the receiver.
            self._driver.copy(targets[step.message], buffer.buffer.data_ptr(), buffer.nbytes, stream.cuda_stream)
        elif isinstance(step, steps.Memops):
            self._driver.operate([self._operation(op) for op in step.ops], stream.cuda_stream)
        elif isinstance(step, steps.RecordEvent):
            if step.event is steps.Event.READY:
                ready.record(self._gpu.current_stream())
                return
            # DONE: receives into plain memory are copied out of staging first, behind the wait for their arrival.
            for dst, src, nbytes in hop.unstaged:
                self._driver.copy(dst, src, nbytes, stream.cuda_stream)
            done.record(stream)
        elif isinstance(step, steps.WaitEvent):
            stream.wait_event(ready)
        else:
            raise TypeError(f"a lane does not run {step}")

    def _operation(self, op: steps.Write | steps.Wait) -> WordOperation:
        word = op.word
        # The word lies in the page of the rank that waits for it, in the line of its writer.
        address = self._bases[word.page] + self._group.pages[word.page].word_address(WORDS[word.kind], word.writer)
        waits, reads = isinstance(op, steps.Wait), isinstance(op, steps.Wait) and op.data
        return WordOperation(waits, address, self.numbers.of(op), reads and self._flushes)


def cut(label: str) -> str:
    """A label as a log keeps it."""
    return label.encode()[: pages.LABEL_BYTES].decode(errors="replace")


MOST_TO_ONE_PEER = pages.LOG_ENTRIES - 1
"""Messages of one exchange to or from one rank."""


# --- the transport --------------------------------------------------------------------------------------------------


class PeerTransport(StreamTransport):
    """One rank of a ring over copy engines. Made by `peer.opening.open_peer`."""

    name = "peer"
    sm_margin = 0
    watch: Watch

    def __init__(
        self, group: SharedGroup, driver: CudaDriver, gpu: CudaDevice, leave: Callable[[str], None] | None = None
    ) -> None:
        """Takes over an open group, which it closes with itself. `leave` ends the process when an abort is stuck."""
        super().__init__(group.opening, gpu)
        self.group, self.driver = group, driver
        self._all_gathers = 0
        self._closing = threading.Lock()
        gpu.activate()
        self.lane = Lane(driver, gpu, group)
        self.stream = self.lane.stream
        self.order = PassOrder(gpu)
        self.arena = Arena(driver, gpu, group.share, self._freed, self._emptied)
        self.staging = Staging(self)
        self.watch = Watch(group, self.lane, gpu, leave)
        group.place = self.watch.place
        self.watch.start()
        closed_at_exit[id(self)] = self

    def close_at_exit(self) -> None:
        """See `Ending.close_at_exit`."""
        self.close()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of `nbytes` that the other ranks can map, for long use: it takes whole pages of 2 MiB."""
        self.check()
        self.refuse_capture()
        self.watch.tick()  # lets go of the buffers of what has arrived
        try:
            return self.arena.allocate(nbytes, self._quiet)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise torch.OutOfMemoryError(f"rank {self.rank}: no {nbytes} bytes for exchanges: {error}") from error

    def refuse_capture(self) -> None:
        """Raise `UnsupportedError` while the current stream is being captured: numbers would stand in the graph."""
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

    def announce(self, call: int, digest: bytes, words: str, gradients: str = "") -> bool:
        """See `Transport.announce`: each call is compared in the pages, which costs microseconds."""
        self.group.health.call = call
        return False

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Transport.all_gather_bytes`; over the shared pages."""
        self.check()
        label = f"rank {self.rank} in all-gather {self._all_gathers}"
        self._all_gathers += 1
        try:
            until = time.monotonic() + self.opening.timeout_s
            return self.group.all_gather(payload, self.watch.raise_failure, lambda: label, until)
        except (TransportError, DisagreementError) as error:
            # The watch may have seen it first, and does not know of the all-gather.
            told = str(error) if label in str(error) else f"{label}: {error}"
            failure = type(error)(told)
            self.abort(failure)
            raise failure from error
        except BaseException as error:
            self.abort(error)
            raise

    def drain(self) -> None:
        """Return when every exchange has arrived and what was computed from it is sound. Raises what has failed.

        A rank that fails poisons every page before it lets its copies loose. So a result is sound when its last reader
        has run and no poison is found after it.
        """
        self.check()
        # Without deadlines: the watch keeps them, from the moment that this rank is ready.
        for handle in list(self.watch.handles):
            wait_until(handle.done.query, Deadline(NEVER), self.check)
        computed = self.gpu.new_event()
        computed.record(self.gpu.current_stream())
        wait_until(lambda: computed.query() and self.order.passed(), Deadline(NEVER), self.check)
        if (words := self.group.trouble()) is not None:
            kind = DisagreementError if f"failed first: {DisagreementError.__name__}:" in words else PeerLostError
            self.watch.fail(kind(f"rank {self.rank}: {words}"))
        self.check()

    def _failure_raised(self) -> None:
        self._finish(failed=True)

    def abort(self, cause: BaseException) -> None:
        """See `Transport.abort`."""
        if self.forked:
            return
        if self._end is None:
            self._end = cause
        self.watch.fail(cause)
        self._finish(failed=True)

    def close(self) -> None:
        """See `Transport.close`. No other rank is waited for: memory lives for as long as another maps it."""
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
        """Give everything back, once: behind the abort where the ring has failed, on a thread that waits for it."""
        if not self._closing.acquire(blocking=False):
            return
        closed_at_exit.pop(id(self), None)
        if failed:
            threading.Thread(target=self._clear, args=(True,), name=f"ringattn-end-{self.rank}", daemon=True).start()
        else:
            self._clear(False)

    def _clear(self, failed: bool) -> None:
        """On an end: everything of this rank has run, or is stuck and keeps what it may touch."""
        if failed:
            self.watch.ended.wait()
        self.watch.stop()
        self.watch.tick()
        self.group.drop() if failed else self.group.leave()
        if failed and not self.watch.drained:
            return
        with suppress(DriverError):  # of a device that is lost
            self.gpu.activate()
            self.lane.close()
            self.staging.clear()
            self.watch.handles.clear()
            self._computed()
            self.arena.free()
            # What the caller still views is freed when it lets go.
            if not self.arena.is_empty:
                threading.Thread(
                    target=self.arena.free_later, args=(self._computed,), name=f"ringattn-free-{self.rank}", daemon=True
                ).start()

    def _computed(self) -> None:
        """Return when the device has computed what the current stream holds now, and the last pass."""
        self.gpu.activate()
        computed = self.gpu.new_event()
        computed.record(self.gpu.current_stream())
        wait_until(lambda: computed.query() and self.order.passed(), Deadline(NEVER))

    def _quiet(self) -> None:
        """Return when neither an exchange nor the caller's stream can touch memory that has no view any more."""
        self.drain()
        self.watch.tick()

    def _freed(self, count: int) -> None:
        self.group.own.store(FREED, count)

    def _emptied(self) -> None:
        self._quiet()
        self.gpu.release_cached()


# --- hops -----------------------------------------------------------------------------------------------------------


ALIGNMENT_BYTES = 256


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
    """One exchange by copy engines, bound once and started many times.

    Guarantees: the buffers of a bound hop have fixed addresses, so a start makes no allocation; receives into memory
    that other ranks cannot map arrive in staging memory and are copied on from there, on the same stream.
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
        """(to, from, bytes): receives into plain memory, copied there behind their arrival."""
        self.places = self._placed()
        """Where the other ranks write each receive."""

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

    def _placed(self) -> list[ArenaPlace]:
        """Where the other ranks write each receive."""
        transport = self.transport
        found = [transport.arena.place(o.buffer.data_ptr(), o.nbytes) for o in self.recvs]
        # All receives into plain memory share one staging buffer, each at an aligned offset.
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

    def __init__(self, transport: PeerTransport) -> None:
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


# --- the watch ------------------------------------------------------------------------------------------------------


class Watch(StreamWatch[PeerWorkHandle]):
    """Watches one rank's exchanges, and ends the ring when one of them cannot end.

    Guarantees: every exchange has a deadline that counts from the moment that this rank is ready for it; a failure of
    any rank, a rank that is gone and a rank that has closed are reported to the caller at its next call; the poison is
    in every page before a wait is released.
    """

    interval_s = 0.02
    stop_s = 1.0
    # The caller may overwrite what is being sent as soon as it has the error: the poison comes first.
    patience_s = ABORT_S

    def __init__(self, group: SharedGroup, lane: Lane, gpu: CudaDevice, leave: Callable[[str], None] | None) -> None:
        """See `StreamWatch`."""
        super().__init__(group.opening, gpu, leave)
        self.drained = False
        """The abort has ended, so nothing of this rank is under way."""
        self.report: Callable[[BaseException], None] = self.end
        """What a failure is told to: another transport of the rank, where there is one, which then calls `end`."""
        self.before_paint: Callable[[], object] = lambda: None
        """Returns when nothing that the device is given besides exchanges can carry spoiled bytes to other ranks."""
        self._group, self._lane = group, lane

    def fail(self, error: BaseException) -> None:
        """End the ring, for `error` unless it has failed already. Returns when all ranks are told; `ended` is later."""
        self.report(error)

    def end(self, error: BaseException) -> None:
        """As `fail`, without a report."""
        if not self._is_first():
            return
        self.failure = _our_error(error)
        # First of all: what a painted word lets loose must find the poison in every page.
        self._group.fail(error)
        # On a thread of its own: it waits for what the device computes before the exchanges, and no caller should.
        threading.Thread(target=self._abort, name=f"ringattn-abort-{self._rank}", daemon=True).start()
        self._write_record(self.failure)
        self._told.set()

    def place(self) -> Place:
        """Where this rank is, for its heartbeats."""
        oldest, call = self.oldest, self._group.health.call
        if oldest is None:
            waits = Waits.PEERS if self._lane.awaited else Waits.HOST
            return Place.make(self._record.where(), call, waits, self._lane.awaited)
        if oldest.started_at:
            return Place.make(oldest.flight.label, call, Waits.PEERS, _peers(oldest.pending()))
        waits = Waits.COMPUTE if time.time() - oldest.flight.posted_s >= STUCK_S else Waits.PEERS
        return Place.make(f"computing before {oldest.flight.label}", call, waits)

    def _may_reuse(self, done: Event) -> bool:
        """The newest event says whether the lane is empty: it is not recorded anew before another is newest."""
        return done is not self._lane.newest

    def _abort(self) -> None:
        try:
            self.before_paint()
            self.drained = self._lane.abort()
        except Exception as trouble:  # a device that is lost raises whatever it likes, and then nothing waits on it
            print(f"ringattn rank {self._rank}: the device is lost: {trouble}", file=sys.stderr, flush=True)
            self.drained = True
        self.ended.set()
        if not self.drained:
            self._leave(f"rank {self._rank}: the abort is stuck, so the process ends after: {self.failure}")

    def _look(self) -> None:
        """One round. Raises what ends the ring."""
        self.tick()
        handle = self.oldest
        pending = handle.pending if handle is not None else list
        if self._group.trouble(_peers(pending())) is not None:
            # Again: what arrived just before its sender closed or went away is there now.
            late = pending()
            self._group.check(_peers(late), lambda: self._said(handle, late))
        if handle is None or handle.done.query():
            return
        if not handle.started_at:
            handle.look()
            return
        if time.monotonic() - handle.started_at >= self._timeout_s:
            late = pending()
            peers = sorted(_peers(late))
            raise DeadlineError(
                f"{self._said(handle, late)}: no answer from ranks {peers} within {self._timeout_s:g} s; "
                f"{self._group.health.explain(peers, waited_s=self._timeout_s)}"
            )

    def _said(self, handle: PeerWorkHandle | None, late: list[Operation]) -> str:
        """Whose error it is, and what was pending."""
        rank = self._rank
        return f"rank {rank}: exchange {handle.flight.sequence}, pending {listed(late)}" if handle else f"rank {rank}"


def _peers(pending: list[Operation]) -> set[int]:
    return {operation.peer for operation in pending}


def _our_error(error: BaseException) -> BaseException:
    """The bare error, whose frames might view memory; what is not ringattn's own is a `RingError`."""
    if isinstance(error, RingError) and type(error).__module__ == errors.__name__:
        return bare(error)
    return RingError(f"{type(error).__name__}: {error}")
