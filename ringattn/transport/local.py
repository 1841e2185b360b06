"""The local transport: a ring whose ranks are threads of one process, on CPU, for tests, notebooks and world size 1.

Guarantees: messages are not buffered. A send ends only when its receive has been posted and filled, so a forgotten or
misplaced receive is always noticed. Bytes and dtype of both ends must match. If no rank can proceed, the waiting ranks
raise at once, and every deadline error lists the pending operations of every rank. A transport that has raised a
failure cannot be used again: later calls raise `ClosedError`.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch

from ringattn.errors import ClosedError, DeadlineError, InputError, PeerLostError, TransportError
from ringattn.integers import whole_number
from ringattn.transport.base import HostTransport, Message, Operation, listed, operations
from ringattn.transport.control_store import first_cause


class _Operation(Operation):
    """An operation with its outcome: when it was completed, or why it was refused."""

    done = False
    done_s = 0.0
    refusal: str | None = None


class LocalWorld:
    """The state that `world_size` ranks share to exchange messages. Every wait ends within `timeout_s` seconds.

    One condition variable protects the state. Methods with a leading underscore are called while it is held.
    """

    def __init__(self, world_size: int, timeout_s: float = 600.0) -> None:
        if timeout_s <= 0:
            raise InputError(f"timeout_s must be positive, got {timeout_s!r}")
        self.world_size = whole_number(world_size, "world_size must be a positive number of ranks", 1)
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.first_failure: tuple[int, BaseException] | None = None
        self.closed: set[int] = set()
        self.all_gathers: dict[int, dict[int, bytes]] = {}
        self._taken: set[int] = set()
        self._blocked: dict[int, Callable[[], bool]] = {}
        self._queues: defaultdict[tuple[int, int, bool], deque[_Operation]] = defaultdict(deque)

    def transport(self, rank: int) -> LocalTransport:
        """Return the transport of `rank`, once per rank. Raises `InputError` if the rank is taken or does not exist."""
        with self.changed:
            if not 0 <= rank < self.world_size or rank in self._taken:
                raise InputError(
                    f"rank {rank} is already in use, or is not one of the ranks 0 to {self.world_size - 1}"
                )
            self._taken.add(rank)
        return LocalTransport(self, rank)

    def _post(self, operation: _Operation) -> None:
        """Match a send with the oldest queued receive between the same ranks, or a receive with the oldest queued send.

        If there is none, queue the operation.
        """
        rank, peer = operation.rank, operation.peer
        src, dst = (rank, peer) if operation.sends else (peer, rank)
        opposite = self._queues[src, dst, not operation.sends]
        if not opposite:
            self._queues[src, dst, operation.sends].append(operation)
            return
        match = opposite.popleft()
        send, recv = (operation, match) if operation.sends else (match, operation)
        if send.nbytes != recv.nbytes or send.buffer.dtype != recv.buffer.dtype:
            send.refusal = recv.refusal = f"two ends of one message do not match: {send}, but {recv}"
        else:
            self._deliver(send, recv)

    def _deliver(self, send: _Operation, recv: _Operation) -> None:
        """Copy the bytes of a message whose ends match."""
        with torch.inference_mode():  # a buffer created in this mode can only be written in this mode
            recv.buffer.detach().view(-1).copy_(send.buffer.view(-1))
        send.done_s = recv.done_s = time.perf_counter()
        send.done = recv.done = True

    def _forget(self, rank: int) -> None:
        """Remove the queued operations of `rank`, so that no other rank accesses its buffers again."""
        for queue in self._queues.values():
            kept = [operation for operation in queue if operation.rank != rank]
            queue.clear()
            queue.extend(kept)

    def _fail(self, rank: int, cause: BaseException) -> None:
        """Record the first failure and remove all queued operations, so that no bytes are copied any more."""
        if self.first_failure is None:
            self.first_failure = (rank, cause)
        self._queues.clear()
        self.changed.notify_all()

    def _block(
        self, rank: int, ready: Callable[[], bool], awaited: Callable[[], set[int]], what: Callable[[], str]
    ) -> None:
        """Block `rank` until `ready()`, which depends on the ranks `awaited()`; `what` describes the wait."""
        deadline = time.monotonic() + self.timeout_s
        self._blocked[rank] = ready
        try:
            while not ready():
                if self.first_failure is not None:
                    raise PeerLostError(f"{what()}: {first_cause(*self.first_failure)}") from self.first_failure[1]
                if gone := awaited() & self.closed:
                    raise PeerLostError(f"{what()}: rank {min(gone)} closed its ring")
                if self._stuck():
                    raise DeadlineError(f"deadlock, no rank can move: {what()}\n{self._report()}")
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    missing = f"no answer from ranks {sorted(awaited())} within {self.timeout_s} s"
                    raise DeadlineError(f"{what()}: {missing}\n{self._report()}")
                self.changed.wait(remaining_s)
        finally:
            del self._blocked[rank]

    def _stuck(self) -> bool:
        """Return whether all ranks that have not closed are blocked: a deadlock, because only ranks can end a wait."""
        return all(
            rank in self.closed or (rank in self._blocked and not self._blocked[rank]())
            for rank in range(self.world_size)
        )

    def _report(self) -> str:
        """List the pending operations of every rank, one line per rank."""
        lines = []
        for rank in range(self.world_size):
            pending = [operation for queue in self._queues.values() for operation in queue if operation.rank == rank]
            all_gathers = [f"all-gather {n}" for n, joined in sorted(self.all_gathers.items()) if rank in joined]
            state = "closed" if rank in self.closed else "; ".join([*all_gathers, listed(pending)])
            lines.append(f"  pending on rank {rank}: {state}")
        return "\n".join(lines)


class LocalWorkHandle:
    """The operations of one exchange. Other exchanges of the rank may be in flight at the same time."""

    def __init__(self, transport: LocalTransport, operations: list[_Operation]) -> None:
        self._transport = transport
        self._operations = operations
        self.arrived_s: float | None = None

    def wait(self) -> None:
        """See `WorkHandle.wait`; raises `TransportError` if two ends differ in bytes or dtype. Idempotent."""
        if self._operations:
            self._transport._finish(self._operations)
            self.arrived_s = max(operation.done_s for operation in self._operations)
            self._operations = []


class LocalTransport(HostTransport):
    """One rank of a `LocalWorld`."""

    name = "local"
    device = torch.device("cpu")

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.rank = rank
        self.world_size = world.world_size
        self._world = world
        self._all_gathers = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 tensor of `nbytes` on the CPU."""
        self.check_process()
        with self._world.changed:
            self._check_alive()
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> LocalWorkHandle:
        """See `Transport.exchange`. Raises `InputError`, `ClosedError`, `PeerLostError`."""
        self.check_process()
        posted = operations(_Operation, self.rank, self.world_size, self.device, sends, recvs)
        with self._world.changed:
            self._check_alive()
            for operation in posted:
                self._world._post(operation)
            self._world.changed.notify_all()
        return LocalWorkHandle(self, posted)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Transport.all_gather_bytes`. The n-th calls of all ranks belong together."""
        self.check_process()
        world = self._world
        with world.changed:
            self._check_alive()
            joined = world.all_gathers.setdefault(self._all_gathers, {})
            joined[self.rank] = bytes(payload)
            world.changed.notify_all()
            everyone = set(range(self.world_size))
            self._hold(
                lambda: len(joined) == self.world_size,
                lambda: everyone - set(joined),
                lambda: f"rank {self.rank} in all-gather {self._all_gathers}",
            )
            world.all_gathers.pop(self._all_gathers, None)
            self._all_gathers += 1
            return [joined[rank] for rank in range(self.world_size)]

    def abort(self, cause: BaseException) -> None:
        """See `Transport.abort`."""
        if self._end is not None:  # checked before locking, because a fork may copy a held lock
            return
        with self._world.changed:
            if self._end is None:
                self._end = cause
                self._world._fail(self.rank, cause)

    def close(self) -> None:
        """See `Transport.close`. A peer that still waits for this rank gets `PeerLostError`."""
        if self._end is not None:
            return
        with self._world.changed:
            if self._end is None:
                self._end = ClosedError(f"rank {self.rank} closed its ring")
                self._world.closed.add(self.rank)
                self._world._forget(self.rank)
                self._world.changed.notify_all()

    def _finish(self, posted: list[_Operation]) -> None:
        """Wait until all operations in `posted` are complete. Raises `TransportError` if one is refused."""
        self.check_process()
        with self._world.changed:
            self._check_open()
            self._hold(
                lambda: all(operation.done for operation in posted) or any(operation.refusal for operation in posted),
                lambda: {operation.peer for operation in posted if not operation.done},
                lambda: f"rank {self.rank} waits for {listed([op for op in posted if not op.done])}",
            )
            for operation in posted:
                if operation.refusal is not None:
                    error = TransportError(operation.refusal)
                    self.abort(error)
                    raise error

    def _hold(self, ready: Callable[[], bool], awaited: Callable[[], set[int]], what: Callable[[], str]) -> None:
        """Block this rank until `ready()`; see `LocalWorld._block`. A failed wait ends this transport."""
        try:
            self._world._block(self.rank, ready, awaited, what)
        except TransportError as error:
            self.abort(error)
            raise

    def _check_alive(self) -> None:
        """Raise `ClosedError` if this transport has ended, `PeerLostError` if another rank has failed."""
        self._check_open()
        if self._world.first_failure is not None:
            rank, cause = self._world.first_failure
            error = PeerLostError(f"rank {self.rank} stopped because of another rank: {first_cause(rank, cause)}")
            self.abort(error)
            raise error from cause
