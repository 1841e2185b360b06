"""A ring whose ranks are processes of one node, over copy engines: no multiprocessor works on an exchange.

Guarantees: an exchange is copies into the other ranks' memory between waits for words in shared host memory, on a
stream of its own, so the host of any rank can release every wait by a plain store; every exchange has a deadline; a
failure is raised on all ranks with its first cause; after `drain` no result is one that a failing rank could have
spoiled. A wait orders streams and returns at once: call `drain` before results are kept.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ringattn.errors import ClosedError, DisagreementError, PeerLostError, RingError, TransportError, UnsupportedError
from ringattn.observe.flight import FlightRecord
from ringattn.transport.base import Message, Operation, operations
from ringattn.transport.deadline import Deadline, wait_until
from ringattn.transport.device import Device, PassOrder
from ringattn.transport.peer.arena import Arena
from ringattn.transport.peer.driver import OUT_OF_MEMORY, Driver, DriverError
from ringattn.transport.peer.hop import HopTransport, PeerHop, Staging
from ringattn.transport.peer.lane import NEVER, Lane
from ringattn.transport.peer.watch import Watch
from ringattn.transport.shared.group import SharedGroup
from ringattn.transport.shared.page import FREED
from ringattn.transport.stream import bare, end_process

_open: weakref.WeakSet[PeerTransport] = weakref.WeakSet()


class PeerTransport(HopTransport):
    """One rank of a ring over copy engines. Made by `peer.opening.open_peer`."""

    name = "peer"
    sm_margin = 0
    watch: Watch

    def __init__(
        self,
        group: SharedGroup,
        record: FlightRecord,
        driver: Driver,
        gpu: Device,
        timeout_s: float,
        *,
        flight_dir: Path | None = None,
        leave: Callable[[str], None] | None = None,
    ) -> None:
        """Takes over an open group, which it closes with itself. `leave` ends the process when an abort is stuck."""
        super().__init__(group.rank, group.world_size, gpu, record, timeout_s)
        self.group, self.driver = group, driver
        self._all_gathers = 0
        self._closing = threading.Lock()
        gpu.activate()
        self.lane = Lane(driver, gpu, group, timeout_s)
        self.stream = self.lane.stream
        self.order = PassOrder(gpu)
        self.arena = Arena(driver, gpu, group.share, self._freed, self._emptied)
        self.staging = Staging(self)
        self.watch = Watch(group, self.lane, gpu, record, timeout_s, flight_dir, leave or end_process)
        group.place = self.watch.place
        self.watch.start()
        _open.add(self)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `HopTransport.allocate`."""
        self.check()
        self.refuse_capture()
        self.watch.tick()  # lets go of the buffers of what has arrived
        try:
            return self.arena.allocate(nbytes, self._quiet)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise torch.OutOfMemoryError(f"rank {self.rank}: no {nbytes} bytes for exchanges: {error}") from error

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
            until = time.monotonic() + self._timeout_s
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

    def check(self) -> None:
        """See `StreamTransport.check`."""
        self._check_open()
        try:
            self.watch.raise_failure()
        except RingError as failure:
            self._end = bare(failure)
            self._finish(failed=True)
            raise

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
        _open.discard(self)
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
            if len(self.arena):
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


@atexit.register
def _close_all() -> None:
    """Close the rings that are still open. In a fork they have ended."""
    for ring in list(_open):
        with suppress(RuntimeError, OSError):
            ring.close()
