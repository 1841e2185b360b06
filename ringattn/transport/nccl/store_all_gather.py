"""The all-gather of a few bytes through the control store, which the supervisor guards."""

from __future__ import annotations

from ringattn.errors import DeadlineError, DisagreementError, PeerLostError, RingError
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.nccl.supervisor import LOOK_PER_RANK_S, LOOK_S, Supervisor


class StoreAllGather:
    """The all-gather of a few bytes through the control store, counted from 0.

    Guarantees: it ends at the deadline, at the first failure of any rank, or when a rank makes another call; the store
    keeps the bytes of two of them at most.
    """

    def __init__(self, control: ControlStore, supervisor: Supervisor, timeout_s: float) -> None:
        self._control, self._supervisor, self._timeout_s = control, supervisor, timeout_s
        self._number = 0
        # All ranks that wait look for the missing ones, so that they ask less often the more they are.
        self._look_s = max(LOOK_S, LOOK_PER_RANK_S * control.world_size)
        self._next_look = Deadline(0.0)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Everyone's payload, by rank. Raises `DeadlineError`, `PeerLostError`, and what the supervisor has found."""
        control, supervisor, stem = self._control, self._supervisor, f"all_gather/{self._number}"
        label = f"rank {control.rank} in all-gather {self._number}"
        supervisor.where, supervisor.gathering = f"all-gather {self._number}", True
        self._next_look = Deadline(self._look_s)
        try:
            answers = control.gather(stem, payload, Deadline(self._timeout_s), lambda: self._watch(stem))
            if self._number:  # every rank has reached this one, so the one before is read no more
                control.forget(f"all_gather/{self._number - 1}")
        except DeadlineError as error:
            raise DeadlineError(f"{label}: {self._late(stem)}") from error
        except RingError as error:
            kind = type(error) if isinstance(error, DisagreementError) else PeerLostError
            raise kind(f"{label}: {error}") from error
        except RuntimeError as error:
            raise PeerLostError(f"{label}: the store's host is gone: {error}") from error
        # Not after an error: whom it waited for is asked when the failure is attributed.
        supervisor.gathering, supervisor.missing = False, frozenset()
        self._number += 1
        return answers

    def _late(self, stem: str) -> str:
        """Who is missing at the deadline, in words."""
        try:
            missing = self._control.missing(stem)
        except RuntimeError as unanswered:
            return str(unanswered)
        self._supervisor.missing = frozenset(missing)
        return f"no answer from ranks {missing} within {self._timeout_s} s"

    def _watch(self, stem: str) -> None:
        """Raise a failure of the ring, or that a missing rank has closed. The supervisor compares calls."""
        supervisor = self._supervisor
        supervisor.watch()
        if self._next_look.passed:
            self._next_look = Deadline(self._look_s)
            supervisor.missing = frozenset(self._control.missing(stem))
        for rank in sorted(supervisor.missing & supervisor.closed):
            # It may have arrived since it was found missing, and closed after that.
            if not self._control.holds(f"{stem}/{rank}"):
                raise PeerLostError(f"rank {rank} closed its ring")
