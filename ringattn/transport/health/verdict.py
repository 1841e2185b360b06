"""A rank's heartbeat, and the decision which rank is at fault, made from everything that one rank knows.

The module contains only values and pure functions. Guarantee: a rank that only waits for another rank is never named at
fault.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

ALL_PEERS = 16
"""A rank that waits for more peers than this reports that it waits for all ranks."""
STUCK_S = 0.3
"""A launch or local kernels that take longer than this are reported in the heartbeat."""
LONGEST_AT = 120
ENDED = 0
"""The count of a rank that ended its heartbeats on purpose."""


class Waits(Enum):
    """What a rank is waiting for."""

    HOST = "host"
    """Nothing in the ring: the rank runs the caller's Python code."""
    LAUNCH = "launch"
    """NCCL's acceptance of a hop: NCCL is connecting to peers, or is stuck."""
    COMPUTE = "compute"
    """The rank's own kernels, which its oldest exchange has to wait for."""
    PEERS = "peers"
    """Messages of an exchange, or an all-gather."""


@dataclass(frozen=True)
class Place:
    """What a rank was doing at a moment, for error messages.

    `at`: its last exchange, or `idle`. `call`: the number of its call. `waits`: the kind of its wait. `peers`: the
    ranks that it waits for; None: all ranks.
    """

    at: str = "idle"
    call: int = 0
    waits: Waits = Waits.HOST
    peers: frozenset[int] | None = frozenset()

    @classmethod
    def make(cls, position: str, call: int, waits: Waits = Waits.HOST, peers: Iterable[int] = ()) -> Place:
        """Return a `Place`. It lists `peers` if there are at most `ALL_PEERS`."""
        waited_for = frozenset(peers)
        return cls(position[:LONGEST_AT], call, waits, waited_for if len(waited_for) <= ALL_PEERS else None)

    def __str__(self) -> str:
        return f"'{self.at}'" + (f" of call {self.call}" if self.call else "")


@dataclass(frozen=True)
class Beat:
    """One heartbeat. A reader only checks whether `count` has changed: clocks of two machines are never compared."""

    count: int
    place: Place = Place()
    closed: bool = False
    """The rank has closed its ring and waits for no more messages."""
    calls: Any = None
    """Fields that the transport adds for its peers, as JSON values."""

    @property
    def left(self) -> bool:
        """Whether the rank closed its ring or ended its heartbeats on purpose. Such a rank is not silent or behind."""
        return self.closed or self.count == ENDED

    def text(self) -> str:
        """Return the heartbeat as JSON."""
        place = self.place
        peers = None if place.peers is None else sorted(place.peers)
        fields = [self.count, place.at, place.call, place.waits.value, peers, self.closed, self.calls]
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def parse_or_none(cls, text: str | bytes | None) -> Beat | None:
        """Decode the result of `text`; return None for anything else."""
        try:
            return None if text is None else cls.parse(text)
        except (ValueError, TypeError, RecursionError):
            return None

    @classmethod
    def parse(cls, text: str | bytes) -> Beat:
        """Decode the result of `text`. Raises `ValueError`, `TypeError` or `RecursionError` for anything else."""
        count, position, call, waits, peers, closed, calls = json.loads(text)
        waited_for = None if peers is None else frozenset(int(peer) for peer in peers)
        return cls(int(count), Place(str(position), int(call), Waits(waits), waited_for), bool(closed), calls)


@dataclass(frozen=True)
class Evidence:
    """Everything that a rank knows about a failed wait. All rank numbers are those of the whole ring."""

    rank: int
    stood_still_s: float = 0.0
    """For how long this rank itself was stopped or starved during the wait; 0 if it was not."""
    cause: str | None = None
    """The first cause that any rank has published."""
    gone: Collection[int] = ()
    """Ranks whose process ended without closing the ring."""
    silent: Collection[int] = ()
    """Ranks whose heartbeat has stopped."""
    unheard: Collection[int] = ()
    """Ranks whose heartbeat is late, but not for long enough to call them silent."""
    closed: Collection[int] = ()
    """Ranks that have closed their ring."""
    failed: Collection[int] = ()
    """Ranks that ended their heartbeats because they failed. They wait for nothing, and are not behind."""
    places: Mapping[int, Place] = field(default_factory=dict)
    """The places of ranks in their last heartbeats, including this rank."""
    missing: Collection[int] = ()
    """Ranks that have not arrived at an all-gather that the whole ring waits for."""
    waited_for: Collection[int] = ()
    lost: tuple[int, str] | None = None
    """The rank whose connection broke, and what the connection reported."""
    at_deadline: bool = True
    """Whether a deadline has passed. Otherwise a rank that is behind may not be at fault."""
    store: str = ""
    """Why the store could not be read, with its host; empty if it answers."""


