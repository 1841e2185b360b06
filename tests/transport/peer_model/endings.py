"""What a host does when a ring drains, fails or closes, in the order that its transport does it.

`PeerTransport.drain`, `Watch.fail` with `Lane.abort`, and `PeerTransport.close`.
"""

from __future__ import annotations

from enum import Enum


class EndStep(Enum):
    """A step of the host."""

    AWAIT_DONE = "wait until the DONE of every exchange has passed"
    AWAIT_COMPUTED = "record an event on the caller's stream now and wait until it has passed"
    CHECK = "raise unless every poison word of the own page is 0"
    POISON = "store who is at fault into the own poison word of every page"
    PAINT = "store PAINTED into every word of the own page, again and again until nothing of this rank waits"
    UNMAP = "unmap the other ranks' memory"


DRAIN = (EndStep.AWAIT_DONE, EndStep.AWAIT_COMPUTED, EndStep.CHECK)
"""A failed rank's queued copies may run into buffers that nobody permitted. It poisons before it lets them, so who
checks behind its last reader knows that the reader saw no such bytes. Behind DONE would be too early: when the next
exchange is started, a copy that nobody permitted may run into what a queued kernel still reads."""
ABORT = (EndStep.POISON, EndStep.PAINT, EndStep.UNMAP)
"""Painting lets the queues run on, unpermitted copies included: first everybody must be able to know, and also before
the caller gets the error and may overwrite what is being sent. Other ranks may overwrite a painted word with a lower
number, so it is painted until nothing of this rank waits. Only then can no copy touch what is unmapped. A start that
has begun to enqueue is let finish before that; none begins after it."""
CLOSE = (*DRAIN, EndStep.UNMAP)
