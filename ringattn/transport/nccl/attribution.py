"""What heartbeats tell: where ranks are, so which is at fault at a deadline; and their calls, so which makes another.

All ranks reach the deadline at about the same time. The first to claim it investigates: it reads every rank's
heartbeat and publishes what it found with the cause; the others wait for that cause. A rank that already knows that
one it waits for is silent publishes at once.
Each heartbeat also tells of some of the rank's calls, so that ranks need not check a call again that they have checked
once.
Guarantees: a rank that only waits for another is never named as the one at fault; a number of requests that grows as
the ranks; it ends in time, also when the store does not answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Any, Protocol

from ringattn.transport.base import COMPARED
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline, wait_until
from ringattn.transport.heartbeat import ENDED, Heartbeat, HeartbeatMonitor, LastHeartbeat, silence

ALL_PEERS = 16
"""A launch with more peers than this says that it waits for all ranks."""
HELD_BACK_S = 5.0
"""No link holds heartbeats back for longer."""
SHORTEST_S = 1.6
"""What it may take in a small job."""
SHARE_S = 0.6
"""What reading all heartbeats and publishing may take, besides the silence."""


class Waits(Enum):
    """What a rank waits for."""

    HOST = "host"
    """Nothing of the ring: its own Python."""
    LAUNCH = "launch"
    """NCCL, to take a hop: it connects to peers, or is stuck."""
    COMPUTE = "compute"
    """Its own kernels, before its oldest exchange."""
    PEERS = "peers"
    """The bytes of an exchange, or an entry in the store."""


@dataclass(frozen=True)
class Place:
    """Where a rank is, as its heartbeat says."""

    at: str
    call: int
    waits: Waits
    peers: frozenset[int] | None = frozenset()
    """Of its oldest hop. None: all."""
    left: bool = False
    """It has closed its ring, or ended its heartbeat."""

    @classmethod
    def parse(cls, heartbeat: LastHeartbeat) -> Place:
        """What a heartbeat tells."""
        told = json.loads(heartbeat.status)
        peers = None if told["peers"] is None else frozenset(told["peers"])
        left = heartbeat.closed or heartbeat.count == ENDED
        return cls(told["at"], told["call"], Waits(told["waits"]), peers, left)

    def __str__(self) -> str:
        return f"'{self.at}' of call {self.call}"


def told_place(at: str, waits: Waits, peers: Iterable[int]) -> dict[str, object]:
    """What a heartbeat tells besides the calls."""
    peers = sorted(peers)
    return {"at": at, "waits": waits.value, "peers": peers if len(peers) <= ALL_PEERS else None}


def at_fault(places: Mapping[int, Place], silent: Iterable[int], missing: Iterable[int] = ()) -> list[str]:
    """The ranks at fault, in words; empty where none can be told.

    `missing`: the ranks that the whole ring waits for in the store. Looked for in this order, since each explains what
    follows: ranks that are silent; ranks that have not arrived at the exchange, in Python or in their own kernels;
    ranks stuck in a launch that no other rank's absence explains.
    """
    if found := [silence(rank, str(places[rank]) if rank in places else None) for rank in sorted(silent)]:
        return found
    here = {rank: place for rank, place in places.items() if not place.left}
    newest = max((place.call for place in here.values()), default=0)
    for rank, place in sorted(here.items()):
        if place.waits is Waits.COMPUTE:
            found.append(f"rank {rank} is still computing: its GPU has not reached an exchange; host in {place}")
        elif place.waits is Waits.HOST and (place.call < newest or rank in missing):
            others = f", others in call {newest}" if place.call < newest else ""
            found.append(f"rank {rank} is behind, in {place}{others}")
    return found or _launches(here)


def _launches(here: Mapping[int, Place]) -> list[str]:
    """Ranks in a launch. One whose peers are in a launch too may only be connecting to the one that is stuck."""
    launching = {rank: place for rank, place in sorted(here.items()) if place.waits is Waits.LAUNCH}
    both = [
        rank
        for rank, place in launching.items()
        if (place.peers is None and len(launching) > 1) or (place.peers or frozenset()) & launching.keys() - {rank}
    ]
    alone = [f"rank {rank} is stuck in a launch, in {place}" for rank, place in launching.items() if rank not in both]
    if alone or not both:
        return alone
    return [f"one of ranks {both} is stuck in a launch, and the others of them wait for it there"]


class Beside(Protocol):
    """Another transport of the same rank, that of its node, which ends with this one."""

    def awaited(self) -> set[int]:
        """The ranks that this one waits for there."""
        ...

    def end(self, error: BaseException) -> None:
        """End it, for `error`. Returns when its ranks are told."""
        ...


class Attribution:
    """One rank's part in finding who is at fault. Used by one thread."""

    def __init__(self, control: ControlStore, status: Callable[[], str], monitor: HeartbeatMonitor) -> None:
        """`status` is this rank's own heartbeat; `control` is used by no other thread."""
        self._control, self._status, self._monitor = control, status, monitor

    @property
    def limit_s(self) -> float:
        """How long it may take."""
        return max(self._monitor.silence_s + SHARE_S, SHORTEST_S)

    def words(self, waited_for: Iterable[int], missing: Iterable[int] = (), waited_s: float | None = 0.0) -> str:
        """For an error, beginning with `; `: the ranks at fault and the live ones of `waited_for`, or another's cause.

        `missing`: see `at_fault`. `waited_s`: for how long this rank has waited. None: no deadline has passed, so a
        rank may be behind the others and at fault in nothing; only silence tells.
        Raises `RuntimeError` when the store does not answer.
        """
        monitor, control = self._monitor, self._control.until(Deadline(self.limit_s))
        # A slow link may hold heartbeats back for a while; who was gone before the wait has sent none for longer.
        if known := monitor.silent(min((waited_s or 0.0) / 2, HELD_BACK_S)):
            return _joined(at_fault(self._places(monitor.heartbeats), known))
        if control.add("investigators") > 1:
            wait_until(lambda: monitor.cause is not None, Deadline(self.limit_s), naps_s=(0.01, monitor.interval_s / 2))
            return f"; {monitor.cause}" if monitor.cause else "; the rank at fault was not found in time"
        others = [rank for rank in control.everyone() if rank != control.rank]
        reader = Heartbeat(control.store, control.rank)
        silent = reader.silent(others, monitor.silence_s, lambda: monitor.cause is not None)
        if monitor.cause:
            return f"; {monitor.cause}"
        places = self._places(reader.last_of(others))
        tell = silent or waited_s is not None
        found = at_fault({**places, control.rank: self._own_place()}, silent, missing) if tell else []
        return _joined(
            found or [f"rank {rank} lives, in {places[rank]}" for rank in sorted(waited_for) if rank in places]
        )

    def _own_place(self) -> Place:
        return Place.parse(LastHeartbeat(1, self._status()))

    def _places(self, heartbeats: Mapping[int, LastHeartbeat]) -> dict[int, Place]:
        return {rank: Place.parse(heartbeat) for rank, heartbeat in heartbeats.items()}


