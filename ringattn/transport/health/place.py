"""What a rank says of itself: where it is, what it waits for, and whether it has closed its ring."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

ALL_PEERS = 16
"""A rank that waits for more peers than this reports that it waits for all ranks."""
STUCK_S = 0.3
"""A launch or own kernels that take longer than this are reported in the heartbeat."""
LONGEST_AT = 120
ENDED = 0
"""The count of a rank that ended its beats on purpose."""


class Waits(Enum):
    """What a rank waits for."""

    HOST = "host"
    """Nothing of the ring: it runs the caller's Python."""
    LAUNCH = "launch"
    """NCCL, to accept a hop: it connects to peers, or is stuck."""
    COMPUTE = "compute"
    """Its own kernels, before its oldest exchange."""
    PEERS = "peers"
    """Messages of an exchange, or an all-gather."""


@dataclass(frozen=True)
class Place:
    """Where a rank is. `peers`: the ranks that it waits for; None: all."""

    at: str = "idle"
    call: int = 0
    waits: Waits = Waits.HOST
    peers: frozenset[int] | None = frozenset()

    @classmethod
    def make(cls, at: str, call: int, waits: Waits = Waits.HOST, peers: Iterable[int] = ()) -> Place:
        """A place that names its peers if they are few."""
        waited_for = frozenset(peers)
        return cls(at[:LONGEST_AT], call, waits, waited_for if len(waited_for) <= ALL_PEERS else None)

    def __str__(self) -> str:
        return f"'{self.at}'" + (f" of call {self.call}" if self.call else "")


@dataclass(frozen=True)
class Beat:
    """One heartbeat. A reader only asks whether `count` changes: clocks of two machines are never compared."""

    count: int
    place: Place = Place()
    closed: bool = False
    """The rank has closed its ring: it waits for no message any more."""
    calls: Any = None
    """What the transport adds for its peers, as JSON values."""

    @property
    def left(self) -> bool:
        """Whether the rank has closed its ring or ended its beats on purpose. It is neither silent nor behind."""
        return self.closed or self.count == ENDED

    def text(self) -> str:
        """Encode as JSON."""
        place = self.place
        peers = None if place.peers is None else sorted(place.peers)
        fields = [self.count, place.at, place.call, place.waits.value, peers, self.closed, self.calls]
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def parse_or_none(cls, text: str | bytes | None) -> Beat | None:
        """Decode what `text` returned; None for anything else."""
        try:
            return None if text is None else cls.parse(text)
        except (ValueError, TypeError, RecursionError):
            return None

    @classmethod
    def parse(cls, text: str | bytes) -> Beat:
        """Decode what `text` returned. Raises `ValueError`, `TypeError` or `RecursionError` for anything else."""
        count, at, call, waits, peers, closed, calls = json.loads(text)
        waited_for = None if peers is None else frozenset(int(peer) for peer in peers)
        return cls(int(count), Place(str(at), int(call), Waits(waits), waited_for), bool(closed), calls)
