"""The nouns of the model: operations, what a state consists of, and what a violation is."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

TORN, LAUNCHED, OVERWRITTEN = -1, -2, -3
"""In the place of a tag: being written; not begun yet; this and less: by the caller of a rank that has failed."""
NOBODY = -1
HOST, CALLER, LANE = range(3)
"""Threads of a rank: `rank * 3` and these."""
At = tuple[int, int]
"""A thread and a position on it."""


class Kind(IntEnum):
    """What an operation does."""

    PASS = 0
    """Nothing but be in order: enqueue, log, look up, record, wait for an event."""
    KERNEL = 1
    WRITE = 2
    WAIT = 3
    COPY = 4
    CHECK = 5
    SUCCESS = 6
    UNMAP = 7
    CLOSED = 8
    START = 9
    """Enqueue an exchange: what a rank that fails before it never does."""


CALM = frozenset({Kind.START, Kind.WRITE, Kind.WAIT})
"""What commutes with everything where nobody fails and words only rise."""


class Op(NamedTuple):
    """One operation of a thread. `needs` has run before it does."""

    kind: Kind
    what: str
    needs: tuple[At, ...] = ()
    word: int = -1
    value: int = 0
    exact: bool = False
    fence: bool = True
    reads: tuple[tuple[int, int], ...] = ()
    """Slots and the tags that they must hold."""
    writes: tuple[tuple[int, int], ...] = ()
    source: int = -1
    target: int = -1
    detached: bool = False
    """The copy is not ordered with what follows on its thread."""


class Life(IntEnum):
    """What has become of a rank's host."""

    RUNS = 0
    ENDED = 1
    RAISED = 2
    DEAD = 3
    STOPPED = 4


class State(NamedTuple):
    """Everything that may differ between two moments of a run."""

    at: tuple[int, ...]
    words: tuple[int, ...]
    slots: tuple[int, ...]
    landing: tuple[tuple[At, int], ...]
    """Copies that are not performed, with the tag that they carry."""
    life: tuple[int, ...]
    phase: tuple[int, ...]
    """How far each rank's abort has come; 0: it has not failed."""
    origin: tuple[int, ...]
    """Whom each failed rank names."""
    poison: tuple[int, ...]
    """Whom the poison words of each page name."""
    spoiled: int
    """A bit for each rank that has read something else than was sent."""
    culprit: int


class Violation(Exception):
    """A property that does not hold."""

    def __init__(self, rule: str, words: str) -> None:
        super().__init__(f"{rule}: {words}")
        self.rule = rule


def put(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    """The values with one of them replaced."""
    return (*values[:at], value, *values[at + 1 :])
