"""The errors that ringattn raises, and the check of a name that suggests the nearest one.

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
    """The ranks do not make the same call (length, dtype, mask, options)."""


class PlanError(RingError):
    """A schedule or a placement breaks one of its rules: a defect of ringattn, never of the input."""


class TransportError(RingError):
    """A message could not be exchanged. Names the rank, the peer, the message and its bytes."""


class DeadlineError(TransportError, TimeoutError):
    """A wait reached its deadline."""


class PeerLostError(TransportError):
    """A peer left, failed or dropped its connections in the middle of a pass."""


class NonFiniteError(RingError, ArithmeticError):
    """A training step produced a loss, a gradient norm or weights that are infinite or NaN."""


class OutOfMemoryError(RingError, MemoryError):
    """There was not enough memory for an attention pass. Lists what the pass held, and what to change."""


class ClosedError(RingError):
    """The ring was closed or aborted; open a new one."""


def one_of(name: str, names: Mapping[str, Any] | tuple[str, ...], key: str) -> str:
    """Return `name` if it is among `names`. Raises `InputError` that suggests the nearest name."""
    if name in names:
        return name
    near = [each for each in names if each.startswith(name)] or difflib.get_close_matches(name, names, 1, cutoff=0.3)
    raise InputError(f"{key}={name}: " + (f"did you mean {near[0]}? " if near else "") + f"one of {', '.join(names)}")