def _joined(found: Iterable[str]) -> str:
    return "".join(f"; {each}" for each in found)


# --- calls ------------------------------------------------------------------------------------------------------------

KEPT = 8192
"""Calls that a rank remembers."""
BACK = (0, 1, 2, 3, 5, 8, 16, 64, 256, 1024, 4096)
"""How far the calls lie back that a heartbeat tells of, besides the first: ranks are compared however far one is
ahead."""
WORDS = 120


GRADIENTS_DIFFER = (
    "needs gradients on one of the two ranks only, which the other cannot know of a call that was compared before; let "
    "an input require a gradient on every rank, as q.requires_grad_() does"
)
CHAIN, CALL = 16, 20
"""Hexadecimal digits of a call in a heartbeat: the chain ends at the first place, a digest of the call alone at the
second, and a chain of needed gradients follows."""


class CallHistory:
    """Written by the thread that makes the calls, read by the supervisor and the heartbeat thread.

    The chain of a call is a digest of it and of all before it, so that one that is equal vouches for all before it.
    A call that the ranks compare themselves is the same in all chains, whatever each rank made of it: if they refuse it
    together, the ring goes on. What follows the chain says only how a difference came about.
    """

    def __init__(self) -> None:
        self._chains: dict[int, str] = {}
        self._chain = self._gradients = b""
        self.words = ""
        self.number = 0

    def announce(self, number: int, digest: bytes, words: str, gradients: str = "") -> None:
        """This rank now makes its call `number`."""
        link = b"" if gradients == COMPARED else digest
        self._chain = sha256(self._chain + link + gradients.encode()).digest()[:8]
        self._gradients = sha256(self._gradients + gradients.encode()).digest()[:2]
        self._chains[number] = self._chain.hex() + sha256(digest).hexdigest()[:4] + self._gradients.hex()
        self._chains.pop(number - KEPT, None)
        self.words, self.number = words.partition("\n")[0][:WORDS], number

    def told(self) -> dict[str, object]:
        """For the heartbeat: a few hundred bytes, however many calls there were."""
        number = self.number
        return {"call": number, "words": self.words, "calls": [self._chains.get(n, "") for n in _told_of(number)]}

    def differs(self, theirs: dict[str, Any]) -> str | None:
        """The first call that the rank which told `theirs` is known to have made otherwise, in words; None if none."""
        equal = 0
        for number, chain in zip(_told_of(theirs["call"]), theirs["calls"], strict=True):
            mine = self._chains.get(number, "")
            if mine and chain and mine[:CHAIN] != chain[:CHAIN]:
                if number == equal + 1 and mine[CHAIN:CALL] == chain[CHAIN:CALL]:
                    return f"call {number} {GRADIENTS_DIFFER}"
                which = f"call {number}" if number == equal + 1 else f"one of calls {equal + 1} to {number}"
                other = f"{which} is another there (now at '{theirs['words']}', here '{self.words}')"
                # Of several calls the first that differs is not known, only that needed gradients differ, too.
                several = number != equal + 1 and mine[CALL:] != chain[CALL:]
                return f"{other}, or {GRADIENTS_DIFFER}" if several else other
            equal = number if mine and chain else equal
        return None


def _told_of(number: int) -> list[int]:
    """The calls of which a rank tells that makes its call `number`, ascending."""
    return sorted({max(number - back, 1) for back in BACK}) if number else []