def at_fault(evidence: Evidence) -> list[str]:
    """Return the ranks at fault as phrases for an error; an empty list if no rank is proven at fault.

    The causes are checked in this order, because an earlier one explains the later ones: this rank itself was stopped;
    a published first cause; dead ranks; silent ranks; ranks that are behind; ranks stuck in a launch. If the store does
    not answer, its host is named in addition, because the state of the ranks is then unknown.
    """
    cause = [evidence.cause] if evidence.cause else []
    if evidence.stood_still_s:
        stopped = f"rank {evidence.rank} itself was stopped or got no processor time for {evidence.stood_still_s:.1f} s"
        return [stopped, *(cause or ["so it cannot report which rank failed"])]
    if cause:
        return cause
    phrases = _lost(evidence) + _gone_or_silent(evidence)
    if not phrases and evidence.at_deadline and not evidence.store:
        phrases = _behind(evidence) or _launches(evidence)
    return phrases + ([evidence.store] if evidence.store else [])


def explain(evidence: Evidence) -> str:
    """Return one line for an error: the ranks at fault, or, if none is proven, what each awaited rank is doing."""
    phrases = at_fault(evidence)
    lost = {evidence.lost[0]} if evidence.lost else set()
    named = {*evidence.gone, *evidence.silent, *lost}
    if phrases in ([], [evidence.store]) or (evidence.unheard and not evidence.cause and not evidence.stood_still_s):
        phrases = [
            *phrases,
            *(_whereabouts(rank, evidence) for rank in sorted({*evidence.waited_for, *evidence.unheard} - named)),
        ]
    return "; ".join(phrase for phrase in phrases if phrase)


def silence(rank: int, place: Place | None) -> str:
    """Describe a silent rank. `place`: what it was doing in its last heartbeat; None if it never sent a heartbeat."""
    heard = "never heard by this rank" if place is None else f"last heard in {place}"
    return f"rank {rank} is silent (stopped, stuck, gone or out of reach), {heard}"


def _lost(evidence: Evidence) -> list[str]:
    """Describe a broken connection. The peer may be healthy: a rank that fails drops all its connections."""
    if evidence.lost is None:
        return []
    peer, error = evidence.lost
    if peer in evidence.closed:
        return [f"rank {peer} closed its ring"]
    if peer in evidence.silent or peer in evidence.gone:
        return [f"rank {peer} is gone ({error})"]
    if evidence.store:
        return [f"the connection to rank {peer} was lost ({error}), and no first cause can be read"]
    return [f"the connection to rank {peer} was lost ({error}); {_whereabouts(peer, evidence)}"]


def _gone_or_silent(evidence: Evidence) -> list[str]:
    gone = [f"rank {rank} is gone (its process has ended)" for rank in sorted(evidence.gone)]
    silent = sorted({*evidence.silent} - {*evidence.gone})
    return gone + [silence(rank, evidence.places.get(rank)) for rank in silent]


def _behind(evidence: Evidence) -> list[str]:
    """Describe the ranks that have not reached the exchange because they run Python code or their own kernels."""
    places, phrases = evidence.places, []
    newest = max((place.call for place in places.values()), default=0)
    for rank, place in sorted(places.items()):
        if rank in evidence.closed or rank in evidence.failed:
            continue
        if place.waits is Waits.COMPUTE:
            phrases.append(f"rank {rank} is still computing: its GPU has not reached an exchange; host in {place}")
        elif place.waits is Waits.HOST and (place.call < newest or rank in evidence.missing):
            rest = f", others in call {newest}" if place.call < newest else ""
            phrases.append(f"rank {rank} is behind, in {place}{rest}")
    return phrases


def _launches(evidence: Evidence) -> list[str]:
    """Describe the ranks that are stuck in a launch.

    A rank whose peers are in a launch too may not be stuck itself: it may only be connecting to a rank that is.
    """
    launching = {
        rank: place
        for rank, place in sorted(evidence.places.items())
        if place.waits is Waits.LAUNCH and rank not in evidence.closed and rank not in evidence.failed
    }
    connecting = [
        rank
        for rank, place in launching.items()
        if (place.peers is None and len(launching) > 1) or (place.peers or frozenset()) & launching.keys() - {rank}
    ]
    stuck = [
        f"rank {rank} is stuck in a launch, in {place}" for rank, place in launching.items() if rank not in connecting
    ]
    if stuck or not connecting:
        return stuck
    return [f"one of ranks {connecting} is stuck in a launch, and the others of them wait for it there"]


def _whereabouts(rank: int, evidence: Evidence) -> str:
    place = evidence.places.get(rank)
    if rank in evidence.closed:
        return f"rank {rank} has left its ring"
    if rank in evidence.failed:
        return f"rank {rank} has failed as well"
    if place is None:
        return f"rank {rank} was never heard"
    if rank in evidence.unheard:
        return f"rank {rank} is not heard at the moment, last in {place}"
    return f"rank {rank} is alive in {place}"
