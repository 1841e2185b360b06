"""A ring whose ranks are processes on CPU, over a gloo group of its own.

Promises: the user's process groups are never touched, whether they exist before or after; several rings may be open at
once; every wait ends within the deadline; a rank that fails publishes its cause in the store before it drops its
connections, and every other rank re-states that first cause. A transport that has raised a failure is dead.
A message whose ends differ in bytes never meets its partner, so both ranks reach the deadline. A rank that dies while a
large message to it is half written is noticed by the sender at the deadline only; gloo does not say it earlier.
Does not know: devices, environment variables, what the bytes mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ringattn.errors import ClosedError, DeadlineError, PeerLostError, TransportError
from ringattn.transport.base import Message
from ringattn.transport.messages import Operation, first_cause, listed, operations

# A rank publishes its cause just before its connections fall, except that gloo drops the pair of a timed-out wait by
# itself, before the cause can be written. So the neighbor looks for the cause this long.
CAUSE_S = 1.0
POLL_S = 0.02
# Gloo itself kills the process when a message is longer than its receive, and takes a shorter one for success. So the
# length is part of the tag. Gloo's tags have 31 bits and keep the order among equals.
AGREE_TAG = 0
LENGTH_TAGS = 2**31 - 2
AGREE_HEAD_BYTES = 256
LENGTH_BYTES = 8


class _Operation(Operation):
    """An operation and gloo's handle of it."""

    work: dist.Work | None = None

    @property
    def tag(self) -> int:
        """What must be equal on both ends."""
        return 1 + self.nbytes % LENGTH_TAGS

    def wait(self, deadline: float) -> None:
        """Wait once, until `deadline` on the monotonic clock; a second wait returns at once. Raises `RuntimeError`."""
        if self.work is not None:
            # Gloo counts whole milliseconds, and takes 0 for "no deadline". Rounded up, for a wait that ends before the
            # deadline is a lost connection.
            remaining_ms = max(math.ceil((deadline - time.monotonic()) * 1e3), 1)
            self.work.wait(timedelta(milliseconds=remaining_ms))
            self.work = None


class _Agreement(_Operation):
    """An operation of the control plane, which never meets the messages of an exchange."""

    tag = AGREE_TAG


class GlooTicket:
    """The operations of one exchange."""

    def __init__(self, transport: GlooTransport, operations: list[_Operation]) -> None:
        self._transport = transport
        self._operations = operations

    def wait(self) -> None:
        """See `Ticket.wait`. A second wait returns at once."""
        if self._operations:
            self._transport._finish(self._operations, "")
            self._operations = []


