"""`ringattn flight`: merges the flight records that the ranks of a failed run left, and says where they parted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ringattn.errors import InputError
from ringattn.launch.doctor.divergence import divergences, first_unfinished, label_of
from ringattn.observe.flight import DONE

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
        print(HELP)
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
