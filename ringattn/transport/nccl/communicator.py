"""A communicator, on which this rank's hops run one after another.

States: new, opening, ready, failed, closed. Guarantees: opening has a deadline. A hop is one NCCL group, whatever it
contains. One thread at a time makes calls on a communicator. Nothing is destroyed by garbage collection. Closing and
aborting are idempotent and bounded. A second thread is refused before it reaches NCCL. (`ProcessBound` refuses a fork.)
Source: notes of the NCCL user guide on groups, non-blocking communicators and fault tolerance.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from ringattn.errors import ClosedError, DeadlineError, RingError
from ringattn.transport.base import Opening
from ringattn.transport.deadline import Deadline, Request, wait_until
from ringattn.transport.device import CudaDevice
from ringattn.transport.nccl.binding import Binding, Capability, CommConfig, NcclError, Status

ABORT_S = 60.0
"""An abort that takes longer counts as stuck. It waits for the computation that precedes the pending hops."""
LEAVE_S = 1.0
"""How long a launch may take to notice that its communicator is being aborted."""

FailureCheck = Callable[[], None]
"""Raises if the ring has failed in the meantime."""


class State(Enum):
    """The states of a communicator."""

    NEW = "new"
    OPENING = "opening"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


class PeerCall(NamedTuple):
    """One send or receive of a hop."""

    sends: bool
    pointer: int
    nbytes: int
    peer: int


class Communicator:
    """The communicator of `rank` in a ring of `world_size`. Opened, used and closed by one thread at a time."""

    def __init__(self, opening: Opening, binding: Binding, device: CudaDevice, config: CommConfig) -> None:
        # If NCCL cannot open without blocking, the open runs on a separate thread, which bounds it.
        if not config.blocking and Capability.NONBLOCKING not in binding.capabilities:
            config = config._replace(blocking=True)
        self.state = State.NEW
        self.handle = 0
        self.rank, self.config = opening.rank, config
        self._opening, self._binding, self._device = opening, binding, device
        # Acquired without waiting: a second thread is the caller's error, and it is reported as such.
        self._launching = threading.Lock()
        self._using = threading.Lock()  # its holder is the only thread that makes NCCL calls on this communicator
        # Closing and aborting exclude each other; the state records which came first.
        self._ending = threading.Lock()

    def open(self, unique_id: bytes, watch: FailureCheck) -> None:
        """Join the communicator of `unique_id`. Raises `DeadlineError`, `NcclError`, and the errors of `watch`."""
        if self.state is not State.NEW:
            raise RingError(
                f"rank {self.rank}: a communicator can be opened only once, but this one is {self.state.value}"
            )
        self.state = State.OPENING
        world_size, deadline = self._opening.world_size, Deadline(self._opening.timeout_s)

        def make() -> int:
            # The current device is set per thread.
            self._device.activate()
            return self._binding.init(world_size, unique_id, self.rank, self.config)

        try:
            with self._using:
                if self.config.blocking:
                    # On a separate thread, abandoned if it never returns: nothing else bounds a blocking open.
                    request = Request(make)
                    threading.Thread(target=request.serve, name="ringattn-open", daemon=True).start()
                    if not wait_until(lambda: request.done, deadline, watch):
                        raise DeadlineError(
                            f"rank {self.rank}: init of the communicator did not end in {deadline.timeout_s} s"
                        )
                    self.handle = request.result()
                else:
                    self.handle = make()
                    # A non-blocking init returns at once and is in progress until all ranks have joined.
                    self._settle("init", Status.IN_PROGRESS, watch, deadline)
                # An abort in the meantime has set FAILED, which must stay.
                if self.state is State.OPENING:
                    self.state = State.READY
            watch()
        except BaseException:
            self.abort()
            raise

    def launch(self, calls: Sequence[PeerCall], stream: int, watch: FailureCheck) -> None:
        """Enqueue one hop on a stream: all `calls` in one group. Returns when NCCL accepted it, not when it has run.

        Raises `ClosedError` if the communicator is not ready, `RingError` if another thread is launching, `NcclError`,
        and `DeadlineError`.
        """
        if not self._launching.acquire(blocking=False):
            raise RingError(f"rank {self.rank}: two threads use one ring at once; give each thread its own")
        self._using.acquire()
        try:
            if self.state is not State.READY:
                # The cause of the ring's failure, if there is one, says more than the state.
                watch()
                raise ClosedError(f"rank {self.rank}: the communicator is {self.state.value}")
            binding, handle = self._binding, self.handle
            where, status = "ncclGroupStart", binding.group_start()
            if not status:
                for sends, pointer, nbytes, peer in calls:
                    call = binding.send if sends else binding.recv
                    status = call(pointer, nbytes, peer, handle, stream)
                    if status and status != Status.IN_PROGRESS:
                        where = f"{'ncclSend to' if sends else 'ncclRecv from'} rank {peer}"
                        break
                else:
                    where, status = "ncclGroupEnd", 0
                ended = binding.group_end()  # after an error too, otherwise the thread's group would stay open
                status = status or ended
            # In progress: wait for it. An error: raise it.
            if status:
                self._settle(where, status, watch)
        finally:
            self._using.release()
            self._launching.release()

    def error(self) -> NcclError | None:
        """Return an error that NCCL reports asynchronously, or None. For the supervisor.

        The query completes NCCL's pending launch, which only one thread may do; a launch in progress queries itself.
        """
        # Already held: a launch is in progress and checks for errors itself, so do not wait.
        if not self._using.acquire(blocking=False):
            return None
        try:
            if self.state is not State.READY:
                return None
            status = self._binding.state(self.handle)
            if status in (Status.SUCCESS, Status.IN_PROGRESS):
                return None
            return NcclError("asynchronous error", status, self._binding.last_error(self.handle))
        finally:
            self._using.release()

    def abort(self, join_s: float = ABORT_S) -> bool:
        """Stop everything on the communicator and free it. Returns False if that takes over `join_s`. Idempotent.

        It waits for a launch in progress, which notices the failure within milliseconds. A launch that is stuck in a
        blocking communicator cannot be aborted: NCCL would free memory that it still uses.
        """
        # Set the state first: a launch that waits for NCCL then ends at its failure check.
        with self._ending:
            if self.state in (State.FAILED, State.CLOSED):
                return True
            self.state = State.FAILED
        # A launch in progress holds this lock; a non-blocking one releases it within milliseconds.
        acquired = self._using.acquire(timeout=LEAVE_S)
        if not acquired and self.config.blocking:
            return False
        # Clear the handle first, so that nothing frees it twice.
        handle, self.handle = self.handle, 0
        try:
            return not handle or self._bounded(lambda: self._binding.abort(handle), join_s)
        finally:
            if acquired:
                self._using.release()

    def close(self, deadline: Deadline) -> bool:
        """Free the communicator together with all other ranks, after its hops have run.

        Returns False if the communicator has failed or the close takes too long.
        """
        with self._ending:
            if self.state is not State.READY:
                return self.state is State.CLOSED
            self.state = State.CLOSED
        # No failure is expected here, so wait for a launch or a query in progress.
        with self._using:
            handle, self.handle = self.handle, 0
            return self._bounded(lambda: self._free(handle, deadline), deadline.timeout_s)

    def _free(self, handle: int, deadline: Deadline) -> None:
        # Finalize is collective: it ends when all ranks have called it.
        if Capability.FINALIZE in self._binding.capabilities:
            self._binding.finalize(handle)
            wait_until(lambda: self._binding.state(handle) != Status.IN_PROGRESS, deadline)
        self._binding.destroy(handle)

    def _settle(self, where: str, status: int, watch: FailureCheck, deadline: Deadline | None = None) -> None:
        """Wait until NCCL has completed a call. Only then may other work be enqueued on its streams.

        `where`: the name of the call in errors. `status`: what the call returned.
        """
        deadline = deadline or Deadline(self._opening.timeout_s)
        current, handle = status, self.handle

        def finalized() -> bool:
            nonlocal current
            current = self._binding.state(handle)
            return current != Status.IN_PROGRESS

        if current == Status.IN_PROGRESS and not wait_until(finalized, deadline, watch):
            raise DeadlineError(f"rank {self.rank}: {where} was still in progress after {deadline.timeout_s} s")
        if current != Status.SUCCESS:
            raise NcclError(f"rank {self.rank}: {where}", current, self._binding.last_error(handle))

    def _bounded(self, call: Callable[[], None], join_s: float) -> bool:
        """Run a call that may hang on a separate thread; return False if it hangs. Its errors are ignored."""

        def body() -> None:
            with suppress(Exception):
                self._device.activate()
                call()

        thread = threading.Thread(target=body, name="ringattn-free", daemon=True)
        thread.start()
        thread.join(join_s)
        return not thread.is_alive()
