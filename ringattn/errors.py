"""The errors that ringattn raises, and the check of a name that suggests the nearest one.

Every message says what was wrong, on which rank, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any


class RingError(RuntimeError):
    """The base class of all errors that ringattn raises on purpose."""


class InputError(RingError, ValueError):
    """An argument is wrong: a shape, a dtype, a length, an option.

    Cause:
        One rank was given a wrong value. All ranks raise this error, and it names the rank and the argument.

    Remedy:
        Correct the argument as the message says. The ring stays usable.
    """


class UnsupportedError(InputError, NotImplementedError):
    """The request is meaningful, but this version does not support it, and computes nothing else in its place.

    Cause:
        The engine, transport, mask or host does not support the option.

    Remedy:
        Use the alternative that the message names, or leave the option out. The ring stays usable.
    """


class DisagreementError(InputError):
    """The ranks do not make the same call (length, dtype, mask, options).

    Cause:
        Ranks took different branches of the program, or were started with different arguments or libraries.

    Remedy:
        Compare the lines of the message, one for each rank, and change the call of the rank that differs. Do not
        continue with the next batch unless all ranks stopped at the same call: the ranks may be in different batches.
    """


class PlanError(RingError):
    """A schedule or a placement breaks one of its rules: a defect of ringattn, never of the input.

    Remedy:
        Report it with the output of `ringattn doctor json=-` and the call.
    """


class TransportError(RingError):
    """A message could not be exchanged. The error names the rank, the peer, the message and its bytes.

    Cause:
        The connection to the peer failed, or the transport reported an error.

    Remedy:
        Look for the earliest error on the rank that the message names. The ring is closed: start the job again.
    """


class DeadlineError(TransportError, TimeoutError):
    """A wait reached its deadline.

    Cause:
        The ranks that the message names hang, are stopped, or are later than `timeout_s`.

    Remedy:
        Read the log of these ranks; `ringattn flight` shows the last message of each. If the ranks are only slow, open
        the ring with a larger `timeout_s`. The ring is closed: start the job again.
    """


class PeerLostError(TransportError):
    """A peer left, failed or dropped its connections in the middle of a pass.

    Cause:
        The process of the peer ended (an exception, a signal, out of memory), or the network between the ranks failed.

    Remedy:
        Read the first cause, which the message quotes, and the log of the rank that it names. Start the job again.
    """


class NonFiniteError(RingError, ArithmeticError):
    """A training step produced a loss, a gradient norm or weights that are infinite or NaN.

    Remedy:
        Continue from the last checkpoint with a lower learning rate, or let `ringattn train` skip such steps with
        `nonfinite=skip`.
    """


class OutOfMemoryError(RingError, MemoryError):
    """There was not enough memory for an attention pass. The error lists the memory in use, and changes that save some.

    Remedy:
        Make the first change that the error lists. `ringattn plan` estimates the memory of a whole training step.
    """


class ClosedError(RingError):
    """The ring was closed or aborted.

    Remedy:
        Open a new ring. If the ring failed before, the first error names the cause.
    """


def one_of(name: str, names: Mapping[str, Any] | tuple[str, ...], key: str) -> str:
    """Return `name` if it is among `names`. Raises `InputError` that suggests the nearest name.

    `key`: the name of the option, for the error.
    """
    if name in names:
        return name
    near = [each for each in names if each.startswith(name)] or difflib.get_close_matches(name, names, 1, cutoff=0.3)
    raise InputError(f"{key}={name}: " + (f"did you mean {near[0]}? " if near else "") + f"one of {', '.join(names)}")
