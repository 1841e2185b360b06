"""The stream that exchanges run on, and what ends it: poison, then paint until it has run empty, then unmap.

Guarantees: a message is paired by the other rank's log of its starts and never by a guess, so a copy is enqueued only
for a receive that was started; between the first operation that is enqueued and the last the host waits for nothing;
an abort needs no stream and no room in a queue, only stores of the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ringattn.errors import DeadlineError, DisagreementError, RingError
from ringattn.transport.base import Operation
from ringattn.transport.deadline import Deadline
from ringattn.transport.device import CudaDevice, Event
from ringattn.transport.peer import program as steps
from ringattn.transport.peer.arena import ArenaPlace, Imports
from ringattn.transport.peer.driver import Attribute, CudaDriver, WordOperation
from ringattn.transport.peer.program import PAINTED, PairNumbers, Program
from ringattn.transport.shared import page as pages
from ringattn.transport.shared.group import SharedGroup

ABORT_S = 60.0
"""How long an abort may take before it counts as stuck. It waits for what the device computes before the exchanges."""
PAINT_S = 1e-3
NEVER = float("inf")
WORDS = {steps.WordKind.CREDIT: pages.CREDIT, steps.WordKind.ARRIVAL: pages.ARRIVAL}


class Bound(Protocol):
    """A hop, as the lane needs it."""

    program: Program
    sends: list[Operation]
    recvs: list[Operation]
    places: list[ArenaPlace]
    """Where the other ranks write each receive."""
    unstaged: list[tuple[int, int, int]]
    """(to, from, bytes): receives into plain memory, copied there behind their arrival."""


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

    def start(self, hop: Bound, ready: Event, done: Event, watch: Callable[[], None]) -> None:
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

    def pending(self, hop: Bound, bases: dict[steps.Pair, int]) -> list[Operation]:
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

    def _log(self, hop: Bound, step: steps.LogStart, watch: Callable[[], None]) -> None:
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

    def _enqueue(self, hop: Bound, step: steps.Step, targets: list[int], ready: Event, done: Event) -> None:
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
