"""Who is to blame when an exchange does not end: whose pulse stands still, who is behind, stuck or still computing.

A rank that waits in vain sees only its neighbors, and they may wait in vain too; so every rank is listened to.
Guarantees: a rank that lives and merely waits is not accused.
"""

from __future__ import annotations

from ringattn.transport.board import Board
from ringattn.transport.nccl.calls import CallWindow
from ringattn.transport.nccl.ear import INTERVAL_S, PER_RANK_S
from ringattn.transport.pulse import ENDED, Pulse

LISTEN_S = 5 * INTERVAL_S
"""How long a pulse must stand still, in small rings; larger ones beat more slowly."""


def accuse(board: Board, calls: CallWindow, waited_for: set[int]) -> str:
    """For an error message, beginning with `; `: the guilty, or else those behind; then the live ones of `waited_for`.

    A rank that is behind may only wait for the guilty itself.
    """
    others = [rank for rank in board.everyone() if rank != board.rank]
    ear = Pulse(board.store, board.rank)
    try:
        silent = ear.silent(others, LISTEN_S + 3 * PER_RANK_S * board.world_size)
        beats = {rank: beat for rank in others if (beat := ear.heard(rank)) is not None}
    except RuntimeError as error:
        return f"; the store's host is gone: {error}"
    guilty, behind, alive = [], [], []
    for rank in others:
        place = calls.places(beats[rank].status) if rank in beats else None
        at = f"'{place['at']}' of call {place['call']}" if place else ""
        if rank in silent:
            heard = f"last heard in {at}" if at else "never heard"
            guilty.append(f"rank {rank} is silent (stopped, stuck or gone), {heard}")
        elif place is None or beats[rank].count == ENDED:
            continue
        elif place["launching"]:
            guilty.append(f"rank {rank} is stuck in a launch, in {at}")
        elif place["computing"]:
            guilty.append(f"rank {rank} is still computing: its GPU has not reached its oldest exchange; host in {at}")
        elif int(str(place["call"])) < calls.number:
            behind.append(f"rank {rank} is behind, in {at}, this rank in call {calls.number}")
        elif rank in waited_for:
            alive.append(f"rank {rank} lives, in {at}")
    return "".join(f"; {each}" for each in [*(guilty or behind), *alive])
