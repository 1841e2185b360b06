"""`ringattn flight`: merges the flight records of a failed run, and reports which ranks and exchanges diverged.

The k-th send from a to b on a lane belongs to the k-th receive of b from a, counted from the opening of the ring. A
record contains the number of dropped messages, so the count is right for long runs too.
Guarantees: an exchange that a rank posted after its peer had written its record does not count as an answer. The clocks
of the two hosts are assumed to differ by less than a deadline.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ringattn.errors import InputError
from ringattn.launch.options import wrapped
from ringattn.observe.flight import CAPTURED, DONE, LAUNCHING

# --- where ranks diverged --------------------------------------------------------------------------------------------


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


# --- the command -----------------------------------------------------------------------------------------------------


HELP = """usage: ringattn flight DIR

Merge the flight records of a failed run, and say which rank and exchange parted from the others.

  DIR  folder with flight-<rank>.json of every rank; a run leaves them where RINGATTN_FLIGHT_DIR points

Returns 0 if every exchange met its partner, 1 if not."""
WIDTH = 200
"""Columns of the table where the output has no width of its own."""
NUMBER = (int, float)
RECORD = {"rank": int, "world_size": int, "transport": str, "written_s": NUMBER, "cause": str, "exchanges": int,
          "dropped": list, "flights": list}  # fmt: skip
FLIGHT = {"sequence": int, "lane": int, "state": str, "posted_s": NUMBER, "done_s": NUMBER, "parts": list}
PART = {"op": str, "peer": int, "nbytes": int, "label": str}
DROPPED = {"op": str, "peer": int, "lane": int, "messages": int}
MOST_RANKS = 2**20
"""A record that speaks of more is none."""


def main(argv: Sequence[str]) -> int:
    """The command. Raises `InputError` for bad options, and for records that are missing or cannot be read."""
    if "--help" in argv or "-h" in argv:
        print("\n".join(wrapped(HELP)))
        return 0
    if len(argv) != 1:
        raise InputError(f"expected one folder, got {' '.join(argv) or 'nothing'}; --help says more")
    records = read_records(Path(argv[0]))
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table_of(records))
    found = divergences(records)
    for words in found:
        console.print(f"divergence: {words}", markup=False, highlight=False, soft_wrap=True)
    if not found:
        console.print("no divergence: every exchange that was posted met its partner, with equal bytes")
    return 1 if found else 0


def read_records(folder: Path) -> dict[int, Mapping[str, Any]]:
    """The records in `folder`, by rank. Raises `InputError` where there are none, and for files that are no records."""
    files = sorted(folder.glob("flight-*.json"))
    if not files:
        why = "holds no flight-<rank>.json" if folder.is_dir() else "is not a folder"
        raise InputError(f"{folder} {why}; set RINGATTN_FLIGHT_DIR before a run, and records are left when it fails")
    records: dict[int, Mapping[str, Any]] = {}
    for file in files:
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{file} cannot be read: {error}") from error
        if wrong := _not_a_record(record):
            raise InputError(f"{file} is not a flight record of this version of ringattn: {wrong}")
        if record["rank"] in records:
            raise InputError(f"{folder} has two records of rank {record['rank']}; keep one folder for each run")
        records[record["rank"]] = record
    sizes = {record["world_size"] for record in records.values()}
    if len(sizes) > 1:
        raise InputError(f"{folder} mixes runs of {sorted(sizes)} ranks; keep one folder for each run")
    return dict(sorted(records.items()))


def _not_a_record(record: Any) -> str | None:
    """What is wrong with what JSON gave, or None for a record as `FlightRecord.dump` writes them."""
    if wrong := _lacks(record, RECORD):
        return wrong
    if not 0 <= record["rank"] < record["world_size"] <= MOST_RANKS:
        return f"rank {record['rank']} of {record['world_size']}"
    for dropped in record["dropped"]:
        if wrong := _lacks(dropped, DROPPED):
            return f"dropped: {wrong}"
    for flight in record["flights"]:
        if wrong := _lacks(flight, FLIGHT):
            return f"flights: {wrong}"
        for part in flight["parts"]:
            if wrong := _lacks(part, PART):
                return f"flights: parts: {wrong}"
    return None


def _lacks(read: Any, keys: Mapping[str, Any]) -> str | None:
    """The first of the keys that is missing or has a value of another type."""
    if not isinstance(read, dict):
        return f"{type(read).__name__} where an object belongs"
    for key, kind in keys.items():
        if not isinstance(read.get(key), kind) or isinstance(read[key], bool):
            return f"{key} is {read[key]!r:.80}" if key in read else f"{key} is missing"
    return None


def table_of(records: Mapping[int, Mapping[str, Any]]) -> Table:
    """One row a rank: how far it came, what it waited for, why it gave up."""
    table = Table("rank", "posted", "last done", "first unfinished", "state", "age", "cause")
    for rank, record in records.items():
        done = [flight for flight in record["flights"] if flight["state"] == DONE]
        waiting = first_unfinished(record)
        age_s = record["written_s"] - waiting["posted_s"] if waiting else 0.0
        table.add_row(
            str(rank),
            str(record["exchanges"]),
            _words(done[-1]) if done else "-",
            _words(waiting) if waiting else "-",
            waiting["state"] if waiting else "-",
            f"{age_s:.2f} s" if waiting else "-",
            escape(record["cause"]),
        )
    return table


def _words(flight: Mapping[str, Any]) -> str:
    return escape(f"{flight['sequence']}: {label_of(flight)}")