class GlooTransport:
    """One rank of a ring of processes."""

    name = "gloo"
    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroupGloo, store: dist.Store, timeout_s: float) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self._group: dist.ProcessGroupGloo | None = group
        self._store = store
        self._timeout_s = timeout_s
        self._agreements = 0
        self._end: BaseException | None = None
        # Gloo keeps a connection for as long as any handle on it lives, so the end must reach all of them.
        self._in_flight: set[_Operation] = set()

    @classmethod
    def open(cls, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> GlooTransport:
        """Connect `rank` with all others through a fresh `store`; every later wait ends within `timeout_s` too.

        Raises `DeadlineError` that names the ranks which did not come.
        """
        try:
            store.set(f"arrived/{rank}", "1")
            group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            missing = [other for other in range(world_size) if not _holds(store, f"arrived/{other}")]
            who = f"ranks {missing} did not come" if missing else "all ranks came, but could not connect"
            raise DeadlineError(f"rank {rank} opened a ring of {world_size}: {who} within {timeout_s} s") from error
        return cls(group, store, timeout_s)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of `nbytes` on CPU, uninitialised."""
        self._check_open()
        return torch.empty(nbytes, dtype=torch.uint8)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> GlooTicket:
        """See `Transport.exchange`. Raises `InputError`, `ClosedError`, `PeerLostError`."""
        posted = operations(_Operation, self.rank, self.world_size, self.device, sends, recvs)
        self._post(posted)
        return GlooTicket(self, posted)

    def agree(self, payload: bytes) -> list[bytes]:
        """See `Transport.agree`. The n-th call of every rank meets the n-th call of the others; any payload length.

        A head of fixed size holds the length and what fits of the payload; the rest, where there is one, follows.
        """
        others = [peer for peer in range(self.world_size) if peer != self.rank]
        label = f"agreement {self._agreements}"
        self._agreements += 1
        framed = len(payload).to_bytes(LENGTH_BYTES, "little") + payload
        framed += bytes(max(AGREE_HEAD_BYTES - len(framed), 0))
        sent = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        answers = {peer: torch.empty(AGREE_HEAD_BYTES, dtype=torch.uint8) for peer in others}
        self._swap(others, sent[:AGREE_HEAD_BYTES], answers, label)

        lengths = {peer: int.from_bytes(answers[peer][:LENGTH_BYTES].numpy().tobytes(), "little") for peer in others}
        rests = {
            peer: torch.empty(max(lengths[peer] + LENGTH_BYTES - AGREE_HEAD_BYTES, 0), dtype=torch.uint8)
            for peer in others
        }
        self._swap(others, sent[AGREE_HEAD_BYTES:], rests, label)
        payloads = {self.rank: bytes(payload)}
        for peer in others:
            whole = torch.cat([answers[peer], rests[peer]])
            payloads[peer] = whole[LENGTH_BYTES : LENGTH_BYTES + lengths[peer]].numpy().tobytes()
        return [payloads[rank] for rank in range(self.world_size)]

    def abort(self, cause: BaseException) -> None:
        """See `Transport.abort`."""
        if self._end is None:
            try:
                self._store.compare_set("cause", "", first_cause(self.rank, cause))
            except RuntimeError:
                pass  # the store's host is gone; the neighbors notice the lost connections all the same
            self._drop(cause)

    def close(self) -> None:
        """See `Transport.close`. A peer that still waits for this rank gets `PeerLostError`."""
        if self._end is None:
            try:
                self._store.set(f"closed/{self.rank}", "1")
            except RuntimeError:
                pass  # without the store's host nobody can be told
            self._drop(ClosedError(f"rank {self.rank} closed its ring"))

    def _swap(self, peers: list[int], sent: torch.Tensor, received: dict[int, torch.Tensor], label: str) -> None:
        """Send one buffer to all `peers` and receive one from each."""
        sends = [Message(peer, sent, label) for peer in peers]
        recvs = [Message(peer, received[peer], label) for peer in peers]
        posted: list[_Operation] = operations(_Agreement, self.rank, self.world_size, self.device, sends, recvs)
        self._post(posted)
        self._finish(posted, f" in {label}")

    def _post(self, posted: list[_Operation]) -> None:
        """Hand operations to gloo, which keeps the order of each pair of ranks and direction."""
        self._check_open()
        for operation in posted:
            try:
                # No name may hold the group here: an error keeps this frame, and with it the connections.
                operation.work = (self._group.send if operation.sends else self._group.recv)(  # type: ignore[union-attr]
                    [operation.buffer.detach()], operation.peer, operation.tag
                )
            except RuntimeError as error:
                raise self._failure(operation, posted, error, None, "") from error
            self._in_flight.add(operation)

    def _finish(self, posted: list[_Operation], where: str) -> None:
        """Wait for every operation; the first that fails ends this transport."""
        self._check_open()
        deadline = time.monotonic() + self._timeout_s
        for operation in posted:
            try:
                operation.wait(deadline)
            except RuntimeError as error:
                raise self._failure(operation, posted, error, deadline, where) from error
        self._in_flight.difference_update(posted)

    def _failure(
        self, failed: _Operation, posted: list[_Operation], error: RuntimeError, deadline: float | None, where: str
    ) -> TransportError:
        """End this transport, and say why as well as can be known."""
        failure: TransportError
        if deadline is not None and time.monotonic() >= deadline:
            pending = [operation for operation in posted if _unfinished(operation)]
            silent = sorted({operation.peer for operation in pending})
            failure = DeadlineError(
                f"rank {self.rank}{where}: no answer from ranks {silent} within {self._timeout_s} s; "
                f"pending: {listed(pending)}{self._earlier_cause()}"
            )
        else:
            known = self._known_cause(failed.peer, deadline)
            failure = PeerLostError(f"{failed}{where}: {known or f'rank {failed.peer} is gone ({error})'}")
        self.abort(failure)
        return failure

    def _known_cause(self, peer: int, deadline: float | None) -> str | None:
        """The first published cause, or that `peer` closed in good order; None when the peer left without a word."""
        until = min(time.monotonic() + CAUSE_S, deadline or float("inf"))
        try:
            while True:
                if self._store.check(["cause"]):
                    return self._store.get("cause").decode()
                if self._store.check([f"closed/{peer}"]):
                    return f"rank {peer} closed its ring"
                if time.monotonic() >= until:
                    return None
                time.sleep(POLL_S)
        except RuntimeError:
            return f"rank {peer} is gone, and the store's host (rank 0) is gone, so no first cause can be read"

    def _earlier_cause(self) -> str:
        """What another rank has published before this one reached its deadline."""
        try:
            return f"; {self._store.get('cause').decode()}" if self._store.check(["cause"]) else ""
        except RuntimeError:
            return "; the store's host (rank 0) is gone"

    def _drop(self, end: BaseException) -> None:
        """Let go of everything that keeps a connection open; gloo then wakes the neighbors."""
        self._end = end
        for operation in self._in_flight:
            operation.work = None
        self._group = None

    def _check_open(self) -> None:
        if self._end is not None:
            raise ClosedError(f"rank {self.rank}: this ring has ended ({self._end}); open a new one") from self._end


def _unfinished(operation: _Operation) -> bool:
    """Whether an operation is still pending after the deadline. Asking may end it, so the ring must end too."""
    try:
        operation.wait(0.0)
    except RuntimeError:
        return True
    return False


def _holds(store: dist.Store, key: str) -> bool:
    """Whether `key` is known to be in the store."""
    try:
        return store.check([key])
    except RuntimeError:
        return False
