"""`ringattn flight`: merge the flight records of a failed run, and report which ranks and exchanges diverged.

The k-th send from rank a to rank b on a lane belongs to the k-th receive of b from a, counted from the opening of the
ring. A record keeps only the latest messages but contains the number of dropped ones, so the count is right for long
runs too.
Guarantees: an exchange that a rank posted after its peer had written its record is ignored. The clocks of the two hosts
are assumed to differ by less than a deadline.
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
    """The send or the receive of one message: the entry `part` in the exchange `flight` of `rank`."""

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
    """The messages from or to one peer of a rank on one lane, in one direction. `first` is the ordinal of `ends[0]`."""

    first: int
    ends: list[End]

    @property
    def total(self) -> int:
        """Return the number of messages posted since the ring was opened."""
        return self.first + len(self.ends)


class Divergence(NamedTuple):
    """A divergence between two ranks. Divergences sort likeliest origin first; `rank` is the rank to examine."""

    distance: int
    sequence: int
    rank: int
    text: str


MISSING, UNEQUAL, ABSENT, WAITING = range(4)
"""Values of `Divergence.distance`. MISSING: a rank has no record. UNEQUAL: the bytes differ. ABSENT: a rank that did
not wait has not posted its message. WAITING: a rank that waited for another message has not posted its message."""


def label_of(flight: Mapping[str, Any]) -> str:
    """Return the label of the first message of an exchange."""
    return flight["parts"][0]["label"] if flight["parts"] else ""


def first_unfinished(record: Record, until_s: float = math.inf) -> Mapping[str, Any] | None:
    """Return the oldest exchange that was unfinished at `until_s`, in seconds of the clock."""
    for flight in record["flights"]:
        if flight["state"] in (LAUNCHING, CAPTURED) or flight["posted_s"] > until_s:
            continue
        if flight["state"] != DONE or flight["done_s"] > until_s:
            return flight
    return None


def divergences(records: Mapping[int, Record]) -> list[str]:
    """Return a sentence for each divergence, the likeliest origin first.

    It describes each rank without a record, and for each rank that did not post its messages the first missing one.
    """
    every = []
    world_size = next(iter(records.values()))["world_size"]
    for rank in sorted(set(range(world_size)) - set(records)):
        text = f"there is no record of rank {rank}: it was killed, it hangs, or its record is in another folder"
        every.append(Divergence(MISSING, 0, rank, text))
    for sender in records:
        for receiver in records:
            if sender != receiver:
                every += _between(records[sender], records[receiver])
    first: dict[tuple[int, int], str] = {}
    for divergence in sorted(every):
        first.setdefault((divergence.distance, divergence.rank), divergence.text)
    return list(first.values())


def _between(sender: Record, receiver: Record) -> list[Divergence]:
    """Return the first divergence between two ranks on each lane."""
    sent = _streams(sender, "send", receiver)
    received = _streams(receiver, "recv", sender)
    empty = Stream(0, [])
    divergences = []
    for lane in sorted({*sent, *received}):
        sends, receives = sent.get(lane, empty), received.get(lane, empty)
        if (difference := _unequal(sends, receives)) is not None:
            divergences.append(difference)
        elif sends.total > receives.total:
            divergences.append(_unanswered(sends, receives, sender, receiver, f"recv from rank {sender['rank']}"))
        elif sends.total < receives.total:
            divergences.append(_unanswered(receives, sends, receiver, sender, f"send to rank {receiver['rank']}"))
    return divergences


def _unequal(sends: Stream, receives: Stream) -> Divergence | None:
    """Return the divergence for the first message in both records whose ends differ in bytes."""
    first = max(sends.first, receives.first)
    pairs = zip(sends.ends[first - sends.first :], receives.ends[first - receives.first :], strict=False)
    for send, receive in pairs:
        if send.part["nbytes"] != receive.part["nbytes"]:
            return Divergence(UNEQUAL, send.flight["sequence"], send.rank, f"bytes differ: {send}; {receive}")
    return None


def _unanswered(more: Stream, fewer: Stream, waiting: Record, owing: Record, owed: str) -> Divergence:
    """Return the divergence for the first message that the rank of `waiting` posted without an answer.

    The rank of `owing` did not post the other end, which `owed` describes. If that rank was waiting too, it is not the
    origin, so the divergence sorts after those of ranks that were not waiting.
    """
    until_s = waiting["written_s"]
    distance = ABSENT if first_unfinished(owing, until_s) is None else WAITING
    started = [flight for flight in owing["flights"] if flight["posted_s"] <= until_s]
    posted = [flight for flight in started if flight["state"] != LAUNCHING]
    where = f"exchange {posted[-1]['sequence']}, '{label_of(posted[-1])}'" if posted else "none"
    if started and started[-1]["state"] == LAUNCHING:
        where += f"; it is inside the launch of exchange {started[-1]['sequence']}"
    text = f"rank {owing['rank']} never posted its {owed}; its last posted exchange: {where}"
    if fewer.total < more.first:
        sequence = waiting["flights"][0]["sequence"]
        dropped = f"rank {waiting['rank']} has dropped the first of them, from before exchange {sequence}"
        return Divergence(distance, sequence, owing["rank"], f"no partner: {dropped}; {text}")
    end = more.ends[fewer.total - more.first]
    return Divergence(distance, end.flight["sequence"], owing["rank"], f"no partner: {end}; {text}")


def _streams(record: Record, op: str, peer: Record) -> dict[int, Stream]:
    """Return the messages of a rank to or from a peer, by lane."""
    ends: dict[int, list[End]] = defaultdict(list)
    for flight in record["flights"]:
        if flight["posted_s"] <= peer["written_s"] and flight["state"] != LAUNCHING:
            for part in flight["parts"]:
                if (part["op"], part["peer"]) == (op, peer["rank"]):
                    ends[flight["lane"]].append(End(record["rank"], part, flight))
    first = {
        dropped["lane"]: dropped["messages"]
        for dropped in record["dropped"]
        if (dropped["op"], dropped["peer"]) == (op, peer["rank"])
    }
    return {lane: Stream(first.get(lane, 0), ends[lane]) for lane in {*ends, *first}}


# --- the command -----------------------------------------------------------------------------------------------------


HELP = """usage: ringattn flight DIR

