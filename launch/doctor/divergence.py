"""Where the flight records of several ranks part: sends without their receive, and ends that differ in bytes.

The k-th send from a to b on a lane belongs to the k-th receive of b from a, counted from the ring's opening; a record
says how many messages it has dropped, so that the count holds for long runs too.
Guarantees: an exchange that a rank posted only after its peer had written its record answers nothing, by the clocks of
the two hosts, which are assumed to agree better than a deadline is long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from ringattn.observe.flight import CAPTURED, DONE, LAUNCHING

Record = Mapping[str, Any]
"""A dump of one rank, see `FlightRecord.dump`."""


class End(NamedTuple):
    """One end of one message, in the exchange `flight` of `rank`."""

    rank: int
    part: Mapping[str, Any]
    flight: Mapping[str, Any]

    def __str__(self) -> str:
        verb = "send to" if self.part["op"] == "send" else "recv from"
        return (
            f"rank {self.rank} {verb} rank {self.part['peer']} '{self.part['label']}' ({self.part['nbytes']} bytes, "
            f"exchange {self.flight['sequence']})"
        )


class Stream(NamedTuple):
    """One rank's messages of one lane in one direction to one peer: ordinals from `first` on are in `ends`."""

    first: int
    ends: list[End]

    @property
    def total(self) -> int:
        """Messages posted since the ring was opened."""
        return self.first + len(self.ends)


class Divergence(NamedTuple):
    """Something that does not fit. They sort by how far from the origin they are; `rank` is the one to look at."""

    distance: int
    sequence: int
    rank: int
    words: str


MISSING, UNEQUAL, ABSENT, WAITING = range(4)
"""Distances: no record; bytes differ; a rank that waits for nobody did not post; one that waits itself did not."""


def label_of(flight: Mapping[str, Any]) -> str:
    """The label of an exchange's first message."""
    return flight["parts"][0]["label"] if flight["parts"] else ""


def first_unfinished(record: Record, until_s: float = math.inf) -> Mapping[str, Any] | None:
    """The oldest exchange that was under way at `until_s`, seconds of the clock."""
    for flight in record["flights"]:
        if flight["state"] in (LAUNCHING, CAPTURED) or flight["posted_s"] > until_s:
            continue
        if flight["state"] != DONE or flight["done_s"] > until_s:
            return flight
    return None


def divergences(records: Mapping[int, Record]) -> list[str]:
    """What does not fit, the likeliest origin first; empty where everything does.

    Names the ranks without a record, and for each rank that owes messages the first of them.
    """
    found = []
    world_size = next(iter(records.values()))["world_size"]
    for rank in sorted(set(range(world_size)) - set(records)):
        words = f"rank {rank} left no record: it was killed, it stands still, or its record is in another folder"
        found.append(Divergence(MISSING, 0, rank, words))
    for sender in records:
        for receiver in records:
            if sender != receiver:
                found += _between(records[sender], records[receiver])
    first: dict[tuple[int, int], str] = {}
    for one in sorted(found):
        first.setdefault((one.distance, one.rank), one.words)
    return list(first.values())


def _between(sender: Record, receiver: Record) -> list[Divergence]:
    """What does not fit between two ranks, on each lane."""
    sent = _streams(sender, "send", receiver)
    received = _streams(receiver, "recv", sender)
    empty = Stream(0, [])
    found = []
    for lane in sorted({*sent, *received}):
        ours, theirs = sent.get(lane, empty), received.get(lane, empty)
        if (difference := _unequal(ours, theirs)) is not None:
            found.append(difference)
        elif ours.total > theirs.total:
            found.append(_unanswered(ours, theirs, sender, receiver, f"recv from rank {sender['rank']}"))
        elif ours.total < theirs.total:
            found.append(_unanswered(theirs, ours, receiver, sender, f"send to rank {receiver['rank']}"))
    return found


def _unequal(ours: Stream, theirs: Stream) -> Divergence | None:
    """The first message that both records still hold and whose ends differ in bytes."""
    first = max(ours.first, theirs.first)
    for mine, other in zip(ours.ends[first - ours.first :], theirs.ends[first - theirs.first :], strict=False):
        if mine.part["nbytes"] != other.part["nbytes"]:
            return Divergence(UNEQUAL, mine.flight["sequence"], mine.rank, f"bytes differ: {mine}; {other}")
    return None


def _unanswered(more: Stream, fewer: Stream, waiting: Record, owing: Record, owed: str) -> Divergence:
    """The first message that the rank of `waiting` posted and the rank of `owing` never did.

    A rank that waited in an exchange of its own is not where it began, so it comes after one that did not.
    """
    until_s = waiting["written_s"]
    distance = ABSENT if first_unfinished(owing, until_s) is None else WAITING
    begun = [flight for flight in owing["flights"] if flight["posted_s"] <= until_s]
    posted = [flight for flight in begun if flight["state"] != LAUNCHING]
    where = f"exchange {posted[-1]['sequence']}, '{label_of(posted[-1])}'" if posted else "no exchange at all"
    if begun and begun[-1]["state"] == LAUNCHING:
        where += f"; it is inside the launch of exchange {begun[-1]['sequence']}"
    words = f"rank {owing['rank']} never posted its {owed}; the last that it posted was {where}"
    if fewer.total < more.first:
        sequence = waiting["flights"][0]["sequence"]
        gone = f"rank {waiting['rank']} has dropped the first of them from its record, from before exchange {sequence}"
        return Divergence(distance, sequence, owing["rank"], f"no partner: {gone}; {words}")
    end = more.ends[fewer.total - more.first]
    return Divergence(distance, end.flight["sequence"], owing["rank"], f"no partner: {end}; {words}")


def _streams(record: Record, op: str, peer: Record) -> dict[int, Stream]:
    """The messages of a rank to or from a peer, by lane."""
    ends: dict[int, list[End]] = defaultdict(list)
    for flight in record["flights"]:
        if flight["posted_s"] <= peer["written_s"] and flight["state"] != LAUNCHING:
            for part in flight["parts"]:
                if (part["op"], part["peer"]) == (op, peer["rank"]):
                    ends[flight["lane"]].append(End(record["rank"], part, flight))
    first = {
        gone["lane"]: gone["messages"] for gone in record["dropped"] if (gone["op"], gone["peer"]) == (op, peer["rank"])
    }
    return {lane: Stream(first.get(lane, 0), ends[lane]) for lane in {*ends, *first}}
