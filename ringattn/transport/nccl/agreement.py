"""The all-gather of a few bytes through the store, by which ranks agree before they touch the device.

Guarantees: it ends at the deadline, at the first failure of any rank, or when a rank is found to have gone on without
agreeing; no more than two agreements of a ring lie in the store.
"""

from __future__ import annotations

from ringattn.errors import DeadlineError, DisagreementError, PeerLostError, RingError
from ringattn.transport.board import Board
from ringattn.transport.nccl.accusation import accuse
from ringattn.transport.nccl.calls import CallWindow
from ringattn.transport.nccl.ear import INTERVAL_S
from ringattn.transport.nccl.supervisor import Supervisor
from ringattn.transport.nccl.waiting import Deadline, wait_until
from ringattn.transport.pulse import Pulse


class Agreement:
    """One rank's agreements, counted from 0."""

    def __init__(self, board: Board, calls: CallWindow, supervisor: Supervisor, timeout_s: float) -> None:
        self._board, self._calls, self._supervisor, self._timeout_s = board, calls, supervisor, timeout_s
        self._pulse = Pulse(board.store, board.rank)
        self._number = 0
        self._next_look = Deadline(0.0)

    def agree(self, payload: bytes) -> list[bytes]:
        """Everyone's payload, by rank. Raises `DeadlineError`, `PeerLostError`, `DisagreementError`."""
        board, stem = self._board, f"agree/{self._number}"
        label = f"rank {board.rank} in agreement {self._number}"
        self._supervisor.where = f"agreement {self._number}"
        self._next_look = Deadline(3 * INTERVAL_S)
        try:
            board.write(f"{stem}/{board.rank}", payload)
            if not wait_until(lambda: board.complete(stem), Deadline(self._timeout_s), lambda: self._watch(stem)):
                missing = board.missing(stem)
                blamed = accuse(board, self._calls, set(missing))
                raise DeadlineError(f"no answer from ranks {missing} within {self._timeout_s} s{blamed}")
            answers = [board.read(f"{stem}/{rank}") for rank in board.everyone()]
            if self._number:  # all have come here, so nobody reads the one before any more
                board.store.delete_key(f"agree/{self._number - 1}/{board.rank}")
        except RingError as error:
            kind = type(error) if isinstance(error, DeadlineError | DisagreementError) else PeerLostError
            raise kind(f"{label}: {error}") from error
        except RuntimeError as error:
            raise PeerLostError(f"{label}: the store's host is gone: {error}") from error
        self._number += 1
        return answers

    def _watch(self, stem: str) -> None:
        """Raise a failure of the ring, or that a missing rank has closed or gone on without agreeing."""
        self._supervisor.watch()
        if not self._next_look.passed:
            return
        self._next_look = Deadline(3 * INTERVAL_S)
        for rank in self._board.missing(stem):
            if self._board.holds(f"closed/{rank}"):
                raise PeerLostError(f"rank {rank} closed its ring")
            beat = self._pulse.heard(rank)
            if beat is not None and (difference := self._calls.differs(beat.status)) is not None:
                raise DisagreementError(f"rank {rank} does not ask for the same: {difference}")