Merge the flight records of a failed run, and report which ranks and exchanges diverged.

  DIR  folder with flight-<rank>.json of every rank; a run writes them to RINGATTN_FLIGHT_DIR

Returns 0 if every message has its partner, 1 if not."""
WIDTH = 200
"""Columns of the table if the output is not a terminal."""
NUMBER = (int, float)
RECORD = {"rank": int, "world_size": int, "transport": str, "written_s": NUMBER, "cause": str, "exchanges": int,
          "dropped": list, "flights": list}  # fmt: skip
FLIGHT = {"sequence": int, "lane": int, "state": str, "posted_s": NUMBER, "done_s": NUMBER, "parts": list}
PART = {"op": str, "peer": int, "nbytes": int, "label": str}
DROPPED = {"op": str, "peer": int, "lane": int, "messages": int}
MOST_RANKS = 2**20
"""A file with more ranks is not a record."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises `InputError` for bad options, and if records are missing or cannot be read."""
    if "--help" in argv or "-h" in argv:
        print("\n".join(wrapped(HELP)))
        return 0
    if len(argv) != 1:
        raise InputError(f"expected one folder, got {' '.join(argv) or 'nothing'}; see --help")
    records = read_records(Path(argv[0]))
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table_of(records))
    texts = divergences(records)
    for text in texts:
        console.print(f"divergence: {text}", markup=False, highlight=False, soft_wrap=True)
    if not texts:
        console.print("no divergence: every posted message has its partner, with the same number of bytes")
    return 1 if texts else 0


def read_records(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Read the records in `folder`, by rank. Raises `InputError` if there are none, or if a file is not a record."""
    files = sorted(folder.glob("flight-*.json"))
    if not files:
        why = "holds no flight-<rank>.json" if folder.is_dir() else "is not a folder"
        raise InputError(f"{folder} {why}; set RINGATTN_FLIGHT_DIR before a run to get records if it fails")
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
    """Return why the content of a file is not a record of `FlightRecord.dump`, or None if it is one."""
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
    """Return a text about the first key that is missing or has a value of the wrong type, or None if all are right."""
    if not isinstance(read, dict):
        return f"{type(read).__name__} instead of an object"
    for key, kind in keys.items():
        if not isinstance(read.get(key), kind) or isinstance(read[key], bool):
            return f"{key} is {read[key]!r:.80}" if key in read else f"{key} is missing"
    return None


def table_of(records: Mapping[int, Mapping[str, Any]]) -> Table:
    """Return a table with a row per rank: its last exchange, the exchange it waited for, and why it stopped."""
    table = Table("rank", "posted", "last done", "first unfinished", "state", "age", "cause")
    for rank, record in records.items():
        done = [flight for flight in record["flights"] if flight["state"] == DONE]
        waiting = first_unfinished(record)
        age_s = record["written_s"] - waiting["posted_s"] if waiting else 0.0
        table.add_row(
            str(rank),
            str(record["exchanges"]),
            _flight_text(done[-1]) if done else "-",
            _flight_text(waiting) if waiting else "-",
            waiting["state"] if waiting else "-",
            f"{age_s:.2f} s" if waiting else "-",
            escape(record["cause"]),
        )
    return table


def _flight_text(flight: Mapping[str, Any]) -> str:
    return escape(f"{flight['sequence']}: {label_of(flight)}")
