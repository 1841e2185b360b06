"""Which sequence a model's tokens lie over just now, for code that is called through someone else's signature.

Kept in a context variable: it nests, and threads and tasks do not see each other's.
Does not know: rings, attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringattn.sequence import Sequence

Activation = tuple["Sequence | None"]
"""What one `Ring.activate` asked for; None: local attention."""

_active: ContextVar[Activation | None] = ContextVar("ringattn_activation", default=None)


@contextmanager
def activate(seq: Sequence | None) -> Iterator[None]:
    """See `Ring.activate`."""
    token = _active.set((seq,))
    try:
        yield
    finally:
        _active.reset(token)


def activation() -> Activation | None:
    """What the innermost `activate` asked for, or None outside of all."""
    return _active.get()


def active_sequence() -> Sequence | None:
    """The sequence of the innermost `Ring.activate`, or None."""
    active = _active.get()
    return None if active is None else active[0]
