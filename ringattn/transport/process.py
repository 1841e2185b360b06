"""What belongs to the process that made it: a forked child refuses to use it.

Guarantees: in a child made by `os.fork` every use of a ring or a transport of the parent raises `ClosedError`, its
close and its abort do nothing, and no destructor needs a thread that only the parent has; the parent goes on.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Self
from weakref import WeakSet

from ringattn.errors import ClosedError

FORKED = "a forked process cannot use the ring of its parent; open a ring after the fork"


class ProcessBound:
    """Base of rings and transports. The fork marks every object, so no call has to look up the process id."""

    rank: Any
    forked = False
    """Whether this is the copy of a forked child."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        _alive.add(made)
        return made

    def check_process(self) -> None:
        """Raise `ClosedError` in a forked child."""
        if self.forked:
            raise ClosedError(f"rank {self.rank}: {FORKED}")

    def leave_to_parent(self) -> None:
        """Called in a forked child before anything else runs there: nothing may touch the parent's connections."""


def never_destroy(thing: object) -> None:
    """Keep the destructor of `thing` from running in this process, at its end either."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_alive: WeakSet[ProcessBound] = WeakSet()


def _mark_all() -> None:
    for bound in list(_alive):
        bound.forked = True
        bound.leave_to_parent()


os.register_at_fork(after_in_child=_mark_all)
