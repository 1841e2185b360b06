"""What a rank hears of the others: a thread that beats this rank's pulse and reads the board, round after round.

Only this thread waits for the store, so that a store whose host has stopped holds up nobody who keeps deadlines.
Guarantees: what is read is at most a round old, or the age says otherwise; the ranks ahead and those that are `wanted`
are read, never all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from ringattn.transport.board import Board
from ringattn.transport.pulse import Beat, Beating, Pulse

INTERVAL_S = 0.1
PER_RANK_S = 0.5e-3
"""Added to a round for each rank of the ring: one store serves them all."""


class Ear:
    """The other ranks as this one last heard of them."""

    def __init__(self, board: Board, status: Callable[[], str]) -> None:
        """`status` is what this rank's pulse says of it. Starts at once."""
        self.cause: str | None = None
        self.lost: str | None = None
        """Why the store cannot be read any more."""
        self.beats: dict[int, Beat] = {}
        self.closed: set[int] = set()
        self.wanted: set[int] = set()
        """Ranks to listen to besides the next one; replaced, never changed."""
        self._board = board
        self._pulse = Pulse(board.store, board.rank)
        self._next = {(board.rank + 1) % board.world_size} - {board.rank}
        self._beating = Beating(
            board.store, board.rank, INTERVAL_S + PER_RANK_S * board.world_size, status, self._round, self._lose
        )

    def stop(self) -> None:
        """End the pulse. Idempotent."""
        self._beating.stop()

    def _round(self) -> None:
        self.cause = self._board.cause()
        for rank in self.wanted | self._next:
            beat = self._pulse.heard(rank)
            if beat is not None:
                self.beats[rank] = beat
            if self._board.holds(f"closed/{rank}"):
                self.closed.add(rank)

    def _lose(self, error: RuntimeError) -> None:
        self.lost = str(error)
