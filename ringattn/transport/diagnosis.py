"""Which rank is at fault when a wait of a gloo ring failed.

Every rank is checked, since the peer that a rank waits for may itself wait for another. The first rank whose wait
fails reads all heartbeats and publishes what it found with the cause; the others wait for that cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ringattn.errors import DeadlineError
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.heartbeat import (
    ENDED,
    REQUESTS_PER_S,
    Heartbeat,
    LastHeartbeat,
    SilenceCheck,
    interval_s,
    silence,
)

HEARTBEAT_S = 0.25
"""Seconds between two heartbeats of a rank, in jobs of up to a thousand ranks."""
SILENCE_S = 0.8
"""How long a heartbeat must not change: three intervals."""
# A rank publishes its cause just before its connections fall, except that gloo drops the pair of a timed-out wait by
# itself, before that rank has read the heartbeats. So its neighbor looks for the cause this long.
CAUSE_S = SILENCE_S + 0.5
CAUSE_POLL_S = 0.02
HOST_LOST = "the store's host (rank 0) is gone"
SHARE_S = 0.8
"""What a diagnosis may take besides the silence, also where the store does not answer."""
PATIENCE_S = SHARE_S - 0.1
"""How long besides the silence the others wait for the cause of the one that looks."""
ANSWER_S = 0.8
"""How long the first answer of the store may take. A store that is stopped or out of reach gives none."""


def heartbeat_s(job_size: int) -> float:
    """Seconds between two heartbeats of a rank in a job of so many ranks."""
    return interval_s(job_size, HEARTBEAT_S, 1)


class Wait:
    """A wait of one rank, halfway to whose deadline its heartbeat thread reads the heartbeats of the others.

    A link that loses packets holds heartbeats back for seconds. A rank that is stopped has sent none for half of the
    deadline when that is reached.
    """

    def __init__(self, timeout_s: float) -> None:
        self._halfway_s = time.monotonic() + timeout_s / 2
        self.heartbeats: dict[int, LastHeartbeat] | None = None
        """None: not read. A rank that had sent none is missing."""

    def look(self, reader: Heartbeat, others: Iterable[int]) -> None:
        """Read them if it is time and they have not been read. On the heartbeat thread."""
        if self.heartbeats is None and time.monotonic() >= self._halfway_s:
            self.heartbeats = reader.last_of(others)


class Diagnosis:
    """One rank's view of the others. Used by the thread that uses the transport. Where the store does not answer in
    time, what is known until then is told."""

    def __init__(self, control: ControlStore, job_size: int | None = None) -> None:
        """`job_size` ranks share the store; None: those of this ring do."""
        self._control = control
        self._others = [rank for rank in control.everyone() if rank != control.rank]
        self._claimed: bool | None = None
        self._silence_s = SILENCE_S * heartbeat_s(job_size or control.world_size) / HEARTBEAT_S
        # Three requests a look, of all ranks at once.
        self._poll_s = max(CAUSE_POLL_S, 3 * control.world_size / REQUESTS_PER_S)

    @property
    def limit_s(self) -> float:
        """How long it may take, also where the store does not answer."""
        return self._silence_s + SHARE_S

    def of_deadline(self, waited_for: Sequence[int], wait: Wait | None = None) -> str:
        """After a missed deadline: the silent among all ranks, where the others of `waited_for` are, the first cause.

        Returns one line; reads until every heartbeat has changed, or for as long as tells silence. With the `wait`
        that has failed, only ranks that have also sent nothing for half of it are called silent.
        """
        control, found = self._control.until(Deadline(self.limit_s)), list[str]()
        reader = Heartbeat(control.store, control.rank)
        try:
            unheard, told = list[int](), None
            # Silence first: it takes the longest, and a cause may be published meanwhile.
            if self._investigates(control, "deadline"):
                unheard = reader.silent(self._others, self._silence_s)
                found += self._unheard(reader, unheard, wait)
            else:
                told = self._cause(control, self._silence_s + PATIENCE_S)
            # A rank that is waited for and alive waits itself for another: its status says where.
            if not told or "silent" not in told:
                found += [_whereabouts(reader, rank) for rank in waited_for if rank not in unheard]
            if cause := told or control.cause():
                found.append(cause)
        except RuntimeError as error:
            found.append(_lost_store(error))
        return "; ".join(found)

    def _unheard(self, reader: Heartbeat, unheard: list[int], wait: Wait | None) -> list[str]:
        """Of ranks without a heartbeat at the moment, which are silent."""
        last = reader.last_of(unheard)
        early = last if wait is None else wait.heartbeats
        silent = [rank for rank in unheard if early is not None and early.get(rank) == last.get(rank)]
        return _silences(last, silent) + [
            f"rank {rank} is not heard at the moment, last in '{last[rank].status}'"
            for rank in unheard
            if rank not in silent and rank in last
        ]

    def of_loss(self, peer: int, error: BaseException) -> str:
        """After the connection to `peer` was lost with `error`: the first cause, else who closed, else who is silent.

        Returns one line. A peer that lives and says nothing fell because of another, which then is the silent one.
        """
        control = self._control.until(Deadline(self.limit_s))
        reader = Heartbeat(control.store, control.rank)
        try:
            check = SilenceCheck(reader, self._others if self._investigates(control, "loss") else [peer])
            closed = False

            def looked() -> bool:
                nonlocal closed
                # Asked in this order: a rank that fails publishes its cause before it ends.
                closed = control.holds(f"closed/{peer}")
                check.update()
                return closed

            # A peer may drop its connection before its cause is in the store.
            if cause := self._cause(control, self._silence_s + CAUSE_S - SILENCE_S, looked):
                return cause
            if closed:
                return f"rank {peer} closed its ring"
            # Nobody has published anything: the heartbeats say who is gone.
            lost = f"rank {peer} {'is gone' if peer in check.quiet else 'dropped its connection'} ({error})"
            return "; ".join([lost, *_silences(reader.last_of(check.quiet), sorted(check.quiet))])
        except RuntimeError as lost_store:
            # The peer may be innocent: where the store's host fails, every rank drops its connections.
            why = f"{_lost_store(lost_store)}, so no first cause can be read"
            return f"the connection to rank {peer} was lost ({error}), and {why}"

    def _investigates(self, control: ControlStore, after: str) -> bool:
        """Whether this rank is the one that reads all heartbeats: of those after a deadline, or after a loss.

        One for each: who has lost a connection waits for the cause of a rank at its deadline, which must not wait for
        that rank in turn.
        """
        if self._claimed is None:
            self._claimed = control.until(Deadline(ANSWER_S)).add(f"investigators/{after}") == 1
        return self._claimed

    def _cause(self, control: ControlStore, wait_s: float, ended: Callable[[], bool] = lambda: False) -> str | None:
        """The first cause, waited for until `ended()`, which is asked before each look."""
        until = time.monotonic() + wait_s
        while True:
            over = ended()
            if (cause := control.cause()) or over or time.monotonic() >= until:
                return cause
            time.sleep(self._poll_s)


def _lost_store(error: RuntimeError) -> str:
    """Why the store told nothing."""
    return str(error) if isinstance(error, DeadlineError) else HOST_LOST


def _silences(last: Mapping[int, LastHeartbeat], silent: Iterable[int]) -> list[str]:
    return [silence(rank, f"'{last[rank].status}'" if rank in last else None) for rank in silent]


def _whereabouts(reader: Heartbeat, rank: int) -> str:
    heartbeat = reader.last(rank)
    if heartbeat is None or heartbeat.count == ENDED:
        return f"rank {rank} has left its ring"
    return f"rank {rank} is alive in '{heartbeat.status}'"
