"""Who is to blame when a wait fails: the first published cause, who left in good order, whose pulse stands still.

A rank that waits in vain sees only its neighbor, and the neighbor may wait in vain too. So every rank is listened to.
Guarantees: an answer within `CAUSE_S` however many ranks are silent; a rank that closed or fell with an error of its
own is never called silent; a lost store is said.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ringattn.transport.board import Board
from ringattn.transport.pulse import ENDED, Listening, Pulse

BEAT_S = 0.25
"""Seconds between two beats of a rank."""
LISTEN_S = 0.8
"""How long a pulse must stand still: three beats."""
# A rank publishes its cause just before its connections fall, except that gloo drops the pair of a timed-out wait by
# itself, before that rank has listened. So its neighbor looks for the cause this long.
CAUSE_S = LISTEN_S + 0.5
POLL_S = 0.02
HOST_LOST = "the store's host (rank 0) is gone"


class Diagnosis:
    """One rank's view of the others. Used by the thread that uses the transport."""

    def __init__(self, board: Board) -> None:
        """`board` is read, never written."""
        self._board = board
        self._ear = Pulse(board.store, board.rank)
        self._others = [rank for rank in board.everyone() if rank != board.rank]

    def of_deadline(self, waited_for: Sequence[int]) -> str:
        """After a missed deadline: the silent among all ranks, where the others of `waited_for` are, the first cause.

        Returns one line; listens for `LISTEN_S` unless every rank is heard before.
        """
        try:
            silent = self._ear.silent(self._others, LISTEN_S)
            found = self._silences(silent)
            found += [self._whereabouts(rank) for rank in waited_for if rank not in silent]
            cause = self._board.cause()
        except RuntimeError:
            return HOST_LOST
        return "; ".join([*found, *([cause] if cause else [])])

    def of_loss(self, peer: int, error: BaseException) -> str:
        """After the connection to `peer` was lost with `error`: the first cause, else who closed, else who is silent.

        Returns one line. A peer that lives and says nothing fell because of another, which then is the silent one.
        """
        until = time.monotonic() + CAUSE_S
        try:
            listening = Listening(self._ear, self._others)
            while time.monotonic() < until:
                # Asked in this order: a rank that fails publishes its cause before it ends.
                closed = self._board.holds(f"closed/{peer}")
                if cause := self._board.cause():
                    return cause
                if closed:
                    return f"rank {peer} closed its ring"
                time.sleep(POLL_S)
                listening.update()
            lost = f"rank {peer} {'is gone' if peer in listening.quiet else 'dropped its connection'} ({error})"
            return "; ".join([lost, *self._silences(sorted(listening.quiet))])
        except RuntimeError:
            return f"rank {peer} is gone, and {HOST_LOST}, so no first cause can be read"

    def _silences(self, silent: Iterable[int]) -> list[str]:
        heard = {rank: self._ear.heard(rank) for rank in silent}
        last = {rank: f"last heard in '{beat.status}'" if beat else "never heard" for rank, beat in heard.items()}
        return [f"rank {rank} is silent (stopped, stuck or gone), {words}" for rank, words in last.items()]

    def _whereabouts(self, rank: int) -> str:
        beat = self._ear.heard(rank)
        if beat is None or beat.count == ENDED:
            return f"rank {rank} has left its ring"
        return f"rank {rank} is alive in '{beat.status}'"
