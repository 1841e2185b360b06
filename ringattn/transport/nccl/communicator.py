"""A communicator, on which this rank's hops run one after another.

States: new, opening, ready, failed, closed. Guarantees: opening has a deadline; a hop is one group, whatever it holds;
NCCL is asked about a communicator by one thread at a time; nothing is destroyed at garbage collection; closing and
aborting are idempotent and bounded; a second thread is refused before it reaches NCCL. (`ProcessBound` refuses a fork.)
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
"""How long an abort may take before it counts as stuck. It waits for what the GPU computes before the pending hops."""
LEAVE_S = 1.0
"""How long a launch may take to notice that its communicator is being aborted."""

FailureCheck = Callable[[], None]
"""Raises when the ring has failed meanwhile."""


class State(Enum):
    """The life of a communicator."""

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
        # Where NCCL cannot open without blocking, a thread of its own bounds the open.
        if not config.blocking and Capability.NONBLOCKING not in binding.capabilities:
            config = config._replace(blocking=True)
        self.state = State.NEW
        self.handle = 0
        self.rank, self.config = opening.rank, config
        self._opening, self._binding, self._device = opening, binding, device
        # Taken without waiting: a second thread is an error of the caller and is told so.
        self._launching = threading.Lock()
        self._using = threading.Lock()  # NCCL is asked about this communicator by the thread that holds this
        # Makes closing and aborting exclude each other; the state says which came first.
        self._ending = threading.Lock()

    def open(self, unique_id: bytes, watch: FailureCheck) -> None:
        """Join the communicator of `unique_id`. Raises `DeadlineError`, `NcclError`, and what `watch` raises."""
        if self.state is not State.NEW:
            raise RingError(f"rank {self.rank}: a communicator opens once, and this one is {self.state.value}")
        self.state = State.OPENING
        world_size, deadline = self._opening.world_size, Deadline(self._opening.timeout_s)

        def make() -> int:
            # The current device is a matter of each thread.
            self._device.activate()
            return self._binding.init(world_size, unique_id, self.rank, self.config)

        try:
            with self._using:
                if self.config.blocking:
                    # On a thread that is left behind if it never returns: nothing else bounds a blocking open.
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
                # An abort meanwhile has set FAILED, which must stay.
                if self.state is State.OPENING:
                    self.state = State.READY
            watch()
        except BaseException:
            self.abort()
            raise

    def launch(self, calls: Sequence[PeerCall], stream: int, watch: FailureCheck) -> None:
        """Put one hop on a stream: all `calls` in one group. Returns when NCCL has taken it, not when it has run.

        Raises `ClosedError` unless ready, `RingError` for a second thread, `NcclError`, `DeadlineError`.
        """
        if not self._launching.acquire(blocking=False):
            raise RingError(f"rank {self.rank}: two threads use one ring at once; give each thread its own")
        self._using.acquire()
        try:
            if self.state is not State.READY:
                # The reason of the ring's failure, if there is one, says more than the state.
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
                ended = binding.group_end()  # also after an error, or the thread would queue for ever
                status = status or ended
            # In progress, or an error: wait for it, or raise.
            if status:
                self._settle(where, status, watch)
        finally:
            self._using.release()
            self._launching.release()

    def error(self) -> NcclError | None:
        """What NCCL reports about this communicator by itself, None while it is healthy. For the supervisor.

        Asking completes NCCL's pending launch, which is safe on one thread only; a launch in progress asks itself.
        """
        # Held: a launch is in progress and looks for errors itself, so this one need not wait.
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
        """Stop what runs on it and free it; False when that does not end within `join_s`. Idempotent.

        A launch in progress is waited for, since it sees the failure within milliseconds. One that is stuck inside a
        blocking communicator cannot be aborted: NCCL would free what it still uses.
        """
        # First the state: a launch that waits for NCCL then finds out by its failure check.
        with self._ending:
            if self.state in (State.FAILED, State.CLOSED):
                return True
            self.state = State.FAILED
        # A launch in progress holds it; a non-blocking one leaves within milliseconds.
        held = self._using.acquire(timeout=LEAVE_S)
        if not held and self.config.blocking:
            return False
        # Taken out first, so that nobody frees it twice.
        handle, self.handle = self.handle, 0
        try:
            return not handle or self._bounded(lambda: self._binding.abort(handle), join_s)
        finally:
            if held:
                self._using.release()

    def close(self, deadline: Deadline) -> bool:
        """Free it, all hops having run, together with all other ranks; False when that does not end in time."""
        with self._ending:
            if self.state is not State.READY:
                return self.state is State.CLOSED
            self.state = State.CLOSED
        # No failure is expected here, so a launch or a query in progress is waited for.
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
        """Wait until the communicator has done what was asked; only then may its streams be given other work."""
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
        """Run a call that may hang on a thread of its own; False when it does. What it raises changes nothing more."""

        def body() -> None:
            with suppress(Exception):
                self._device.activate()
                call()

        thread = threading.Thread(target=body, name="ringattn-free", daemon=True)
        thread.start()
        thread.join(join_s)
        return not thread.is_alive()
