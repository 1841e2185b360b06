"""The errors a user can meet, and what tells a name from a misspelt one.

Every message says what was wrong, on which rank, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any


class RingError(RuntimeError):
    """Base of every error that ringattn raises on purpose."""


class InputError(RingError, ValueError):
    """An argument is wrong: a shape, a dtype, a length, an option."""


class UnsupportedError(InputError, NotImplementedError):
    """The request is meaningful, and this version refuses it by name instead of computing something else."""


class DisagreementError(InputError):
    """The ranks of one call do not ask for the same thing (length, dtype, mask, options)."""


class PlanError(RingError):
    """A schedule or a placement breaks one of its own rules; always a defect, never bad input."""


class TransportError(RingError):
    """A message could not be exchanged. Names rank, peer, what was exchanged and its bytes."""


class DeadlineError(TransportError, TimeoutError):
    """A wait reached its deadline."""


class PeerLostError(TransportError):
    """A peer left, failed or dropped its connections in the middle of a pass."""


class NonFiniteError(RingError, ArithmeticError):
    """A training step came to a loss, a gradient norm or weights that are infinite or NaN."""


class OutOfMemoryError(RingError, MemoryError):
    """There was no memory for an attention pass. Says what the rank held for it, and what to change."""


class ClosedError(RingError):
    """The ring was closed or aborted; open a new one."""


def one_of(name: str, known: Mapping[str, Any] | tuple[str, ...], key: str) -> str:
    """`name`, if it is one of `known`. Raises `InputError` with the nearest name."""
    if name in known:
        return name
    near = [one for one in known if one.startswith(name)] or difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    raise InputError(f"{key}={name}: " + (f"did you mean {near[0]}? " if near else "") + f"one of {', '.join(known)}")
